"""Stories of ranks that die, fall silent, return, or fail to obey: who is told what, and how the group comes back."""

from wavekeeper.coordinator.core import Effect, Ended, Send, Tick
from wavekeeper.coordinator.core.lockstep import RETURN_MS
from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.messages import Mode, Phase

from .cluster import formed_cluster
from .stories import TIMING, Puppet, Stage, dense, moe, picture, published, sent


def running(dp_size: int = 4) -> Stage:
    """A stage whose wave 0 runs."""
    stage = Stage(moe(dp_size))
    stage.form()
    stage.run()
    return stage


def kill(stage: Stage, rank: int) -> list[Effect]:
    """One rank falls silent for good; the others live on until it is noticed."""
    survivors = [puppet for puppet in stage.ranks if puppet.rank != rank]
    return stage.live(TIMING.dead_after_ms, *survivors)


def test_the_death_of_a_rank_is_told_to_every_survivor_in_time_and_by_name() -> None:
    """Case B39, vllm PR 44428: within dead_after, and the group is not ready meanwhile."""
    stage = running()
    effects = kill(stage, 2)

    faults = sent(effects, m.Fault)
    assert {fault.rank for fault in faults} == {0, 1, 3}
    assert {(fault.lost, fault.epoch, fault.reason) for fault in faults} == {(2, 1, "rank 2 silent for 1500 ms")}
    assert Phase.FAULTED in published(effects) and not stage.deployment.ready(stage.now_ms)
    assert stage.deployment.lost_ranks == 1


def test_the_next_group_waits_for_the_replacement_and_for_every_survivor_to_leave() -> None:
    """Case B39: a recovery that comes too early is accepted and waits; the wave goes on at w+1 in epoch v+1."""
    stage = running()
    kill(stage, 2)
    new = Puppet(2, stage.spec, life=1)
    assert "waits for rank 2 to register" in stage.deployment.waits_for(stage.now_ms)
    effects = stage.tell(new.registers())
    stage.tell(new.move(term=1, applied=3).says(m.Heartbeat))
    for rank in (0, 1):
        effects += stage.tell(
            stage.ranks[rank].move(mode=Mode.HALTED, applied=3).says(m.Halted, reason="fault", lost=2)
        )
    assert not sent(effects, m.Form)
    assert "waits for rank 3 to hear of it" in stage.deployment.waits_for(stage.now_ms)
    stage.tell(stage.ranks[3].move(applied=3).says(m.Heartbeat))
    assert "waits for rank 3 to leave the broken step" in stage.deployment.waits_for(stage.now_ms)

    effects = stage.tell(stage.ranks[3].move(mode=Mode.HALTED, applied=3).says(m.Halted, reason="fault", lost=2))
    assert {(form.epoch, form.wave) for form in sent(effects, m.Form)} == {(2, 1)}
    assert sent(effects, m.Form)[0].members[2].incarnation == new.incarnation


def test_a_rank_that_leaves_its_exchange_faults_the_group_once_whoever_else_says_so() -> None:
    stage = running()
    first = stage.tell(stage.ranks[0].move(mode=Mode.HALTED).says(m.Halted, reason="no row of rank 3", lost=3))
    assert {(fault.lost, fault.rank) for fault in sent(first, m.Fault)} == {(3, rank) for rank in range(4)}
    assert stage.deployment.fault == "rank 3 is lost, says rank 0: no row of rank 3"

    second = stage.tell(stage.ranks[1].move(mode=Mode.HALTED).says(m.Halted, reason="interrupted"))
    assert not sent(second, m.Fault) and not published(second)
    assert stage.deployment.fault == "rank 3 is lost, says rank 0: no row of rank 3", "the first reason stays"


def test_a_rank_that_halts_without_blaming_anybody_is_named_itself() -> None:
    stage = running(2)
    effects = stage.tell(stage.ranks[1].move(mode=Mode.HALTED).says(m.Halted, reason="out of memory"))
    assert {fault.lost for fault in sent(effects, m.Fault)} == {1}


