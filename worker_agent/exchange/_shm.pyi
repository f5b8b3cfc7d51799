"""The C side of shm.py."""

from mmap import mmap

AREA_BYTES: int
"""Bytes of each rank's area, behind a header of 64 bytes."""

class Channel:
    """One rank's side of a segment. One thread at a time."""

    spin_most_ns: int
    """Never spin for longer than that; 0: sleep at once."""

    def __init__(self, memory: mmap | bytearray, size: int, rank: int) -> None: ...
    def post(self, row: bytes, number: int) -> None:
        """Write row `number` (64 bytes)."""

    def wait(self, slice_ns: int) -> bytes | None:
        """The rows of all ranks with the number of our newest one, or None if some are not there after sleeping for
        `slice_ns`. The first wait for a number spins for a while before it sleeps.
        """

    def missing(self) -> tuple[int, ...]:
        """Ranks whose row of the newest exchange is not there."""

    def close(self) -> None:
        """Let go of the memory. Nothing else may be called after it."""
