"""Run a command under the system call rules of a systemd unit, without systemd.

    python -I sandbox.py UNIT COMMAND ARGUMENT...

Takes over what systemd makes of `SystemCallFilter`, `RestrictAddressFamilies` and `MemoryDenyWriteExecute`: these are
the rules that can abort a process which never did anything wrong (ZeroMQ asserts on the answer of `socket` and of
`sched_setscheduler`). Namespaces, users and mounts of the unit are not taken over.

Needs Linux, libseccomp and `systemd-analyze`; `missing()` says what is not there.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LIBSECCOMP = "libseccomp.so.2"

# From linux/seccomp.h, linux/prctl.h and libseccomp's seccomp.h.
ACTION_ALLOW = 0x7FFF0000
ACTION_ERRNO = 0x00050000
COMPARE_EQUAL = 4
SET_NO_NEW_PRIVILEGES = 38
SET_NO_WRITE_EXECUTE, REFUSE_EXEC_GAIN = 65, 1

FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
FAMILY_MAX = 45  # AF_MCTP, the last one of Linux 6


def missing() -> str:
    """What is not installed here, in words; empty if a command can be run."""
    if shutil.which("systemd-analyze") is None:
        return "systemd-analyze is not installed"
    try:
        ctypes.CDLL(LIBSECCOMP)
    except OSError:
        return f"{LIBSECCOMP} is not installed"
    return ""


def settings(unit: Path) -> Iterator[tuple[str, str]]:
    """Yield each `Key=value` of the unit, in order; a key may come more than once."""
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            yield key, value


def values(unit: Path, key: str) -> list[str]:
    """Return every value of one key."""
    return [value for found, value in settings(unit) if found == key]


def members(group: str) -> set[str]:
    """Return the system calls of a set such as `@system-service`, its inner sets resolved."""
    command = ["systemd-analyze", "--no-pager", "syscall-filter", group]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    found = set()
    for word in (line.strip() for line in text.splitlines()[1:]):
        if word and not word.startswith("#"):
            found |= members(word) if word.startswith("@") else {word}
    return found


def allowed_calls(filters: list[str]) -> set[str]:
    """Return the system calls that the unit's `SystemCallFilter` lines leave, the first line being an allow-list."""
    calls = members("@default")  # systemd adds it to every allow-list
    for line in filters:
        named = set().union(*(members(word) if word[0] == "@" else {word} for word in line.lstrip("~").split()))
        calls = calls - named if line.startswith("~") else calls | named
    return calls


class _Compare(ctypes.Structure):
    """`struct scmp_arg_cmp`: compares one argument of a system call."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
    )


class _Filter:
    """One seccomp filter. The kernel obeys all loaded ones, the strictest answer winning."""

    def __init__(self, otherwise: int) -> None:
        self._lib = ctypes.CDLL(LIBSECCOMP)
        self._lib.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.seccomp_init(ctypes.c_uint32(otherwise)))

    def rule(self, action: int, call: str, *, first_argument: int | None = None) -> None:
        number = self._lib.seccomp_syscall_resolve_name(call.encode())
        compares = [] if first_argument is None else [_Compare(0, COMPARE_EQUAL, first_argument, 0)]
        array = (_Compare * 1)(*compares)
        # A call that this architecture lacks is no error: systemd leaves it out as well.
        self._lib.seccomp_rule_add_array(self._context, ctypes.c_uint32(action), number, len(compares), array)

    def load(self) -> None:
        if self._lib.seccomp_load(self._context) != 0:
            raise OSError("the kernel does not take the filter")


def enter(unit: Path) -> None:
    """Put this process, and what it becomes, under the rules of the unit. There is no way back."""
    libc = ctypes.CDLL(None)
    calls = allowed_calls(values(unit, "SystemCallFilter"))
    families = {FAMILIES[name] for line in values(unit, "RestrictAddressFamilies") for name in line.split()}
    libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if values(unit, "MemoryDenyWriteExecute") == ["yes"]:
        libc.prctl(SET_NO_WRITE_EXECUTE, REFUSE_EXEC_GAIN, 0, 0, 0)  # refused before Linux 6.3: then not tried here

    strangers = _Filter(ACTION_ALLOW)
    for family in set(range(FAMILY_MAX + 1)) - families:
        strangers.rule(ACTION_ERRNO | errno.EAFNOSUPPORT, "socket", first_argument=family)
    # Loaded last: what it forbids includes, perhaps, the loading of filters.
    only = _Filter(ACTION_ERRNO | errno.EPERM)
    for call in calls:
        only.rule(ACTION_ALLOW, call)
    strangers.load()
    only.load()


if __name__ == "__main__":
    enter(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
