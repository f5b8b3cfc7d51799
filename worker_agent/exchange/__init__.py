"""The exchange of rows among the ranks of one lockstep deployment: rank to rank, never through the coordinator.

`make_exchange` connects this rank; `available_exchanges` says what it could use. torch is imported only when an
exchange over torch is made.

Reading order: `base` (the interface and its rules), `shm` with `segment` (its memory) and `_shm.c` (its loads, stores
and waits),
`torch_dist` (gloo, NCCL, HCCL) with `rendezvous` (where its ranks meet).
"""

from importlib.util import find_spec

from ..errors import ExchangeUnavailableError
from .base import Exchange, GroupSpec, SoloExchange
from .rendezvous import Listener

__all__ = ["Exchange", "GroupSpec", "Listener", "available_exchanges", "make_exchange"]


def make_exchange(backend: str, group: GroupSpec, *, timeout_ms: int, listener: Listener | None = None) -> Exchange:
    """Connect this rank to its group; returns when all ranks are there.

    Args:
        backend: `shm`, `gloo`, `nccl` or `hccl`; the same on all ranks.
        group: This rank's group.
        timeout_ms: Longest wait for the other ranks, in milliseconds.
        listener: Rank 0 of a group over torch: the one whose endpoint is `group.rendezvous`.

    Raises:
        ExchangeTimeoutError: `missing` ranks did not come.
        ExchangeBrokenError: A rank was lost while the group met.
        ExchangeUnavailableError: This exchange cannot be used here; says what to install or to set.
    """
    match backend:
        case "shm" | "gloo" | "nccl" | "hccl" if group.dp_size == 1:
            return SoloExchange(backend, group)
        case "shm":
            return _shm_exchange(group, timeout_ms)
        case "gloo" | "nccl" | "hccl":
            return _torch_exchange(backend, group, timeout_ms, listener)
        case _:
            raise ExchangeUnavailableError(f"no exchange is called {backend!r}; there are shm, gloo, nccl and hccl")


def available_exchanges(device: str = "cpu") -> list[str]:
    """Names of the exchanges that this rank could use, best first; found without importing torch.

    Args:
        device: `cpu`, `cuda:0`, `npu:0`: where the engine runs.
    """
    names = ["shm"] if _has_shm() else []
    if find_spec("torch") is not None:
        if device.startswith("cuda"):
            names.append("nccl")
        if device.startswith("npu") and find_spec("torch_npu") is not None:
            names.append("hccl")
        names.append("gloo")
    return names


def _has_shm() -> bool:
    try:
        from .shm import available
    except ImportError:  # not Linux, or a machine that _shm.c does not know
        return False
    return available()


def _shm_exchange(group: GroupSpec, timeout_ms: int) -> Exchange:
    try:
        from .shm import ShmExchange
    except ImportError as error:
        raise ExchangeUnavailableError(f"exchange shm cannot be used here ({error}): choose gloo") from error
    return ShmExchange(group, timeout_ms=timeout_ms)


def _torch_exchange(backend: str, group: GroupSpec, timeout_ms: int, listener: Listener | None) -> Exchange:
    try:
        from .torch_dist import TorchExchange
    except ImportError as error:
        extra = "npu" if backend == "hccl" else "gpu"
        raise ExchangeUnavailableError(
            f"exchange {backend} needs torch ({error}): install wavekeeper[{extra}], or choose exchange shm"
        ) from error
    except RuntimeError as error:
        raise ExchangeUnavailableError(
            f"exchange {backend} needs torch, which cannot be imported here: {str(error).strip()} "
            f"(torch_npu without CANN breaks it: install CANN, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0)"
        ) from error
    return TorchExchange(backend, group, timeout_ms=timeout_ms, listener=listener)
