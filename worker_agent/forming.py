"""From a `Form` to an exchange that has been tried: what a rank offers, where it listens, and the pre-flight
exchange.
"""

from collections.abc import Sequence

from ..proto.endpoints import parse_endpoint
from ..proto.messages import Form, Kind
from ..proto.rows import DUMMY, Operation, Position, pack, unpack
from .exchange import available_exchanges, make_exchange
from .exchange.base import Exchange, GroupSpec
from .exchange.rendezvous import Listener
from .host import address_towards

OFFLINE_EPOCH = 1


class Builder:
    """Builds the exchanges of one rank. Creates nothing by itself but, where a torch exchange is offered, a
    listener.
    """

    def __init__(self, deployment: str, rank: int, device: str, listener: Listener | None) -> None:
        self._deployment = deployment
        self._rank = rank
        self._device = device
        self._listener = listener

    @property
    def rendezvous(self) -> str:
        """Where this rank listens, or an empty text."""
        return self._listener.endpoint if self._listener is not None else ""

    def build(self, form: Form, timeout_ms: int) -> Exchange:
        """Build the exchange of a command and try it once. Waits for the other ranks.

        Raises:
            ExchangeError: It cannot be built; says who or what is missing.
        """
        ranks = [member.rank for member in form.members]
        group = GroupSpec(
            deployment=self._deployment,
            epoch=form.epoch,
            group=form.group,
            rank=ranks.index(self._rank),
            dp_size=len(ranks),
            rendezvous=form.members[0].rendezvous,
            device=self._device,
        )
        return self._build(form.exchange, group, form.wave, timeout_ms)

    def build_offline(self, exchange: str, dp_size: int, rendezvous: str, timeout_ms: int) -> Exchange:
        """The same without a coordinator: the deployment's name is all that the ranks have in common."""
        group = GroupSpec(
            deployment=self._deployment,
            epoch=OFFLINE_EPOCH,
            group="offline",
            rank=self._rank,
            dp_size=dp_size,
            rendezvous=rendezvous,
            device=self._device,
        )
        return self._build(exchange, group, 0, timeout_ms)

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _build(self, backend: str, group: GroupSpec, wave: int, timeout_ms: int) -> Exchange:
        listener = self._listener if group.rank == 0 else None
        exchange = make_exchange(backend, group, timeout_ms=timeout_ms, listener=listener)
        position = Position(Operation.PREFLIGHT, group.epoch, wave, 0)
        mine = pack(DUMMY, position, group.rank)
        try:
            unpack(exchange.gather(mine, timeout_ms=timeout_ms), group.dp_size, mine, group.rank)
        except Exception:
            exchange.close()
            raise
        return exchange


def offers_of(kind: Kind, exchanges: Sequence[str] | None, device: str) -> tuple[str, ...]:
    """What a rank says that it could use; an independent one creates nothing, so it offers nothing."""
    if not kind.lockstep:
        return ()
    return tuple(available_exchanges(device) if exchanges is None else exchanges)


def listener_for(offers: Sequence[str], coordinator: str, advertise_host: str) -> Listener | None:
    """A socket that listens where other ranks can reach this one, bound before it is told; None if no offer needs
    one.
    """
    if all(offer == "shm" for offer in offers):
        return None
    address = parse_endpoint(coordinator)
    own = address_towards(address.host, address.port) if address.host else "127.0.0.1"
    return Listener(advertise_host or own)
