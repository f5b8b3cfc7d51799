import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from wavekeeper.proto.rows import DUMMY
from wavekeeper.worker_agent.demo.engine import Agent, Engine, EngineSettings, Scheduler, Sequence, generate_alone
from wavekeeper.worker_agent.demo.model import Batch, DenseDecoder, LocalAllToAll, ModelConfig, MoeDecoder
from wavekeeper.worker_agent.demo.wire import GenerateRequest, GenerateResult, RankClient, RequestServer
from wavekeeper.worker_agent.errors import AgentClosedError
from wavekeeper.worker_agent.plan import Outcome, Plan, Role

from .fakes import (
    DEADLINE_S,
    ClosedAgent,
    DenseAgent,
    LockstepAgent,
    LockstepAgents,
    LosingAgent,
    Meeting,
    Results,
    ThreadAllToAll,
    requests,
    wait_until,
)

CONFIG = ModelConfig(seed=7)


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """The engines run, each in a thread, until the block is left; every thread ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=engine.run, args=(stop,)) for engine in engines]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "an engine did not stop"


def moe_engines(agents: list[LockstepAgent], settings: EngineSettings | None = None) -> list[Engine]:
    dp_size = len(agents)
    meeting = Meeting(dp_size)
    return [
        Engine(
            MoeDecoder(CONFIG, ThreadAllToAll(meeting, rank, dp_size)),
            agents[rank],
            settings=settings,
        )
        for rank in range(dp_size)
    ]


def dense_engine(agent: Agent, settings: EngineSettings | None = None) -> Engine:
    return Engine(DenseDecoder(CONFIG), agent, settings=settings)


@pytest.mark.parametrize("dp_size", [2, 4])
def test_ranks_in_lockstep_give_what_one_rank_gives(dp_size: int) -> None:
    asked = requests(24)
    expected = generate_alone(MoeDecoder(CONFIG, LocalAllToAll()), asked)
    group, results = LockstepAgents(dp_size), Results()
    engines = moe_engines(group.agents, EngineSettings(step_tokens_max=16, wait_s=0.05))
    with running(*engines):
        for number, request in enumerate(asked):
            engines[number % dp_size].submit(request, results)
        results.wait(len(asked))
        wait_until(group.all_idle, "the last wave to end")
        counts = [len(agent.plans) for agent in group.agents]
    assert results.tokens() == expected
    assert group.agents[0].plans[: counts[0]] == group.agents[-1].plans[: counts[-1]], "ranks saw different plans"
    assert sum(engine.figures.requests_done for engine in engines) == len(asked)


def test_a_rank_without_requests_runs_dummies_and_the_wave_ends_with_the_work() -> None:
    group, results = LockstepAgents(3), Results()
    engines = moe_engines(group.agents, EngineSettings(wait_s=0.05))
    with running(*engines):
        engines[1].submit(GenerateRequest("only", [1, 2, 3], 5), results)
        results.wait(1)
        wait_until(group.all_idle, "the wave to end")
    assert [e.figures.forwards for e in engines] == [5, 5, 5]
    assert [e.figures.dummy_forwards for e in engines] == [5, 0, 5]
    plans = group.agents[0].plans
    assert [plan.outcome for plan in plans] == [Outcome.FORWARD] * 5 + [Outcome.WAVE_ENDED]
    assert plans[0].roles == (Role.DUMMY, Role.REAL, Role.DUMMY)
    assert plans[0].num_tokens_across_dp == (1, 3, 1)
    assert [plan.has_prefill for plan in plans] == [True] + [False] * 5


def test_requests_that_come_after_a_wave_has_ended_get_the_next_one() -> None:
    group, results = LockstepAgents(2), Results()
    engines = moe_engines(group.agents, EngineSettings(wait_s=0.05))
    with running(*engines):
        for number in range(6):
            engines[number % 2].submit(GenerateRequest(f"late-{number}", [number], 2), results)
            results.wait(number + 1)
            wait_until(group.all_idle, "the wave to end")
    assert group.started == 6
    results.tokens()


def test_a_dense_rank_gives_what_one_rank_gives_and_runs_no_dummy() -> None:
    asked = requests(24)
    agent, results = DenseAgent(), Results()
    engine = dense_engine(agent, EngineSettings(step_tokens_max=16, wait_s=0.05))
    with running(engine):
        for request in asked:
            engine.submit(request, results)
        results.wait(len(asked))
        wait_until(lambda: not agent.rows[-1].has_work, "a row without work")
    assert results.tokens() == generate_alone(DenseDecoder(CONFIG), asked)
    assert engine.figures.dummy_forwards == 0
    assert engine.figures.forwards == sum(row.has_work for row in agent.rows), "it ran the model without work"
    assert agent.rows.count(DUMMY) <= len(asked), "it turns without work"


def test_the_queue_drains_in_order_whatever_its_length() -> None:
    agent, results = DenseAgent(), Results()
    engine = dense_engine(agent, EngineSettings(wait_s=0.05))
    asked = [GenerateRequest(f"{number:02}", [number], 3) for number in range(40)]
    for request in asked:
        engine.submit(request, results)
    with running(engine):
        results.wait(len(asked))
    assert list(results.tokens()) == [request.id for request in asked]
    assert max(load.running for load in agent.loads) == CONFIG.slots
    last = agent.loads[-1]
    assert (last.running, last.waiting, last.waiting_tokens, last.kv_cache_usage) == (0, 0, 0, 0.0)
    assert all(a != b for a, b in zip(agent.loads, agent.loads[1:], strict=False)), "an unchanged load was reported"


def test_a_prompt_longer_than_a_step_is_cut_and_decodes_go_on_beside_it() -> None:
    group, results = LockstepAgents(1), Results()
    engine = moe_engines(group.agents, EngineSettings(step_tokens_max=8, wait_s=0.05))[0]
    asked = [GenerateRequest("short", [1, 2], 12), GenerateRequest("long", list(range(60)), 4)]
    for request in asked:
        engine.submit(request, results)
    with running(engine):
        results.wait(2)
    assert results.tokens() == generate_alone(MoeDecoder(CONFIG, LocalAllToAll()), asked)
    forwards = [plan for plan in group.agents[0].plans if plan.outcome is Outcome.FORWARD]
    assert [plan.sum_tokens for plan in forwards][:8] == [8] * 8
    assert [plan.max_query_len for plan in forwards][:3] == [6, 7, 7], "the decode did not run beside the prompt"


def test_decodes_run_before_prompts_and_proposing_changes_nothing() -> None:
    scheduler = Scheduler(slots=2, context_tokens=512, step_tokens_max=8)
    first, second, third = (
        Sequence(GenerateRequest(id, [1] * length, 4), lambda result: None)
        for id, length in (("long", 40), ("short", 1), ("no slot", 1))
    )
    scheduler.waiting.extend([second, first, third])
    for expected in ([(second, 1), (first, 7)], [(second, 1), (first, 7)]):
        proposed = scheduler.propose()
        assert [(chunk.sequence, chunk.num_tokens) for chunk in proposed] == expected
        assert proposed == scheduler.propose()
        assert scheduler.running == [] or scheduler.running == [second, first]
        scheduler.begin(proposed)
        scheduler.finish(proposed, [0] * 8)
    scheduler.running.reverse()  # the long prompt came first
    assert [chunk.sequence for chunk in scheduler.propose()] == [second, first]


class InboxWatcher(DenseAgent):
    """Notes how many requests were queued when it was told of work."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.queued: list[int] = []

    def notify_work(self) -> None:
        assert self.engine is not None
        self.queued.append(len(self.engine._inbox))