def test_a_start_that_is_never_acknowledged_is_a_fault_that_names_the_rank_in_seconds() -> None:
    """Case B06, vllm issue 45092, in the core."""
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.asks_for_start(0))
    stage.tell(stage.ranks[0].move(mode=Mode.RUNNING, applied=2).says(m.Started))
    assert "rank 1 to acknowledge the start of wave 0" in stage.deployment.waits_for(stage.now_ms)

    effects = stage.live(TIMING.start_ack_timeout_ms)
    assert {fault.lost for fault in sent(effects, m.Fault)} == {1}
    assert stage.deployment.fault == "rank 1 did not acknowledge the start of wave 0 within 800 ms"
    assert Phase.RUNNING not in published(effects)


def test_silence_that_was_announced_is_not_death() -> None:
    """DESIGN.md section 5: a long operation extends the deadline, and no longer than it said."""
    stage = running(2)
    stage.tell(stage.ranks[1].says(m.Heartbeat, busy_ms=10_000, activity=m.Activity.BUSY))
    stage.live(9_900, stage.ranks[0])
    assert stage.is_in(Phase.RUNNING)
    stage.live(100, stage.ranks[0])
    assert stage.is_in(Phase.FAULTED)


def test_a_busy_rank_that_speaks_again_has_only_the_usual_time() -> None:
    stage = running(2)
    stage.tell(stage.ranks[1].says(m.Heartbeat, busy_ms=60_000))
    stage.tell(stage.ranks[1].says(m.Heartbeat))
    stage.live(TIMING.dead_after_ms, stage.ranks[0])
    assert stage.is_in(Phase.FAULTED)


