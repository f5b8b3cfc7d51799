"""The exchange of ranks on one host: rows through shared memory, without locks.

The stores, loads and waits, and why no row is mixed and no wake-up lost, are in `_shm.c`; who sits in the segment is in
`segment`. Here is what an exchange does while it waits: every sleep is a slice, and a look at the interrupt, the
deadline and the missing ranks' locks (are they alive?) follows.

Rows are numbered by the count of exchanges since the group began, modulo 2^32. It is not the step, which begins again
in every wave: a fast rank's first row of the next wave would overwrite the one that a slow rank still reads.

Why C. In Python a row of this size must be written and read word by word, each word with a tag, because Python has no
barriers: 16, 21 and 35 us for 2, 4 and 8 ranks on 16 cores, nearly all of it the interpreter. docs/performance.md has
the figures of both.
"""

import os

from ...proto.rows import ROW_BYTES
from ..errors import ExchangeBrokenError, ExchangeTimeoutError, ExchangeUnavailableError
from ._shm import AREA_BYTES, Channel
from .base import SLICE_MS, Deadline, GroupSpec, GuardedExchange
from .segment import FOLDER, HEADER_BYTES, Layout, attach, reclaim, segment_prefix

LAYOUT_VERSION = 2
NUMBERS = 1 << 32
_OWNER_AT = 8
_SLICE_NS = SLICE_MS * 1_000_000


def available() -> bool:
    """Whether this machine has a place for it."""
    return os.access(FOLDER, os.W_OK | os.X_OK)


class ShmExchange(GuardedExchange):
    """One rank's side of a shared-memory group. Connecting blocks until all ranks are there."""

    def __init__(self, group: GroupSpec, *, timeout_ms: int) -> None:
        """Attach, meet all ranks, and leave no name behind.

        Raises:
            ExchangeTimeoutError: `missing` ranks did not come.
            ExchangeUnavailableError: See `segment.attach`.
        """
        super().__init__("shm", group)
        if not available():
            raise ExchangeUnavailableError(f"exchange shm needs a writable {FOLDER}; choose gloo")
        name = f"{segment_prefix(group.deployment)}{group.epoch}.{group.group}.{group.channel}"
        reclaim(group.deployment, keep=name)
        size_bytes = HEADER_BYTES + group.dp_size * AREA_BYTES
        self._layout = Layout(LAYOUT_VERSION, group.dp_size, ROW_BYTES, size_bytes)
        self._meet(name, Deadline(timeout_ms))

    def _meet(self, name: str, deadline: Deadline) -> None:
        """Attach and pass exchanges 1 and 2: the first shows that all ranks came, the second that each lived to see it.

        A rank that died early leaves its first row behind, but never a second one, so nobody forms a group with it.
        """
        group = self.group
        while True:
            self._segment = attach(name, group.rank, self._layout, self._owner_word(group.rank), deadline)
            self._channel = Channel(self._segment.memory, group.dp_size, group.rank)
            try:
                for self._count in (1, 2):
                    self._post(bytes(ROW_BYTES), deadline)
                    self._collect(deadline)
            except ExchangeBrokenError:
                # A rank died while the group met, perhaps one of an earlier run of this name: meet again without it.
                self._release()
            except BaseException:
                self._release()
                raise
            else:
                break
        if group.rank == 0:
            self._segment.remove_name()

    def _owner_word(self, rank: int) -> int:
        return (HEADER_BYTES + rank * AREA_BYTES + _OWNER_AT) // 8

    def _post(self, row: bytes, deadline: Deadline) -> None:
        self._channel.post(row, self._count % NUMBERS)

    def _collect(self, deadline: Deadline) -> bytes:
        rows = self._channel.wait(min(deadline.left_ns(), _SLICE_NS))
        gone: list[int] = []
        while rows is None:
            self._raise_if_interrupted()
            missing = self._channel.missing()
            # Their rows are looked for after their locks were found free: they died, or left, without them.
            if lost := tuple(rank for rank in gone if rank in missing):
                raise ExchangeBrokenError(self.name, lost, "its process has ended or has left the group")
            left_ns = deadline.left_ns()
            if missing and left_ns == 0:
                raise ExchangeTimeoutError(self.name, missing, deadline.timeout_ms, f"count {self._count}")
            gone = [rank for rank in missing if self._is_gone(rank)]
            rows = self._channel.wait(0 if gone else min(left_ns, _SLICE_NS))
        return rows

    def _is_gone(self, rank: int) -> bool:
        """Whether this rank, not our own, has been attached and no longer is; one that never came is not gone."""
        came = self._segment.words[self._owner_word(rank)] != 0
        return came and not self._segment.holds(rank)

    def _release(self) -> None:
        self._channel.close()
        self._segment.close()
