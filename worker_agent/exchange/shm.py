"""The exchange of ranks on one host: rows through shared memory, without locks, and without a C extension.

Where things are. After a header of 64 bytes each rank has an area of 384 bytes that it alone writes:

    +0    doorbell: 32 bits, the tag of this rank's newest row
    +8    pid of the process that sits here, for messages
    +128  slot 0: its rows with even counts      16 words of 64 bits = tag << 32 | value
    +256  slot 1: its rows with odd counts

The tag is the count of exchanges since the group began, modulo 2^32. It is not the step, which begins again in every
wave: a fast rank's first row of the next wave would overwrite the one that a slow rank still reads.

Why a reader never gets a mixed row. Python gives no memory barriers, and aarch64 lets others see our stores in any
order. So no word relies on another one: each is one aligned 64-bit store (a memoryview of format `Q` copies eight bytes
at once), which no reader sees in halves, and carries the tag of its row. A reader takes a row only if all 16 words
carry the tag that it waits for. Each word is stored once with that tag, so those 16 words are that row, whatever order
they became visible in, and whatever else was seen before.

Why two slots are enough. Rank r stores row c+2 over row c only after its exchange c+1 is complete, that is after it has
seen row c+1 of every rank q; and q stores row c+1 only after it has taken row c of every rank, r's included (the store
stands behind the branch that looked at the tags, and no processor makes a store visible before a branch that may forbid
it). So nobody still wants what is overwritten. The same argument makes the tag's wrap harmless: a slot holds tag c-2 or
c and nothing older, and 2^32 is even.

Why no wake-up is lost. Each doorbell has one writer, who stores the row, then the doorbell, then wakes its sleepers. A
reader loads the doorbell, then looks for the row, and only then sleeps, on condition that the doorbell still is what it
loaded. Was it stored in between, the kernel refuses the sleep; was it not, the waker finds the sleeper. Was the new tag
loaded already, then the row is on its way, and the reader does not sleep. While it waits the doorbell changes once at
most: its writer cannot get further than one row ahead. Every sleep is a slice: a look at the interrupt, the deadline
and the missing ranks' locks (are they alive?) follows.
"""

import os
from array import array
from collections.abc import Sequence

from ...proto.rows import ROW_BYTES
from ..errors import ExchangeBrokenError, ExchangeTimeoutError, ExchangeUnavailableError
from . import futex
from .base import SLICE_MS, Deadline, GroupSpec, GuardedExchange
from .segment import FOLDER, HEADER_BYTES, Layout, attach, reclaim, segment_prefix

LAYOUT_VERSION = 1
WORDS = ROW_BYTES // 4
TAGS = 1 << 32
_TAG_MASK = TAGS - 1
_AREA_BYTES = 384
_OWNER_AT, _SLOT_AT, _SLOT_BYTES = 8, 128, 128
_SLICE_NS = SLICE_MS * 1_000_000

SPINS = 128
"""Looks before the first sleep, about 0.1 ms: a sleep and its wake cost about half of that on a virtual machine. Each
look gives the core away (`sched_yield`), so a rank that waits never keeps the late one from running; with 8 ranks on 2
cores this was measured to be better than fewer looks, and than a number that learns."""


def encode_row(row: bytes, tag: int) -> list[int]:
    """Return the 16 words of a row: each says by itself which exchange it belongs to."""
    base = tag << 32
    return [base | value for value in memoryview(row).cast("I")]


def is_row(words: Sequence[int], tag: int) -> bool:
    """Whether these 16 words are the row of this tag; one word of another row is enough to say no."""
    return min(words) >> 32 == tag and max(words) >> 32 == tag


def decode_rows(words: list[int]) -> bytes:
    """Return the values without the tags; 64 bytes for each 16 words."""
    return memoryview(array("Q", words)).cast("B").cast("I")[::2].tobytes()


