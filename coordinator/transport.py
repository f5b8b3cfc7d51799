"""The coordinator's two ZeroMQ sockets: bytes and addresses, decides nothing.

A ROUTER for the control plane and an XPUB for the feed, bound in the constructor: whoever has a `Transport` has its
ports. A frame above the size limit never reaches memory (ZeroMQ ends that connection); any other bad frame comes out
as `Junk` and costs one counter.
"""

import os
from collections import Counter

import zmq

from ..proto.codec import FRAME_BYTES_MAX, HEADER, decode, encode, topic
from ..proto.endpoints import Endpoint
from ..proto.errors import RemoteProtocolError
from ..proto.messages import Message
from .core import Junk, Received

FRAMES_A_TURN_MAX = 1_000
"""Most messages that one turn reads, so that time passes also under a flood."""
QUEUE_MAX = 10_000
"""Messages that wait for one peer; a peer that reads no more loses the newest and makes up for them."""
GOODBYE_MS_MAX = 500


class BindError(Exception):
    """An address cannot be bound; the text names the configuration's key."""


class Transport:
    """Both sockets. `wake()` may be called from any thread and from signal handlers; everything else from one
    thread.
    """

    def __init__(self, control: Endpoint, feed: Endpoint) -> None:
        self.dropped: Counter[str] = Counter()
        self.subscribers: Counter[bytes] = Counter()
        self._context = zmq.Context()
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._control, self.control_port = self._bind(zmq.ROUTER, "control", control)
            self._feed, self.feed_port = self._bind(zmq.XPUB, "feed", feed)
        except BindError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._control, self._feed, self._wakes):
            self._poller.register(source, zmq.POLLIN)

    def receive(self, timeout_ms: int) -> list[Received | Junk]:
        """Wait for something to read, or for a wake-up; at most FRAMES_A_TURN_MAX messages."""
        events: list[Received | Junk] = []
        for source, _ in self._poller.poll(timeout_ms):
            if source is self._control:
                self._read_control(events)
            elif source is self._feed:
                self._read_subscriptions()
            else:
                os.eventfd_read(self._wakes)
        return events

    def send(self, peer: bytes, message: Message) -> None:
        """Send to one peer, or drop: a peer without a connection is heard of again, or dies."""
        try:
            self._control.send_multipart([peer, *encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            self.dropped["queue_full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped["unreachable"] += 1

    def publish(self, deployment: str, message: Message) -> None:
        """Publish under the deployment's topic. A subscriber that reads too slowly loses updates and sees the gap."""
        self._feed.send_multipart([topic(deployment), *encode(message)], zmq.NOBLOCK)

    def wake(self) -> None:
        """Make a `receive` that waits return."""
        os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Let the last messages out for a bounded time, and give the ports back."""
        self._context.destroy(linger=GOODBYE_MS_MAX)
        os.close(self._wakes)

    def _bind(self, kind: int, key: str, endpoint: Endpoint) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(kind)
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to nobody is counted, not lost in silence
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects before its old connection is gone
        else:
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # every subscription and its end is seen, so they can be counted
        socket.setsockopt(zmq.IPV6, int(":" in endpoint.host))
        try:
            socket.bind(endpoint.text)
        except zmq.ZMQError as error:
            raise BindError(f"coordinator.{key}: cannot bind {endpoint.text}: {error.strerror}") from None
        real = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, int(real.rpartition(":")[2]) if endpoint.transport == "tcp" else 0

    def _read_control(self, events: list[Received | Junk]) -> None:
        while len(events) < FRAMES_A_TURN_MAX:
            try:
                peer, *frames = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                events.append(Received(peer, decode(frames)))
            except RemoteProtocolError as error:
                answerable = len(frames) == 2 and frames[0] == HEADER
                events.append(Junk(peer, error.reason, error.detail, answerable))

    def _read_subscriptions(self) -> None:
        for _ in range(FRAMES_A_TURN_MAX):
            try:
                frames = self._feed.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            note = frames[0]
            if note[:1] in (b"\x00", b"\x01"):
                subscribed = note[:1] == b"\x01"
                self.subscribers[note[1:]] += 1 if subscribed else -1
                if self.subscribers[note[1:]] <= 0:
                    del self.subscribers[note[1:]]
            else:
                self.dropped["message_on_feed"] += 1


_OPTIONS = {
    zmq.LINGER: GOODBYE_MS_MAX,
    zmq.SNDHWM: QUEUE_MAX,
    zmq.RCVHWM: QUEUE_MAX,
    zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
    zmq.BACKLOG: 1_024,  # a whole fleet connects in the same second
    zmq.HANDSHAKE_IVL: 5_000,
    zmq.HEARTBEAT_IVL: 1_000,
    zmq.HEARTBEAT_TIMEOUT: 3_000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
