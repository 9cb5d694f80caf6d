"""Two runs above each other: each GPU's timeline as recorded, and below it as simulated, on one scale of time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from core.config import Scenario
from core.run import execute
from core.timeline import Segment
from core.trace import Entry
from core.units import ns, show_s
from scenarios.board import Board
from scenarios.timeline import LEGEND, Painter, strip

WIDTH = 96
"""Characters for the length of a window."""


class Window(NamedTuple):
    """What to look at, s since the run began."""

    start: float
    end: float


def seen(scenario: Scenario, entries: Sequence[Entry]) -> list[list[Segment]]:
    """The timeline of a recorded run, by GPU; empty if it has too many GPUs for rows of their own."""
    board = Board(scenario)
    for entry in entries:
        board(entry.i, entry.t, entry.cause, entry.item)
    return board.history()


def foreseen(scenario: Scenario) -> list[list[Segment]]:
    """The same of one simulated run."""
    board = Board(scenario)
    execute(scenario, "sim", [board])
    return board.history()


def picture(
    scenario: Scenario, recorded: list[list[Segment]], simulated: list[list[Segment]], window: Window | None = None
) -> Iterator[str]:
    """Lines of text. `window`: None is the longer of the two runs as a whole."""
    if not recorded or not simulated:
        return
    ends = [segments[-1].end for segments in (*recorded, *simulated) if segments]
    start, end = (0, max(ends)) if window is None else (ns(window.start), ns(window.end))
    painter = Painter(scenario)
    yield f"  each character is {show_s((end - start) // WIDTH)}, from {show_s(start)} to {show_s(end)}"
    drawn = ""
    for gpu, (there, here) in enumerate(zip(recorded, simulated, strict=True)):
        for what, segments in ((f"gpu {gpu} recorded", there), ("simulated", here)):
            row = _row(painter, segments, start, end)
            drawn += row
            yield f"  {what:>14} {row}".rstrip()
    for signs, meaning in (*painter.who(), *LEGEND):
        if any(sign in drawn for sign in signs.split()):
            yield f"  {signs:<4} {meaning}"


def _row(painter: Painter, segments: Sequence[Segment], start: int, end: int) -> str:
    """Blank where the run was over."""
    within = [
        replace(segment, start=max(segment.start, start) - start, end=min(segment.end, end) - start)
        for segment in segments
        if segment.end > start and segment.start < end
    ]
    over = within[-1].end if within else 0
    cells = strip(within, end - start, WIDTH)
    return "".join(
        painter.sign(*cell) if (end - start) * column // WIDTH < over else " " for column, cell in enumerate(cells)
    )
