"""Where the ranks of a process group find each other, and who of them is there. No torch here.

Bind first: rank 0 binds port 0, keeps the socket, and only then tells its address. A port that was chosen before it was
bound is the most repeated fault of distributed starts (vllm issue 28498 and many more). The socket itself is handed to
the store, never its number.

`Roll` answers "who is missing?" with the help of the store. A collective cannot tell: its error names an address, or
nobody. So a rank that has waited for a while writes down which exchange it waits at, and at its deadline reads what the
others wrote. Who has not written this number is missing. When a connection breaks, ranks of the same host look which of
the processes is gone. Every call on the store is made in a thread of its own and waited for with a limit: a store whose
server is stopped (SIGSTOP) answers never.
"""

import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ...proto.process_identity import has_ended, this_process
from .base import Deadline, GroupSpec

T = TypeVar("T")

ANNOUNCE_AFTER_MS = 100
"""How long a rank waits before it writes down where. A rank that came later than this before another one's deadline may
be named there."""

STORE_ANSWER_S = 1.0
"""How long a store may take to answer before its server, rank 0, is taken for gone."""

_BACKLOG = 1024
_POLL_S = 0.01


class Store(Protocol):
    """What is used of torch's stores. `get` waits for a missing key, so it is only called for keys that were
    checked."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a key that exists."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys exist."""
        ...


class Listener:
    """A bound and listening socket for the store of which this rank may become the server.

    It outlives groups: a store that was made on it is kept and serves the later epochs in which this process is rank 0
    as well.

    Raises:
        ValueError: `host` is a wildcard, which is no address for others to connect to.
        OSError: `host` and `port` cannot be bound here. Port 0 (the default) takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        if host in ("", "*", "0.0.0.0", "::"):
            raise ValueError(f"host is {host!r}, but must be an address at which the other ranks reach this one")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a fixed port, soon after an earlier run
            bound.bind((host, port))
            bound.listen(_BACKLOG)
        except OSError:
            bound.close()
            raise
        self._socket: socket.socket | None = bound
        self.host = host
        self.port: int = bound.getsockname()[1]
        self.endpoint = f"tcp://[{host}]:{self.port}" if family == socket.AF_INET6 else f"tcp://{host}:{self.port}"
        self._server: object | None = None
        self._lock = threading.Lock()

    @classmethod
    def at(cls, endpoint: str) -> "Listener":
        """Bind `tcp://host:port`, an address that all ranks were given. For groups without a coordinator.

        Raises:
            ValueError: It is something else.
            OSError: It cannot be bound here.
        """
        return cls(*split_endpoint(endpoint))

    def server(self, make: Callable[[str, int, int], T]) -> T:
        """Return the store that serves here; the first call makes it by `make(host, port, file descriptor)`, which
        takes the socket over."""
        with self._lock:
            if self._server is None:
                if self._socket is None:
                    raise ValueError(f"the listener at {self.endpoint} is closed")
                self._server = make(self.host, self.port, self._socket.fileno())
                self._socket.detach()
                self._socket = None
            return self._server  # type: ignore[return-value]  # one listener is only ever asked for one kind of store

    def close(self) -> None:
        """Stop listening. Exchanges that were made here keep the store alive until they are closed."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            self._server = None


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of `tcp://host:port`; an IPv6 host stands in brackets.

    Raises:
        ValueError: It is something else.
    """
    host, separator, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not separator or not host or not port.isdecimal():
        raise ValueError(f"rendezvous is {endpoint!r}, but must be tcp://host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Slow(Generic[T]):
    """A call in a daemon thread, for calls that may never return. Ask `result` for it, with a limit."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._value = call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def result(self, timeout_s: float) -> T:
        """Return or raise what the call did.

        Raises:
            TimeoutError: It has not returned; it goes on in its thread.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set, for there was no error


class Roll:
    """Who of a group has come, where each one waits, and who is dead; one per rank and group."""

    def __init__(self, store: Store, group: GroupSpec) -> None:
        self._store = store
        self._rank = group.rank
        self._at = [f"at/{rank}" for rank in range(group.dp_size)]
        self._who = [f"who/{rank}" for rank in range(group.dp_size)]
        self._processes: tuple[str, ...] = ()

    def meet(self, deadline: Deadline) -> tuple[int, ...]:
        """Say that this rank has come, wait for the others, and note who is who. May block: call it in `Slow`.

        Returns:
            The ranks that have not come at the deadline.
        """
        self._store.set(self._who[self._rank], this_process())
        self._store.set(self._at[self._rank], "0")
        while not self._store.check(self._at):
            if deadline.passed():
                return tuple(rank for rank, key in enumerate(self._at) if not self._store.check([key]))
            time.sleep(_POLL_S)
        self._processes = tuple(self._store.get(key).decode() for key in self._who)
        return ()

    def announce(self, count: int) -> None:
        """Write down that this rank waits at exchange `count`. Returns at once."""
        Slow(lambda: self._store.set(self._at[self._rank], str(count)), "wavekeeper-announce")

    def missing(self, count: int) -> tuple[int, ...]:
        """Ranks that have not written down exchange `count`; rank 0 if its store does not answer. At most
        STORE_ANSWER_S."""
        try:
            counts = Slow(lambda: [int(self._store.get(key)) for key in self._at], "wavekeeper-missing").result(
                STORE_ANSWER_S
            )
        except Exception:  # whatever a store raises or does not answer means the same: its server is not there
            return (0,) if self._rank != 0 else ()
        return tuple(rank for rank, at in enumerate(counts) if at < count and rank != self._rank)

    def server_gone(self) -> tuple[int, ...]:
        """Rank 0 if its store does not answer. At most STORE_ANSWER_S."""
        try:
            Slow(lambda: self._store.check(self._at), "wavekeeper-ask").result(STORE_ANSWER_S)
        except Exception:  # see above
            return (0,) if self._rank != 0 else ()
        return ()

    def dead(self) -> tuple[int, ...]:
        """Ranks of this host whose process has ended. Of other hosts' ranks nothing is known."""
        return tuple(rank for rank, process in enumerate(self._processes) if rank != self._rank and has_ended(process))
