"""What ranks do when their coordinator is gone, and what the coordinator sees of ranks that are gone."""

import subprocess
import sys
import time

import pytest

from wavekeeper.proto.messages import Kind
from wavekeeper.proto.rows import Row
from wavekeeper.worker_agent import LossPolicy, RankAgent
from wavekeeper.worker_agent.errors import CoordinatorLostError

from .house import Coordinator, eventually

DENSE_RANK = """
import sys
from wavekeeper.proto.messages import Kind
from wavekeeper.worker_agent import RankAgent

agent = RankAgent.connect(sys.argv[1], deployment="dense", rank=0, dp_size=2, kind=Kind.DENSE)
agent.wait_ready(20)
print("ready", flush=True)
sys.stdin.read()
"""


def agent_with(coordinator: Coordinator, policy: LossPolicy) -> RankAgent:
    agent = RankAgent.connect(
        coordinator.facts["control"],
        deployment="dense",
        rank=0,
        dp_size=2,
        kind=Kind.DENSE,
        on_coordinator_loss=policy,
    )
    agent.wait_ready(20)
    return agent


@pytest.mark.parametrize("policy", [LossPolicy.DRAIN, LossPolicy.EXIT])
def test_a_rank_that_shall_not_outlive_its_coordinator_is_told_when_it_is_gone(
    coordinator: Coordinator, policy: LossPolicy
) -> None:
    """Case B37, policies on loss of the coordinator."""
    agent = agent_with(coordinator, policy)
    assert agent.wait(0.3) is False, "a coordinator that lives is no reason to leave"
    coordinator.kill()
    try:
        with pytest.raises(CoordinatorLostError, match=f"the policy is to {policy}"):
            assert agent.wait(30) is False, "waited in vain"
    finally:
        agent.close()


def test_a_draining_rank_finishes_its_work_first(coordinator: Coordinator) -> None:
    agent = agent_with(coordinator, LossPolicy.DRAIN)
    agent.notify_work()
    coordinator.kill()
    until = time.monotonic() + 2.5  # longer than dead_after_ms of this fleet
    try:
        while time.monotonic() < until:
            assert agent.wait(1.0), "there is work"
            assert agent.step(Row(num_tokens=1, has_work=True)).runs_forward
        agent.step(Row())
        with pytest.raises(CoordinatorLostError):
            agent.wait(30)
    finally:
        agent.close()


def test_the_default_is_to_hold_and_to_be_found_again(coordinator: Coordinator) -> None:
    agent = agent_with(coordinator, LossPolicy.HOLD)
    try:
        coordinator.kill()
        assert agent.wait(2.5) is False
        coordinator.restart_on_the_same_ports()
        eventually(lambda: coordinator.deployment("dense")["ranks_up"] == 1, "the rank to register again")
    finally:
        agent.close()


def test_a_killed_process_of_this_machine_is_noticed_long_before_its_silence_counts(coordinator: Coordinator) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-P", "-c", DENSE_RANK, coordinator.facts["control"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        assert coordinator.deployment("dense")["ranks_up"] == 1
    finally:
        rank.kill()
        rank.communicate()
    eventually(lambda: coordinator.deployment("dense")["ranks_up"] == 0, "the death to be noticed")

    assert "its process has ended" in coordinator.logged(), "not by silence"
