"""How a GPU's state looks: one character in the terminal, one colour in the report, and the strip made of them.

Letters stand for pipelines (a, b, c, ...): capital while a trainer phase runs, small while engines decode. Everything
else is a sign that is the same for all. Only ASCII, so that a log file shows what the terminal showed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from core.config import Scenario
from core.timeline import Segment

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLOURS = ("dodger_blue1", "dark_orange", "green3", "magenta", "gold1", "cyan", "red1", "purple")


class Look(NamedTuple):
    sign: str
    """`A`, `a`: the pipeline's letter, capital or small."""
    style: str = ""


UP, DOWN, HELD, TRAINS = Look("+"), Look("-"), Look("="), Look("A", "bold")

LOOK: dict[str, Look] = {
    "free": Look(".", "dim"),
    "awake": HELD,
    "held": HELD,
    "decoding": Look("a"),
    "train": TRAINS,
    "log_probs": TRAINS,
    "values": TRAINS,
    "publish": TRAINS,
    "init": Look("*"),
    "onload": UP,
    "wake": UP,
    "sync": UP,
    "offload": DOWN,
    "drain": DOWN,
    "sleep": DOWN,
    "kill": DOWN,
    "release": DOWN,
    "quarantine": Look("!", "reverse"),
    "lost": Look("x", "dim"),
}
"""How each state of `core.timeline.STATES` looks."""

LEGEND = (
    ("*", "initialising"),
    ("+", "coming up (onload, wake, sync)"),
    ("-", "going down (offload, drain, sleep, memory not yet seen free)"),
    ("=", "held, nothing running"),
    (".", "free"),
    ("#", "another run's"),
    ("!", "quarantined"),
    ("x", "lost"),
)


class Painter:
    """The letters and colours of one scenario's pipelines."""

    def __init__(self, scenario: Scenario) -> None:
        self.number = {job.spec.id: number for number, job in enumerate(scenario.jobs)}

    def letter(self, pipeline: str) -> str:
        """`#`: a pipeline of another run on the same cluster."""
        return LETTERS[self.number[pipeline] % len(LETTERS)] if pipeline in self.number else "#"

    def colour(self, pipeline: str) -> str:
        """A rich colour name; "" for nobody."""
        return COLOURS[self.number[pipeline] % len(COLOURS)] if pipeline in self.number else ""

    def sign(self, state: str, pipeline: str) -> str:
        sign = LOOK[state].sign
        if sign not in "aA":
            return sign
        letter = self.letter(pipeline)
        return letter.upper() if sign == "A" else letter

    def style(self, state: str, pipeline: str) -> str:
        return f"{LOOK[state].style} {self.colour(pipeline)}".strip()

    def who(self) -> list[tuple[str, str]]:
        """(letters, meaning) for the legend."""
        return [
            (f"{self.letter(pipeline).upper()} {self.letter(pipeline)}", f"{pipeline} trains, rolls out")
            for pipeline in self.number
        ]


Cell = tuple[str, str]
"""(state, pipeline)"""


def strip(segments: Sequence[Segment], end_ns: int, width: int) -> list[Cell]:
    """`width` cells of equal length up to `end_ns`; each shows what took most of its time."""
    cells, index = [], 0
    for column in range(width):
        start, end = end_ns * column // width, end_ns * (column + 1) // width
        while index < len(segments) and segments[index].end <= start:
            index += 1
        cells.append(_longest(segments, index, start, end))
    return cells


def _longest(segments: Sequence[Segment], index: int, start: int, end: int) -> Cell:
    """The cell with the most time in `start`..`end`, looking from `index` on."""
    spent: dict[Cell, int] = {}
    while index < len(segments) and segments[index].start < end:
        segment = segments[index]
        cell = segment.state, segment.pipeline
        spent[cell] = spent.get(cell, 0) + min(end, segment.end) - max(start, segment.start)
        index += 1
    return max(spent, key=spent.__getitem__) if spent else ("free", "")


def stretches(segments: Sequence[Segment], end_ns: int, most: int) -> Sequence[Segment]:
    """The segments themselves, or if there are more than `most`, as many columns with equal neighbours joined."""
    if len(segments) <= most:
        return segments
    joined: list[Segment] = []
    for column, (state, pipeline) in enumerate(strip(segments, end_ns, most)):
        end = end_ns * (column + 1) // most
        if joined and (joined[-1].state, joined[-1].pipeline) == (state, pipeline):
            joined[-1] = msgspec.structs.replace(joined[-1], end=end)
        else:
            joined.append(Segment(segments[0].gpu, end_ns * column // most, end, state, pipeline))
    return joined
