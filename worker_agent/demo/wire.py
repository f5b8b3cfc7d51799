"""How a front-end of the demo hands requests to a rank: msgpack over one ROUTER, bound before its address is said.

This is the engine's own wire, not wavekeeper's: the coordinator only passes the address on (`Register.serve`).
Whatever arrives that is not a request costs a count in `dropped` and nothing else; a request that can be read is
always answered once, also when it is refused.
"""

import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 1 << 20
"""Largest request or result; more never reaches memory."""

FRAMES_PER_TURN = 256
"""Requests read before results are sent again, so that neither side starves the other."""

CLOSE_WAIT_S = 2.0
"""Longest wait for the server's thread to send its last results."""

LINGER_MS = 200
"""How long the last results may take to leave at `close`: all that a client which is gone can delay."""


class GenerateRequest(msgspec.Struct, frozen=True, tag_field="t", tag="generate"):
    """Continue `prompt` (byte values) greedily by `max_tokens` tokens. `id` is the caller's and comes back in the
    result.
    """

    id: str
    prompt: list[int]
    max_tokens: int


class GenerateResult(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="t", tag="result"):
    """The answer of `rank`: all tokens, or an error and those made until then."""

    id: str
    rank: int
    tokens: list[int] = []
    error: str = ""


Reply = Callable[[GenerateResult], None]
"""Where the result of one request goes; called exactly once, from any thread, and must not block."""

Submit = Callable[[GenerateRequest, Reply], None]

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest)
_result_decoder = msgspec.msgpack.Decoder(GenerateResult)


class RequestServer:
    """The rank's side: a thread that owns one ROUTER on the loopback.

    `endpoint` is known as soon as the object exists; requests are read once `start` has been called.
    """

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._router.bind("tcp://127.0.0.1:0")
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._results: deque[tuple[bytes, GenerateResult]] = deque()  # as long as the engine's limit of requests
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, submit: Submit) -> None:
        """Begin to read requests and hand each to `submit`, in the server's thread."""
        self._thread = threading.Thread(target=self._serve, args=(submit,), name="demo-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the results that are there, then stop. Waits at most `CLOSE_WAIT_S`."""
        self._closing.set()
        self._signal()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)
            if self._thread.is_alive():
                log.warning("the request server did not stop within %.1f s", CLOSE_WAIT_S)
                return
        self._router.close(linger=LINGER_MS)  # the last results may still be on their way out
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _serve(self, submit: Submit) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._closing.is_set():
            poller.poll()  # no deadline: whoever has something for this thread sends a byte to `_woken`
            self._drain_wakes()
            self._receive(submit)
            self._send_results()
        self._send_results()

    def _receive(self, submit: Submit) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._drop("frames", f"expected 1 frame, got {len(frames) - 1}")
                continue
            peer, body = frames
            try:
                request = _request_decoder.decode(body)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self._drop("malformed", str(error))
                continue
            submit(request, self._reply_to(peer))

    def _reply_to(self, peer: bytes) -> Reply:
        def reply(result: GenerateResult) -> None:
            self._results.append((peer, result))
            self._signal()

        return reply

    def _send_results(self) -> None:
        while self._results:
            peer, result = self._results.popleft()
            # A ROUTER drops what goes to a peer that has left or does not read: nobody else waits for it.
            self._router.send_multipart([peer, _encoder.encode(result)], zmq.NOBLOCK)

    def _signal(self) -> None:
        with suppress(OSError):  # full: the thread will wake anyway; closed: nobody is left to wake
            self._wake.send(b"\0")

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _drop(self, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        log.warning("dropped a request frame (%s): %s", reason, detail)


class RankClient:
    """The front-end's side: one DEALER to one rank. Belongs to the thread that uses it."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._dealer.connect(endpoint)
        self.endpoint = endpoint

    def submit(self, request: GenerateRequest) -> bool:
        """Send a request; False when so many are unsent that the rank must be taken for gone."""
        try:
            self._dealer.send(_encoder.encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_ms: int) -> GenerateResult | None:
        """Return the next result, or None if none comes within `timeout_ms`; results come in the order of
        completion.
        """
        if not self._dealer.poll(timeout_ms, zmq.POLLIN):
            return None
        return _result_decoder.decode(self._dealer.recv(zmq.NOBLOCK))

    def close(self) -> None:
        """Close at once; requests that are still out are answered to nobody."""
        self._dealer.close()
        self._context.term()
