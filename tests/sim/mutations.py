"""Deliberate mistakes in the cores: what a hurried change could do. The simulator or the explorer must catch each.

A mutation is one replacement in the source of one method, applied in this process and taken back. It fails loudly when
its text is not there any more: then the code has changed, and the mutation must be written anew.
"""

import inspect
import json
import multiprocessing
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from wavekeeper.coordinator.core.commanded import Commanded
from wavekeeper.coordinator.core.deployment import Deployment
from wavekeeper.coordinator.core.fleet import Fleet
from wavekeeper.coordinator.core.holding import Holding
from wavekeeper.coordinator.core.lockstep import Lockstep
from wavekeeper.coordinator.core.members import Members
from wavekeeper.coordinator.core.regrouping import Regrouping
from wavekeeper.worker_agent.core import RankCore
from wavekeeper.worker_agent.front_end_core import FrontEndCore
from wavekeeper.worker_agent.stepper import Stepper
from wavekeeper.worker_agent.voice import Voice

from .explore import explore
from .scenario import Arrival, Scenario, Trouble, What, draw, play
from .system import Budget
from .world import Weather

SEEDS = 500
"""So many scenarios are tried on each mistake, then the small systems."""
SYSTEMS = (
    (2, Budget(requests=2), 3_000),
    (2, Budget(requests=1, doubled=1), 6_000),
    (2, Budget(requests=1, restarts=1), 6_000),
    (2, Budget(requests=1, deaths=1), 6_000),
)


class MutationError(Exception):
    """The text that a mutation replaces is not there, or not exactly once."""


@dataclass(frozen=True)
class Mutation:
    """One mistake."""

    name: str
    why: str
    """What is wrong with it."""
    owner: type
    method: str
    old: str
    new: str
    also: tuple[tuple[type, str, str, str], ...] = ()
    """Further replacements, where one defence behind another hides the mistake."""
    story: Scenario | None = None
    """Played first: what rarely comes about by chance."""

    @property
    def changes(self) -> tuple[tuple[type, str, str, str], ...]:
        return ((self.owner, self.method, self.old, self.new), *self.also)


def story(moe: int, *troubles: Trouble, arrivals: tuple[tuple[int, int], ...] = ((3_000, 6),)) -> Scenario:
    """In the best weather: what goes wrong, and when a request of how many steps comes to the lockstep deployment."""
    requests = tuple(Arrival(at_ms, "moe", steps) for at_ms, steps in arrivals)
    return Scenario(0, moe, 0, 1, Weather(), False, requests, troubles)


