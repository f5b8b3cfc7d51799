"""Stories of who may be a rank: settings, identity, addresses, and that a refusal says why and changes nothing."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from wavekeeper.coordinator.core import Junk, Received, Send, Tick
from wavekeeper.coordinator.core.members import FENCED_MAX
from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.errors import RemoteProtocolError
from wavekeeper.proto.messages import Mode, Phase

from .cluster import Cluster
from .stories import FRONT_END, TIMING, Puppet, Stage, dense, moe, picture, sent, wire

SETTINGS = {"plan.graph_buckets": "1,8,256", "plan.microbatch_min_tokens": 32, "row.layout": 1}


def refused(stage: Stage, puppet: Puppet) -> m.Refused:
    """Register, expect exactly one refusal and no other change of state."""
    before = picture(stage.deployment)
    (refusal,) = sent(stage.tell(puppet.registers()), m.Refused)
    assert picture(stage.deployment) == before
    assert refusal.incarnation == puppet.incarnation
    return refusal


# --- B34: settings ---------------------------------------------------------------------------------------------------


def test_ranks_with_other_settings_are_refused_by_key_and_the_start_completes_when_they_are_repaired() -> None:
    """Case B34, vllm PR 26218."""
    spec = moe(4)
    stage = Stage(spec)
    r0, r1 = (Puppet(rank, spec, settings=SETTINGS) for rank in (0, 1))
    stage.join(r0, r1)

    other_buckets = Puppet(2, spec, settings={**SETTINGS, "plan.graph_buckets": "1,8"})
    other_size = Puppet(3, spec, settings=SETTINGS, dp_size=8)
    assert refused(stage, other_buckets).mismatches == [m.Mismatch("plan.graph_buckets", "1,8,256", "1,8")]
    assert refused(stage, other_size).mismatches == [m.Mismatch("dp_size", 4, 8)]
    assert "rank 2 and 3" in stage.deployment.waits_for(stage.now_ms)

    stage.ranks = [r0, r1, *(Puppet(rank, spec, life=1, settings=SETTINGS) for rank in (2, 3))]
    stage.join(*stage.ranks[2:])
    for rank in stage.ranks:
        stage.tell(rank.move(mode=Mode.IDLE, term=1, epoch=1, applied=1).says(m.Formed, exchange="shm"))
    assert stage.place == (Phase.IDLE, 1, 0)


DIFFERENT = {
    "another value": ({**SETTINGS, "row.layout": 2}, [m.Mismatch("row.layout", 1, 2)]),
    "a key too few": (
        {"row.layout": 1, "plan.microbatch_min_tokens": 32},
        [m.Mismatch("plan.graph_buckets", "1,8,256", None)],
    ),
    "a key too many": ({**SETTINGS, "skip_sync": True}, [m.Mismatch("skip_sync", None, True)]),
    "two at once": (
        {**SETTINGS, "row.layout": 2, "plan.microbatch_min_tokens": 16},
        [m.Mismatch("plan.microbatch_min_tokens", 32, 16), m.Mismatch("row.layout", 1, 2)],
    ),
}


@pytest.mark.parametrize("settings, expected", DIFFERENT.values(), ids=DIFFERENT)
def test_a_refusal_names_every_differing_key_with_what_was_expected_and_what_came(
    settings: dict[str, Any], expected: list[m.Mismatch]
) -> None:
    """Cases B34, B14 (a restarted rank with another micro-batch threshold), B22 (one rank skips the exchange)."""
    spec = moe(2)
    stage = Stage(spec)
    stage.tell(Puppet(0, spec, settings=SETTINGS).registers())

    refusal = refused(stage, Puppet(1, spec, settings=settings))
    assert (refusal.reason, refusal.mismatches, refusal.retry) == (m.RefusalReason.SETTINGS_MISMATCH, expected, False)
    assert "rank 0" in refusal.detail


def test_what_is_configured_is_demanded_of_the_first_rank_as_well() -> None:
    stage = Stage(moe(2, settings={"model": "x"}))
    refusal = refused(stage, Puppet(0, stage.spec, settings={"model": "y"}))

    assert refusal.mismatches == [m.Mismatch("model", "x", "y")]
    assert "the configuration" in refusal.detail


def test_dense_ranks_may_differ_in_whatever_is_not_configured() -> None:
    spec = dense(2, settings={"model": "x"})
    stage = Stage(spec)
    effects = stage.tell(
        Puppet(0, spec, settings={"model": "x", "buckets": 1}).registers(),
        Puppet(1, spec, settings={"model": "x", "buckets": 2}).registers(),
    )
    assert len(sent(effects, m.Welcome)) == 2


def test_a_dense_engine_cannot_join_a_moe_deployment_nor_the_reverse() -> None:
    """Case B45, last sentence."""
    for spec, wrong in ((moe(2), m.Kind.DENSE), (dense(2), m.Kind.MOE)):
        refusal = refused(Stage(spec), Puppet(0, spec, kind=wrong))
        assert refusal.reason is m.RefusalReason.KIND_MISMATCH
        assert refusal.mismatches == [m.Mismatch("kind", spec.kind.value, wrong.value)]


# --- B35: which rank is "rank 3"? ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [-1, b"\x03\x00", "3", 3.0, True, m.DP_SIZE_MAX])
def test_a_rank_is_a_typed_number_on_the_wire_or_the_message_is_refused(target: object) -> None:
    """Case B35, vllm PR 40285."""
    right = m.FirstRequest(front_end=FRONT_END, deployment="moe", ask=1, wave=0, rank=3)
    header, body = encode(right)
    fields = {**msgspec.msgpack.decode(body), "rank": target}
    with pytest.raises(RemoteProtocolError, match=r"malformed: .*\$\.rank"):
        decode([header, msgspec.msgpack.encode(fields)])


def test_a_rank_beyond_the_deployment_is_an_error_to_its_sender_and_no_rank_at_all_is_not() -> None:
    """Case B35: 8 ranks; 8 is refused, absent means nobody is excluded, 5 is rank 5."""
    stage = Stage(moe(8))
    stage.form()
    before = picture(stage.deployment)
    (answer,) = stage.tell(stage.asks_for_start(0, rank=8))
    assert isinstance(answer, Send) and isinstance(answer.message, m.Rejected)
    assert answer.message.reason is m.RejectReason.RANK_OUT_OF_RANGE and "0..7" in answer.message.detail
    assert picture(stage.deployment) == before

    effects = stage.tell(stage.asks_for_start(0, rank=None))
    assert [start.rank for start in sent(effects, m.Start)] == list(range(8))


def test_a_rank_that_registers_beyond_the_deployment_is_told_the_range() -> None:
    stage = Stage(moe(2))
    refusal = refused(stage, Puppet(2, stage.spec))
    assert (refusal.reason, refusal.detail) == (m.RefusalReason.RANK_OUT_OF_RANGE, "rank must be in 0..1, got 2")


# --- B36: the same rank twice ----------------------------------------------------------------------------------------


def test_a_second_incarnation_is_refused_while_the_first_is_alive_and_told_when_it_was_heard() -> None:
    """Case B36, vllm PR 37357: policy refuse."""
    stage = Stage(moe(2))
    stage.form()
    stage.live(1_000)
    refusal = refused(stage, Puppet(1, stage.spec, life=6))

    assert (refusal.reason, refusal.retry) == (m.RefusalReason.DUPLICATE_RANK, True)
    assert stage.ranks[1].incarnation in refusal.detail
    assert "last heard of 0.0 s ago" in refusal.detail and "1.5 s of silence" in refusal.detail


def test_a_dead_incarnation_is_replaced_and_whatever_it_still_says_changes_nothing() -> None:
    """Case B36: policy replace; the group is faulted first, for a lockstep group cannot swap a member in a wave."""
    stage = Stage(moe(2))
    stage.form()
    stage.run()
    old, survivor = stage.ranks[1], stage.ranks[0]
    stage.live(TIMING.dead_after_ms + 100, survivor)
    assert stage.is_in(Phase.FAULTED)
    new = Puppet(1, stage.spec, life=6)
    stage.tell(new.registers())
    before = picture(stage.deployment)

    late: list[tuple[type[m.FromRank], dict[str, Any]]] = [
        (m.LoadReport, {"load": m.Load(running=7)}),
        (m.WaveComplete, {"steps": 3}),
        (m.Halted, {"reason": "x"}),
        (m.Leave, {}),
        (m.Register, old.register),
    ]
    for kind, fields in late:
        (refusal,) = sent(stage.tell(old.move(wave=9).says(kind, **fields)), m.Refused)
        assert (refusal.reason, refusal.retry, refusal.incarnation) == (m.RefusalReason.FENCED, False, old.incarnation)
    assert picture(stage.deployment) == before
    assert stage.deployment.dropped == {"fenced": 4, "refused_fenced": 1}


def test_a_rank_that_was_given_up_may_come_back_while_nobody_has_its_place() -> None:
    stage = Stage(dense(2))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    stage.live(TIMING.dead_after_ms + 100, stage.ranks[0])
    assert len(stage.deployment.members) == 1

    effects = stage.tell(stage.ranks[1].says(m.Heartbeat))
    assert [again.rank for again in sent(effects, m.RegisterAgain)] == [1]
    effects = stage.tell(stage.ranks[1].registers())
    assert len(sent(effects, m.Welcome)) == 1 and len(stage.deployment.members) == 2


def test_the_same_life_on_a_new_connection_keeps_what_it_has_acknowledged() -> None:
    stage = Stage(moe(2))
    stage.form()
    stage.run()
    rank = stage.ranks[1]
    rank.peer = b"another-connection"
    (welcome,) = sent(stage.tell(rank.registers()), m.Welcome)

    assert (welcome.seq, welcome.epoch, welcome.wave, welcome.phase) == (2, 1, 0, Phase.RUNNING)
    assert stage.place == (Phase.RUNNING, 1, 0)
    (effect,) = (e for e in stage.tell(rank.says(m.Heartbeat)) if isinstance(e, Send))
    assert effect.peer == b"another-connection"


def test_memory_of_dead_incarnations_is_bounded() -> None:
    stage = Stage(dense(1))
    for life in range(FENCED_MAX + 50):
        puppet = Puppet(0, stage.spec, life=life)
        stage.tell(puppet.registers(), puppet.says(m.Leave))
    assert len(stage.deployment.members._fenced) == FENCED_MAX


# --- B32, B23, B29: the right coordinator, addresses, who is missing -------------------------------------------------


def test_a_rank_of_another_cluster_is_told_what_there_is() -> None:
    """Case B32, the cluster part: hello carries the deployment, so nobody registers at the wrong coordinator."""
    stage = Stage(moe(2), dense(1))
    stranger = Puppet(0, moe(2))
    event = stranger.registers()
    assert isinstance(event.message, m.Register)
    renamed = Received(event.peer, wire(m.Register(**{**as_fields(event.message), "deployment": "other"})))
    (effect,) = stage.tell(renamed)

    assert isinstance(effect, Send) and isinstance(effect.message, m.Refused)
    assert effect.message.reason is m.RefusalReason.UNKNOWN_DEPLOYMENT
    assert "'other'" in effect.message.detail and "moe, dense" in effect.message.detail
    assert stage.fleet.dropped == {"unknown_deployment": 1}


def as_fields(message: m.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_loopback_address_is_refused_as_soon_as_there_are_two_hosts() -> None:
    """Case B23, in the core."""
    spec = moe(2)
    stage = Stage(spec)
    stage.tell(Puppet(0, spec, host="a", exchanges=["gloo"], rendezvous="tcp://10.0.0.1:1").registers())
    refusal = refused(stage, Puppet(1, spec, host="b", exchanges=["gloo"], rendezvous="tcp://127.0.0.1:2"))

    assert refusal.reason is m.RefusalReason.BAD_ADDRESS
    assert "rank 1 advertises the loopback address tcp://127.0.0.1:2" in refusal.detail and "2 hosts" in refusal.detail


OFFERS = {
    "one host shares memory": (["one", "one"], [["gloo", "shm"], ["shm", "gloo"]], "shm"),
    "two hosts do not": (["a", "b"], [["shm", "gloo"], ["shm", "gloo"]], "gloo"),
    "the device's own goes before gloo": (["a", "b"], [["nccl", "gloo"], ["gloo", "nccl"]], "nccl"),
    "what one rank lacks is out": (["one", "one"], [["shm", "gloo"], ["gloo"]], "gloo"),
    "nothing in common": (["a", "b"], [["nccl"], ["hccl"]], None),
    "two hosts with shared memory alone": (["a", "b"], [["shm"], ["shm"]], None),
}


@pytest.mark.parametrize("hosts, offers, chosen", OFFERS.values(), ids=OFFERS)
def test_the_exchange_is_chosen_by_the_coordinator_from_all_offers(
    hosts: list[str], offers: list[list[str]], chosen: str | None
) -> None:
    spec = moe(2)
    stage = Stage(spec)
    for rank, (host, exchanges) in enumerate(zip(hosts, offers, strict=True)):
        puppet = Puppet(rank, spec, host=host, exchanges=exchanges, rendezvous=f"tcp://10.0.0.{rank}:1")
        effects = stage.join(puppet)
    forms, refusals = sent(effects, m.Form), sent(effects, m.Refused)
    if chosen is None:
        assert refusals[0].reason is m.RefusalReason.NO_COMMON_EXCHANGE and not forms
        assert "rank 0 on" in refusals[0].detail and "rank 1 on" in refusals[0].detail
    else:
        assert {form.exchange for form in forms} == {chosen} and len(forms) == 2
        assert all(form.members[rank].host == hosts[rank] for form in forms for rank in (0, 1))


def test_the_group_is_formed_when_all_dp_size_ranks_are_there_and_the_missing_ones_are_named_until_then() -> None:
    """Case B29 (a), vllm PR 21538: the expected count is ranks, and 2 of 4 says which."""
    stage = Stage(moe(4))
    effects = stage.join(stage.ranks[0], stage.ranks[2])
    effects += stage.live(5_000, stage.ranks[0], stage.ranks[2])
    assert not sent(effects, m.Form) and stage.is_in(Phase.GATHERING)
    assert stage.deployment.waits_for(stage.now_ms) == "waits for rank 1 and 3 to register, since 5.0 s"
    assert not stage.deployment.ready(stage.now_ms)

    assert not sent(stage.join(stage.ranks[1]), m.Form)
    forms = sent(stage.join(stage.ranks[3]), m.Form)
    assert [form.rank for form in forms] == [0, 1, 2, 3]
    assert len({form.group for form in forms}) == 1


def test_a_group_is_ready_when_every_rank_says_that_its_exchange_stands() -> None:
    """Case B29: subscribed is not enough, answered is."""
    stage = Stage(moe(3))
    stage.join(*stage.ranks)
    for rank in stage.ranks[:2]:
        stage.tell(rank.move(mode=Mode.IDLE, term=1, epoch=1, applied=1).says(m.Formed, exchange="shm"))
    stage.tell(stage.ranks[2].move(mode=Mode.FORMING, term=1, epoch=1, applied=1).says(m.Heartbeat))
    assert stage.place == (Phase.FORMING, 1, 0) and not stage.deployment.ready(stage.now_ms)
    assert stage.deployment.waits_for(stage.now_ms) == "waits for rank 2 to form epoch 1, since 0.0 s"

    stage.tell(stage.ranks[2].move(mode=Mode.IDLE).says(m.Heartbeat))
    assert stage.place == (Phase.IDLE, 1, 0) and stage.deployment.ready(stage.now_ms), "the position alone is enough"


def test_a_group_that_was_formed_in_another_term_is_not_the_one_that_is_waited_for() -> None:
    stage = Stage(moe(2), term=2)
    stage.join(*stage.ranks)
    for rank in stage.ranks:
        stage.tell(rank.move(mode=Mode.IDLE, term=1, epoch=1, applied=1).says(m.Formed, exchange="shm"))
    assert stage.is_in(Phase.FORMING)


def test_an_exchange_that_cannot_be_built_is_tried_again_as_the_next_epoch_and_says_why() -> None:
    stage = Stage(moe(2))
    stage.join(*stage.ranks)
    for rank in stage.ranks:
        rank.move(mode=Mode.FORMING, term=1, epoch=1, applied=1)
    stage.tell(stage.ranks[1].says(m.FormFailed, reason="no such device"))
    assert "rank 1: no such device" in stage.deployment.waits_for(stage.now_ms)

    forms = sent(stage.live(1_000), m.Form)
    assert {form.epoch for form in forms} == {2} and stage.place == (Phase.FORMING, 2, 0)


def test_ranks_that_do_not_form_in_time_are_named() -> None:
    stage = Stage(moe(2))
    stage.join(*stage.ranks)
    stage.ranks[0].move(mode=Mode.IDLE, term=1, epoch=1, applied=1)
    stage.ranks[1].move(mode=Mode.FORMING, term=1, epoch=1, applied=1)
    stage.live(TIMING.form_timeout_ms)
    assert "rank 1 did not form within 3000 ms" in stage.deployment.waits_for(stage.now_ms)


def test_junk_is_counted_and_answered_only_if_its_header_was_ours() -> None:
    stage = Stage(moe(2))
    before = picture(stage.deployment)
    assert stage.fleet.handle(Junk(b"x", "magic", "GET / HTTP/1.1"), 0) == []
    (answer,) = stage.fleet.handle(Junk(b"x", "malformed", "no such type", answerable=True), 0)
    assert isinstance(answer, Send) and isinstance(answer.message, m.Rejected)
    assert stage.fleet.dropped == {"magic": 1, "malformed": 1} and picture(stage.deployment) == before


def test_a_message_that_only_a_coordinator_sends_is_dropped() -> None:
    stage = Stage(moe(2))
    stage.form()
    before = picture(stage.deployment)
    pulse = m.Pulse(deployment="moe", rank=0, incarnation=stage.ranks[0].incarnation, term=1, seq=99)
    assert stage.tell(Received(b"x", pulse)) == []
    assert picture(stage.deployment) == before and stage.fleet.dropped == {"misdirected": 1}


def test_every_rank_s_core_registers_again_with_a_bounded_pause_until_it_is_answered() -> None:
    cluster = Cluster(2)
    cluster.crash()
    times: list[int] = []
    for _ in range(1_000):
        cluster.now_ms += 10
        cluster.tick(cluster.engines[0])
        times += [cluster.now_ms] * len(cluster.up[0])
        cluster.up[0].clear()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert 8 <= len(gaps) and max(gaps) <= 1_250 + 10 and min(gaps) >= 150


def test_a_coordinator_that_stops_says_goodbye_to_every_rank() -> None:
    stage = Stage(moe(2))
    stage.form()
    farewell = stage.fleet.farewell("SIGTERM")
    assert [(e.peer, e.message.rank) for e in farewell if isinstance(e, Send) and isinstance(e.message, m.Goodbye)] == [
        (b"peer-0-0", 0),
        (b"peer-1-0", 1),
    ]
    assert stage.tell(Tick()) == []
