"""Which process is this, and has that one ended? Words by which processes of one machine know each other.

Two processes with the same pid space see each other in /proc; of any other nothing is known, so nothing is claimed.
Linux only.
"""

import functools
import os
from collections.abc import Sequence


def this_process() -> str:
    """One text for this process: host and pid namespace, pid, and start time (pids are used again)."""
    return f"{_pid_space()} {os.getpid()} {_start_time(os.getpid())}"


def has_ended(process: str) -> bool:
    """Whether the process of this text ran on this host and does not any more; a zombie has ended. Never of other
    texts.
    """
    space, _, rest = process.partition(" ")
    pid, _, started = rest.partition(" ")
    return space == _pid_space() and pid.isdecimal() and len(pid) < 10 and _start_time(int(pid)) != started


@functools.cache
def _pid_space() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> str:
    """The kernel's start time of a process in clock ticks, or `gone`."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields: Sequence[str] = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    state, started = fields[0], fields[19]
    return "gone" if state in "ZX" else started
