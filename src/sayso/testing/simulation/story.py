"""A story: what people, sources, time and misfortune do to one session, as a list of explicit actions.

A seed is drawn into such a list once. From then on the list alone decides, so that a shorter one is a story too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: what may go wrong at each place, and how often beside each other
MISFORTUNES: Mapping[str, Sequence[str]] = {
    "put:before": ("crash", "unavailable", "slow"),
    "put:after": ("crash", "lost", "slow"),
    "write:before": ("crash", "unavailable", "slow"),
    "write:after": ("crash", "lost", "slow"),
    "release:before": ("crash", "unavailable", "slow"),
    "release:after": ("crash", "lost", "slow"),
    "surrender:before": ("crash", "unavailable", "slow"),
    "surrender:after": ("crash", "lost", "slow"),
    "claim:before": ("crash", "unavailable", "slow"),
    "claim:after": ("crash", "slow"),  # a lost answer leaves the session with nobody until a process starts
    "fire:before": ("crash", "unavailable", "slow"),
    "fire:after": ("crash", "lost", "slow"),
    "read:before": ("crash", "unavailable", "slow"),
    "read:after": ("crash", "slow"),
    "tool:before": ("crash", "hang", "slow", "break"),
    "tool:after": ("crash", "hang", "slow", "break", "lie"),
    "lookup:before": ("crash", "hang", "slow", "break"),
    "lookup:after": ("crash", "hang", "slow", "break"),
    "classifier:before": ("crash", "hang", "slow", "break"),
    "classifier:after": ("crash", "hang", "slow", "break"),
    "model:before": ("crash", "hang", "slow", "break"),
    "model:midway": ("crash", "hang", "slow", "break"),
    "model:after": ("crash", "slow"),
}

_SAID = {
    "crash": "the process ends",
    "unavailable": "the store does not answer, and nothing is stored",
    "lost": "the store does it, and its answer is lost",
    "slow": "it takes {ms} ms",
    "hang": "it never answers",
    "break": "it breaks off",
    "lie": "the tool says that it failed",
}
_PLACES = {
    "put": "an input is stored",
    "write": "rows are written",
    "release": "the session is let go",
    "surrender": "the session is given up",
    "claim": "a session is claimed",
    "fire": "the timers are fired",
    "read": "the store is read",
    "tool": "a tool does its work",
    "lookup": "a lookup is made",
    "model": "the model answers",
    "classifier": "it is asked how words fit",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens, and how many steps everybody may make before the next."""

    do: str
    args: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0

    def __str__(self) -> str:
        return _TELLERS[self.do](self.args)


@dataclass(frozen=True, slots=True)
class Story:
    """What happens, in order."""

    actions: tuple[Action, ...]
    #: what it was drawn from; it also decides the jitter of the runtime's own back-off
    seed: int = 0

    def __str__(self) -> str:
        return "\n".join(f"{n:3}  {action}" for n, action in enumerate(self.actions, 1))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        told = [{"do": each.do, "args": dict(each.args), "steps": each.steps} for each in self.actions]
        return {"seed": self.seed, "actions": told}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Story:
        """Return the story that `to_json` gave.

        Raises:
            ValueError: it has an action that there is none of.
        """
        actions = tuple(Action(each["do"], each["args"], each["steps"]) for each in data["actions"])
        for action in actions:
            if action.do not in _TELLERS:
                raise ValueError(f"there is no action {action.do!r}")
        return cls(actions, data["seed"])


