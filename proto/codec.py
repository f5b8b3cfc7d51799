"""Bytes <-> messages.

A message is two frames: a header of three bytes (`WK` and the protocol's version) and a body, a msgpack map whose key
`t` tells the message's type. On the feed a topic frame goes before them. Unknown keys of a known message are ignored,
so that a newer peer may add some; an unknown type is an error. Anything wrong raises `RemoteProtocolError` and never
anything else.
"""

from collections.abc import Sequence

import msgspec

from .errors import LocalProtocolError, RemoteProtocolError
from .messages import Message, WireMessage

PROTOCOL_VERSION = 1
HEADER = b"WK" + bytes([PROTOCOL_VERSION])

FRAME_BYTES_MAX = 4 << 20
"""Largest body: the members of a group, or the snapshot, of 4,096 ranks with the longest texts that they may have.
Sockets set it as MAXMSGSIZE, so more never reaches memory."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WireMessage)


def encode(message: Message) -> list[bytes]:
    """Return the frames of one message.

    Raises:
        LocalProtocolError: The body is larger than `FRAME_BYTES_MAX`.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"{type(message).__name__} takes {len(body)} bytes, at most {FRAME_BYTES_MAX}")
    return [HEADER, body]


def decode(frames: Sequence[bytes]) -> Message:
    """Return the message of these frames.

    Raises:
        RemoteProtocolError: With `reason` `frames`, `magic`, `version`, `oversize` or `malformed`.
    """
    if len(frames) != 2:
        raise RemoteProtocolError("frames", f"expected 2 frames (header, body), got {len(frames)}")
    header, body = frames
    if len(header) != len(HEADER) or header[:2] != HEADER[:2]:
        raise RemoteProtocolError("magic", f"expected a header {HEADER!r}, got {header[:8]!r}")
    if header[2] != PROTOCOL_VERSION:
        raise RemoteProtocolError("version", f"expected protocol version {PROTOCOL_VERSION}, got {header[2]}")
    if len(body) > FRAME_BYTES_MAX:
        raise RemoteProtocolError("oversize", f"a body of {len(body)} bytes, at most {FRAME_BYTES_MAX}")
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError("malformed", str(error)) from None
    return message


def topic(deployment: str) -> bytes:
    """Return the feed's topic of a deployment; the slash keeps `moe` from matching `moe-2`."""
    return deployment.encode() + b"/"