def available() -> bool:
    """Whether this machine can do it: Linux on x86-64 or aarch64, with a writable /dev/shm."""
    return futex.supported() and os.access(FOLDER, os.W_OK | os.X_OK)


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
            raise ExchangeUnavailableError(
                f"exchange shm needs Linux on x86-64 or aarch64 and a writable {FOLDER}; choose gloo"
            )
        name = f"{segment_prefix(group.deployment)}{group.epoch}.{group.group}.{group.channel}"
        reclaim(group.deployment, keep=name)
        size_bytes = HEADER_BYTES + group.dp_size * _AREA_BYTES
        self._layout = Layout(LAYOUT_VERSION, group.dp_size, ROW_BYTES, size_bytes)
        self._meet(name, Deadline(timeout_ms))

    def _meet(self, name: str, deadline: Deadline) -> None:
        """Attach and pass exchanges 1 and 2: the first shows that all ranks came, the second that each lived to see it.

        A rank that died early leaves its first row behind, but never a second one, so nobody forms a group with it.
        """
        while True:
            self._segment = attach(name, self.group.rank, self._layout, self._owner_word(self.group.rank), deadline)
            self._map_areas()
            try:
                for self._count in (1, 2):
                    self._exchange(bytes(ROW_BYTES), deadline)
            except ExchangeBrokenError:
                # A rank died while the group met, perhaps one of an earlier run of this name: meet again without it.
                self._release()
            except BaseException:
                self._release()
                raise
            else:
                break
        if self.group.rank == 0:
            self._segment.remove_name()

    def _owner_word(self, rank: int) -> int:
        return (HEADER_BYTES + rank * _AREA_BYTES + _OWNER_AT) // 8

    def _map_areas(self) -> None:
        words, ranks = self._segment.words, range(self.group.dp_size)
        starts = [HEADER_BYTES + rank * _AREA_BYTES for rank in ranks]
        self._doorbells = [start // 4 for start in starts]
        self._addresses = [self._segment.address + start for start in starts]
        self._slots = tuple(
            [words[(start + at) // 8 : (start + at) // 8 + WORDS] for start in starts]
            for at in (_SLOT_AT, _SLOT_AT + _SLOT_BYTES)
        )

    def _exchange(self, row: bytes, deadline: Deadline) -> bytes:
        tag = self._count & _TAG_MASK
        slots = self._slots[tag & 1]
        self._post(row, tag)
        gathered: list[int] = []
        for rank, slot in enumerate(slots):
            words = slot.tolist()
            if not is_row(words, tag):
                words = self._wait_for(rank, tag, deadline)
            gathered += words
        return decode_rows(gathered)

    def _post(self, row: bytes, tag: int) -> None:
        mine = self.group.rank
        slot = self._slots[tag & 1][mine]
        # One by one: a slice would be copied in units of the C library's choice.
        for index, word in enumerate(encode_row(row, tag)):
            slot[index] = word
        self._segment.halves[self._doorbells[mine]] = tag
        # Always: to know that nobody sleeps would take a barrier between our store and our load.
        futex.wake(self._addresses[mine])

    def _wait_for(self, rank: int, tag: int, deadline: Deadline) -> list[int]:
        slot: memoryview = self._slots[tag & 1][rank]
        for _ in range(SPINS):
            os.sched_yield()
            words: list[int] = slot.tolist()
            if is_row(words, tag):
                return words
        return self._sleep_for(rank, tag, deadline)

    def _sleep_for(self, rank: int, tag: int, deadline: Deadline) -> list[int]:
        slots = self._slots[tag & 1]
        halves, doorbell, address = self._segment.halves, self._doorbells[rank], self._addresses[rank]
        gone: list[int] = []
        while True:
            rung = halves[doorbell]
            words: list[int] = slots[rank].tolist()
            if is_row(words, tag):
                return words
            self._raise_if_interrupted()
            # Their rows are looked for after their locks were found free: they died, or left, without them.
            lost = tuple(other for other in gone if not is_row(slots[other].tolist(), tag))
            if lost:
                raise ExchangeBrokenError(self.name, lost, "its process has ended or has left the group")
            left_ns = deadline.left_ns()
            if left_ns == 0:
                raise ExchangeTimeoutError(self.name, self._missing(tag), deadline.timeout_ms, f"count {tag}")
            if rung != tag and not futex.wait(address, rung, min(left_ns, _SLICE_NS)):
                gone = [other for other in self._missing(tag) if self._is_gone(other)]

    def _is_gone(self, rank: int) -> bool:
        """Whether this rank, not our own, has been attached and no longer is; one that never came is not gone."""
        came = self._segment.words[self._owner_word(rank)] != 0
        return came and not self._segment.holds(rank)

    def _missing(self, tag: int) -> tuple[int, ...]:
        return tuple(rank for rank, slot in enumerate(self._slots[tag & 1]) if not is_row(slot.tolist(), tag))

    def _release(self) -> None:
        for slots in self._slots:
            for slot in slots:
                slot.release()
        self._segment.close()
