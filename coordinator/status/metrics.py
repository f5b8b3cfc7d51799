"""One view of the fleet -> what Prometheus reads.

The law of this file: nothing is kept between two scrapes. Each scrape renders one `FleetView`, so the series of a rank
that is gone are gone with it, and every rank that is up has its row in both kinds of deployment, rank 0 and idle ones
included (vllm PR 49204, where dense ranks had none). A place without a rank has only `rank_up 0`.

What is not known is not told as 0: the load of a rank that has never reported one has the age +Inf, and the exchange
times of a rank that has exchanged nothing are NaN, as in an empty summary. Names end in their base unit and hold no
colon. Labels come from closed sets: deployments and ranks of the configuration, phases, message types, reasons.
"""

import math
import platform
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ...proto.messages import Phase
from ..core.view import DeploymentView, FleetView, RankView
from .report import ServiceInfo

PREFIX = "wavekeeper_"

# name -> (help, value). A name that ends in _total is a counter, any other a gauge.
_OF_DEPLOYMENT: dict[str, tuple[str, Callable[[DeploymentView], float]]] = {
    "deployment_ready": ("1 if the deployment can serve.", lambda d: d.ready),
    "wave": ("Number of the current wave; its count of running to idle cycles.", lambda d: d.wave),
    "epoch": ("Version of the group of ranks; 0 means that there is none.", lambda d: d.epoch),
    "waves_total": ("Waves that have run in this term.", lambda d: d.waves),
    "empty_waves_total": ("Waves in which no forward was run.", lambda d: d.empty_waves),
    "group_operations_total": (
        "Exchanges of steps, of the rank that has done the most; 0 for a dense deployment.",
        lambda d: d.group_operations,
    ),
    "process_groups": ("Process groups that the ranks hold; 0 for a dense deployment.", lambda d: d.process_groups),
    "wave_messages_total": ("Wave messages sent and received; 0 for a dense deployment.", lambda d: d.wave_messages),
    "dummy_steps_total": ("Steps that ranks without work ran for the group.", lambda d: d.dummy_steps),
    "deployment_requests_running": ("Requests in the running batches of all ranks.", lambda d: d.load.running),
    "deployment_requests_waiting": ("Requests in the queues of all ranks.", lambda d: d.load.waiting),
    "waiting_starts": ("Starts that were asked for and cannot be served yet.", lambda d: len(d.waiting_starts)),
    "lost_ranks_total": ("Ranks that died, fell silent or left.", lambda d: d.lost_ranks),
    "feed_gap_longest_seconds": ("Longest time between two updates of the feed.", lambda d: d.longest_feed_gap_s),
}
_OF_RANK: dict[str, tuple[str, Callable[[RankView], float]]] = {
    "rank_requests_running": ("Requests in the rank's running batch.", lambda r: r.load.running),
    "rank_requests_waiting": ("Requests in the rank's queue.", lambda r: r.load.waiting),
    "rank_kv_cache_usage_ratio": ("Used part of the rank's KV cache, 0 to 1.", lambda r: r.load.kv_cache_usage),
    "rank_heartbeat_age_seconds": ("Time since the rank was last heard of.", lambda r: r.heard_s),
    "rank_load_age_seconds": (
        "Age of the rank's load report; +Inf if it has never made one.",
        lambda r: math.inf if r.load_age_s is None else r.load_age_s,
    ),
    "rank_steps_total": ("Steps of this incarnation of the rank.", lambda r: r.counters.steps),
    "rank_dummy_steps_total": ("Those of them that it ran without work.", lambda r: r.counters.dummy_steps),
    "rank_exchanging_seconds_total": ("Time inside exchanges.", lambda r: r.counters.costs.exchange_us / 1e6),
    "rank_exchange_waiting_seconds_total": (
        "The part of it that was spent waiting for the others.",
        lambda r: r.counters.costs.waited_us / 1e6,
    ),
    "rank_last_arrivals_total": (
        "Exchanges in which the others waited for this rank.",
        lambda r: r.counters.costs.last_arrivals,
    ),
    "rank_forced_eager_total": ("Steps without a graph because of it.", lambda r: r.counters.costs.forced_eager),
    "rank_forced_padding_total": (
        "Steps in which others were padded to its batch.",
        lambda r: r.counters.costs.forced_padding,
    ),
    "rank_padding_tokens_total": ("Tokens that it fed beyond its own.", lambda r: r.counters.costs.padding_tokens),
}


