"""Sleep until a 32-bit word in shared memory changes: Linux futexes through `syscall`, without a C extension.

The kernel compares the word with the expected value and puts the caller to sleep as one act, under a lock that `wake`
takes as well. So either the sleeper sees the new value and does not sleep, or the waker finds it asleep. Nothing is
lost in between, as long as the writer stores first and wakes second.

ctypes releases the GIL around the call: the engine's other threads run while this one sleeps.
"""

import ctypes
import errno
import platform
import sys

_FUTEX_WAIT = 0  # without FUTEX_PRIVATE_FLAG: the sleepers live in other processes
_FUTEX_WAKE = 1
_EVERYBODY = (1 << 31) - 1
_SYSCALL = {"x86_64": 202, "aarch64": 98}
_NUMBER = _SYSCALL.get(platform.machine(), 0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether this machine is one of those for which the call's number is known: 64-bit little-endian Linux."""
    return sys.platform == "linux" and _NUMBER != 0 and sys.byteorder == "little" and sys.maxsize > 1 << 32


if supported():
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    # syscall() is variadic in C; on both machines integer arguments travel alike in either convention.
    _syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.POINTER(_Timespec),
    )


def wait(address: int, expected: int, timeout_ns: int) -> bool:
    """Sleep while the word at `address` is `expected`, at most `timeout_ns` nanoseconds.

    Returns:
        False when the time ran out. True says only that it is worth looking again: the word differs, somebody woke us,
        or a signal came.

    Raises:
        OSError: The kernel refused (a bad address, or no futexes here).
    """
    timeout = _Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000)
    if _syscall(_NUMBER, address, _FUTEX_WAIT, expected, timeout) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.ETIMEDOUT:
        return False
    if number in (errno.EAGAIN, errno.EINTR):
        return True
    raise OSError(number, f"futex wait: {errno.errorcode.get(number, number)}")


def wake(address: int) -> None:
    """Wake all who sleep on the word at `address`. The new value must have been stored before."""
    _syscall(_NUMBER, address, _FUTEX_WAKE, _EVERYBODY, None)
