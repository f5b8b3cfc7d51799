import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from wavekeeper.worker_agent.demo.engine import generate_alone
from wavekeeper.worker_agent.demo.model import (
    Batch,
    BatchInvalidError,
    DenseDecoder,
    LocalAllToAll,
    ModelConfig,
    MoeDecoder,
    owner_of,
)
from wavekeeper.worker_agent.demo.wire import GenerateRequest
from wavekeeper.worker_agent.forward_context import forward_context
from wavekeeper.worker_agent.plan import Outcome, Plan

from .fakes import DEADLINE_S, Meeting, ThreadAllToAll, requests

CONFIG = ModelConfig(seed=7)
PROMPT = list(b"the quick brown fox jumps over the lazy dog")

MODELS: dict[str, Callable[[], DenseDecoder]] = {
    "dense": lambda: DenseDecoder(CONFIG),
    "moe": lambda: MoeDecoder(CONFIG, LocalAllToAll()),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> DenseDecoder:
    return MODELS[request.param]()


def chunk(token_ids: list[int], first: int, slot: int) -> Batch:
    return Batch(token_ids, list(range(first, first + len(token_ids))), [slot] * len(token_ids))


def forward_plan(*num_tokens: int) -> Plan:
    return Plan(outcome=Outcome.FORWARD, num_tokens_across_dp=num_tokens)


def in_threads(dp_size: int, work: Callable[[int], None]) -> None:
    """Run `work(rank)` for all ranks at once; an error of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(dp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_prompt_in_chunks_gives_what_it_gives_in_one_piece(model: DenseDecoder) -> None:
    whole = model.forward(chunk(PROMPT, 0, slot=0))
    pieces = [model.forward(chunk(PROMPT[start : start + 7], start, slot=3)) for start in range(0, len(PROMPT), 7)]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-10, atol=1e-10)
    assert torch.cat(pieces).argmax(-1).tolist() == whole.argmax(-1).tolist()


def test_sequences_in_one_batch_do_not_see_each_other(model: DenseDecoder) -> None:
    left, right = PROMPT[:9], PROMPT[9:30]
    alone = torch.cat([model.forward(chunk(left, 0, slot=0)), model.forward(chunk(right, 0, slot=1))])
    mixed = Batch(*(a + b for a, b in zip(chunk(left, 0, slot=4), chunk(right, 0, slot=5), strict=True)))
    torch.testing.assert_close(model.forward(mixed), alone, rtol=1e-10, atol=1e-10)


def test_a_slot_used_again_remembers_nothing(model: DenseDecoder) -> None:
    fresh = model.forward(chunk(PROMPT[:5], 0, slot=1))
    model.forward(chunk(PROMPT, 0, slot=2))
    torch.testing.assert_close(model.forward(chunk(PROMPT[:5], 0, slot=2)), fresh, rtol=1e-10, atol=1e-10)


def test_the_output_depends_on_the_whole_prompt(model: DenseDecoder) -> None:
    prompts = [PROMPT, [PROMPT[0] + 1, *PROMPT[1:]], PROMPT[:-1], PROMPT[::-1]]
    asked = [GenerateRequest(str(number), prompt, 16) for number, prompt in enumerate(prompts)]
    outputs = generate_alone(model, asked)
    assert len({tuple(output) for output in outputs.values()}) == len(prompts)


def test_equal_configs_make_equal_models_and_other_seeds_do_not() -> None:
    batch = chunk(PROMPT, 0, slot=0)
    first, again, other = (DenseDecoder(ModelConfig(seed=seed)).forward(batch) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_hundred_dummy_passes_change_nothing(model: DenseDecoder) -> None:
    model.forward(chunk(PROMPT, 0, slot=0))
    before = model.state_digest()
    expected = model.forward(chunk([7], len(PROMPT), slot=0))
    after_decode = model.state_digest()
    assert after_decode != before, "the digest does not see the cache"
    for number in range(100):
        model.forward(Batch([], [], []).padded(1 + number % 3))
    assert model.state_digest() == after_decode
    assert torch.equal(model.forward(chunk([7], len(PROMPT), slot=0)), expected)


def test_padding_changes_neither_results_nor_caches(model: DenseDecoder) -> None:
    batch = chunk(PROMPT, 0, slot=0)
    plain = model.forward(batch)
    before = model.state_digest()
    padded = model.forward(batch.padded(64))
    assert len(padded) == 64
    torch.testing.assert_close(padded[: len(PROMPT)], plain, rtol=1e-10, atol=1e-10)
    model.forward(batch)
    assert model.state_digest() == before


@pytest.mark.parametrize(
    "batch",
    [
        Batch([], [], []),
        Batch([256], [0], [0]),
        Batch([1], [CONFIG.context_tokens], [0]),
        Batch([1], [0], [CONFIG.slots]),
        Batch([1], [0], [-2]),
    ],
)
def test_an_impossible_batch_is_refused_and_changes_nothing(model: DenseDecoder, batch: Batch) -> None:
    before = model.state_digest()
    with pytest.raises(BatchInvalidError):
        model.forward(batch)
    assert model.state_digest() == before


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 8, 11])
def test_every_expert_has_one_owner_and_shares_differ_by_one_at_most(dp_size: int) -> None:
    owners = [owner_of(expert, CONFIG, dp_size) for expert in range(CONFIG.experts)]
    assert owners == sorted(owners)
    assert all(0 <= owner < dp_size for owner in owners)
    shares = [owners.count(rank) for rank in range(dp_size)]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_experts_spread_over_ranks_give_what_one_rank_gives(dp_size: int) -> None:
    """Every rank its own prompt, all of other lengths; the last rank has none and runs a dummy."""
    meeting = Meeting(dp_size)
    prompts = [PROMPT[: 5 + 11 * rank] for rank in range(dp_size - 1)]
    alone = MoeDecoder(CONFIG, LocalAllToAll())
    expected = [alone.forward(chunk(prompt, 0, slot=0)) for prompt in prompts]
    plan = forward_plan(*map(len, prompts), 1)
    logits: dict[int, torch.Tensor] = {}
    swaps: list[int] = []

    def work(rank: int) -> None:
        all_to_all = ThreadAllToAll(meeting, rank, dp_size)
        model = MoeDecoder(CONFIG, all_to_all)
        batch = chunk(prompts[rank], 0, slot=0) if rank < dp_size - 1 else Batch([], [], []).padded(1)
        before = model.state_digest()
        with forward_context(plan, rank):
            logits[rank] = model.forward(batch)
        assert (model.state_digest() == before) is (rank == dp_size - 1)
        swaps.append(all_to_all.swaps)

    in_threads(dp_size, work)
    for rank, one in enumerate(expected):
        torch.testing.assert_close(logits[rank], one, rtol=1e-10, atol=1e-10)
    assert swaps == [2 * CONFIG.layers] * dp_size, "some rank took part less often than the others"


def test_a_rank_holds_its_own_share_of_the_experts_only() -> None:
    model = MoeDecoder(CONFIG, LocalAllToAll())
    everything = len(model._experts)
    model.join(ThreadAllToAll(Meeting(4), 1, 4))
    assert sorted(model._experts) == [(layer, e) for layer in range(CONFIG.layers) for e in (2, 3)]
    model.join(LocalAllToAll())
    assert len(model._experts) == everything == CONFIG.layers * CONFIG.experts


def test_neutral_tokens_take_part_and_ask_for_no_expert() -> None:
    sent: list[torch.Tensor] = []

    class Watched(LocalAllToAll):
        def swap(self, send: torch.Tensor) -> torch.Tensor:
            sent.append(send)
            return send

    model = MoeDecoder(CONFIG, Watched())
    model.forward(chunk(PROMPT[:3], 0, slot=0).padded(5))
    assert len(sent) == 2 * CONFIG.layers
    for questions in sent[::2]:
        assert questions.shape == (1, 5, CONFIG.hidden + CONFIG.experts_per_token)
        asked = questions[0, :, CONFIG.hidden :]
        assert (asked[:3] >= 0).all()
        assert (asked[3:] == -1).all()


def test_feeding_another_number_than_the_group_was_told_ends_before_any_swap() -> None:
    all_to_all = ThreadAllToAll(Meeting(2), 0, 2)
    model = MoeDecoder(CONFIG, all_to_all)
    before = model.state_digest()
    with forward_context(forward_plan(4, 1), 0), pytest.raises(BatchInvalidError, match=r"feeds 5 tokens.*\(4, 1\)"):
        model.forward(chunk(PROMPT[:5], 0, slot=0))
    assert all_to_all.swaps == 0
    assert model.state_digest() == before


GLOO_RANK = """
import json, os, signal, sys, time
import torch
from wavekeeper.worker_agent.forward_context import forward_context
from wavekeeper.worker_agent.demo.model import AllToAllError, Batch, LocalAllToAll, ModelConfig, MoeDecoder
from wavekeeper.worker_agent.demo.rank import ExpertGroup
from wavekeeper.worker_agent.plan import Outcome, Plan

torch.set_num_threads(1)
print("up", flush=True)
sys.stdin.readline()
task = json.loads(sys.argv[1])
rank, prompts, lengths = task["rank"], task["prompts"], task["max_tokens"]
group = ExpertGroup(task["store"], rank, len(prompts), task["timeout_s"], *task["fds"])
model = MoeDecoder(ModelConfig(seed=7), LocalAllToAll())

def generate(epoch):
    tokens, computed = list(prompts[rank]), 0
    for step in range(max(lengths)):
        fed = tuple(len(p) if step == 0 else 1 for p in prompts)
        plan = Plan(outcome=Outcome.FORWARD, epoch=epoch, wave=1, step=step + 1, num_tokens_across_dp=fed)
        if step in (0, 3):  # also in the middle of it: the caches stay, the group is another
            model.join(group.build(plan, rank))
        if step == task.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == task.get("skip"):
            sys.stdin.read()  # alive, connected, and not taking part
            break
        real = step < lengths[rank]
        count = len(tokens) - computed if real else 0
        batch = Batch(tokens[computed:], list(range(computed, len(tokens))), [0] * count) if real else Batch([], [], [])
        began = time.monotonic()
        try:
            with forward_context(plan, rank):
                choices = model.next_tokens(batch.padded(fed[rank]))
        except AllToAllError as error:
            return {"error": str(error), "step": step, "waited_s": time.monotonic() - began}
        if real:
            computed += count
            tokens.append(choices[count - 1])
    return {"tokens": tokens[len(prompts[rank]):]}

result = generate(task.get("epoch", 1))
if task.get("regroups"):
    result = {**generate(2), "lost": result["error"]}
print(json.dumps(result), flush=True)
group.leave()
os._exit(0)  # as rank.py ends: what torch still has running after a lost peer may not survive the interpreter's end
"""


class GlooRanks:
    """Processes that run the script above, one a rank, on one store whose port was bound before any of them began."""

    def __init__(self, prompts: list[list[int]], max_tokens: list[int], *, timeout_s: float = DEADLINE_S) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._task = {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "store": f"tcp://127.0.0.1:{self._listener.getsockname()[1]}",
            "timeout_s": timeout_s,
        }
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "GlooRanks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self._listener.close()

    def start(self, rank: int, **task: object) -> subprocess.Popen[str]:
        """Start a process, which imports torch and then waits for `go`."""
        fds = [self._listener.fileno()] if rank == 0 else []
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", GLOO_RANK, json.dumps({**self._task, "rank": rank, "fds": fds, **task})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    def go(self, *processes: subprocess.Popen[str]) -> None:
        """Let them begin when all have imported torch, which takes longer than some deadlines here."""
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def results(self) -> list[dict[str, object]]:
        """What each process printed last, in the order of their starts; one that was killed gives {}."""
        outputs = [process.communicate(timeout=2 * DEADLINE_S) for process in self.processes]
        assert all(process.returncode in (0, -signal.SIGKILL) for process in self.processes), outputs
        return [json.loads(out.splitlines()[-1]) if out else {} for out, _ in outputs]


def test_experts_spread_over_processes_give_what_one_rank_gives() -> None:
    asked = requests(4, max_tokens=14)
    expected = generate_alone(MoeDecoder(CONFIG, LocalAllToAll()), asked)
    with GlooRanks([r.prompt for r in asked], [r.max_tokens for r in asked]) as ranks:
        ranks.go(*[ranks.start(rank) for rank in range(4)])
        assert [result["tokens"] for result in ranks.results()] == [expected[r.id] for r in asked]


def test_a_rank_that_leaves_out_a_step_really_hangs_the_others_until_their_deadline() -> None:
    with GlooRanks([[1, 2], [3]], [6, 6], timeout_s=3) as ranks:
        ranks.go(ranks.start(0), ranks.start(1, skip=4))
        left, _ = ranks.results()
    assert "rank 0 of 2 could not swap tokens" in str(left["error"])
    assert left["step"] == 4
    assert isinstance(left["waited_s"], float)
    assert 2.5 < left["waited_s"] < DEADLINE_S


def test_a_new_group_forms_with_the_replacement_of_a_killed_rank_0_whose_store_is_gone() -> None:
    asked = requests(2, max_tokens=14)
    expected = generate_alone(MoeDecoder(CONFIG, LocalAllToAll()), asked)
    with GlooRanks([r.prompt for r in asked], [14, 14]) as ranks:
        doomed = ranks.start(0, dies=2)
        ranks.go(ranks.start(1, regroups=True), doomed)
        assert doomed.wait(DEADLINE_S) == -signal.SIGKILL
        ranks.go(ranks.start(0, epoch=2))
        gone, survivor, replacement = ranks.results()
    assert gone == {}
    assert survivor["lost"]
    for rank, result in ((1, survivor), (0, replacement)):
        tokens = result["tokens"]
        assert isinstance(tokens, list)
        assert tokens[: asked[rank].max_tokens] == expected[asked[rank].id]
