"""The exchange over torch.distributed: gloo on CPUs, NCCL on CUDA, HCCL on Ascend NPUs. The only file of the agent that
imports torch.

The engine in the same process has groups of its own, so nothing here touches torch's default group or its registry of
groups: a backend object is made from a store and used directly (`_backend`). The public `new_group` needs a default
group; `init_process_group` would be one.

One exchange is one `all_gather_into_tensor` of a [1, 16] int32 tensor into [dp_size, 16] (two-dimensional: a flat one
loses the rank axis). On an accelerator it runs on a side stream of high priority, between two copies from and to pinned
memory, so that it does not wait behind the model's queued kernels; the host polls an event. Buffers are allocated once.

Foreign errors end here. torch's own text names an address or nobody, so `Roll` is asked who it was.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, TCPStore

from ...proto.rows import ROW_BYTES
from ..errors import (
    ExchangeBrokenError,
    ExchangeTimeoutError,
    ExchangeUnavailableError,
)
from ..host import address_towards
from .base import CLOSE_WAIT_S, SLICE_MS, Deadline, GroupSpec, GuardedExchange
from .rendezvous import ANNOUNCE_AFTER_MS, STORE_ANSWER_S, Listener, Roll, Slow, split_endpoint

_SLICE = timedelta(milliseconds=SLICE_MS)
_NEVER = timedelta(days=7)
"""torch's own limit of a device group: above every deadline of ours (a day at most), because its watchdog ends the
process."""
_GLOO_GRACE_MS = 2_000
"""By how much gloo's limit of one gather exceeds ours. gloo cannot be aborted: this is how long a lost gather lingers
after its deadline."""
_DEAD_GRACE_MS = 200
"""A killed process's connections close shortly before it counts as ended."""
_STORE_GRACE_S = 0.2
"""By how much connecting to the store may outlast the deadline: torch's own limit, which is the deadline, comes
first."""
_POLL_SPINS = 200
"""Looks at a device event before the first sleep between two."""

_lingering: list[tuple[Any, Any]] = []
"""(backend, work) of gloo gathers that nobody waits for any more; the backend's destructor would wait for its lost
peer."""
_lingering_lock = threading.Lock()


