"""The life of one shared-memory segment: who may clean it, who may sit in it, and who takes its name away.

A segment is a plain file under /dev/shm. It is never trusted for being there: a crash may have left it. Two kinds of
kernel lock say what it is, and the kernel drops both when a process dies, however it dies:

- Whole file, `flock`. Every attached rank holds it *shared*. So *exclusive* is granted only if nobody is attached: the
  file is new or stale. Who gets it makes the file zeros (truncate to nothing, allocate again), writes the header and
  goes down to shared.
- One byte per rank, a lock of the open file description (`F_OFD_SETLK`). Its holder is that rank. Whether a rank lives
  is whether its byte is locked: no pid, no heartbeat. (A child forked without exec inherits both locks; engines spawn.)

Why going down from exclusive to shared is safe, although the kernel lets go for a moment in between: in that moment
another process may get the exclusive lock and zero the file again. Nothing is lost, since nobody maps, claims or writes
rows before holding it shared, and while anyone does no exclusive lock is granted. A process that gets it shared before
anyone wrote the header sees no magic and begins again.

Why nobody stays in a file without a name: whoever removes a name holds the file exclusively, or is rank 0 after all
ranks have arrived. So a process that has its lock compares the name's inode with its own, and begins again if they
differ.

Rank 0 removes the name once all ranks have arrived: from then on nothing is left behind even if every process is
killed. Earlier, the last one that leaves removes it; and what a crash has left is removed by the next segment of the
same deployment.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import random
import struct
import time
from typing import NamedTuple

from ..errors import ExchangeUnavailableError
from .base import Deadline

FOLDER = "/dev/shm"
HEADER_BYTES = 64
_HEADER = struct.Struct("@8Q")
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_MAGIC = int.from_bytes(b"wavekpr\0", "little")
_NAME_BYTES_MAX = 255


class Layout(NamedTuple):
    """What a segment must be for the ranks to understand each other."""

    version: int
    dp_size: int
    row_bytes: int
    size_bytes: int

    def header(self) -> bytes:
        """The segment's first 64 bytes."""
        return _HEADER.pack(_MAGIC, self.version, self.dp_size, self.row_bytes, self.size_bytes, 0, 0, 0)


def segment_prefix(deployment: str) -> str:
    """How the names of all segments of this user's deployment begin."""
    return f"wavekeeper.{os.geteuid()}.{deployment}."


class Segment:
    """A mapped segment in which this process sits as one rank.

    `memory` is the whole of it, `words` the same as aligned 64-bit words.
    """

    def __init__(self, path: str, fd: int, size_bytes: int) -> None:
        self.path = path
        self._fd = fd
        self.memory = mmap.mmap(fd, size_bytes)
        self.words = memoryview(self.memory).cast("Q")

    def holds(self, rank: int) -> bool:
        """Whether another process (or another rank of this one) sits here as `rank` now. Our own rank never counts."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0]
        return bool(kind != fcntl.F_UNLCK)

    def remove_name(self) -> None:
        """Take the name away; the memory stays until the last rank has left."""
        if _is_named(self._fd, self.path):
            os.unlink(self.path)

    def close(self) -> None:
        """Leave; the last one of an unfinished group takes the name with it. The caller has dropped its own views."""
        self.words.release()
        self.memory.close()
        _leave(self._fd, self.path)


def attach(name: str, rank: int, layout: Layout, owner_word: int, deadline: Deadline) -> Segment:
    """Sit down as `rank` in the segment of this name; make or clean it first if nobody sits there.

    Args:
        name: File name, without the folder.
        rank: This rank.
        layout: What the header must say.
        owner_word: Index of the 64-bit word in which this rank's pid is written; not zero in a clean segment means that
            a process sat here before.
        deadline: How long to wait for others to finish cleaning, or for the survivors of an earlier run to leave.

    Raises:
        ExchangeUnavailableError: Another process sits there as this rank, the segment has another layout, or there is
            no memory. Names who or what.
    """
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise ExchangeUnavailableError(f"a segment cannot be named {name!r}: at most {_NAME_BYTES_MAX} bytes")
    path = f"{FOLDER}/{name}"
    while True:
        segment, hindrance = _try(path, rank, layout, owner_word)
        if segment is not None:
            return segment
        if deadline.passed():
            raise ExchangeUnavailableError(f"shared memory {path}: {hindrance} for {deadline.timeout_ms} ms")
        # Two processes that clean in turn would keep refusing each other in step: pause for a different time each.
        time.sleep(random.uniform(0.0005, 0.005))


def reclaim(deployment: str, keep: str) -> list[str]:
    """Remove the segments of this deployment in which nobody sits, `keep` excepted; return their names.

    One that is just being made may be among them: its maker then finds its name gone and begins again.
    """
    removed = []
    prefix = segment_prefix(deployment)
    with contextlib.suppress(OSError):  # cleaning up after others must never fail a start
        for name in os.listdir(FOLDER):
            if name.startswith(prefix) and name != keep and _remove_if_unused(f"{FOLDER}/{name}"):
                removed.append(name)
    return removed


def _try(path: str, rank: int, layout: Layout, owner_word: int) -> tuple[Segment | None, str]:
    """One attempt: a segment, or what was in the way."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ExchangeUnavailableError(f"cannot open shared memory {path}: {error.strerror}") from error
    try:
        hindrance = _sit_down(fd, path, rank, layout, owner_word)
        if not hindrance:
            segment = Segment(path, fd, layout.size_bytes)
            segment.words[owner_word] = os.getpid()
            return segment, ""
    except BaseException:
        _leave(fd, path)
        raise
    os.close(fd)
    return None, hindrance


