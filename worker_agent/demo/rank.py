"""One rank of the demo as a process: `python -m wavekeeper.worker_agent.demo.rank --control tcp://... --kind moe
--rank 0 ...`.

The main thread only waits: for a signal, for the end of its parent, or for the engine's thread, which does
everything else. So a stop is obeyed even while the engine sits in a collective; what does not end within
`STOP_WAIT_S` is ended with the process.

Standard output carries one JSON object per line, for the program that started us: `{"event": "ready", ...}` once
requests are served, `{"event": "refused"|"failed", ...}` when they never will be any more, and after a stop `{"event":
"stopping"}` and at last `{"event": "counters", ...}`. Logs go to standard error. The exit status is 0 after a stop that
was asked for, 1 after a failure, 2 if the coordinator refused us.

Experts' tokens travel in a process group of the engine's own, which is torch's default group of this process. It is
made at the first forward pass of an epoch and remade after a failed step, under a name taken from that step's plan;
since every rank has the same plan, no message is needed to agree on it. A dense rank, and a MoE deployment of one
rank, make none.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # re-exported, but not for type checkers

from ...proto.messages import HoldMode, Kind
from ..agent import RankAgent
from ..errors import NotReadyError, RegistrationRefusedError
from ..hooks import EngineHooks
from ..plan import Plan, PlanSettings
from .engine import Engine
from .model import AllToAll, DenseDecoder, GlooAllToAll, LocalAllToAll, ModelConfig, MoeDecoder
from .wire import RequestServer

log = logging.getLogger(__name__)

STOP_WAIT_S = 2.0
"""From the wish to stop until the process ends, whatever its threads do."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

PARENT_CHECK_S = 0.2
"""How often we look for our parent, for the case that it died before it could be watched."""

READY_SLICE_S = 0.5
"""A wait for the group is cut into slices of this length, so that a stop is obeyed between them."""

_PR_SET_PDEATHSIG = 1

_stdout = threading.Lock()  # two threads tell events; a line must stay a line


class ExpertGroup:
    """The process group in which experts' tokens travel, of the current epoch.

    Args:
        store: `tcp://host:port` of the store through which the ranks find each other; rank 0 serves it.
        listen_fd: Rank 0 only: a socket that already listens on that port, so that no other program can take it first.
        timeout_s: Deadline of one all-to-all and of building the group.
    """

    def __init__(self, store: str, rank: int, dp_size: int, timeout_s: float, listen_fd: int | None = None) -> None:
        address = urlsplit(store)
        if address.scheme != "tcp" or address.hostname is None or address.port is None:
            raise ValueError(f"--store is {store!r}, but must look like tcp://127.0.0.1:29600")
        self._host, self._port = address.hostname, address.port
        self._rank = rank
        self._dp_size = dp_size
        self._timeout = timedelta(seconds=timeout_s)
        self._server = self._connect(listen_fd) if rank == 0 else None

    def build(self, plan: Plan, place: int) -> AllToAll:
        """Leave the old group and meet the other ranks of the plan in a new one; all of them call it, each with its
        own place.

        Raises:
            RuntimeError: A rank did not come in time (torch says which part failed).
        """
        self.leave()
        size = len(plan.num_tokens_across_dp)
        if size == 1:
            return LocalAllToAll()
        store = self._server or self._connect(None)
        name = f"experts/{plan.epoch}.{plan.wave}.{plan.step}"
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=place,
            world_size=size,
            timeout=self._timeout,
        )
        group = dist.group.WORLD
        assert group is not None  # it is what init_process_group has just made
        return GlooAllToAll(group)

    def leave(self) -> None:
        """Give up the group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _connect(self, listen_fd: int | None) -> TCPStore:
        return TCPStore(
            self._host,
            self._port,
            world_size=self._dp_size,
            is_master=self._rank == 0,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )


class RankProcess:
    """Everything that one rank of the demo consists of."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._stop = threading.Event()
        self._options = options
        self._exit_status = 1  # until the engine's thread has ended as it should
        self._ended = threading.Event()
        self._group: ExpertGroup | None = None

    def run(self) -> int:
        """Serve until a signal asks to stop or the rank fails, and return the exit status.

        Signals are blocked and taken by this thread when it waits for them: a handler would run in the middle of
        anything, also while this thread holds the lock of the very event that it sets.
        """
        thread = threading.Thread(target=self._serve, name="demo-engine", daemon=True)
        thread.start()
        parent = self._options.parent
        while signal.sigtimedwait(STOP_SIGNALS, PARENT_CHECK_S) is None and not self._ended.is_set():
            if parent is not None and os.getppid() != parent:
                log.warning("rank %d: process %d, which started us, is gone", self._options.rank, parent)
                break
        self._stop.set()
        if not self._ended.is_set():
            event("stopping", rank=self._options.rank)
        if not self._ended.wait(STOP_WAIT_S):
            log.error("rank %d: the engine did not stop within %.1f s; leaving it", self._options.rank, STOP_WAIT_S)
            return 1
        return self._exit_status

    def _serve(self) -> None:
        try:
            self._serve_requests()
            self._exit_status = 0
        except RegistrationRefusedError as error:
            self._exit_status = 2
            event("refused", rank=self._options.rank, reason=error.reason, error=str(error))
        except Exception as error:
            log.exception("rank %d failed", self._options.rank)
            event("failed", rank=self._options.rank, error=f"{type(error).__name__}: {error}")
        finally:
            self._ended.set()

    def _serve_requests(self) -> None:
        options = self._options
        kind = Kind(options.kind)
        model = self._build_model(kind)
        server = RequestServer()
        hooks = _Hooks()
        agent = RankAgent.connect(
            options.control,
            deployment=options.deployment,
            rank=options.rank,
            dp_size=options.dp_size,
            kind=kind,
            settings=PlanSettings(),
            extra_settings={"model": f"demo-{kind}-seed-{options.seed}"},
            exchanges=(options.exchange,) if kind.lockstep else (),
            serve=server.endpoint,
            attributes={"pid": str(os.getpid()), "engine": "demo"},
            hooks=hooks,
        )
        engine = hooks.engine = Engine(model, agent, regroup=self._regroup_of(model, agent))
        try:
            server.start(engine.submit)
            if self._wait_ready(agent):
                event("ready", rank=options.rank, serve=server.endpoint, pid=os.getpid())
            engine.run(self._stop)
        finally:
            agent.close()
            server.close()
        self._report(agent, engine)
        if self._group is not None:
            self._group.leave()

    def _build_model(self, kind: Kind) -> DenseDecoder:
        options = self._options
        config = ModelConfig(seed=options.seed)
        if not kind.lockstep:
            return DenseDecoder(config)
        if options.dp_size > 1:
            if options.store is None:
                raise ValueError("--store is missing: the ranks of a moe deployment need one to find each other")
            self._group = ExpertGroup(
                options.store, options.rank, options.dp_size, options.expert_timeout_s, options.store_fd
            )
        return MoeDecoder(config, LocalAllToAll())

    def _regroup_of(self, model: DenseDecoder, agent: RankAgent) -> Callable[[Plan], None] | None:
        group = self._group
        if group is None or not isinstance(model, MoeDecoder):
            return None
        return lambda plan: model.join(group.build(plan, agent.group_rank))

    def _wait_ready(self, agent: RankAgent) -> bool:
        """Wait for the group; False if we were stopped before."""
        left_s = self._options.ready_timeout_s
        while not self._stop.is_set():
            try:
                agent.wait_ready(min(READY_SLICE_S, left_s))
                return True
            except NotReadyError:
                left_s -= READY_SLICE_S
                if left_s <= 0:
                    raise
        return False

    def _report(self, agent: RankAgent, engine: Engine) -> None:
        counted = agent.counters
        event(
            "counters",
            rank=self._options.rank,
            agent={**msgspec.structs.asdict(counted), "costs": msgspec.structs.asdict(counted.costs)},
            engine=msgspec.structs.asdict(engine.figures),
            torch_dist_imported="wavekeeper.worker_agent.exchange.torch_dist" in sys.modules,
            default_group=dist.is_initialized(),
        )


