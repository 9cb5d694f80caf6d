"""How a GPU's state looks: one character in the terminal, one colour in the report, and the strip made of them.

Letters stand for pipelines (a, b, c, ...): capital while a trainer phase runs, small while engines decode. Everything
else is a sign that is the same for all. Only ASCII, so that a log file shows what the terminal showed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from core.config import Scenario
from scenarios.board import Cell, Segment

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLOURS = ("dodger_blue1", "dark_orange", "green3", "magenta", "gold1", "cyan", "red1", "purple")


class Look(NamedTuple):
    kind: str
    """busy, switching or idle: the three that the accounting knows."""
    sign: str
    """`A`, `a`: the pipeline's letter, capital or small."""
    style: str


LOOK: dict[str, Look] = {
    "free": Look("idle", ".", "dim"),
    "awake": Look("idle", "=", ""),
    "held": Look("idle", "=", ""),
    "decoding": Look("busy", "a", ""),
    "train": Look("busy", "A", "bold"),
    "log_probs": Look("busy", "A", "bold"),
    "values": Look("busy", "A", "bold"),
    "publish": Look("busy", "A", "bold"),
    "init": Look("switching", "+", ""),
    "onload": Look("switching", "+", ""),
    "wake": Look("switching", "+", ""),
    "sync": Look("switching", "+", ""),
    "offload": Look("switching", "-", ""),
    "sleep": Look("switching", "-", ""),
    "release": Look("switching", "-", ""),
    "quarantine": Look("switching", "!", "reverse"),
    "lost": Look("idle", "x", "dim"),
}

LEGEND = (
    ("+", "coming up (init, onload, wake, sync)"),
    ("-", "going down (offload, drain, sleep, memory not yet seen free)"),
    ("=", "held, nothing running"),
    (".", "free"),
    ("!", "quarantined"),
    ("x", "lost"),
)


class Painter:
    """The letters and colours of one scenario's pipelines."""

    def __init__(self, scenario: Scenario) -> None:
        self.number = {job.spec.id: number for number, job in enumerate(scenario.jobs)}

    def letter(self, pipeline: str) -> str:
        return LETTERS[self.number[pipeline] % len(LETTERS)]

    def colour(self, pipeline: str) -> str:
        """A rich colour name; "" for nobody."""
        return COLOURS[self.number[pipeline] % len(COLOURS)] if pipeline in self.number else ""

    def sign(self, cell: Cell) -> str:
        sign = LOOK[cell.state].sign
        if sign not in "aA":
            return sign
        letter = self.letter(cell.pipeline)
        return letter.upper() if sign == "A" else letter

    def style(self, cell: Cell) -> str:
        return f"{LOOK[cell.state].style} {self.colour(cell.pipeline)}".strip()

    def who(self) -> list[tuple[str, str]]:
        """(letters, meaning) for the legend."""
        return [
            (f"{self.letter(pipeline).upper()} {self.letter(pipeline)}", f"{pipeline} trains, rolls out")
            for pipeline in self.number
        ]


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
        overlap = min(end, segment.end) - max(start, segment.start)
        spent[segment.cell] = spent.get(segment.cell, 0) + overlap
        index += 1
    return max(spent, key=spent.__getitem__) if spent else Cell()


def stretches(segments: Sequence[Segment], end_ns: int, most: int) -> Sequence[Segment]:
    """The segments themselves, or if there are more than `most`, as many columns with equal neighbours joined."""
    if len(segments) <= most:
        return segments
    joined: list[Segment] = []
    for column, cell in enumerate(strip(segments, end_ns, most)):
        end = end_ns * (column + 1) // most
        if joined and joined[-1].cell == cell:
            joined[-1] = Segment(joined[-1].start, end, cell)
        else:
            joined.append(Segment(end_ns * column // most, end, cell))
    return joined