def test_the_agent_hears_of_a_request_when_it_is_queued_and_not_before() -> None:
    agent = InboxWatcher()
    agent.engine = dense_engine(agent)
    for number in range(2):
        agent.engine.submit(GenerateRequest(f"{number}", [1], 1), Results())
    agent.engine.submit(GenerateRequest("refused", [], 1), Results())
    assert agent.queued == [1, 2]


def test_a_lost_group_fails_each_request_that_has_begun_once_and_the_others_are_served() -> None:
    group, results = LockstepAgents(1), Results()
    agent = LosingAgent(group, 0)
    agent.lost_at_step = 4
    group.agents = [agent]
    engine = moe_engines(group.agents, EngineSettings(wait_s=0.05))[0]
    asked = [GenerateRequest(f"{number:02}", [number], 6) for number in range(CONFIG.slots + 5)]
    for request in asked:
        engine.submit(request, results)
    with running(engine):
        results.wait(len(asked))
    assert all(len(answers) == 1 for answers in results.by_id.values())
    begun = [results.by_id[request.id][0] for request in asked[: CONFIG.slots]]
    assert all(answer.error.startswith("lost rank 1 at wave") for answer in begun)
    assert all(len(answer.tokens) == 3 for answer in begun), "what was made before the failure is passed on"
    expected = generate_alone(MoeDecoder(CONFIG, LocalAllToAll()), asked)
    for request in asked[CONFIG.slots :]:
        assert results.by_id[request.id] == [GenerateResult(request.id, 0, expected[request.id])]
    assert (engine.figures.requests_failed, engine.figures.requests_done) == (CONFIG.slots, 5)