def test_the_end_of_a_long_operation_is_looked_for_again_in_the_usual_time() -> None:
    stage = Stage(dense(1))
    stage.tell(stage.ranks[0].registers(), stage.ranks[0].says(m.Heartbeat, busy_ms=60_000))
    stage.tell(Tick(), wait_ms=TIMING.dead_after_ms + 1)  # looks, and would not look again for a minute
    stage.tell(stage.ranks[0].says(m.Heartbeat))
    assert stage.fleet.next_deadline_ms(stage.now_ms) <= stage.now_ms + TIMING.dead_after_ms

    for _ in range(TIMING.dead_after_ms // TIMING.heartbeat_ms):
        stage.tell(Tick(), wait_ms=TIMING.heartbeat_ms)
    assert len(stage.deployment.members) == 0


def test_old_messages_that_still_arrive_do_not_keep_a_dead_rank_alive() -> None:
    stage = running(2)
    last_words = stage.ranks[1].says(m.Heartbeat)
    stage.tell(last_words)
    for _ in range(TIMING.dead_after_ms // 100):
        stage.tell(last_words, stage.ranks[0].says(m.Heartbeat), wait_ms=100)
    assert stage.is_in(Phase.FAULTED)


def test_the_next_look_at_the_silent_is_never_later_than_their_death() -> None:
    """Liveness is a deadline that the service asks for, not a thing found by chance."""
    stage = running(2)
    while stage.place[0] is Phase.RUNNING:
        due_ms = stage.fleet.next_deadline_ms(stage.now_ms)
        assert stage.now_ms < due_ms <= stage.now_ms + TIMING.dead_after_ms
        stage.tell(Tick(), wait_ms=due_ms - stage.now_ms)
    assert stage.now_ms == 1_000 + TIMING.dead_after_ms


def test_a_rank_that_returns_from_silence_into_a_faulted_group_is_told_of_the_fault_and_is_formed_in() -> None:
    """It may still sit in the old exchange, idle or not; had it not been told, nobody would ever be formed again."""
    cluster = formed_cluster(2)
    for _ in range(40):
        cluster.now_ms += 50
        cluster.coordinator(Tick())
        cluster.tick(cluster.engines[0])
        cluster.flow(lambda rank: rank == 0)
        cluster.up[1].clear()
        cluster.down[1].clear()
    assert cluster.is_in(Phase.FAULTED)
    assert cluster.waves() == [(Mode.HALTED, 0), (Mode.IDLE, 0)]

    cluster.pass_time(1_000)
    assert cluster.is_in(Phase.IDLE) and cluster.lockstep.epoch == 2
    assert cluster.waves() == [(Mode.IDLE, 0)] * 2


def test_work_that_waits_for_a_broken_group_is_done_by_the_next_one() -> None:
    """Invariant 4, over a fault in the middle of a wave: a row is written, and its exchange never completes."""
    cluster = formed_cluster(3)
    cluster.request(1, steps=4)
    cluster.flow()
    cluster.post(0)
    assert cluster.engines[0].posted is not None
    for engine in cluster.engines[1:]:
        cluster.perform(engine, engine.core.fail("a wire was pulled", 2))
    cluster.pass_time(2_000)

    assert cluster.lockstep.epoch == 2 and cluster.is_in(Phase.IDLE)
    assert cluster.engines[1].done == 4
    assert cluster.waves() == [(Mode.IDLE, 2)] * 3, "the broken wave's number is used up"


def test_a_rank_that_leaves_on_purpose_is_gone_at_once_and_its_goodbye_may_be_doubled() -> None:
    stage = running(2)
    leave = stage.ranks[1].says(m.Leave, reason="scaled down")
    effects = stage.tell(leave)
    assert {fault.reason for fault in sent(effects, m.Fault)} == {"rank 1 left: scaled down"}
    before = picture(stage.deployment)

    assert stage.tell(leave) == [] and picture(stage.deployment) == before


def test_when_every_rank_is_gone_the_deployment_gathers_again_above_the_old_epoch() -> None:
    stage = running(2)
    stage.tell(*(rank.says(m.Leave) for rank in stage.ranks))
    assert stage.place == (Phase.GATHERING, 1, 0)

    lives = [Puppet(rank, stage.spec, life=1) for rank in range(2)]
    forms = sent(stage.join(*lives), m.Form)
    assert {(form.epoch, form.wave) for form in forms} == {(2, 1)}


def test_a_new_coordinator_that_finds_a_part_of_a_group_gives_the_rest_up_after_dead_after() -> None:
    """Somebody died while nobody watched; the survivors must not wait for ever."""
    stage = Stage(moe(3), term=2)
    for rank in stage.ranks[:2]:
        rank.register["group"] = "g"
        stage.join(rank.move(mode=Mode.RUNNING, wave=5, epoch=3, term=1))
    assert stage.is_in(Phase.GATHERING)

    stage.live(TIMING.dead_after_ms, *stage.ranks[:2])
    assert stage.is_in(Phase.GATHERING), "the others may still be backing off from connecting and registering"
    effects = stage.live(RETURN_MS, *stage.ranks[:2])
    assert {(fault.rank, fault.lost, fault.epoch) for fault in sent(effects, m.Fault)} == {(0, 2, 3), (1, 2, 3)}
    assert f"rank 2 did not come back within {TIMING.dead_after_ms + RETURN_MS} ms" in stage.deployment.fault


def test_the_death_of_a_dense_rank_changes_its_own_row_and_nothing_else() -> None:
    """Case B39, last sentence; case B45."""
    stage = Stage(dense(4))
    stage.tell(*(rank.registers() for rank in stage.ranks))
    before = [picture(stage.deployment.members.get(rank)) for rank in (0, 1, 3)]
    effects = stage.tell(stage.ranks[2].says(m.Leave))

    assert not [effect for effect in effects if isinstance(effect, Send)]
    assert [picture(stage.deployment.members.get(rank)) for rank in (0, 1, 3)] == before
    assert [rank.up for rank in stage.deployment.state(stage.now_ms).ranks] == [True, True, False, True]
    assert stage.deployment.ready(stage.now_ms)


def test_a_broken_invariant_is_raised_with_the_latest_scenes() -> None:
    stage = running(2)
    stage.deployment.members.get(0).applied = 0
    try:
        stage.fleet.check()
    except AssertionError as error:
        assert "running was published, but rank 0 has not acknowledged" in str(error)
        assert "Started" in str(error)
    else:
        raise AssertionError("the broken invariant went unseen")


# --- found by a review of the core: each was a way to lose work or to break a group ----------------------------------


def test_a_halted_rank_whose_word_was_lost_is_heard_by_its_next_heartbeat() -> None:
    stage = running(2)
    effects = stage.tell(stage.ranks[1].move(mode=Mode.HALTED).says(m.Heartbeat))

    assert stage.is_in(Phase.FAULTED) and {fault.rank for fault in sent(effects, m.Fault)} == {0, 1}


def test_a_coordinator_that_was_stopped_for_a_while_calls_nobody_silent() -> None:
    """SIGSTOP of the coordinator, not of the ranks: what they said meanwhile waits in the socket."""
    stage = running(3)
    stage.fleet.next_deadline_ms(stage.now_ms)
    stage.tell(stage.ranks[0].says(m.Heartbeat), wait_ms=60_000)

    assert stage.is_in(Phase.RUNNING) and len(stage.deployment.members) == 3


def test_a_coordinator_that_was_stopped_during_a_start_still_waits_for_its_acknowledgements() -> None:
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.asks_for_start(0))
    stage.fleet.next_deadline_ms(stage.now_ms)
    stage.tell(stage.ranks[0].says(m.Heartbeat), wait_ms=60_000)

    assert stage.is_in(Phase.STARTING)


def test_the_longest_reason_still_makes_a_fault_that_every_rank_can_read() -> None:
    stage = running(2)
    effects = stage.tell(stage.ranks[0].move(mode=Mode.HALTED).says(m.Halted, reason="x" * m.TEXT_MAX))

    assert [decode(encode(fault)) for fault in sent(effects, m.Fault)] == sent(effects, m.Fault)


def test_an_announced_long_operation_extends_the_time_for_an_acknowledgement() -> None:
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.ranks[1].says(m.Heartbeat, busy_ms=60_000), stage.asks_for_start(0))
    stage.live(TIMING.start_ack_timeout_ms + 1_000, stage.ranks[0])

    assert stage.is_in(Phase.STARTING)


