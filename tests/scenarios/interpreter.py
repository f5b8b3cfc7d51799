"""The little language of the scenarios: one short command a line moves the cluster, and lines tell what happened.

README.md beside this file explains every command with an example; `Scenario.run` is the door. A command is a method
with the pattern of its line; what the methods move is in `puppetry`.
"""

import ast
import re
from collections.abc import Callable
from random import Random

import msgspec

from wavekeeper.coordinator.core import Junk, Tick, Wished
from wavekeeper.coordinator.core.holds import HoldWish, ResumeWish
from wavekeeper.coordinator.core.regroups import RecoverWish, ScaleWish
from wavekeeper.coordinator.core.view import deployment_view
from wavekeeper.proto import messages as m
from wavekeeper.proto.codec import decode, encode
from wavekeeper.proto.errors import RemoteProtocolError
from wavekeeper.worker_agent import events as rank_events
from wavekeeper.worker_agent import front_end_core as desk
from wavekeeper.worker_agent.front_end_core import FrontEndCore

from ..core.stories import make_fleet
from .puppetry import COORDINATOR, QUIET, Life, Puppetry, Request, ScriptError
from .words import MANY, Lines, arrow, front_end_id, load_lines, position_text, rank_name, sees_text, view_lines

STEPS_MAX = 500
COMMANDS: list[tuple[re.Pattern[str], str]] = []
Method = Callable[..., None]


def command(pattern: str) -> Callable[[Method], Method]:
    """Make a method the meaning of every line that this pattern matches as a whole."""

    def register(method: Method) -> Method:
        COMMANDS.append((re.compile(pattern), method.__name__))
        return method

    return register


