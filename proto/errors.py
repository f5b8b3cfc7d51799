"""Errors of the wire contract, by who is at fault.

`LocalProtocolError` is our own bug or our caller's: it is raised before anything is sent.
`RemoteProtocolError` is the peer's: the frame is dropped and counted under `reason`, and nothing changes.
"""


class ProtocolError(Exception):
    """Base of the two; never raised itself."""


class LocalProtocolError(ProtocolError):
    """What we were about to send is not allowed. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that is not part of the protocol.

    `reason` is one of a small closed set (it labels a counter); `detail` is for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason, detail)  # keeps the error picklable

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class RowInvalidError(RemoteProtocolError):
    """A gathered row cannot be what its owner wrote (a damaged transport, or a foreign writer).

    Raised before any value of any row is used. Source of the case: vllm-ascend PR 10046.
    """

    def __init__(self, seen_by: int, owner: int, field: str, found: str) -> None:
        self.seen_by = seen_by
        self.owner = owner
        self.field = field
        self.found = found
        Exception.__init__(self, seen_by, owner, field, found)

    @property
    def reason(self) -> str:  # type: ignore[override]
        """The counter's label."""
        return "row_invalid"

    def __str__(self) -> str:
        return f"rank {self.seen_by} sees an invalid row of rank {self.owner}: {self.field} is {self.found}"


class HeaderMismatchError(RemoteProtocolError):
    """The ranks met in one exchange at different positions; `positions[r]` is where rank r says it is.

    Every rank of the group raises it at the same exchange, because every rank sees the same rows.
    """

    def __init__(self, positions: tuple[str, ...]) -> None:
        self.positions = positions
        Exception.__init__(self, positions)

    @property
    def reason(self) -> str:  # type: ignore[override]
        """The counter's label."""
        return "header_mismatch"

    def __str__(self) -> str:
        places = "; ".join(f"rank {rank} at {place}" for rank, place in enumerate(self.positions))
        return f"the ranks of this group are not at the same exchange: {places}"