def _sit_down(fd: int, path: str, rank: int, layout: Layout, owner_word: int) -> str:
    """Lock, clean if nobody is there, check, claim the rank. Returns what is in the way; empty when done."""
    if os.fstat(fd).st_uid != os.geteuid():  # the folder is open to everybody: somebody else may have taken the name
        raise ExchangeUnavailableError(
            f"shared memory {path} belongs to user {os.fstat(fd).st_uid}, not to this process's user"
        )
    if _lock(fd, fcntl.LOCK_EX) and _is_named(fd, path):
        _clean(fd, path, layout)
    if not _lock(fd, fcntl.LOCK_SH):
        return "another process was cleaning it"
    header = os.pread(fd, HEADER_BYTES, 0)
    if not _is_named(fd, path) or len(header) < HEADER_BYTES or not any(header):
        return "others made and removed it"
    if header != layout.header():
        _, version, dp_size, row_bytes, *_ = _HEADER.unpack(header)
        raise ExchangeUnavailableError(
            f"shared memory {path} was made for layout {version}, dp_size {dp_size}, rows of {row_bytes} bytes; "
            f"this rank expects layout {layout.version}, dp_size {layout.dp_size}, rows of {layout.row_bytes} bytes"
        )
    owner = int.from_bytes(os.pread(fd, 8, owner_word * 8), "little")
    if not _claim(fd, rank):
        raise ExchangeUnavailableError(
            f"rank {rank} of this group is taken by process {owner or 'unknown'} ({path}): "
            f"stop that one, or give this one another rank"
        )
    # Read again under the claim: the word that we read before may have been older than the last owner's end.
    owner = int.from_bytes(os.pread(fd, 8, owner_word * 8), "little")
    return (
        f"process {owner} was rank {rank} here and is gone, but other ranks of that run still sit in it"
        if owner
        else ""
    )


def _clean(fd: int, path: str, layout: Layout) -> None:
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        # Not ftruncate: without memory behind it the first store would kill the process with SIGBUS.
        os.posix_fallocate(fd, 0, layout.size_bytes)
        os.pwrite(fd, layout.header(), 0)
    except OSError as error:
        raise ExchangeUnavailableError(
            f"no {layout.size_bytes} bytes of shared memory for {path}: {error.strerror}; "
            f"enlarge {FOLDER}, or choose exchange gloo"
        ) from error


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _claim(fd: int, rank: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_named(fd: int, path: str) -> bool:
    """Whether `path` still leads to the file that `fd` has open."""
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _leave(fd: int, path: str) -> None:
    """Close; remove the name if nobody else sits there. Of several that leave at once, the last to ask is granted
    it."""
    try:
        if _is_named(fd, path) and _lock(fd, fcntl.LOCK_EX) and _is_named(fd, path):
            os.unlink(path)
    finally:
        os.close(fd)


def _remove_if_unused(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        unused = os.fstat(fd).st_uid == os.geteuid() and _lock(fd, fcntl.LOCK_EX) and _is_named(fd, path)
        if unused:
            os.unlink(path)
        return unused
    finally:
        os.close(fd)