def test_a_registration_that_was_sent_before_the_goodbye_does_not_bring_the_dead_back() -> None:
    stage = Stage(dense(1))
    late = stage.ranks[0].registers()
    stage.tell(late, stage.ranks[0].says(m.Leave), late)

    assert len(stage.deployment.members) == 0


def test_an_acknowledgement_of_what_was_never_commanded_is_dropped_and_counted() -> None:
    stage = running(2)
    stage.tell(stage.ranks[0].move(applied=99).says(m.Heartbeat))
    stage.fleet.check()

    assert stage.deployment.dropped["impossible"] == 1


def test_a_coordinator_that_waits_for_ranks_does_not_ask_to_be_called_all_the_time() -> None:
    stage = Stage(moe(2))
    stage.tell(stage.ranks[0].registers())
    for _ in range(100):
        stage.tell(stage.ranks[0].says(m.Heartbeat), Tick(), wait_ms=100)

    assert stage.fleet.next_deadline_ms(stage.now_ms) > stage.now_ms


def test_a_process_that_has_ended_is_lost_at_once_and_another_life_of_it_is_not() -> None:
    stage = running(3)
    rank = stage.ranks[1]
    stage.tell(Ended("moe", 1, "f" * 16))
    assert stage.is_in(Phase.RUNNING), "some other incarnation"
    effects = stage.tell(Ended("moe", 1, rank.incarnation))

    assert stage.is_in(Phase.FAULTED) and "its process has ended" in stage.deployment.fault
    assert {fault.rank for fault in sent(effects, m.Fault)} == {0, 2}


def test_a_command_that_a_heartbeat_shows_to_be_lost_is_sent_again_at_once() -> None:
    """After a cut connection nobody waits for the timer of sending again."""
    stage = Stage(moe(2))
    stage.form()
    stage.tell(stage.asks_for_start(0))
    effects = stage.tell(stage.ranks[1].says(m.Heartbeat), wait_ms=60)

    assert [start.rank for start in sent(effects, m.Start)] == [1]
