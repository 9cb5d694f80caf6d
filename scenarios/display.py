"""What a person sees while a run goes on: a live picture in a terminal, a handful of lines elsewhere.

1. A display listens; it never changes a run, and one that cannot be written to falls silent.
2. The real clock is read through the simulator's gate, and only to draw at most `FRAMES_PER_S` pictures a second.
3. Plain lines depend on the log alone, so two runs of one seed print the same.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from core import actions, events
from core.config import Scenario
from core.units import seconds, show_s
from scenarios.board import Board, Progress
from scenarios.timeline import LOOK, Painter

try:
    from backends.sim.fence import unfenced
except ModuleNotFoundError:  # the simulator's packages are not installed, so there is no fence either
    unfenced = nullcontext  # type: ignore[assignment]

FRAMES_PER_S = 10
GPU_ROWS = 24
"""More GPUs than this are counted by what they do instead of listed."""
PIPELINE_ROWS = 16
PLAIN_STEPS = 20
"""Lines about finished steps in one run, at most; more steps are told in portions."""
PLAIN_TROUBLE = 20
"""Lines about faults and their consequences in one run."""

BAR = 24
WORDS = {
    "decoding": "rolling out",
    "awake": "engine awake",
    "held": "held",
    "wake": "waking",
    "sync": "syncing",
    "sleep": "going to sleep",
    "release": "freeing memory",
    "log_probs": "log-probs",
    "quarantine": "QUARANTINED",
    "lost": "LOST",
}
TROUBLE = ("quarantine", "residue_growth", "degraded", "failed")


class LiveView:
    """Redraws the board in place. A context manager and a listener; the board must listen before it."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board = board
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_frame = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):
            self._live.stop()

    def __call__(self, i: int, t_ns: int, cause: int, item: object) -> None:
        with unfenced():
            if time.monotonic() >= self._next_frame:
                self._draw()

    def _draw(self) -> None:
        try:
            self._live.update(picture(self._board), refresh=True)
            self._next_frame = time.monotonic() + 1 / FRAMES_PER_S
        except OSError:
            self._next_frame = float("inf")


def picture(board: Board) -> Group:
    """The present moment: a bar a pipeline, the holder of each GPU, the time."""
    painter = Painter(board.scenario)
    gpus = _gpu_rows(board, painter) if len(board.cells) <= GPU_ROWS else _gpu_counts(board, painter)
    return Group(Text(f"time {seconds(board.now):.1f} s", style="bold"), _pipeline_rows(board, painter), gpus)


def _pipeline_rows(board: Board, painter: Painter) -> Table:
    table = Table.grid(padding=(0, 2))
    for progress in list(board.progress.values())[:PIPELINE_ROWS]:
        delivered, target = progress.open_batch
        table.add_row(
            Text(progress.id, style=painter.colour(progress.id)),
            ProgressBar(total=max(1, target), completed=min(delivered, target), width=BAR),
            Text(f"{delivered}/{target} trajectories" if target else "no open batch"),
            Text(f"step {progress.steps_done}/{progress.steps}"),
            Text(_doing(progress)),
        )
    if len(board.progress) > PIPELINE_ROWS:
        done = sum(progress.steps_done for progress in board.progress.values())
        more = len(board.progress) - PIPELINE_ROWS
        table.add_row("", "", f"and {more} more pipelines", f"{done} steps in all")
    return table


def _doing(progress: Progress) -> str:
    if progress.over:
        return f"failed: {progress.error}" if progress.error else "done"
    if progress.doing == "waiting" and progress.demand:
        return f"wants {progress.demand} trajectories"
    return WORDS.get(progress.doing, progress.doing)


def _gpu_rows(board: Board, painter: Painter) -> Table:
    table = Table.grid(padding=(0, 2))
    for gpu, cell in enumerate(board.cells):
        style = painter.style(cell)
        table.add_row(f"gpu {gpu}", Text(cell.pipeline or "-", style), Text(WORDS.get(cell.state, cell.state), style))
    return table


def _gpu_counts(board: Board, painter: Painter) -> Table:
    """One line a kind and state: what all the GPUs are doing, by how many."""
    counts: dict[tuple[str, str], int] = {}
    for cell in board.cells:
        key = (LOOK[cell.state].kind, cell.state)
        counts[key] = counts.get(key, 0) + 1
    table = Table.grid(padding=(0, 2))
    for (kind, state), count in sorted(counts.items()):
        share = ProgressBar(total=len(board.cells), completed=count, width=BAR)
        table.add_row(f"{count} GPUs", share, WORDS.get(state, state), f"({kind})")
    return table


class PlainLines:
    """A handful of lines: initialisations, first grants, steps, faults. A listener; the board must listen before it."""

    def __init__(self, board: Board, write: Callable[[str], None]) -> None:
        self._board = board
        self._write = write
        self._milestones = Milestones(board.scenario)
        self._told: set[str] = set()
        self._trouble = 0

    def __call__(self, i: int, t_ns: int, cause: int, item: object) -> None:
        for line in self._lines(item):
            self._write(f"[{show_s(t_ns):>10}] {line}")

    def _lines(self, item: object) -> Iterable[str]:
        match item:
            case events.PhaseEnded(phase="init", pipeline=pipeline, error=None):
                return self._once(f"{pipeline}: initialised")
            case events.StepCompleted(pipeline=pipeline):
                return self._milestones.passed(self._board.progress[pipeline])
            case actions.Note(kind="rollout_granted", pipeline=pipeline):
                return self._once(f"{pipeline}: granted its first engines for rollout")
            case actions.Note(kind="init_accepted", pipeline=pipeline):
                return self._once(f"{pipeline}: asks for all its GPUs to initialise")
            case actions.Note(kind=kind, text=text) if kind in TROUBLE:
                return self._trouble_line(f"{kind.replace('_', ' ')}: {text}")
            case events.FaultInjected(kind=kind, target=target):
                return self._trouble_line(f"fault injected: {kind} {target}".rstrip())
            case events.PipelineEnded(pipeline=pipeline, error=error) if error is not None:
                return self._trouble_line(f"{pipeline}: ended with an error: {error}")
        return ()

    def _once(self, line: str) -> Iterable[str]:
        if line in self._told or len(self._told) >= 4 * PIPELINE_ROWS:
            return ()
        self._told.add(line)
        return (line,)

    def _trouble_line(self, line: str) -> Iterable[str]:
        self._trouble += 1
        if self._trouble <= PLAIN_TROUBLE:
            return (line,)
        return ("more of that; the log (--trace) has it all",) if self._trouble == PLAIN_TROUBLE + 1 else ()


class Milestones:
    """Which finished steps are worth a line: each of a short run, every so many of a long one, and the last."""

    def __init__(self, scenario: Scenario) -> None:
        self._total = sum(job.steps for job in scenario.jobs)
        self._every = -(-self._total // PLAIN_STEPS)
        self._done = 0

    def passed(self, progress: Progress) -> Iterable[str]:
        self._done += 1
        if self._done % self._every and self._done != self._total:
            return ()
        line = f"{progress.id}: step {progress.steps_done} of {progress.steps} ({self._done} of {self._total} in all)"
        return (line,)
