"""What a person sees while a run goes on: a live picture in a terminal, a handful of lines elsewhere.

1. A display listens; it never changes a run, and one that cannot be written to falls silent.
2. The real clock is read through the simulator's gate, and only to draw at most `FRAMES_PER_S` pictures a second.
3. Plain lines depend on the log alone, so two runs of one seed print the same.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from core import actions, events
from core.config import Job
from core.timeline import STATES
from core.units import seconds, show_s
from scenarios.board import Board
from scenarios.timeline import Painter

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
    "drain": "draining",
    "sleep": "going to sleep",
    "kill": "being killed",
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
    gpus = _gpu_rows(board, painter) if board.scenario.cluster.gpus <= GPU_ROWS else _gpu_counts(board)
    return Group(Text(f"time {seconds(board.now):.1f} s", style="bold"), _pipeline_rows(board, painter), gpus)


def _pipeline_rows(board: Board, painter: Painter) -> Table:
    table = Table.grid(padding=(0, 2))
    for job in board.scenario.jobs[:PIPELINE_ROWS]:
        pipeline = job.spec.id
        delivered, target = board.open_batch(pipeline)
        table.add_row(
            Text(pipeline, style=painter.colour(pipeline)),
            ProgressBar(total=max(1, target), completed=min(delivered, target), width=BAR),
            Text(f"{delivered}/{target} trajectories" if target else "no open batch"),
            Text(f"step {board.steps_done(pipeline)}/{job.steps}"),
            Text(_doing(board, pipeline)),
        )
    more = len(board.scenario.jobs) - PIPELINE_ROWS
    if more > 0:
        done = sum(board.steps_done(job.spec.id) for job in board.scenario.jobs)
        table.add_row("", "", f"and {more} more pipelines", f"{done} steps in all")
    return table


def _doing(board: Board, pipeline: str) -> str:
    if pipeline in board.ended:
        error = board.ended[pipeline]
        return f"failed: {error}" if error else "done"
    if pipeline in board.phases:
        return WORDS.get(board.phases[pipeline], board.phases[pipeline])
    wanted = board.demand(pipeline)
    return f"wants {wanted} trajectories" if wanted else "waiting"


def _gpu_rows(board: Board, painter: Painter) -> Table:
    table = Table.grid(padding=(0, 2))
    for gpu, (state, pipeline) in enumerate(board.moment()):
        style = painter.style(state, pipeline)
        table.add_row(f"gpu {gpu}", Text(pipeline or "-", style), Text(WORDS.get(state, state), style))
    return table


def _gpu_counts(board: Board) -> Table:
    """One line a state: how many of all the GPUs are in it."""
    moment = board.moment()
    counts: dict[tuple[str, str], int] = {}
    for state, _ in moment:
        counts[STATES[state], state] = counts.get((STATES[state], state), 0) + 1
    table = Table.grid(padding=(0, 2))
    for (kind, state), count in sorted(counts.items()):
        share = ProgressBar(total=len(moment), completed=count, width=BAR)
        table.add_row(f"{count} GPUs", share, WORDS.get(state, state), f"({kind})")
    return table


class PlainLines:
    """A handful of lines: initialisations, first grants, steps, faults. A listener; the board must listen before it."""

    def __init__(self, board: Board, write: Callable[[str], None]) -> None:
        self._board = board
        self._write = write
        self._milestones = Milestones(board.scenario.jobs)
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
                return self._milestones.passed(pipeline, self._board.steps_done(pipeline))
            case actions.Note(kind="rollout_granted", pipeline=pipeline):
                return self._once(f"{pipeline}: granted its first engines for rollout")
            case actions.Note(kind="init_accepted", pipeline=pipeline):
                return self._once(f"{pipeline}: asks for all its GPUs to initialise")
            case actions.Note(kind=kind, text=text, pipeline=pipeline) if kind in TROUBLE:
                whose = f"{pipeline}: " if pipeline and pipeline not in text else ""
                return self._trouble_line(f"{whose}{kind.replace('_', ' ')}: {text}")
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

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._steps = {job.spec.id: job.steps for job in jobs}
        self._total = sum(self._steps.values())
        self._every = -(-self._total // PLAIN_STEPS)
        self._done = 0

    def passed(self, pipeline: str, step: int) -> Iterable[str]:
        self._done += 1
        if self._done % self._every and self._done != self._total:
            return ()
        return (f"{pipeline}: step {step} of {self._steps[pipeline]} ({self._done} of {self._total} in all)",)
