"""What belongs to torch alone: where it is imported, whose groups it leaves alone, and what is said when it is not
there."""

import subprocess
import sys
from pathlib import Path

import pytest

from wavekeeper.worker_agent.errors import ExchangeTimeoutError, ExchangeUnavailableError
from wavekeeper.worker_agent.exchange import GroupSpec, available_exchanges, make_exchange

from .conftest import Fleet, import_torch, together


def run_isolated(script: str, *arguments: str) -> str:
    """Run it in a fresh interpreter, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torch_is_imported_by_nothing_but_an_exchange_over_torch() -> None:
    script = """
import sys
from wavekeeper.worker_agent.exchange import GroupSpec, Listener, available_exchanges, make_exchange
available_exchanges("cuda:0")
spec = GroupSpec(deployment="d", epoch=1, group="g", rank=0, dp_size=1)
make_exchange("gloo", spec, timeout_ms=1).close()
make_exchange("shm", spec, timeout_ms=1).close()
Listener().close()
print("torch" in sys.modules)
"""
    assert run_isolated(script) == "False"


MAKE = """
import sys
from wavekeeper.worker_agent.errors import ExchangeUnavailableError
from wavekeeper.worker_agent.exchange import GroupSpec, make_exchange
spec = GroupSpec(deployment="d", epoch=1, group="g", rank=0, dp_size=2, rendezvous="tcp://127.0.0.1:1")
try:
    make_exchange(sys.argv[1], spec, timeout_ms=100)
except ExchangeUnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize(("backend", "extra"), [("gloo", "gpu"), ("nccl", "gpu"), ("hccl", "npu")])
def test_without_torch_the_error_says_what_to_install(backend: str, extra: str) -> None:
    said = run_isolated("import sys; sys.modules['torch'] = None\n" + MAKE, backend)
    assert f"install wavekeeper[{extra}]" in said


def test_a_torch_that_torch_npu_breaks_is_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('Failed to load the backend extension: torch_npu')")
    said = run_isolated(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + MAKE, "gloo")
    assert "Failed to load the backend extension: torch_npu" in said
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


@pytest.mark.parametrize(("backend", "needs"), [("nccl", "a visible GPU"), ("hccl", "torch-npu and CANN")])
def test_a_backend_without_its_device_says_what_it_needs(gloo_fleet: Fleet, backend: str, needs: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ExchangeUnavailableError, match=needs):
        make_exchange(backend, gloo_fleet.spec(0, 2), timeout_ms=100, listener=gloo_fleet.listener)


def test_exchanges_are_offered_best_first() -> None:
    import_torch()
    assert available_exchanges() == ["shm", "gloo"]
    assert available_exchanges("cuda:0") == ["shm", "nccl", "gloo"]


def test_torchs_default_group_is_neither_needed_nor_touched(gloo_fleet: Fleet) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    for exchange in gloo_fleet.form(2, group="before"):
        exchange.close()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        exchanges = gloo_fleet.form(2, group="beside")
        got = together(lambda rank: exchanges[rank].gather(bytes([rank]) * 64, timeout_ms=10_000), range(2))
        assert got == [bytes(64) + b"\1" * 64] * 2
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
    finally:
        dist.destroy_process_group()
    got = together(lambda rank: exchanges[rank].gather(bytes([rank]) * 64, timeout_ms=10_000), range(2))
    assert got == [bytes(64) + b"\1" * 64] * 2


def test_a_rank_0_that_listens_but_never_forms_is_named(gloo_fleet: Fleet) -> None:
    """Its port accepts connections, for the socket is bound and listens; nobody answers on it."""
    errors = together(lambda rank: gloo_fleet.connect(gloo_fleet.spec(rank, 3), timeout_ms=500), [1, 2])
    assert [isinstance(error, ExchangeTimeoutError) and error.missing for error in errors] == [(0,)] * 2


def test_a_group_without_a_rendezvous_is_told_what_is_missing() -> None:
    import_torch()
    spec = GroupSpec(deployment="d", epoch=1, group="g", rank=0, dp_size=2)
    with pytest.raises(ExchangeUnavailableError, match="tcp://host:port"):
        make_exchange("gloo", spec, timeout_ms=100)


def test_rank_0_must_bring_the_listener_that_all_were_told_of(gloo_fleet: Fleet) -> None:
    with pytest.raises(ExchangeUnavailableError, match=gloo_fleet.rendezvous):
        make_exchange("gloo", gloo_fleet.spec(0, 2), timeout_ms=100)


def test_a_process_ends_although_a_gather_was_given_up() -> None:
    """gloo cannot be aborted, and its destructor waits for the lost peer: the end of the process must not."""
    script = """
import threading
from wavekeeper.worker_agent.errors import ExchangeInterruptedError
from wavekeeper.worker_agent.exchange import GroupSpec, Listener, make_exchange
listener = Listener()
made = {}
def connect(rank):
    spec = GroupSpec(
        deployment="d", epoch=1, group="g", rank=rank, dp_size=2, rendezvous=listener.endpoint
    )
    made[rank] = make_exchange("gloo", spec, timeout_ms=20_000, listener=listener if rank == 0 else None)
threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
threading.Timer(0.2, made[0].interrupt).start()
try:
    made[0].gather(bytes(64), timeout_ms=3_600_000)
except ExchangeInterruptedError:
    made[0].close()
    print("left")
"""
    assert run_isolated(script) == "left"