def render(fleet: FleetView, info: ServiceInfo, accept: str) -> tuple[bytes, str]:
    """Return the body and the content type that the `Accept` header of a scrape asks for."""
    registry = CollectorRegistry()  # not the library's global one: whoever embeds this process may use that
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, _Rendered(_families(fleet, info))):
        registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Rendered(Collector):
    """Metrics that are there already; the library reads them once."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(fleet: FleetView, info: ServiceInfo) -> Iterator[Metric]:
    build = {"version": info.version, "python": platform.python_version()}
    yield InfoMetricFamily(f"{PREFIX}build", "The program.", value=build)
    yield InfoMetricFamily(f"{PREFIX}config", "The configuration.", value={"config_hash": info.config_hash})
    yield GaugeMetricFamily(f"{PREFIX}uptime_seconds", "Age of the process.", info.uptime_s)
    yield GaugeMetricFamily(f"{PREFIX}term", "Leadership number; grows with each restart.", fleet.term)
    received = _family("messages_received_total", "Messages received.", "type")
    for type_, count in fleet.received.items():
        received.add_metric([type_], count)
    yield received
    dropped = _family("messages_dropped_total", "Messages that had no effect.", "deployment", "reason")
    # An empty label where no deployment can be told: nobody's frames are not the first deployment's.
    for name, reasons in [("", fleet.dropped), *((d.name, d.dropped) for d in fleet.deployments)]:
        for reason, count in reasons.items():
            dropped.add_metric([name, reason], count)
    yield dropped
    yield from _of_deployments(fleet.deployments)
    yield from _of_ranks([(d.name, rank) for d in fleet.deployments for rank in d.ranks])


def _of_deployments(deployments: list[DeploymentView]) -> Iterator[Metric]:
    size = _family("deployment_size", "Ranks, as configured and as registered now.", "deployment", "state")
    phase = _family("deployment_phase", "1 for the phase that the deployment is in.", "deployment", "phase")
    balance = _family(
        "deployment_load_imbalance_ratio", "Requests of the fullest rank by the mean; 1 is balanced.", "deployment"
    )
    for d in deployments:
        size.add_metric([d.name, "configured"], d.dp_size)
        size.add_metric([d.name, "registered"], d.ranks_up)
        for each in Phase:
            phase.add_metric([d.name, each.value], each is d.phase)
        if d.ranks_up:
            balance.add_metric([d.name], _imbalance(d))
    yield from (size, phase, balance)
    for name, (help_, value) in _OF_DEPLOYMENT.items():
        family = _family(name, help_, "deployment")
        for d in deployments:
            family.add_metric([d.name], value(d))
        yield family


def _of_ranks(ranks: list[tuple[str, RankView]]) -> Iterator[Metric]:
    up = _family("rank_up", "1 if the place of this rank is taken.", "deployment", "rank")
    for name, rank in ranks:
        up.add_metric([name, str(rank.rank)], rank.up)
    yield up
    present = [(name, rank) for name, rank in ranks if rank.up]
    for metric, (help_, value) in _OF_RANK.items():
        family = _family(metric, help_, "deployment", "rank")
        for name, rank in present:
            family.add_metric([name, str(rank.rank)], value(rank))
        yield family
    # A gauge: a summary would need a sum, which ranks do not report.
    exchange = _family(
        "rank_exchange_seconds", "Time in an exchange; NaN if there was none.", "deployment", "rank", "quantile"
    )
    for name, rank in present:
        counters = rank.counters
        for quantile, micros in (("0.5", counters.exchange_p50_us), ("0.99", counters.exchange_p99_us)):
            seconds = micros / 1e6 if counters.group_operations else math.nan
            exchange.add_metric([name, str(rank.rank), quantile], seconds)
    yield exchange


def _family(name: str, help_: str, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return family(PREFIX + name, help_, labels=labels)


def _imbalance(deployment: DeploymentView) -> float:
    requests = [rank.load.running + rank.load.waiting for rank in deployment.ranks if rank.up]
    return max(requests) * len(requests) / sum(requests) if any(requests) else 1.0
