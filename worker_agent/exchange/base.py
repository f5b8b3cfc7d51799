"""What every exchange is: one row in, all rows out, with a deadline.

The law of this file:

1. `gather` checks its argument before anything leaves this rank. A rank that fails after some of its peers have entered
   would hang them.
2. An exchange that has failed, was interrupted or was closed is over: every later `gather` is refused. Ranks that went
   on after one of them left would meet at different exchanges. The way back is a new group.
3. `interrupt` may come from any thread; only it and `close` may. Two gathers at the same time are the caller's bug and
   are refused.

Source of the first rule: an exchange must accept a fixed record only, and refuse locally (vllm-ascend PR 1593 and
1857).
"""

import re
import threading
import time
from typing import Protocol

import msgspec

from ...proto.errors import LocalProtocolError
from ...proto.rows import ROW_BYTES
from ..errors import ExchangeBrokenError, ExchangeError, ExchangeInterruptedError

SLICE_MS = 25
"""Longest sleep between two looks at the deadline and the interrupt; half of the 50 ms within which an interrupt must
be obeyed."""

CLOSE_WAIT_S = 2.0
"""How long `close` waits for a gather that it has interrupted; many times SLICE_MS, for machines with more threads than
cores."""

_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOKEN = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]*"
)  # no dot: it stands between the parts of a key, and no two groups may share one


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One group of ranks that exchange rows, as each of them must know it.

    Raises:
        ValueError: A name could not be part of a file's name, or the rank is not one of the group.
    """

    deployment: str
    epoch: int
    group: str
    """Unique text of this group: two groups that ever were have different ones, also within one epoch."""
    rank: int
    dp_size: int
    rendezvous: str = ""
    """`tcp://host:port`, where rank 0 listens; empty where the exchange needs none (shm)."""
    device: str = "cpu"
    """`cpu`, `cuda:0`, `npu:0`: where a device exchange keeps its rows."""
    channel: str = "step"
    """Tells apart several exchanges of the same group."""

    def __post_init__(self) -> None:
        if not _DEPLOYMENT.fullmatch(self.deployment):
            raise ValueError(
                f"deployment is {self.deployment!r}, but must be letters, digits, '.', '_' and '-' (it names a file)"
            )
        for key in ("group", "channel"):
            value = getattr(self, key)
            if not _TOKEN.fullmatch(value):
                raise ValueError(
                    f"{key} is {value!r}, but must be letters, digits, '_' and '-' (it is part of a file's name)"
                )
        if not 0 <= self.rank < self.dp_size:
            raise ValueError(f"rank is {self.rank}, but must be in 0..{self.dp_size - 1} (dp_size {self.dp_size})")

    @property
    def key(self) -> str:
        """Deployment, epoch, group and channel as one text; no two groups share it."""
        return f"{self.deployment}.{self.epoch}.{self.group}.{self.channel}"


class Exchange(Protocol):
    """The all_gather of rows among the ranks of one group."""

    name: str
    """`shm`, `gloo`, `nccl` or `hccl`."""
    process_groups: int
    """How many torch process groups it created."""

    def begin(self, row: bytes, *, timeout_ms: int) -> None:
        """Send one row to every rank of the group, and do not wait: `end` does. The caller's own work fits between.

        Args:
            row: Exactly 64 bytes; see `wavekeeper.proto.rows`.
            timeout_ms: Longest wait for the slowest rank, from now, in milliseconds.

        Raises:
            TypeError: `row` is not `bytes`. Nothing was sent; the group is as it was.
            LocalProtocolError: `row` is not 64 bytes long, or an exchange is under way. Likewise.
            ExchangeBrokenError, ExchangeInterruptedError: The group is over.
        """
        ...

    def end(self) -> bytes:
        """Wait for the rows of the exchange that `begin` began.

        Returns:
            dp_size * 64 bytes; row index == rank.

        Raises:
            LocalProtocolError: None was begun.
            ExchangeTimeoutError: Some ranks did not arrive; the group is over.
            ExchangeBrokenError: A rank has left or its connection broke; the group is over.
            ExchangeInterruptedError: `interrupt` or `close` was called; the group is over.
        """
        ...

    def gather(self, row: bytes, *, timeout_ms: int) -> bytes:
        """`begin` and `end` in one."""
        ...

    def interrupt(self) -> None:
        """Make a gather in progress raise ExchangeInterruptedError within 50 ms, and every later one at once. From any
        thread."""
        ...

    def close(self) -> None:
        """Interrupt, then give everything back. Never hangs, may be repeated."""
        ...


class Deadline:
    """A moment on the monotonic clock, with the words for how long it was."""

    __slots__ = ("_at_ns", "timeout_ms")

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._at_ns = time.monotonic_ns() + timeout_ms * 1_000_000

    def left_ns(self) -> int:
        """Nanoseconds that are left, 0 when it is over."""
        return max(0, self._at_ns - time.monotonic_ns())

    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic_ns() >= self._at_ns


def check_row(row: object) -> None:
    """Refuse anything but 64 bytes.

    Raises:
        TypeError: Not `bytes`. A bytearray is refused as well: it could change while it is read.
        LocalProtocolError: Another length.
    """
    if type(row) is not bytes:
        raise TypeError(f"a row is bytes, got {type(row).__name__}")
    if len(row) != ROW_BYTES:
        raise LocalProtocolError(f"a row is {ROW_BYTES} bytes, got {len(row)}")


class GuardedExchange:
    """Rules 1 to 3 of this file; a transport adds `_post`, `_collect` and `_release`."""

    name: str
    process_groups: int = 0

    def __init__(self, name: str, group: GroupSpec) -> None:
        self.name = name
        self.group = group
        self._count = 0
        """Exchanges begun; never goes back within a group, unlike steps, which begin again in every wave."""
        self._interrupted = False
        self._failure: ExchangeError | None = None
        self._released = False
        self._deadline: Deadline | None = None
        """Of the exchange that is under way."""
        self._in_use = threading.Lock()

    def begin(self, row: bytes, *, timeout_ms: int) -> None:
        """See `Exchange.begin`."""
        check_row(row)
        self._take()
        try:
            if self._deadline is not None:
                raise LocalProtocolError(f"exchange {self._count} of {self.group.key} was begun and not ended")
            self._count += 1
            self._deadline = deadline = Deadline(timeout_ms)
            self._post(row, deadline)
        except ExchangeError as error:
            self._failure = error
            raise
        finally:
            self._in_use.release()

    def end(self) -> bytes:
        """See `Exchange.end`."""
        self._take()
        try:
            deadline, self._deadline = self._deadline, None
            if deadline is None:
                raise LocalProtocolError(f"no exchange of {self.group.key} was begun")
            return self._collect(deadline)
        except ExchangeError as error:
            self._failure = error
            raise
        finally:
            self._in_use.release()

    def gather(self, row: bytes, *, timeout_ms: int) -> bytes:
        """See `Exchange.gather`."""
        self.begin(row, timeout_ms=timeout_ms)
        return self.end()

    def interrupt(self) -> None:
        """See `Exchange.interrupt`. A plain store: the gather in progress looks at it after every slice of its wait."""
        self._interrupted = True

    def close(self) -> None:
        """See `Exchange.close`."""
        self.interrupt()
        # A reader must never lose its memory or its group while it reads: without the lock nothing is given back.
        if not self._in_use.acquire(timeout=CLOSE_WAIT_S):
            return
        try:
            if not self._released:
                self._released = True
                self._release()
        finally:
            self._in_use.release()

    def _take(self) -> None:
        """Take the lock of an exchange that is not over; the caller releases it."""
        if not self._in_use.acquire(blocking=False):
            self._raise_if_interrupted()  # then it is `close` that holds it
            raise LocalProtocolError(
                f"two threads use the {self.name} exchange of rank {self.group.rank} at the same time"
            )
        if self._interrupted or self._failure is not None:
            self._in_use.release()
            self._refuse_if_over()

    def _refuse_if_over(self) -> None:
        self._raise_if_interrupted()
        failure = self._failure
        if failure is not None:
            who = getattr(failure, "missing", ()) or getattr(failure, "lost", ())
            raise ExchangeBrokenError(self.name, who, f"this group is over ({failure})") from failure

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise ExchangeInterruptedError(f"{self.name} exchange {self._count} of {self.group.key} was interrupted")

    def _post(self, row: bytes, deadline: Deadline) -> None:
        raise NotImplementedError

    def _collect(self, deadline: Deadline) -> bytes:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


class SoloExchange(GuardedExchange):
    """A group of one: its row is all rows. No segment, no process group, no collective."""

    _row = b""

    def _post(self, row: bytes, deadline: Deadline) -> None:
        self._row = row

    def _collect(self, deadline: Deadline) -> bytes:
        return self._row

    def _release(self) -> None:
        pass