class Scenario(Puppetry):
    """One script's cluster. `run` plays one command and returns the lines to show."""

    def __init__(self) -> None:
        super().__init__("moe", 1)

    def run(self, line: str) -> list[str]:
        """Play one command.

        Raises:
            ScriptError: There is no such command, or it cannot be played now.
        """
        self.lines = Lines(self.lines.told)
        for pattern, method in COMMANDS:
            if match := pattern.fullmatch(line):
                getattr(self, method)(**match.groupdict())
                return self.lines.render()
        raise ScriptError(f"no such command: {line!r}")

    # --- who is there ------------------------------------------------------------------------------------------------

    @command(r"deployment (?P<kind>moe|dense) ranks (?P<ranks>\d+)(?P<formed> formed(?: at wave (?P<wave>\d+))?)?")
    def deployment(self, kind: str, ranks: str, formed: str | None, wave: str | None) -> None:
        super().__init__(kind, int(ranks))
        self.coordinator(Tick())
        if not formed:
            return
        self.register(" ".join(str(rank) for rank in range(self.spec.dp_size)), "")
        self.flow()
        for _ in range(int(wave or 0)):
            self.request("0", None)
            self.settle()
        self.lines = Lines()
        self.status()
        self.lines.keep_first()

    @command(r"register (?P<ranks>[\d ]*\d)(?P<words>( \w+=\S+)*)")
    def register(self, ranks: str, words: str) -> None:
        """Start the process of these ranks; what is not known of a rank's own properties becomes a setting."""
        for rank in map(int, ranks.split()):
            self.newest[rank] = self.newest.get(rank, -1) + 1
            own = dict(word.split("=", 1) for word in words.split())
            life = Life(rank, self.newest[rank], self.spec, self.now_ms, own)
            self.lives[life.name] = life
            self.tick(life)

    @command(r"replace rank (?P<ranks>[\d ]*\d)")
    def replace(self, ranks: str) -> None:
        self.register(ranks, "")

    @command(r"kill rank (?P<ranks>[\d. ]*\d)")
    def kill(self, ranks: str) -> None:
        for life in self.lives_of(ranks):
            del self.lives[life.name]
            for link in self.links_of(life.name):
                self.links[link].clear()

    @command(r"leave rank (?P<ranks>[\d. ]*\d): (?P<reason>.+)")
    def leave_on_purpose(self, ranks: str, reason: str) -> None:
        for life in self.lives_of(ranks):
            self.perform(life, life.core.handle(rank_events.Closing(reason), self.now_ms + life.clock_ms))

    @command(r"front-end (?P<name>F\d+)")
    def begin_front_end(self, name: str) -> None:
        self.front_ends[name] = FrontEndCore(self.spec.name, front_end_id(name), Random(7), self.now_ms)
        self.front_end(name, desk.Tick())

    @command(r"crash coordinator")
    def crash(self) -> None:
        self.fleet = None
        for link, messages in self.links.items():
            if not link[0].startswith("F") or link[1] == COORDINATOR:
                messages.clear()

    @command(r"start coordinator")
    def start(self) -> None:
        self.term += 1
        self.fleet = make_fleet(self.spec, term=self.term, now_ms=self.now_ms)
        self.coordinator(Tick())

    @command(r"freeze (?P<whom>.+)")
    def freeze(self, whom: str) -> None:
        self.frozen.update(self.names(whom))

    @command(r"thaw (?P<whom>.+)")
    def thaw(self, whom: str) -> None:
        self.frozen.difference_update(self.names(whom))

    # --- the network -------------------------------------------------------------------------------------------------

    @command(r"deliver all")
    def deliver_all(self) -> None:
        self.flow()

    @command(r"deliver (?:(?P<which>oldest|newest) )?(?P<link>.+ -> .+)")
    def deliver(self, which: str | None, link: str) -> None:
        for one in self.links_of(link):
            if which == "newest":
                self.links[one].rotate(1)
            count = len(self.links[one])
            for _ in range(min(1, count) if which else count):
                self.cross(one)
        self.build()

    @command(r"drop (?P<link>.+ -> .+)")
    def drop(self, link: str) -> None:
        for one in self.links_of(link):
            way, who = arrow(one)
            for message in self.links[one]:
                if not isinstance(message, QUIET):
                    self.lines.say(f"{way}: {self.text(message)} (lost)", who)
            self.links[one].clear()

    @command(r"double (?P<link>.+ -> .+)")
    def double(self, link: str) -> None:
        for one in self.links_of(link):
            self.links[one].extend(list(self.links[one]))

    @command(r"cut (?P<link>.+)")
    def cut_link(self, link: str) -> None:
        self.cut.update(self.links_of(link))

    @command(r"delay (?P<link>.+)")
    def delay(self, link: str) -> None:
        self.slow.update(self.links_of(link))

    @command(r"mend (?P<link>.+)")
    def mend(self, link: str) -> None:
        mended = self.links_of(link)
        self.cut.difference_update(mended)
        self.slow.difference_update(mended)
        self.lines.told -= {about for about in self.lines.told if about[1] in mended}

    @command(r"links")
    def show_links(self) -> None:
        for link in sorted(self.links):
            way, who = arrow(link)
            for message in self.links[link]:
                if not isinstance(message, QUIET):
                    self.lines.say(f"{way}: {self.text(message)}", who)

    # --- time --------------------------------------------------------------------------------------------------------

    @command(r"wait (?P<amount>\d+) (?P<unit>ms|s)")
    def wait(self, amount: str, unit: str) -> None:
        """Time passes for everybody, from deadline to deadline; open links deliver, engines do not step."""
        self.flow()
        began_ms, until_ms = self.now_ms, self.now_ms + int(amount) * (1_000 if unit == "s" else 1)
        while self.now_ms < until_ms:
            self.now_ms = max(self.now_ms + 1, min([until_ms, *self._deadlines()]))
            outer, self.lines = self.lines, Lines(self.lines.told)
            if COORDINATOR not in self.frozen:
                self.coordinator(Tick())
            for name, life in list(self.lives.items()):
                if name not in self.frozen:
                    self.tick(life)
            for name in self.front_ends:
                self.front_end(name, desk.Tick())
            self.flow()
            inner, self.lines = self.lines, outer
            if inner:
                self.lines.say(f"after {self.now_ms - began_ms} ms:")
            self.lines.extend(inner)

    def _deadlines(self) -> list[int]:
        due = [core.next_deadline_ms(self.now_ms) for core in self.front_ends.values()]
        due += [v.core.next_deadline_ms() - v.clock_ms for n, v in self.lives.items() if n not in self.frozen]
        if self.fleet is not None and COORDINATOR not in self.frozen:
            due.append(self.fleet.next_deadline_ms(self.now_ms))
        return due

    # --- requests ----------------------------------------------------------------------------------------------------

    @command(r"request rank (?P<ranks>[\d. ]*\d)(?: for (?P<steps>\d+) steps)?")
    def request(self, ranks: str, steps: str | None) -> None:
        """A request reaches these ranks by a way that no front-end of ours knows."""
        for life in self.lives_of(ranks):
            life.work += int(steps or 1)
            self.perform(life, life.core.work_arrived())

    @command(r"ask(?: rank (?P<rank>\S+))? wave (?P<wave>\d+)(?: by (?P<name>F\d+))?")
    def ask(self, rank: str | None, wave: str, name: str | None) -> None:
        """Somebody asks for a start, with whatever it takes for a rank."""
        name = name or "F0"
        self.asks[name] += 1
        ask = m.FirstRequest(
            front_end=front_end_id(name), deployment=self.spec.name, ask=self.asks[name], wave=int(wave), rank=0
        )
        header, body = encode(ask)
        raw = {**msgspec.msgpack.decode(body), "rank": ast.literal_eval(rank) if rank else None}
        try:
            message = decode([header, msgspec.msgpack.encode(raw)])
        except RemoteProtocolError as error:
            self.lines.say(f"{name} -> coordinator: firstrequest to rank {rank} (no message of the protocol)")
            self.coordinator(Junk(name.encode(), error.reason, error.detail, answerable=True))
        else:
            self.put(name, COORDINATOR, message)

    @command(r"send (?P<name>F\d+)(?: for (?P<steps>\d+) steps)?")
    def send(self, name: str, steps: str | None) -> None:
        """A front-end picks a rank, sends it a request, and asks for a start if it sees a need."""
        state = self.front_ends[name].state
        if state is not None and state.refuses:
            self.lines.say(f"{name}: turns the request away, to be tried again later")
            return
        choice, effects = self.front_ends[name].pick(self.now_ms)
        if choice is None:
            self.lines.say(f"{name}: finds no rank that is up")
            return
        target = rank_name(choice.rank, int(choice.incarnation[8:], 16))
        self.lines.say(f"{name}: picks {target}, in wave {choice.wave}")
        for effect in effects:
            if isinstance(effect, desk.Send):
                self.put(name, COORDINATOR, effect.message)
        self.put(name, target, Request(int(steps or 1)))

    @command(r"load rank (?P<ranks>[\d. ]*\d) running (?P<running>\d+) waiting (?P<waiting>\d+)")
    def load(self, ranks: str, running: str, waiting: str) -> None:
        load = m.Load(running=int(running), waiting=int(waiting))
        for life in self.lives_of(ranks):
            self.perform(life, life.core.handle(rank_events.LoadChanged(load), self.now_ms + life.clock_ms))

    # --- operators ---------------------------------------------------------------------------------------------------

    @command(r"hold (?P<mode>wait|now|keep)(?P<refuse> refusing)?(?: as (?P<key>\S+))?")
    def hold(self, mode: str, refuse: str | None, key: str | None) -> None:
        wish = HoldWish(mode=m.HoldMode(mode), key=key or "", refuse=refuse is not None)
        self.coordinator(Wished(1, self.spec.name, wish))

    @command(r"resume(?: (?P<operation>\d+))?")
    def resume(self, operation: str | None) -> None:
        self.coordinator(Wished(2, self.spec.name, ResumeWish(int(operation) if operation else None)))

    @command(r"scale to (?P<size>\d+)(?: within (?P<deadline>\d+) s)?")
    def scale(self, size: str, deadline: str | None) -> None:
        self.coordinator(Wished(3, self.spec.name, ScaleWish(int(size), float(deadline or 60))))

    @command(r"recover by shrinking")
    def shrink(self) -> None:
        self.coordinator(Wished(4, self.spec.name, RecoverWish()))

    @command(r"device (?P<state>busy|idle) rank (?P<ranks>[\d. ]*\d)")
    def device(self, state: str, ranks: str) -> None:
        for life in self.lives_of(ranks):
            life.device_idle = state == "idle"

    # --- engines -----------------------------------------------------------------------------------------------------

    @command(r"step(?: (?P<count>\d+) times)?")
    def steps(self, count: str | None) -> None:
        """Every engine makes one turn: it writes its row, and reads all rows if all are there."""
        for _ in range(int(count or 1)):
            self.step()

    @command(r"steps until (?:wave ends|idle)")
    def steps_until_idle(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise ScriptError(f"the wave has not ended after {STEPS_MAX} steps")

    @command(r"write rank (?P<ranks>[\d. ]*\d)")
    def write_rows(self, ranks: str) -> None:
        for life in self.lives_of(ranks):
            if not self.write(life):
                raise ScriptError(f"{life.name} has no row to write")

    @command(r"read rank (?P<ranks>[\d. ]*\d)")
    def read_rows(self, ranks: str) -> None:
        for life in self.lives_of(ranks):
            if not self.read(life):
                raise ScriptError(f"{life.name} cannot read yet")

    @command(r"fail rank (?P<ranks>[\d. ]*\d)(?: for want of rank (?P<lost>\d+))?: (?P<reason>.+)")
    def fail(self, ranks: str, lost: str | None, reason: str) -> None:
        """The exchange fails under the hands of these ranks' engines."""
        for life in self.lives_of(ranks):
            life.posted = None
            self.perform(life, life.core.fail(reason, int(lost) if lost else None))

    @command(r"settle")
    def settle(self) -> None:
        """Deliver and step until nothing moves; no time passes."""
        for _ in range(STEPS_MAX):
            self.flow()
            if not self.step():
                return
        raise ScriptError(f"the cluster has not come to rest after {STEPS_MAX} turns")

    @command(r"quietly (?P<line>.+)")
    def quietly(self, line: str) -> None:
        told = self.lines.told
        self.run(line)
        self.lines = Lines(told)

    # --- looking -----------------------------------------------------------------------------------------------------

    @command(r"status")
    def status(self) -> None:
        """What the coordinator shows."""
        if self.fleet is None:
            self.lines.say("coordinator: not there")
        else:
            self.lines.extend(view_lines(deployment_view(self.fleet.deployments[self.spec.name], self.now_ms)))

    @command(r"loads")
    def loads(self) -> None:
        """What the coordinator shows of every rank's queue."""
        if self.fleet is not None:
            self.lines.extend(load_lines(deployment_view(self.fleet.deployments[self.spec.name], self.now_ms)))

    @command(r"ranks")
    def ranks(self) -> None:
        """Where the ranks truly stand, whatever the coordinator believes."""
        for name in sorted(self.lives):
            life = self.lives[name]
            left = f", {life.work} steps of work left" if life.work else ""
            self.lines.say(f"rank {MANY}: {position_text(life.core)}{left}", name)

    @command(r"counters")
    def counters(self) -> None:
        for name in sorted(self.lives):
            c = self.lives[name].core.stepper.counters()
            waves = f"{c.waves} waves ({c.empty_waves} empty), {c.steps} steps, {c.dummy_steps} dummies"
            self.lines.say(f"rank {MANY}: {waves}, {c.group_operations} group operations", name)
        if self.fleet is not None:
            sent = self.fleet.deployments[self.spec.name].wave_messages
            self.lines.say(f"coordinator: {sent} wave messages sent and received")

    @command(r"look (?P<name>F\d+)")
    def look(self, name: str) -> None:
        """What a front-end believes."""
        core = self.front_ends[name]
        self.lines.say(f"{name}: {sees_text(core)}")
        for rank in core.state.ranks if core.state is not None else []:
            load = f"{rank.load.running} running, {rank.load.waiting} waiting" if rank.load_number else "no load yet"
            own = core.in_flight[rank.rank, rank.incarnation]
            self.lines.say(f"  rank {MANY}: {load if rank.up else 'down'}, {own} sent from here", str(rank.rank))
