"""A case: everything that decides how one run goes, as plain data. No behaviour, no seeds left to be drawn from.

The one seed in it is the scenario's, from which the simulator draws the lengths of trajectories; a schedule that was
drawn is written down as holds once it has failed (`strategies.written_down`).
"""

from enum import StrEnum

from core.config import Durations, Job, Scenario
from core.model import Record


class Strategy(StrEnum):
    """How the order of what is ready at one instant is chosen."""

    FIFO = "fifo"
    """The order users see."""
    WALK = "walk"
    """Uniform over what could run."""
    PCT = "pct"
    """Random priorities and a few demotions: good at delaying one task past all others."""
    HOLDS = "holds"
    """FIFO, but for a step held back now and then."""
    EXHAUSTIVE = "exhaustive"
    """Every schedule with few holds, fewest first."""


class Schedule(Record, frozen=True, kw_only=True):
    """The order of one run: a policy and its numbers, or the holds themselves."""

    strategy: Strategy = Strategy.FIFO
    seed: int = 0
    p: float = 0.0
    """`holds`: how often something other than FIFO."""
    depth: int = 0
    """`pct`: demotions plus one."""
    length: int = 0
    """`pct`: decisions among which the demotions are spread."""
    holds: dict[int, int] = {}  # noqa: RUF012  msgspec copies a default
    """Decision -> how many steps wait there. Used with `fifo`, where it says all there is to say."""


class Move(Record, frozen=True, kw_only=True):
    """One thing a guest does, `wait` ns after the last one."""

    kind: str
    wait: int = 0
    number: int = 0
    """Whatever the kind makes of it: a batch, an epoch, a sort of nonsense."""


class Guest(Record, frozen=True, kw_only=True):
    """A client with strange habits: a pipeline whose loop is a list of moves, sensible or not."""

    job: Job
    moves: tuple[Move, ...] = ()


class Case(Record, frozen=True, kw_only=True):
    scenario: Scenario
    guests: tuple[Guest, ...] = ()
    heal_at: int = 0
    """ns; from here on nothing new goes wrong: what is armed is called off, what is slow gets fast again."""
    release_lag: Durations = Durations()
    """Between "released" and memory seen free; without parts: the simulator's default."""
    schedule: Schedule = Schedule()


class Finding(Record, frozen=True, kw_only=True):
    """What an oracle has against a run. `signature` is what stays the same while a case is shrunk."""

    rule: str
    """A rule of the monitor (`S1` ... `L5`, `outcome`), or one of the explorer's own: `unexcused` (a pipeline failed,
    though nothing that happened to it explains it), `leftover`, `books`, `crash`, `replay`, `nondeterminism`."""
    outcome: str
    """How the run ended, or the type of the error that ended it."""
    text: str
    at_ns: int = 0

    @property
    def signature(self) -> str:
        return f"{self.rule}-{self.outcome}"
