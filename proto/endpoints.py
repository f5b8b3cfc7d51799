"""Addresses: one parser and one formatter, used wherever an address is read or written.

The law of this file: what `parse_endpoint` accepts has exactly one meaning, and `Endpoint.text` says it in the form
that ZeroMQ takes. Whatever could be read in two ways is refused together with a form that would work.

Binding and advertising are two things. A socket is bound to an address of this machine, perhaps to all of them (`*`)
and perhaps to any free port (0); a peer needs one address and one port. `Endpoint.for_bind` and `Endpoint.for_connect`
check the one and the other, and `advertised` makes the second out of the first.
"""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Literal

import msgspec

PORT_MAX = 65_535
IPC_PATH_BYTES_MAX = 107
"""Linux keeps 108 bytes for the path of a Unix socket, and the last one is a NUL."""

HOST_NAME_CHARACTERS_MAX = 253

_PORT = re.compile(r"0|[1-9][0-9]{0,4}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_WILDCARDS = ("*", "0.0.0.0", "::")
_EXAMPLE_PORT = 29_560


class EndpointError(ValueError):
    """`found` is not an address that can be used here; `problem` says why, and `remedy` is what to write.

    A ValueError, so that msgspec turns it into its own validation error where it is raised inside a struct.
    """

    def __init__(self, found: str, problem: str, remedy: str) -> None:
        self.found = found
        self.problem = problem
        self.remedy = remedy
        super().__init__(found, problem, remedy)  # keeps the error picklable

    def __str__(self) -> str:
        shown = self.found if len(self.found) <= 160 else self.found[:157] + "..."
        return f"{shown!r} {self.problem}; write {self.remedy}"


class Endpoint(msgspec.Struct, frozen=True):
    """A parsed address, in one canonical form: equal addresses are equal values.

    `host` is an IPv4 or IPv6 address (without brackets), a name in lower case, or `*`; it is empty for ipc.
    `path` is absolute or, with a leading `@`, a name in Linux's abstract namespace; it is empty for tcp.
    """

    transport: Literal["tcp", "ipc"]
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def text(self) -> str:
        """The address as ZeroMQ takes it; `parse_endpoint` reads it back."""
        if self.transport == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://{bracketed(self.host)}:{self.port}"

    def __str__(self) -> str:
        return self.text

    @property
    def is_wildcard(self) -> bool:
        """Whether this means every address of the machine, which only a binder can use."""
        return self.host in _WILDCARDS

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can reach it. A Unix socket counts; a wildcard does not."""
        return self.transport == "ipc" or is_loopback_host(self.host)

    def with_port(self, port: int) -> "Endpoint":
        """Return the same address with another port: the real one, once a socket bound to port 0 has got it."""
        return msgspec.structs.replace(self, port=port)

    def for_bind(self) -> "Endpoint":
        """Return the address to bind to.

        Raises:
            EndpointError: The host is a name. What a name stands for may be another machine, or a service in front of
                this one; the name belongs into `advertise`.
        """
        if self.transport == "ipc" or self.host in _WILDCARDS or _address(self.host) is not None:
            return self
        if self.host == "localhost":
            return msgspec.structs.replace(self, host="127.0.0.1")
        raise EndpointError(
            self.text,
            "is a name, and a socket is bound to an address",
            f"bind: tcp://*:{self.port} and advertise: {self.text}",
        )

    def for_connect(self) -> "Endpoint":
        """Return the address to connect to.

        Raises:
            EndpointError: It is a wildcard, or has port 0: it tells a peer nothing.
        """
        if self.is_wildcard:
            problem = "means every address of the machine that binds it, so nobody can connect to it"
            raise EndpointError(self.text, problem, f"tcp://127.0.0.1:{self.port or _EXAMPLE_PORT}")
        if self.transport == "tcp" and self.port == 0:
            problem = "has port 0, which means any free port of the machine that binds it"
            raise EndpointError(self.text, problem, self.with_port(_EXAMPLE_PORT).text)
        return self


def parse_endpoint(text: str, *, default_port: int | None = None) -> Endpoint:
    """Read an address: `tcp://HOST:PORT`, `HOST:PORT` or `ipc://PATH`.

    HOST is an IPv4 address, an IPv6 address in brackets, a name, or `*`. Port 0 and wildcards are read here;
    `for_connect` refuses them.

    Args:
        text: What somebody wrote.
        default_port: Taken where `text` has none; an IPv6 address without a port then needs no brackets. Without it
            a port is demanded.

    Raises:
        EndpointError: It cannot be read, or can be read in two ways.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tcp", text
    if not rest:
        raise EndpointError(text, "holds no address", f"tcp://127.0.0.1:{default_port or _EXAMPLE_PORT}")
    match scheme.lower():
        case "tcp":
            return _parse_tcp(text, rest, default_port)
        case "ipc":
            return Endpoint("ipc", path=_ipc_path(text, rest))
        case _:
            remedy = f"tcp://127.0.0.1:{_EXAMPLE_PORT} or ipc:///run/wavekeeper/control.sock"
            raise EndpointError(text, f"has the unknown transport {scheme!r}", remedy)


def parse_host(text: str) -> str:
    """Read a host without a port, as an HTTP server takes it; return its canonical form (IPv6 without brackets).

    Raises:
        EndpointError: It is no address and no name. `*` is neither: it is ZeroMQ's own.
    """
    if text == "*":
        raise EndpointError(text, "is not a host", "0.0.0.0 for every IPv4 address, or '::' for IPv6 as well")
    if text.startswith("[") and text.endswith("]") and _ipv6(text[1:-1]) is not None:
        raise EndpointError(text, "needs no brackets where it stands without a port", repr(text[1:-1]))
    return _host(text, text, "127.0.0.1")


def bracketed(host: str) -> str:
    """Return the host as it is written before a port: an IPv6 address gets its brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback_host(host: str) -> bool:
    """Tell whether only this machine can reach that host. No name but `localhost` is trusted to be one."""
    address = _address(host)
    if address is None:
        return host == "localhost"
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def advertised(bind: Endpoint, real_port: int, advertise: str = "") -> Endpoint:
    """Return the address that peers are told.

    Args:
        bind: Where the socket is bound.
        real_port: The port that it got; `bind.port` unless that is 0.
        advertise: What the operator wants peers to be told; may leave out the port. Empty: the bound address itself.

    Raises:
        EndpointError: `bind` is a wildcard and `advertise` is empty, or nobody can connect to `advertise`.
    """
    if not advertise:
        if bind.is_wildcard:
            raise EndpointError(
                bind.text,
                f"alone is not enough: peers cannot connect to {bind.host}",
                f"bind: {bind.text} and advertise: the address or the name by which peers reach this machine",
            )
        return bind if bind.transport == "ipc" else bind.with_port(real_port).for_connect()
    told = parse_endpoint(advertise, default_port=real_port)
    if told.transport != bind.transport:
        raise EndpointError(advertise, f"cannot reach a socket that is bound to {bind.text}", f"{bind.transport}://...")
    return told.for_connect()


def _parse_tcp(text: str, rest: str, default_port: int | None) -> Endpoint:
    host, port = _split(text, rest, default_port)
    if port is None:
        if default_port is None:
            raise EndpointError(text, "has no port", f"tcp://{bracketed(host)}:{_EXAMPLE_PORT}")
        return Endpoint("tcp", host, default_port)
    if port == "*":
        raise EndpointError(text, "asks for any free port", f"tcp://{bracketed(host)}:0")
    if not _PORT.fullmatch(port) or int(port) > PORT_MAX:
        number = default_port or _EXAMPLE_PORT
        remedy = f"a number from 1 to {PORT_MAX}, such as tcp://{bracketed(host)}:{number}"
        raise EndpointError(text, f"has the port {port!r}", remedy)
    return Endpoint("tcp", host, int(port))


def _split(text: str, rest: str, default_port: int | None) -> tuple[str, str | None]:
    """Return the canonical host, and the port as it is written, if there is one."""
    example = default_port or _EXAMPLE_PORT
    if rest.startswith("["):
        inner, closing, tail = rest[1:].partition("]")
        address = _ipv6(inner)
        if not closing or address is None:
            raise EndpointError(text, "has brackets, and no IPv6 address in them", f"tcp://[::1]:{example}")
        if tail and not tail.startswith(":"):
            raise EndpointError(text, "goes on after the bracket", f"tcp://[{address}]:{example}")
        return address, tail[1:] if tail else None
    if rest.count(":") < 2:
        host, colon, port = rest.partition(":")
        return _host(text, host, f"tcp://127.0.0.1:{example}"), port if colon else None
    whole = _ipv6(rest)
    head, _, tail = rest.rpartition(":")
    address = _ipv6(head) if _PORT.fullmatch(tail) and int(tail) <= PORT_MAX else None
    if address is not None:
        # `2001:db8::1:80` is an address, and another one with a port: the wrong guess connects to a stranger.
        other = f", or tcp://[{whole}]:{example}" if whole is not None else ""
        problem = "is ambiguous: an IPv6 address before a port needs brackets"
        raise EndpointError(text, problem, f"tcp://[{address}]:{tail}{other}")
    if whole is None:
        problem = "has several colons and is not an IPv6 address"
        raise EndpointError(text, problem, f"tcp://127.0.0.1:{example} or tcp://[::1]:{example}")
    return whole, None


def _host(text: str, host: str, remedy: str) -> str:
    """Return the canonical form of an address, a name or `*`."""
    address = _address(host)
    if host == "*" or isinstance(address, IPv4Address):
        return host
    if isinstance(address, IPv6Address):
        return str(address)
    if not host:
        raise EndpointError(text, "holds no host", remedy)
    if not host.isascii():
        raise EndpointError(text, "has a host name that is not ASCII", f"its encoded form (xn--...), or {remedy}")
    labels = host.removesuffix(".").split(".")
    # A last label of digits alone is a mistyped IPv4 address; a resolver may read 127.1 or 2130706433 as one.
    proper = len(host) <= HOST_NAME_CHARACTERS_MAX and not labels[-1].isdigit()
    if not proper or not all(_LABEL.fullmatch(label) for label in labels):
        raise EndpointError(text, f"has {host[:64]!r} where an address or a host name should be", remedy)
    return host.lower()


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.scope_id is not None and not _ZONE.fullmatch(address.scope_id):
        return None
    return address


def _ipv6(text: str) -> str | None:
    address = _address(text)
    return str(address) if isinstance(address, IPv6Address) else None


def _ipc_path(text: str, path: str) -> str:
    if path[0] not in "/@" or path in ("/", "@"):
        # A peer that was started in another folder would look elsewhere.
        raise EndpointError(text, "needs an absolute path", "ipc:///run/wavekeeper/control.sock")
    if not path.isprintable():
        raise EndpointError(text, "has a path with unprintable characters", "ipc:///run/wavekeeper/control.sock")
    size_bytes = len(path.encode())
    if size_bytes > IPC_PATH_BYTES_MAX:
        problem = f"has a path of {size_bytes} bytes, and a Unix socket takes {IPC_PATH_BYTES_MAX}"
        raise EndpointError(text, problem, "a shorter one, such as ipc:///run/wavekeeper/control.sock")
    return path