# --- what a story is drawn from ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sender:
    """A source that calls, as `@agent.source` declares it with `standard_webhook`."""

    secret: str
    #: bodies that it may send
    events: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part, and what they may say. The first of `people` opens the session, the others come and go."""

    says: Sequence[str]
    senders: Mapping[str, Sender] = field(default_factory=dict)
    people: Sequence[str] = ("alice", "bob")
    #: names of what may happen in the world beside, see `Simulation`
    happenings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Rates:
    """How often things go wrong: the part of all actions."""

    #: the process ends: between two steps, or at a place of its own
    crash: float = 0.1
    #: anything else at a place: the store, a tool, the model
    fault: float = 0.15
    #: another process takes the session from a living one
    take_over: float = 0.04
    #: a message or an event that came before comes again
    repeat: float = 0.1


def draw(seed: int, cast: Cast, *, rates: Rates, length: int = 24, steps_max: int = 40) -> Story:
    """Return the story of a seed."""
    drawing = _Drawing(random.Random(seed), cast, rates)
    actions = tuple(drawing.action(steps_max) for _ in range(length))
    return Story(actions, seed)


class _Drawing:
    def __init__(self, chance: random.Random, cast: Cast, rates: Rates) -> None:
        self._chance, self._cast, self._rates = chance, cast, rates
        #: what was sent so far, and may be sent again
        self._sent: list[tuple[str, dict[str, Any]]] = []
        self._keys = 0
        usual = [self._say] * 6 + [self._answer] * 5 + [self._wait] * 3 + [self._page] * 3
        usual += [self._stop, self._retract, self._people, self._mend, self._wake]
        usual += [self._event] * 5 if cast.senders else []
        usual += [self._happen] * 2 if cast.happenings else []
        self._usual: Sequence[Callable[[], tuple[str, dict[str, Any]]]] = usual

    def action(self, steps_max: int) -> Action:
        do, args = self._what()
        return Action(do, args, self._chance.randrange(steps_max))

    def _what(self) -> tuple[str, dict[str, Any]]:
        share = self._chance.random()
        for rate, happens in (
            (self._rates.crash, self._crash),
            (self._rates.fault, self._fault),
            (self._rates.take_over, self._take_over),
            (self._rates.repeat, self._again),
        ):
            if share < rate:
                return happens()
            share -= rate
        return self._chance.choice(self._usual)()

    # misfortune

    def _crash(self) -> tuple[str, dict[str, Any]]:
        return ("crash", {}) if self._chance.random() < 0.4 else self._at_a_place(crash=True)

    def _fault(self) -> tuple[str, dict[str, Any]]:
        return self._at_a_place(crash=False)

    def _at_a_place(self, *, crash: bool) -> tuple[str, dict[str, Any]]:
        place = self._chance.choice([*MISFORTUNES, "write:before", "write:after", "tool:before", "tool:after"])
        ways = [way for way in MISFORTUNES[place] if (way == "crash") is crash]
        args: dict[str, Any] = {"at": place, "what": self._chance.choice(ways), "after": self._chance.randrange(4)}
        if args["what"] == "slow":
            args["ms"] = self._chance.choice((100, 5_000, 60_000))
        if args["what"] in ("unavailable", "lost"):
            args["times"] = self._chance.choice((1, 1, 2, 5))
        return "fault", args

    def _take_over(self) -> tuple[str, dict[str, Any]]:
        return "take_over", {"stands_still": self._chance.random() < 0.7}

    def _wake(self) -> tuple[str, dict[str, Any]]:
        return "wake", {}

    def _mend(self) -> tuple[str, dict[str, Any]]:
        return "mend", {}

    def _again(self) -> tuple[str, dict[str, Any]]:
        return self._chance.choice(self._sent) if self._sent else self._say()

    # people and sources

    def _who(self) -> str:
        return self._chance.choice((self._cast.people[0], *self._cast.people))

    def _say(self) -> tuple[str, dict[str, Any]]:
        self._keys += 1
        seen = self._chance.random() < 0.7
        text = self._chance.choice((*self._cast.says, *self._cast.says, "yes", "no"))
        said = ("say", {"who": self._who(), "text": text, "key": f"key {self._keys}", "seen": seen})
        self._sent.append(said)
        return said

    def _event(self) -> tuple[str, dict[str, Any]]:
        source = self._chance.choice(list(self._cast.senders))
        event = self._chance.choice(self._cast.senders[source].events)
        self._keys += 1
        sent = ("event", {"source": source, "event": dict(event), "id": f"evt {self._keys}".replace(" ", "_")})
        self._sent.append(sent)
        return sent

    def _answer(self) -> tuple[str, dict[str, Any]]:
        return "answer", {"who": self._who(), "which": self._chance.randrange(4), "yes": self._chance.random() < 0.8}

    def _stop(self) -> tuple[str, dict[str, Any]]:
        return "stop", {"who": self._who()}

    def _retract(self) -> tuple[str, dict[str, Any]]:
        return "retract", {"who": self._who(), "which": self._chance.randrange(3)}

    def _people(self) -> tuple[str, dict[str, Any]]:
        if len(self._cast.people) < 2:
            return self._wait()
        who = self._chance.choice(self._cast.people[1:])
        return self._chance.choice((("invite", {"who": who}), ("leave", {"who": who})))

    def _page(self) -> tuple[str, dict[str, Any]]:
        page = {"page": self._chance.randrange(2)}
        back, anew = page | {"anew": False}, page | {"anew": True}
        return self._chance.choice((("connect", back), ("connect", anew), ("cut", page)))

    def _happen(self) -> tuple[str, dict[str, Any]]:
        return "happen", {"what": self._chance.choice(self._cast.happenings)}

    def _wait(self) -> tuple[str, dict[str, Any]]:
        return "wait", {"ms": self._chance.choice((200, 1_000, 6_000, 60_000, 240_000, 660_000))}


# --- in words -------------------------------------------------------------------


def _said(args: Mapping[str, Any]) -> str:
    seen = "" if args["seen"] else ", having seen nothing"
    return f"{args['who']} says {args['text']!r} ({args['key']}{seen})"


def _fault_said(args: Mapping[str, Any]) -> str:
    place, _, when = args["at"].partition(":")
    number = "next" if not args["after"] else f"next but {args['after']}"
    often = f", {args['times']} times in a row" if args.get("times", 1) > 1 else ""
    return f"{when} {_PLACES[place]}, the {number} time: {_SAID[args['what']].format(ms=args.get('ms'))}{often}"


def _taken_over(args: Mapping[str, Any]) -> str:
    return f"another process takes over; the old one {'stands still' if args['stands_still'] else 'goes on'}"


def _answered(args: Mapping[str, Any]) -> str:
    return f"{args['who']} says {'yes' if args['yes'] else 'no'} to question {args['which']} (or the newest before it)"


_TELLERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "say": _said,
    "event": lambda a: f"{a['source']} sends {json.dumps(a['event'])} ({a['id']})",
    "answer": _answered,
    "stop": lambda a: f"{a['who']} stops the turn",
    "retract": lambda a: f"{a['who']} takes back what waits of hers",
    "invite": lambda a: f"{a['who']} takes part",
    "leave": lambda a: f"{a['who']} leaves",
    "wait": lambda a: f"{a['ms']} ms pass",
    "crash": lambda a: "the process ends, and another starts",
    "fault": _fault_said,
    "mend": lambda a: "what was to go wrong does not",
    "take_over": _taken_over,
    "wake": lambda a: "processes that stood still go on",
    "connect": lambda a: f"page {a['page']} connects" + (", painted anew" if a["anew"] else ""),
    "cut": lambda a: f"page {a['page']} loses its connection",
    "happen": lambda a: f"in the world: {a['what']}",
}
