"""Which machine is this, and by which address do others reach it?"""

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")


def host_identity() -> str:
    """A text that two processes have in common exactly if they can share memory.

    Two containers of one machine have the same boot id, but may have a /dev/shm each; and a segment of ours may be
    opened by its own user only.
    """
    boot_id = _BOOT_ID.read_text().strip()[:13] if _BOOT_ID.exists() else "unknown"
    device = _SHARED_MEMORY.stat().st_dev if _SHARED_MEMORY.exists() else 0
    return f"{socket.gethostname()}/{boot_id}/{device:x}/{os.getuid()}"


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to `host` (nothing is sent). Raises OSError when there is no way."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
