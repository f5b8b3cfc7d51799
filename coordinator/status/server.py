"""uvicorn on a thread of its own.

The law of this file: the socket is bound, and listens, before anything else of the coordinator starts. So a taken port
is told before a rank hears of this coordinator, and a probe that comes early waits instead of being refused. The
process's signals, loggers and event loop are not touched.
"""

import logging
import socket
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ...proto.endpoints import bracketed, parse_host

log = logging.getLogger("wavekeeper.coordinator.status")

BACKLOG = 128
CONNECTIONS_MAX = 256
"""More get a 503 at once: a flood of probes must not queue before the request of an operator."""
KEEP_ALIVE_S = 5
DRAIN_S = 1
"""What a request that is being answered may still take when the server stops."""
START_S_MAX = 10.0


class HttpBindError(Exception):
    """The HTTP server cannot have its address. Nothing was started."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        self.reason = reason
        super().__init__(host, port, reason)  # keeps the error picklable

    def __str__(self) -> str:
        return (
            f"coordinator.http.port: cannot bind {bracketed(self.host)}:{self.port}: {self.reason}; "
            "write another host or port (0 takes any free port)"
        )


class HttpStartError(Exception):
    """The HTTP server has its address and does not serve there."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        super().__init__(endpoint)

    def __str__(self) -> str:
        return f"the HTTP server at {self.endpoint} did not come up; the log has the reason"


class StatusServer:
    """Serves an application at `host:port` (0: any free port); the socket is bound when this exists.

    Raises:
        HttpBindError: The address is taken, or is not one of this machine.
    """

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        name = bracketed(parse_host(host))
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.endpoint = f"http://{name}:{self.port}"
        config = uvicorn.Config(
            app,
            # One behaviour everywhere: not whatever else an image happens to have installed.
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="wavekeeper-http", daemon=True)

    def start(self) -> None:
        """Serve on a daemon thread; returns when requests are answered.

        Raises:
            HttpStartError: The server did not come up; the log has the reason.
        """
        self._thread.start()
        if not self._server.up.wait(START_S_MAX) or not self._server.started:
            raise HttpStartError(self.endpoint)

    def stop(self, timeout_s: float) -> bool:
        """End the server and close its socket; False if it was still busy after `timeout_s`. May be called twice."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the HTTP server is still busy after %g s; it is left to the end of the process", timeout_s)
            return False
        self._socket.close()
        return True

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("the HTTP server at %s has failed; the coordinator goes on without it", self.endpoint)
        finally:
            self._server.up.set()  # whoever waits for the start must not wait for nothing


class _Server(uvicorn.Server):
    """Tells when it is up. Off the main thread uvicorn leaves the process's signals alone by itself."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _bind(host: str, port: int) -> socket.socket:
    try:
        # A name takes its first address, as everywhere else; `localhost` may be IPv6.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HttpBindError(host, port, error.strerror or str(error)) from None
    try:
        # Else a coordinator that restarts waits a minute for the connections of its earlier life.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise HttpBindError(host, port, error.strerror or str(error)) from None
    return bound