class PoisonedDecoder(MoeDecoder):
    """Fails for a batch that holds token 255 (before its tokens travel, on one rank alone, so the group must have
    one rank).
    """

    def next_tokens(self, batch: Batch) -> list[int]:
        if 255 in batch.token_ids:
            raise ValueError("poisoned")
        return super().next_tokens(batch)


def test_a_failed_forward_fails_its_requests_once_is_told_to_the_group_and_the_engine_goes_on() -> None:
    group, results = LockstepAgents(2), Results()
    regrouped: list[tuple[int, Plan]] = []
    engines = [
        Engine(
            PoisonedDecoder(CONFIG, LocalAllToAll()),
            group.agents[rank],
            settings=EngineSettings(wait_s=0.05),
            regroup=lambda plan, rank=rank: regrouped.append((rank, plan)),  # type: ignore[misc]
        )
        for rank in range(2)
    ]
    engines[0].submit(GenerateRequest("bystander", [1], 50), results)
    engines[1].submit(GenerateRequest("poison", [255], 5), results)
    with running(*engines):
        results.wait(2)
        wait_until(group.all_idle, "the wave to end")
        assert results.by_id["poison"][0].error == "the forward pass failed: poisoned"
        bystander = results.by_id["bystander"][0]
        assert bystander.error.startswith("rank 1 reported a local error at wave 1 step ")
        engines[1].submit(GenerateRequest("next", [1], 5), results)
        results.wait(3)
        wait_until(group.all_idle, "the wave to end")
    assert all(len(answers) == 1 for answers in results.by_id.values())
    assert results.by_id["next"][0].error == ""
    by_rank = [[(plan.wave, plan.step) for rank, plan in regrouped if rank == r] for r in range(2)]
    assert by_rank[0] == by_rank[1], "the ranks built their group at different steps"
    assert len(by_rank[0]) == 2, "once at first, once after the failure"


def test_an_engine_that_stops_answers_what_is_unfinished_once_and_refuses_the_rest() -> None:
    results = Results()
    engine = dense_engine(DenseAgent(), EngineSettings(wait_s=0.05))
    asked = [GenerateRequest(f"{number:02}", [number], 400) for number in range(20)]
    with running(engine):
        for request in asked:
            engine.submit(request, results)
        wait_until(lambda: engine.figures.forwards > 3, "some steps")
    engine.submit(GenerateRequest("late", [1], 1), results)
    assert len(results.by_id) == 21
    assert all([answer.error for answer in answers] == ["this rank is stopping"] for answers in results.by_id.values())