class TorchExchange(GuardedExchange):
    """One rank's side of a process group. Connecting blocks until all ranks are there and have gathered once."""

    process_groups = 1

    def __init__(self, backend: str, group: GroupSpec, *, timeout_ms: int, listener: Listener | None) -> None:
        """Meet at rank 0's store, build the group, and try it with exchange 1.

        Raises:
            ExchangeTimeoutError: `missing` ranks did not come.
            ExchangeBrokenError: A rank came and was lost again.
            ExchangeUnavailableError: This torch, or this device, cannot do it.
        """
        super().__init__(backend, group)
        self._device = _check_device(backend, group.device)
        self._on_host = self._device.type == "cpu"
        self._backend: Any = None
        self._work: Any = None
        self._options = _options(self._on_host)
        deadline = Deadline(timeout_ms)
        _drop_finished()
        store = self._meet(listener, deadline)
        self._buffers: _HostBuffers | _DeviceBuffers = (
            _HostBuffers(group.dp_size) if self._on_host else _DeviceBuffers(group.dp_size, self._device)
        )
        build = Slow(lambda: _backend(backend, store, group, self._device, deadline), "wavekeeper-form")
        self._backend = self._bounded(build, deadline)
        self._count = 1
        try:
            # The first gather of a device group makes its communicator, in a call that returns when all have come.
            first = Slow(lambda: self._first(deadline), "wavekeeper-first")
            self._bounded(first, deadline, grace_s=CLOSE_WAIT_S)
        except BaseException:
            self._release()
            raise

    def _meet(self, listener: Listener | None, deadline: Deadline) -> Store:
        """Connect to rank 0's store, sign the roll and wait until everybody has."""
        try:
            connect = Slow(lambda: _store(self.group, listener, deadline), "wavekeeper-store")
            store = connect.result(_seconds(deadline) + _STORE_GRACE_S)
            self._roll = Roll(store, self.group)
            absent = Slow(lambda: self._roll.meet(deadline), "wavekeeper-meet").result(
                _seconds(deadline) + STORE_ANSWER_S
            )
        except (dist.DistError, TimeoutError) as error:
            raise ExchangeTimeoutError(self.name, (0,), deadline.timeout_ms, "forming") from error
        if absent:
            raise ExchangeTimeoutError(self.name, absent, deadline.timeout_ms, "forming")
        return store

    def _bounded(self, slow: Slow[Any], deadline: Deadline, grace_s: float = 0.0) -> Any:
        """Wait for a step of forming; torch's calls there can be neither sliced nor interrupted."""
        try:
            return slow.result(_seconds(deadline) + grace_s)
        except TimeoutError:
            raise ExchangeTimeoutError(self.name, self._roll.dead(), deadline.timeout_ms, "forming") from None
        except RuntimeError as error:
            raise self._broken(error) from error

    def _first(self, deadline: Deadline) -> None:
        self._post(bytes(ROW_BYTES), deadline)
        self._collect(deadline)

    def _post(self, row: bytes, deadline: Deadline) -> None:
        buffers = self._buffers
        if self._on_host:
            self._options.timeout = timedelta(milliseconds=deadline.timeout_ms + _GLOO_GRACE_MS)
        before = buffers.enter()
        try:
            buffers.load(row)
            self._work = self._backend._allgather_base(buffers.rows, buffers.row, self._options)
            buffers.fetch(self._work)
        except RuntimeError as error:
            self._raise_if_interrupted()
            raise self._broken(error) from error
        finally:
            buffers.leave(before)

    def _collect(self, deadline: Deadline) -> bytes:
        buffers = self._buffers
        announce_at_ms = min(ANNOUNCE_AFTER_MS, deadline.timeout_ms // 2)
        announced = False
        try:
            while not buffers.wait_slice(self._work):
                self._raise_if_interrupted()
                if not announced and _waited_ms(deadline) >= announce_at_ms:
                    announced = True
                    self._roll.announce(self._count)
                # Not every rank has a connection that breaks: in a ring only the neighbours' do.
                if announced and (dead := self._roll.dead()):
                    raise ExchangeBrokenError(self.name, dead, "its process has ended")
                if deadline.passed():
                    missing = self._roll.missing(self._count)
                    raise ExchangeTimeoutError(self.name, missing, deadline.timeout_ms, f"count {self._count}")
        except RuntimeError as error:
            self._raise_if_interrupted()
            raise self._broken(error) from error
        self._work = None
        return buffers.gathered()

    def _broken(self, error: RuntimeError) -> ExchangeBrokenError:
        """Say which rank it was, if its process has ended on this host or rank 0's store is gone."""
        until = Deadline(_DEAD_GRACE_MS)
        while not (dead := self._roll.dead()) and not until.passed():
            time.sleep(0.005)
        return ExchangeBrokenError(self.name, dead or self._roll.server_gone(), str(error).strip().splitlines()[0])

    def _release(self) -> None:
        backend, work = self._backend, self._work
        self._backend = self._work = None
        if backend is None:
            return
        if self._on_host:
            if work is not None and not work.is_completed():
                with _lingering_lock:
                    _lingering.append((backend, work))
        else:
            with contextlib.suppress(TimeoutError, RuntimeError):
                Slow(backend.abort, "wavekeeper-abort").result(CLOSE_WAIT_S)


class _HostBuffers:
    """A row and all rows as tensors over plain memory."""

    def __init__(self, dp_size: int) -> None:
        self._row, self._rows = bytearray(ROW_BYTES), bytearray(dp_size * ROW_BYTES)
        self.row = torch.frombuffer(self._row, dtype=torch.int32).view(1, -1)
        self.rows = torch.frombuffer(self._rows, dtype=torch.int32).view(dp_size, -1)

    def enter(self) -> None:
        """Nothing to change over to."""

    def leave(self, before: Any) -> None:
        """Nothing to change back."""

    def load(self, row: bytes) -> None:
        self._row[:] = row

    def fetch(self, work: Any) -> None:
        """Nothing to copy."""

    def wait_slice(self, work: Any) -> bool:
        """Wait for one slice; whether the rows are there. Raises torch's own RuntimeError if the gather failed."""
        try:
            work.wait(_SLICE)
        except RuntimeError:
            # The same type tells the end of the slice and a failure; a finished work raises its own error when asked
            # again.
            if not work.is_completed():
                return False
            work.wait()
        return True

    def gathered(self) -> bytes:
        return bytes(self._rows)


class _DeviceBuffers:
    """Pinned and device memory for a row and all rows, and the side stream on which everything happens."""

    def __init__(self, dp_size: int, device: torch.device) -> None:
        self._module: Any = getattr(torch, device.type)
        self._index = device.index if device.index is not None else self._module.current_device()
        words = ROW_BYTES // 4
        self._pinned_row = torch.empty((1, words), dtype=torch.int32, pin_memory=True)
        self._pinned_rows = torch.empty((dp_size, words), dtype=torch.int32, pin_memory=True)
        self.row = torch.empty((1, words), dtype=torch.int32, device=device)
        self.rows = torch.empty((dp_size, words), dtype=torch.int32, device=device)
        self._row_at, self._rows_at = self._pinned_row.data_ptr(), self._pinned_rows.data_ptr()
        self._rows_bytes = dp_size * ROW_BYTES
        self._side = self._module.Stream(device=device, priority=-1)
        self._done = self._module.Event()
        self._side.wait_stream(self._module.current_stream(device))  # which allocated the two

    def enter(self) -> tuple[int, Any]:
        """From now on this thread queues on the side stream; returns the device and the stream that it was on."""
        # With an index: to find out which device is meant by none costs as much as a copy.
        before = self._module.current_device(), self._module.current_stream(self._index)
        self._module.set_stream(self._side)
        return before

    def leave(self, before: Any) -> None:
        """Back to them."""
        device, stream = before
        self._module.set_stream(stream)
        if device != self._index:
            self._module.set_device(device)

    def load(self, row: bytes) -> None:
        ctypes.memmove(self._row_at, row, ROW_BYTES)
        self.row.copy_(self._pinned_row, non_blocking=True)

    def fetch(self, work: Any) -> None:
        if work is not None:  # the collective has a stream of its own
            work.wait()  # makes the side stream wait for it; the host goes on (`_check_device` saw to that)
        self._pinned_rows.copy_(self.rows, non_blocking=True)
        self._done.record(self._side)

    def wait_slice(self, work: Any) -> bool:
        """Poll the event for one slice; whether the rows are there."""
        for _ in range(_POLL_SPINS):
            if self._done.query():
                return True
        until = Deadline(SLICE_MS)
        while not until.passed():
            if self._done.query():
                return True
            time.sleep(0.000_05)
        return False

    def gathered(self) -> bytes:
        return ctypes.string_at(self._rows_at, self._rows_bytes)


def _options(on_host: bool) -> Any:
    """Made once. On a device the collective goes into the side stream itself, where torch can (since 2.8): a stream of
    its own would only cost two more events.
    """
    options = AllgatherOptions()
    if not on_host and hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _backend(name: str, store: Store, group: GroupSpec, device: torch.device, deadline: Deadline) -> Any:
    """Make the backend object of a group that torch's registry never hears of.

    A `ProcessGroup` around it would add nothing but a dispatcher: `_allgather_base`, which `all_gather_into_tensor`
    calls in the end, is the one private name that is used, and the class of HCCL has no public one (vLLM and
    vllm-ascend build their stateless groups likewise).
    """
    if name == "gloo":
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave the options out
        options = gloo._Options()
        options._timeout = timedelta(seconds=_seconds(deadline) + 1.0)  # of connecting; each gather has its own
        options._devices = [_gloo_device(group)]
        return gloo(store, group.rank, group.dp_size, options)
    with getattr(torch, device.type).device(device):
        kind = dist.ProcessGroupNCCL if name == "nccl" else _hccl()
        options = kind.Options()
        options._timeout = _NEVER
        options.is_high_priority_stream = True
        return kind(store, group.rank, group.dp_size, options)


def _gloo_device(group: GroupSpec) -> Any:
    """Bind gloo to the address from which rank 0 is reached, unless the operator named an interface.

    Left alone, gloo takes what the host name resolves to, on some hosts loopback: the group then hangs or is refused at
    its first gather (aws-do-eks PR 82).
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_device(hostname=address_towards(*split_endpoint(group.rendezvous)))


def _hccl() -> Any:
    try:
        module = importlib.import_module("torch_npu._C._distributed_c10d")
    except (ImportError, RuntimeError) as error:
        raise ExchangeUnavailableError(
            f"exchange hccl needs torch-npu and CANN: {error}; install them, or choose gloo or shm"
        ) from error
    return module.ProcessGroupHCCL


def _check_device(backend: str, device: str) -> torch.device:
    """The device on which this backend keeps its rows; gloo's is the CPU wherever the engine runs.

    Raises:
        ExchangeUnavailableError: The backend is not in this torch, or does not run on this device.
    """
    match backend:
        case "gloo":
            if not dist.is_available() or not dist.is_gloo_available():
                raise ExchangeUnavailableError("exchange gloo is not part of this torch; choose shm")
            return torch.device("cpu")
        case "nccl":
            if not dist.is_available() or not dist.is_nccl_available() or not torch.cuda.is_available():
                raise ExchangeUnavailableError(
                    "exchange nccl needs a CUDA build of torch and a visible GPU; choose gloo or shm"
                )
            if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in ("1", "y", "yes", "t", "true"):
                raise ExchangeUnavailableError(
                    "exchange nccl cannot keep a deadline while TORCH_NCCL_BLOCKING_WAIT is set; unset it"
                )
            kind = "cuda"
        case "hccl":
            _hccl()
            kind = "npu"
        case _:
            raise ExchangeUnavailableError(f"torch has no exchange {backend!r}")
    if not device.startswith(kind):
        raise ExchangeUnavailableError(
            f"exchange {backend} needs device {kind}:N, this rank has {device!r}; choose gloo or shm"
        )
    return torch.device(device)


def _store(group: GroupSpec, listener: Listener | None, deadline: Deadline) -> Store:
    """This group's part of rank 0's store. A client tries again until the deadline."""
    try:
        host, port = split_endpoint(group.rendezvous)
    except ValueError as error:
        raise ExchangeUnavailableError(f"exchanges over torch meet at rank 0, but {error}; or choose shm") from error
    if group.rank == 0:
        if listener is None or listener.endpoint != group.rendezvous:
            raise ExchangeUnavailableError(
                f"rank 0 must listen at {group.rendezvous}: give make_exchange the listener that is bound there"
            )
        store = listener.server(_serve)
    else:
        timeout = timedelta(seconds=max(0.01, _seconds(deadline)))
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(group.key, store)


def _serve(host: str, port: int, fd: int) -> Store:
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _seconds(deadline: Deadline) -> float:
    return deadline.left_ns() / 1e9


def _waited_ms(deadline: Deadline) -> float:
    return deadline.timeout_ms - deadline.left_ns() / 1e6


def _drop_finished() -> None:
    with _lingering_lock:
        _lingering[:] = [(backend, work) for backend, work in _lingering if not work.is_completed()]


@atexit.register
def _leave_to_the_system() -> None:
    """A lingering gather must not keep the process from ending: its backend is never destroyed."""
    for backend, _ in _lingering:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
