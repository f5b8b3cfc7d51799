"""Who is in a deployment: registration, incarnations, and the comparison of settings.

The law of this file: a registration is judged before anything changes. It is refused with a reason that names what
was expected and what was found, or it is accepted and the record is complete. Identity is (rank, incarnation); the
transport's peer is only the way back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...proto.messages import (
    Activity,
    At,
    Counters,
    FromRank,
    Heartbeat,
    Leave,
    Load,
    LoadReport,
    Member,
    Mismatch,
    RefusalReason,
    Refused,
    Register,
    WaveComplete,
)
from .replies import refused
from .specs import DeploymentSpec

FENCED_MAX = 1024
"""Remembered dead incarnations of a deployment; the oldest are forgotten first."""

NEVER_MS = 1 << 62

_LOOPBACK = ("tcp://127.", "tcp://[::1]", "tcp://localhost")
_DEVICE_EXCHANGES = ("nccl", "hccl", "gloo")


@dataclass(slots=True)
class MemberRecord:
    """All that is known of one living incarnation of a rank."""

    rank: int
    incarnation: str
    peer: bytes
    register: Register
    heard_ms: int
    number: int
    at: At
    applied: int
    """Number of the newest command of this term that it has acknowledged."""
    joined_ms: int
    sent_seq: int = 0
    sent_ms: int = 0
    load: Load = field(default_factory=Load)
    load_number: int = 0
    load_ms: int = 0
    counters: Counters = field(default_factory=Counters)
    activity: Activity = Activity.IDLE
    activity_since_ms: int = 0
    work_since_ms: int | None = None
    """Since when it says that it holds work."""
    busy_until_ms: int = 0

    def public(self) -> Member:
        """As the other ranks must know it."""
        return Member(
            rank=self.rank,
            incarnation=self.incarnation,
            host=self.register.host,
            rendezvous=self.register.rendezvous,
        )


class Members:
    """The living ranks of one deployment."""

    def __init__(self, spec: DeploymentSpec, dead_after_ms: int) -> None:
        self._spec = spec
        self._dead_after_ms = dead_after_ms
        self._by_rank: dict[int, MemberRecord] = {}
        self._sorted: list[MemberRecord] = []
        self._departed = Counters()
        self.places: tuple[int, ...] = tuple(range(spec.dp_size))
        """Ranks that make up the group; any other that is registered is a spare."""
        self._fenced: dict[tuple[int, str], int] = {}
        """Dead incarnations, with the highest number heard of each."""
        self.version = 0
        """Grows whenever a rank comes or goes."""
        self.look_again_ms = NEVER_MS
        """No rank is overdue before this; an early look costs nothing, a late one is a dead rank unseen."""

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[MemberRecord]:
        return iter(self._sorted)

    def sorted(self) -> list[MemberRecord]:
        """By rank."""
        return self._sorted

    @property
    def full(self) -> bool:
        """Whether every place of the group is taken."""
        return all(rank in self._by_rank for rank in self.places)

    def missing(self) -> list[int]:
        """Places that are not taken."""
        return [rank for rank in self.places if rank not in self._by_rank]

    def group(self) -> list[MemberRecord]:
        """The ranks that make up the group, as far as they are there."""
        return [self._by_rank[rank] for rank in self.places if rank in self._by_rank]

    def move(self, places: tuple[int, ...]) -> None:
        """From now on other ranks make up the group."""
        self.places = places
        self.version += 1

    def get(self, rank: int) -> MemberRecord | None:
        """The living incarnation of `rank`."""
        return self._by_rank.get(rank)

    def of(self, message: FromRank) -> MemberRecord | None:
        """The record that this message belongs to, if its incarnation is the living one."""
        record = self._by_rank.get(message.rank)
        return record if record is not None and record.incarnation == message.incarnation else None

    def is_fenced(self, message: FromRank) -> bool:
        """Whether another incarnation has taken this one's place."""
        return (message.rank, message.incarnation) in self._fenced

    def refusal(self, register: Register, term: int, now_ms: int) -> Refused | None:
        """Why this registration cannot be accepted, or None. Changes nothing."""
        for judge in (self._judge_shape, self._judge_identity, self._judge_settings, self._judge_exchange):
            verdict = judge(register, now_ms)
            if verdict is not None:
                reason, detail, mismatches = verdict
                return refused(register, term, reason, detail, mismatches)
        return None

    def accept(self, register: Register, peer: bytes, term: int, seq: int, now_ms: int) -> MemberRecord:
        """Write down an accepted registration; the next command for a new member has number `seq + 1`."""
        record = self.of(register)
        if record is None:
            applied = seq
        else:  # the same life on a new connection: what it has acknowledged in this term stays acknowledged
            applied = max(record.applied, register.at.applied if register.at.term == term else 0)
        fresh = MemberRecord(
            rank=register.rank,
            incarnation=register.incarnation,
            peer=peer,
            register=register,
            heard_ms=now_ms,
            number=register.number,
            at=register.at,
            applied=applied,
            joined_ms=now_ms if record is None else record.joined_ms,
            activity_since_ms=now_ms,
            work_since_ms=now_ms if register.at.has_work else None,
        )
        if record is not None:
            fresh.load, fresh.load_number, fresh.load_ms = record.load, record.load_number, record.load_ms
            fresh.counters = record.counters
        else:
            self.version += 1
        self._by_rank[register.rank] = fresh
        self._sort()
        self.look_again_ms = min(self.look_again_ms, self.deadline_ms(fresh))
        return fresh

    def hear(self, record: MemberRecord, message: FromRank, peer: bytes, term: int, now_ms: int) -> bool:
        """Take in what every message of a rank carries. False: it is older than one already heard, so nothing
        changed.
        """
        if message.number <= record.number:
            return False
        record.number = message.number
        record.heard_ms = now_ms
        record.peer = peer
        record.at = message.at
        if not message.at.has_work:
            record.work_since_ms = None
        elif record.work_since_ms is None:
            record.work_since_ms = now_ms
        if message.at.term == term:
            record.applied = max(record.applied, message.at.applied)
        match message:
            case Heartbeat():
                record.activity = message.activity
                record.activity_since_ms = now_ms - message.age_ms
                record.busy_until_ms = now_ms + message.busy_ms if message.busy_ms else 0
                record.counters = message.counters
                self.look_again_ms = min(self.look_again_ms, self.deadline_ms(record))
            case LoadReport():
                record.load, record.load_number, record.load_ms = message.load, message.number, now_ms
            case WaveComplete() | Leave():
                record.counters = message.counters
            case _:
                pass  # its position was all that mattered here
        return True

    def lose(self, record: MemberRecord) -> None:
        """Forget a dead rank; whatever it still says is fenced once another incarnation has its place."""
        del self._by_rank[record.rank]
        self.version += 1
        self._sort()
        self._departed = _added(self._departed, record.counters)
        self._fenced[record.rank, record.incarnation] = record.number
        while len(self._fenced) > FENCED_MAX:
            del self._fenced[next(iter(self._fenced))]

    def is_late(self, register: Register) -> bool:
        """Whether this registration was sent before something that its incarnation has said since, if only goodbye."""
        record = self.of(register)
        heard = self._fenced.get((register.rank, register.incarnation), -1) if record is None else record.number
        return register.number <= heard

    def excuse(self, paused_ms: int) -> None:
        """We were not there for so long: whoever was not heard in that time was not silent."""
        for record in self:
            record.heard_ms += paused_ms
            record.busy_until_ms += paused_ms if record.busy_until_ms else 0
        self.look_again_ms += paused_ms if self.look_again_ms != NEVER_MS else 0

    def unfence(self, register: Register) -> None:
        """A rank that was given up, and whose place nobody has taken, may come back."""
        self._fenced.pop((register.rank, register.incarnation), None)

    def overdue(self, now_ms: int) -> list[tuple[MemberRecord, str]]:
        """Ranks that have been silent for too long, with the reason in words."""
        if now_ms < self.look_again_ms:
            return []
        deadlines = {record.rank: self.deadline_ms(record) for record in self}
        self.look_again_ms = min((due for due in deadlines.values() if due > now_ms), default=NEVER_MS)
        return [
            (record, f"silent for {now_ms - record.heard_ms} ms") for record in self if deadlines[record.rank] <= now_ms
        ]

    def busy_until_ms(self, ranks: list[int]) -> int:
        """Until when the last of these ranks has announced to be busy; 0 if none has."""
        return max((self._by_rank[rank].busy_until_ms for rank in ranks if rank in self._by_rank), default=0)

    def totals(self) -> Counters:
        """What all ranks have done, those that are gone included, so that no total ever goes back."""
        total = self._departed
        for record in self:
            total = _added(total, record.counters)
        return total

    def deadline_ms(self, record: MemberRecord) -> int:
        """When this rank counts as dead if nothing is heard of it; an announced long operation extends it."""
        return max(record.heard_ms + self._dead_after_ms, record.busy_until_ms)

    def _sort(self) -> None:
        self._sorted = [self._by_rank[rank] for rank in sorted(self._by_rank)]

    def _judge_shape(self, register: Register, now_ms: int) -> "_Verdict | None":
        spec = self._spec
        if register.kind is not spec.kind:
            detail = (
                f"deployment {spec.name!r} is configured as kind {spec.kind.value}, but this rank serves a "
                f"{register.kind.value} model: attach it to a {register.kind.value} deployment or change its kind"
            )
            mismatch = [Mismatch("kind", spec.kind.value, register.kind.value)]
            return RefusalReason.KIND_MISMATCH, detail, mismatch
        if register.dp_size != spec.dp_size:
            detail = f"this rank was started for dp_size {register.dp_size}, the deployment has {spec.dp_size}"
            mismatch = [Mismatch("dp_size", spec.dp_size, register.dp_size)]
            return RefusalReason.SETTINGS_MISMATCH, detail, mismatch
        if register.rank >= spec.dp_size:
            detail = f"rank must be in 0..{spec.dp_size - 1}, got {register.rank}"
            return RefusalReason.RANK_OUT_OF_RANGE, detail, []
        return None

    def _judge_identity(self, register: Register, now_ms: int) -> "_Verdict | None":
        record = self._by_rank.get(register.rank)
        if record is None or record.incarnation == register.incarnation:
            return None
        if self.is_fenced(register):
            detail = f"rank {register.rank} was given up and has been replaced by incarnation {record.incarnation}"
            return RefusalReason.FENCED, detail, []
        seen_s = (now_ms - record.heard_ms) / 1000
        detail = (
            f"rank {register.rank} is alive as incarnation {record.incarnation}, last heard of {seen_s:.1f} s ago; "
            f"it is given up after {self._dead_after_ms / 1000:g} s of silence"
        )
        return RefusalReason.DUPLICATE_RANK, detail, []

    def _judge_settings(self, register: Register, now_ms: int) -> "_Verdict | None":
        expected = dict(self._spec.settings)
        source = "the configuration"
        peers = [record for record in self.sorted() if record.rank != register.rank]
        if peers and self._spec.kind.lockstep:
            expected = {**peers[0].register.settings, **expected}
            source = f"rank {peers[0].rank} and the configuration"
        keys = set(expected) | (set(register.settings) if peers and self._spec.kind.lockstep else set())
        mismatches = [
            Mismatch(key, expected.get(key), register.settings.get(key))
            for key in sorted(keys)
            if expected.get(key) != register.settings.get(key)
        ]
        if not mismatches:
            return None
        detail = f"settings that change what the group does differ from those of {source}"
        return RefusalReason.SETTINGS_MISMATCH, detail, mismatches

    def _judge_exchange(self, register: Register, now_ms: int) -> "_Verdict | None":
        spec = self._spec
        if not spec.kind.lockstep or spec.dp_size == 1:
            return None
        peers = [record for record in self.sorted() if record.rank != register.rank]
        hosts = {record.register.host for record in peers} | {register.host}
        if len(hosts) > 1:
            for rank, endpoint in [(register.rank, register.rendezvous)] + [
                (record.rank, record.register.rendezvous) for record in peers
            ]:
                if endpoint.startswith(_LOOPBACK):
                    detail = (
                        f"rank {rank} advertises the loopback address {endpoint}, but the ranks are on "
                        f"{len(hosts)} hosts: give its agent an address that the others can reach"
                    )
                    return RefusalReason.BAD_ADDRESS, detail, []
        if not register.rendezvous and any(name in _DEVICE_EXCHANGES for name in register.exchanges):
            detail = f"rank {register.rank} offers {', '.join(register.exchanges)}, but no rendezvous where it listens"
            return RefusalReason.BAD_ADDRESS, detail, []
        if not common_exchanges(spec, [*(record.register for record in peers), register]):
            offers = "; ".join(
                f"rank {r.rank} on {r.host}: {', '.join(r.exchanges) or 'none'}"
                for r in [*(record.register for record in peers), register]
            )
            detail = (
                f"no exchange {'' if spec.exchange == 'auto' else spec.exchange + ' '}that all ranks offer: {offers}"
            )
            return RefusalReason.NO_COMMON_EXCHANGE, detail, []
        return None


