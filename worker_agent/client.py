"""The ZeroMQ socket of an agent or a front-end to the coordinator: bytes in and out, decides nothing.

It belongs to one thread. ZeroMQ connects again by itself, with a bounded back-off; while there is no connection a
send is refused at once and the message dropped, because every message of ours is made up for by a later one and none
may pile up for a dead coordinator.
"""

import os
import threading
from collections.abc import Sequence

import zmq

from ..proto.codec import FRAME_BYTES_MAX, decode, encode
from ..proto.endpoints import parse_endpoint
from ..proto.errors import RemoteProtocolError
from ..proto.messages import Message

RECONNECT_MS = 100
RECONNECT_MS_MAX = 1_000
FRAMES_A_TURN_MAX = 256
SEND_QUEUE_MAX = 1_000


class Link:
    """A DEALER to the coordinator's ROUTER. `wake()` may be called from any thread; everything else from one."""

    def __init__(self, endpoint: str, routing_id: str) -> None:
        address = parse_endpoint(endpoint)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in dealer_options().items():
            self.socket.setsockopt(option, value)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id.encode())
        self.socket.connect(address.text)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._wakes = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wakes, zmq.POLLIN)
        self._closing = threading.Lock()
        self._closed = False
        self.dropped = 0
        """Messages that met no connection, and frames that were not of the protocol."""

    def subscribe(self, endpoint: str, topic: bytes) -> zmq.Socket[bytes]:
        """Open a SUB socket for a feed; its frames come out of `receive` as well."""
        feed = self._context.socket(zmq.SUB)
        for option, value in dealer_options().items():
            feed.setsockopt(option, value)
        feed.setsockopt(zmq.SUBSCRIBE, topic)
        feed.connect(parse_endpoint(endpoint).text)
        self._poller.register(feed, zmq.POLLIN)
        return feed

    def unsubscribe(self, feed: zmq.Socket[bytes]) -> None:
        """Close a socket that `subscribe` gave."""
        self._poller.unregister(feed)
        feed.close(linger=0)

    def wake(self) -> None:
        """Make a `receive` that waits return. Any thread, also after `close`."""
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._wakes, 1)

    def receive(self, timeout_ms: int) -> list[Message]:
        """Wait for messages or a wake-up; at most FRAMES_A_TURN_MAX messages."""
        messages: list[Message] = []
        for source, _ in self._poller.poll(timeout_ms):
            if source == self._wakes:
                os.eventfd_read(self._wakes)
            else:
                self._drain(source, messages)
        return messages

    def send(self, message: Message) -> None:
        """Send, or drop when there is no connection or the queue is full."""
        try:
            self.socket.send_multipart(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1

    def close(self, linger_ms: int = 200) -> None:
        """Let the last message out, then close; nothing may be called afterwards."""
        for source, _ in self._poller.sockets:
            if isinstance(source, zmq.Socket):
                source.close(linger=linger_ms)
        with self._closing:  # a number that was closed may be another file by now
            self._closed = True
            os.close(self._wakes)
        self._context.term()  # bounded by linger_ms

    def _drain(self, source: zmq.Socket[bytes], messages: list[Message]) -> None:
        while len(messages) < FRAMES_A_TURN_MAX:
            try:
                frames: Sequence[bytes] = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                messages.append(decode(frames[-2:]))  # on the feed a topic goes before the two
            except RemoteProtocolError:
                self.dropped += 1


def dealer_options() -> dict[int, int]:
    """Options of every connecting socket; see zmq_setsockopt(3)."""
    return {
        zmq.LINGER: 0,
        zmq.IMMEDIATE: 1,  # nothing queues up for a coordinator that is not there
        zmq.SNDHWM: SEND_QUEUE_MAX,
        zmq.RCVHWM: SEND_QUEUE_MAX,
        zmq.MAXMSGSIZE: FRAME_BYTES_MAX,
        zmq.RECONNECT_IVL: RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
        zmq.HEARTBEAT_IVL: 1_000,
        zmq.HEARTBEAT_TIMEOUT: 3_000,  # a peer that is gone without a word (power, SIGSTOP) is noticed
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.IPV6: 1,
    }