CUT_OFF_AND_SHRUNK = story(3, Trouble(What.CUT, 1_733, 3_000, "moe", 1), Trouble(What.SHRINK, 2_923, 1_700, "moe", 2))

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "running without acknowledgements",
        "running is told before every rank has begun the wave",
        Lockstep,
        "_starting",
        "if not self._behind():",
        "if len(self._behind()) < self.spec.dp_size:",
    ),
    Mutation(
        "running on sending",
        "what was asked for is taken for what is so",
        Lockstep,
        "_start",
        "self._enter(Phase.STARTING,",
        "self._enter(Phase.RUNNING,",
    ),
    Mutation(
        "whoever asked is left out",
        "a rank that asked for the wave gets no start: it is thought to have started itself",
        Commanded,
        "_send_from",
        "command = self._log[number]\n",
        "command = self._log[number]\n"
        "        if isinstance(command, Start) and record.at.has_work:\n"
        "            continue\n",
    ),
    Mutation(
        "a late message rewinds the wave",
        "the wave follows the last word, not the highest",
        Lockstep,
        "_ended",
        "if wave <= self.wave:",
        "if wave == self.wave:",
        ((Members, "hear", "if message.number <= record.number:", "if False:"),),
    ),
    Mutation(
        "an early start is dropped",
        "a rank that still reads the last exchange never hears of the next wave",
        RankCore,
        "_apply_pending",
        "return  # nothing has made it void",
        "pass",
    ),
    Mutation(
        "numbers of messages are ignored",
        "an old message overwrites what was heard after it",
        Members,
        "hear",
        "if message.number <= record.number:",
        "if False:",
    ),
    Mutation(
        "numbers of questions are ignored",
        "a doubled question of a front-end starts a wave for nothing",
        Lockstep,
        "_asked",
        "if message.ask <= self._served_asks.get(message.front_end, -1):",
        "if False:",
    ),
    Mutation(
        "an old term is obeyed",
        "a coordinator that is gone still commands",
        RankCore,
        "_message",
        "if message.term < self.term:",
        "if False:",
    ),
    Mutation(
        "a fenced life is let in again",
        "a zombie takes the place of its successor",
        Members,
        "_judge_identity",
        "if record is None or record.incarnation == register.incarnation:",
        "if record is None or record.incarnation == register.incarnation or True:",
    ),
    Mutation(
        "work is forgotten with its row",
        "a request that came after the row was written asks for nothing",
        Stepper,
        "finish",
        "self.inside = False\n",
        "self.inside = self._arrived = False\n",
    ),
    Mutation(
        "halted is said once only",
        "a lost word leaves the others in an exchange that nobody ends",
        Lockstep,
        "_has_left",
        "return at.mode is Mode.HALTED and at.epoch == self.epoch",
        "return False",
    ),
    Mutation(
        "work of a wave that is over asks",
        "a rank's old word that it holds work starts waves in which nothing runs",
        Lockstep,
        "_asks",
        "return at.has_work and at.mode is Mode.IDLE and at.wave == self.wave",
        "return at.has_work",
    ),
    Mutation(
        "a mixed group is adopted",
        "a new coordinator takes ranks of two groups, or of none, for one",
        Lockstep,
        "_adopt",
        'if len(groups) != 1 or "" in groups or any(record.at.mode not in _FORMED_MODES for record in members):',
        "if False:",
    ),
    Mutation(
        "nothing is sent again",
        "a lost command is lost",
        Commanded,
        "_resend",
        "self._send_from(record, record.applied + 1, now_ms)",
        "pass",
    ),
    Mutation(
        "the next group does not wait",
        "a group is formed while a rank still sits in the broken exchange or has not heard of the fault",
        Lockstep,
        "_faulted",
        "if not self.members.full or self._still_inside():",
        "if not self.members.full:",
    ),
    Mutation(
        "work asks once only",
        "a question that is lost, or comes while the group is formed, is never asked again",
        Voice,
        "at",
        "has_work=self.stepper.has_work",
        "has_work=False",
    ),
    Mutation(
        "a pause is held against others",
        "a coordinator that was stopped calls everybody silent",
        Fleet,
        "_excuse",
        "if paused_ms > self.spec.timing.heartbeat_ms:",
        "if False:",
    ),
    Mutation(
        "who returns from silence need not know of the fault",
        "a rank that was given up and comes back sits in the broken exchange for ever",
        Lockstep,
        "_seq_before_joining",
        "return self._phase_seq - 1 if self.phase is Phase.FAULTED else self.seq",
        "return self.seq",
    ),
    Mutation(
        "a gap in the feed goes unseen",
        "a front-end that has missed an update believes what is not so",
        FrontEndCore,
        "_update",
        "elif update.seq > self.seq + 1:",
        "elif False:",
    ),
    Mutation(
        "a start is served twice",
        "the wishes that a wave serves stay, and start another one",
        Lockstep,
        "_start",
        "self.asks.clear()",
        "pass",
    ),
    Mutation(
        "held is told when every rank has heard of it",
        "weights are changed under a forward that still runs",
        Holding,
        "_not_held",
        "r.at.mode is not Mode.HELD or r.applied < self._phase_seq",
        "r.applied < self._phase_seq",
    ),
    Mutation(
        "the silent are not given up",
        "a dead rank keeps its place, and nobody can take it",
        Members,
        "overdue",
        "if deadlines[record.rank] <= now_ms",
        "if False",
    ),
    Mutation(
        "an unknown rank is not asked to register",
        "after a restart nobody tells the ranks that they are not known",
        Deployment,
        "_from_stranger",
        "elif not isinstance(message, Leave):",
        "elif False:",
    ),
    Mutation(
        "a registration is believed",
        "a late copy of an old registration stands for where its rank is now",
        Commanded,
        "_is_placed",
        "return record.at.term == self.term",
        "return True",
        ((RankCore, "_apply_form", "if ours and (", "if False and ("),),
        story=story(
            2,
            Trouble(What.LATE_REGISTER, 2_000, 3, "moe", 0),
            Trouble(What.RESTART, 2_000, 1),
            arrivals=((500, 6), (3_000, 6)),
        ),
    ),
    Mutation(
        "a welcome to the past is believed",
        "a rank obeys a new coordinator that knows where it stood long ago",
        RankCore,
        "_welcome",
        "if message.answers < self._attempt or (self.registered and message.term > self.term):",
        "if False:",
        story=story(
            2,
            Trouble(What.LATE_REGISTER, 2_000, 3, "moe", 0),
            Trouble(What.RESTART, 2_000, 1),
            arrivals=((1_900, 200),),
        ),
    ),
    Mutation(
        "a spare is not told",
        "a rank that returns to a group without it sits in its old exchange for ever",
        Regrouping,
        "_is_left_out",
        "return grouped and record.rank not in self.members.places",
        "return False",
        story=CUT_OFF_AND_SHRUNK,
    ),
    Mutation(
        "a resume that meets a fault is forgotten",
        "the next group is held, and nobody knows why",
        Lockstep,
        "_break",
        "if self.phase is Phase.RESUMING:",
        "if False:",
        story=story(3, Trouble(What.FREEZE, 869, 3_000, "moe", 0), Trouble(What.SCALE, 1_993, 300, "moe", 1)),
    ),
    Mutation(
        "the hold of a scaling outlives its coordinator",
        "a deployment is held for a change of ranks that nobody makes any more",
        Lockstep,
        "_adopt",
        "if self.operation is not None and self.operation.over:",
        "if False:",
        story=story(3, Trouble(What.SCALE, 1_000, 1, "moe", 1), Trouble(What.RESTART, 1_020, 300)),
    ),
    Mutation(
        "a zombie that comes first stays",
        "a new coordinator turns away the life that it had been replaced by",
        Lockstep,
        "_fence_zombies",
        "return bool(zombies)",
        "return False",
        ((Deployment, "_from_stranger", "is not None and self.members.is_fenced(message):", "is not None:"),),
        story=story(
            2,
            Trouble(What.ZOMBIE, 1_000, 1_000, "moe", 1),
            Trouble(What.CUT, 3_400, 300, "moe", 1),
            Trouble(What.RESTART, 3_450, 40),
        ),
    ),
    Mutation(
        "a group that was given up is adopted",
        "what a zombie brings back is taken for the present",
        Lockstep,
        "_adopt",
        "if any(record.at.epoch < self.epoch for record in members) or max(r.at.wave for r in members) < self.wave:",
        "if False:",
        story=story(1, Trouble(What.ZOMBIE, 1_000, 1_700, "moe", 0), Trouble(What.LEAVE, 4_100, 2_000, "moe", 0)),
    ),
    Mutation(
        "a spare keeps what it holds",
        "a request that reached a rank on its way out of the group waits there for ever",
        RankCore,
        "take_hook",
        "if hook is Hook.SPARE:",
        "if hook is Hook.SPARE:\n        return None\n    if False:",
        story=CUT_OFF_AND_SHRUNK,
    ),
)


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The mistake is in the code while this lasts."""
    with ExitStack() as stack:
        for owner, method, old, new in mutation.changes:
            before = vars(owner)[method]
            source = textwrap.dedent(inspect.getsource(before))
            if source.count(old) != 1:
                times = source.count(old)
                raise MutationError(f"{mutation.name!r}: {old!r} stands {times} times in {owner.__name__}.{method}")
            source = source.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
            made: dict[str, object] = {}
            exec(compile(source, f"<{mutation.name}>", "exec"), vars(sys.modules[owner.__module__]), made)
            stack.callback(setattr, owner, method, before)
            setattr(owner, method, made[method])
        yield


@dataclass(frozen=True)
class Catch:
    """Who noticed a mistake, and by what."""

    mutation: str
    by: str
    """Empty: nobody."""
    failure: str


def hunt(mutation: Mutation) -> Catch:
    """Look for the mistake as it would be looked for: by the simulator's first seeds, then by the explorer."""
    try:
        return _hunt(mutation)
    except MutationError as error:
        return Catch(mutation.name, "", str(error))


def _hunt(mutation: Mutation) -> Catch:
    with applied(mutation):
        if mutation.story is not None:
            failure = play(mutation.story).failure
            return Catch(mutation.name, "its story" if failure else "", failure.splitlines()[0] if failure else "")
        for seed in range(SEEDS):
            failure = play(draw(seed)).failure
            if failure:
                return Catch(mutation.name, f"simulator, seed {seed}", failure.splitlines()[0])
        for ranks, budget, states_max in SYSTEMS:
            result = explore(ranks, budget, states_max)
            if result.fails:
                return Catch(mutation.name, f"explorer, {ranks} ranks, {budget}", result.told().splitlines()[0].strip())
    return Catch(mutation.name, "", "")


def main(arguments: list[str]) -> int:
    """Hunt for every mistake, in as many processes as there are CPUs; one line of JSON for each."""
    missed = 0
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for catch in pool.imap_unordered(hunt, MUTATIONS):
            missed += not catch.by
            print(json.dumps(asdict(catch)), flush=True)
    print(f"{len(MUTATIONS) - missed} passed, {missed} failed", file=sys.stderr)
    return int(missed > 0)