def test_an_engine_whose_agent_is_closed_answers_everything_with_the_reason_and_ends() -> None:
    results = Results()
    engine = dense_engine(ClosedAgent())
    for number in range(3):
        engine.submit(GenerateRequest(f"{number}", [1], 1), results)
    with pytest.raises(AgentClosedError):
        engine.run(threading.Event())
    assert [[a.error for a in answers] for answers in results.by_id.values()] == [["closed by the test"]] * 3


IMPOSSIBLE = {
    "an empty prompt": (GenerateRequest("x", [], 1), "at least one token"),
    "no byte": (GenerateRequest("x", [256], 1), r"0\.\.255"),
    "nothing to generate": (GenerateRequest("x", [1], 0), "at least 1"),
    "longer than the context": (GenerateRequest("x", [1] * 500, 13), "at most 512"),
}


@pytest.mark.parametrize(("request_", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_request_is_refused_with_its_reason(request_: GenerateRequest, reason: str) -> None:
    answers: list[GenerateResult] = []
    dense_engine(DenseAgent()).submit(request_, answers.append)
    assert len(answers) == 1
    assert re.search(reason, answers[0].error)


def test_a_flood_is_refused_at_the_limit_and_the_limit_counts_unanswered_requests_only() -> None:
    results = Results()
    engine = dense_engine(DenseAgent(), EngineSettings(requests_max=4, wait_s=0.05))
    for number in range(5):
        engine.submit(GenerateRequest(f"{number}", [1], 1), results)
    assert "4 requests are waiting here already" in results.by_id["4"][0].error
    with running(engine):
        results.wait(5)
        engine.submit(GenerateRequest("5", [1], 1), results)
        results.wait(6)
    assert results.by_id["5"][0].error == ""


def test_requests_travel_to_a_rank_and_results_come_back_by_id() -> None:
    asked = requests(12)
    engine = dense_engine(DenseAgent(), EngineSettings(wait_s=0.05))
    server = RequestServer()
    client, other = RankClient(server.endpoint), RankClient(server.endpoint)
    try:
        server.start(engine.submit)
        with running(engine):
            for request in asked:
                assert client.submit(request)
            assert other.submit(GenerateRequest("refused", [], 1))
            received = [client.receive(int(DEADLINE_S * 1000)) for _ in asked]
            refused = other.receive(int(DEADLINE_S * 1000))
    finally:
        client.close()
        other.close()
        server.close()
    assert {r.id: r.tokens for r in received if r} == generate_alone(DenseDecoder(CONFIG), asked)
    assert refused is not None
    assert refused.id == "refused"
    assert refused.error


def test_what_is_unfinished_when_a_rank_stops_reaches_its_client_as_an_error() -> None:
    agent = DenseAgent()
    engine = dense_engine(agent, EngineSettings(wait_s=0.05))
    server = RequestServer()
    client = RankClient(server.endpoint)
    try:
        server.start(engine.submit)
        with running(engine):
            for number in range(20):
                client.submit(GenerateRequest(f"{number}", [1], 500))
            wait_until(lambda: any(load.running + load.waiting == 20 for load in agent.loads), "20 requests")
        server.close()
        received = [client.receive(int(DEADLINE_S * 1000)) for _ in range(20)]
    finally:
        client.close()
    assert {result.error for result in received if result} == {"this rank is stopping"}


def test_junk_on_the_request_port_is_counted_and_the_server_goes_on() -> None:
    engine = dense_engine(DenseAgent(), EngineSettings(wait_s=0.05))
    server = RequestServer()
    client = RankClient(server.endpoint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(server.endpoint)
    try:
        server.start(engine.submit)
        stranger.send(b"\xff\xfe junk")
        stranger.send(b"")
        stranger.send_multipart([b"one", b"two", b"three"])
        wait_until(lambda: server.dropped.total() == 3, "three drops")
        with running(engine):
            client.submit(GenerateRequest("fine", [1], 2))
            result = client.receive(int(DEADLINE_S * 1000))
    finally:
        client.close()
        stranger.close()
        context.term()
        server.close()
    assert dict(server.dropped) == {"malformed": 2, "frames": 1}
    assert result is not None
    assert len(result.tokens) == 2