def common_exchanges(spec: DeploymentSpec, registers: list[Register]) -> list[str]:
    """Exchanges that all of these ranks can use together, best first.

    Shared memory first where the ranks share a host (a few microseconds instead of a collective), then the device's
    own, then gloo.
    """
    one_host = len({register.host for register in registers}) == 1
    candidates = (["shm"] if one_host else []) + list(_DEVICE_EXCHANGES)
    wanted = candidates if spec.exchange == "auto" else [name for name in candidates if name == spec.exchange]
    return [name for name in wanted if all(name in register.exchanges for register in registers)]


def choose_exchange(spec: DeploymentSpec, registers: list[Register]) -> tuple[str, str]:
    """The exchange for these ranks, the same for all, and why. All of them have been accepted, so there is one."""
    if spec.dp_size == 1:
        return "shm", "one rank exchanges with nobody"
    name = common_exchanges(spec, registers)[0]
    if spec.exchange != "auto":
        return name, "configured"
    hosts = len({register.host for register in registers})
    return name, f"the first that all ranks offer; they are on {hosts} host{'s' if hosts > 1 else ''}"


def _added(one: Counters, other: Counters) -> Counters:
    """The sums of what each rank does for itself, the higher of what all do together; exchange times have neither."""
    return Counters(
        waves=max(one.waves, other.waves),
        empty_waves=max(one.empty_waves, other.empty_waves),
        steps=one.steps + other.steps,
        dummy_steps=one.dummy_steps + other.dummy_steps,
        steps_after_last_work=max(one.steps_after_last_work, other.steps_after_last_work),
        group_operations=one.group_operations + other.group_operations,
        preflights=one.preflights + other.preflights,
        process_groups=one.process_groups + other.process_groups,
        wave_messages=one.wave_messages + other.wave_messages,
    )


_Verdict = tuple[RefusalReason, str, list[Mismatch]]