class _Hooks(EngineHooks):
    """What an operator's hold or scaling means to the demo's engine; requests that are given back are answered."""

    engine: Engine | None = None

    def hold(self, mode: HoldMode) -> None:
        if self.engine is not None and mode is HoldMode.NOW:
            self.engine.give_back("aborted: an operator holds the deployment")

    def spare(self) -> None:
        if self.engine is not None:
            self.engine.give_back("this rank is a spare now: an operator has scaled the deployment")


def event(name: str, **facts: object) -> None:
    """Tell the program that started us, in one line."""
    line = json.dumps({"event": name, **facts}) + "\n"
    try:
        with _stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
    except BrokenPipeError:
        log.warning("nobody reads our events any more: %s", line.rstrip())


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when `parent` ends (Linux). It watches the parent's thread that started us, so
    start us from a lasting one.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before we could ask
        os.kill(os.getpid(), signal.SIGTERM)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m wavekeeper.worker_agent.demo.rank", description="One rank of the demo engine."
    )
    parser.add_argument("--control", required=True, help="the coordinator, tcp://host:port")
    parser.add_argument("--deployment", required=True)
    parser.add_argument("--kind", required=True, choices=[kind.value for kind in Kind])
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--dp-size", required=True, type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the weights; the same on all ranks")
    parser.add_argument("--exchange", default="shm", choices=["shm", "gloo"], help="of the step's rows (moe)")
    parser.add_argument(
        "--store", help="tcp://host:port where the ranks' experts find each other (moe); rank 0 serves it"
    )
    parser.add_argument("--store-fd", type=int, help="a socket already listening there, inherited by rank 0")
    parser.add_argument("--expert-timeout-s", type=float, default=10.0, help="deadline of one exchange of tokens")
    parser.add_argument("--ready-timeout-s", type=float, default=60.0, help="longest wait for the other ranks")
    parser.add_argument("--parent", type=int, help="stop when this process, which started us, ends")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank until it is stopped, and return the exit status."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)  # several ranks share this machine
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # before any thread, so that all of them inherit it
    if options.parent is not None:
        die_with_parent(options.parent)
    return RankProcess(options).run()


if __name__ == "__main__":
    # Not sys.exit: an engine that is stuck in a collective must not keep the interpreter from ending.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
