"""A TCP proxy on the loopback that loses what it should carry: one direction in silence, or whole connections.

The law of this file: a connection that was silenced stays so for ever, as one whose entry a firewall has forgotten:
nobody gets a reset, and what was lost is not sent again (a stream that went on after a gap would be junk, which no
network makes). `heal` lets new connections pass; whether the peers make one is their affair.
"""

import contextlib
import selectors
import socket
import threading
from enum import Enum

CHUNK_BYTES = 65_536
LOOK_S = 0.02


class Way(Enum):
    """A direction, as seen by the one who connects."""

    THERE = "from the one who connects"
    BACK = "to the one who connects"


class _Pipe:
    """One connection: two sockets and the ways that are silenced."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far
        self.silenced: set[Way] = set()

    def carry(self, source: socket.socket) -> bool:
        """Pass on what has come; False when the connection is over."""
        way, target = (Way.THERE, self.far) if source is self.near else (Way.BACK, self.near)
        try:
            data = source.recv(CHUNK_BYTES)
            if data and way not in self.silenced:
                target.sendall(data)
        except OSError:
            return False
        return bool(data)

    def close(self) -> None:
        self.near.close()
        self.far.close()


class Proxy:
    """`with Proxy("tcp://127.0.0.1:1234") as proxy:` connects `proxy.endpoint` to that address."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        """How many there have been."""
        self._silenced: set[Way] = set()
        self._pipes: list[_Pipe] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(5)
        self._listener.close()
        self.cut()

    def silence(self, way: Way) -> None:
        """Discard this direction of every connection, and of those to come until `heal`."""
        with self._lock:
            self._silenced.add(way)
            for pipe in self._pipes:
                pipe.silenced.add(way)

    def heal(self) -> None:
        """Let new connections pass. Those that were silenced stay dead."""
        with self._lock:
            self._silenced.clear()

    def cut(self) -> None:
        """End every connection."""
        with self._lock:
            for pipe in self._pipes:
                pipe.close()
            self._pipes.clear()

    def _run(self) -> None:
        while not self._ending.is_set():
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                with self._lock:
                    for pipe in self._pipes:
                        selector.register(pipe.near, selectors.EVENT_READ, pipe)
                        selector.register(pipe.far, selectors.EVENT_READ, pipe)
                ready = selector.select(LOOK_S)
            with self._lock:
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    elif key.data in self._pipes and not key.data.carry(key.fileobj):
                        self._pipes.remove(key.data)
                        key.data.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        with contextlib.suppress(OSError):  # nobody listens there now: the one who connects is sent away
            pipe = _Pipe(near, socket.create_connection(self._target, timeout=1))
            pipe.silenced |= self._silenced
            self._pipes.append(pipe)
            self.connections += 1
            return
        near.close()
