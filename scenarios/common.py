"""The command line that all scenarios share: from arguments to an exit code.

1. Whatever is refused is refused before the run: one `error:` line, exit 2, nothing written.
2. A run that began always ends in a summary, also when interrupted; its files are written before anything is shown.
3. The first line printed is the topology and where it came from. With `--json -` people read standard error.
4. Exit codes follow from the result (`scenarios.outcome`), not from how the printing went.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from core import run as core_run
from core.backend import Backend, load_backend
from core.config import Job, Scenario
from core.errors import ConfigError, InvariantBroken, RequestError, TurnstileError
from core.model import Role
from core.perfetto import PerfettoWriter
from core.topology import remarks
from core.trace import TraceWriter, header_of
from scenarios import catalogue
from scenarios.backend_options import backend_options, for_policy
from scenarios.board import Board
from scenarios.display import LiveView, PlainLines
from scenarios.options import ALL, STDOUT, check_outputs, declared, output, parser, variants
from scenarios.outcome import FAILED, INTERRUPTED, OK, REFUSED, Summary, exit_code, table_code
from scenarios.report import render
from scenarios.summary import Run, print_brief, print_comparison, print_run, say

PIPELINES_NAMED = 8
"""More than this and the first line says how many more there are."""

Listener = Callable[[int, int, int, Any], None]


def main(name: str, argv: Sequence[str] | None = None) -> int:
    """Run a shipped scenario as the arguments say; the exit code."""
    return guarded(lambda: run(parser(f"scenarios.{name}", catalogue.about(name)).parse_args(argv), name))


def guarded(command: Callable[[], int]) -> int:
    """Turn what a command raises into one line and an exit code."""
    try:
        return command()
    except RequestError as error:
        return complain(error, REFUSED)
    except TurnstileError as error:
        return complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        drop(sys.stdout)
        return FAILED
    except OSError as failed:
        if failed.filename is not None or failed.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        drop(sys.stdout)
        return complain(ConfigError("standard output", f"could not be written: {failed.strerror}"), FAILED)


def complain(error: Exception, code: int) -> int:
    """Say in one line what was wrong."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def run(options: argparse.Namespace, name_or_file: str) -> int:
    """Run a scenario under the policies asked for, write what was asked for, show the rest; the exit code."""
    file = catalogue.find(name_or_file)
    scenario = declared(catalogue.load(name_or_file), options, os.environ)
    settings = backend_options(options, scenario, check_backend(options.backend))
    check_outputs(options, [file])
    show = Show(options)
    show.opening(scenario)
    runs = []
    for variant in variants(scenario, options):
        show.policy(variant)
        own = for_policy(settings, variant.demand) if options.demand == ALL else settings
        runs.append(run_one(variant, options, show, own))
        if runs[-1].summary["outcome"] == "interrupted":
            break
    written = _write(runs, options, topology_line(scenario))
    show.result(runs)
    return _code(runs, options) or written or (FAILED if any(one.log_lost for one in runs) else OK)


def _code(runs: Sequence[Run], options: argparse.Namespace) -> int:
    if options.demand == ALL:
        return table_code([run.summary for run in runs])
    return exit_code(runs[0].summary, runs[0].scenario.expect)


def check_backend(name: str) -> Collection[str]:
    """Which of `scenarios.backend_options` the backend takes. Raises ConfigError unless it can be loaded."""
    return getattr(load_backend(name), "takes", ())


# --- one run ----------------------------------------------------------------------------------------------


def run_one(scenario: Scenario, options: argparse.Namespace, show: "Show", settings: Mapping[str, Any]) -> Run:
    """Run one scenario to its end, on a backend with these settings. Raises TurnstileError if it could not begin, or
    broke Turnstile itself."""
    backend = core_run.prepare(scenario, options.backend, **settings)
    scenario = core_run.scenario_of(backend, scenario)
    show.notes(getattr(backend, "remarks", ()))
    board, lost = Board(scenario), list[Path]()
    with ExitStack() as stack:
        stack.callback(core_run.abandon, backend)
        listeners: list[Listener] = [*_logs(scenario, options, stack, lost), *show.listeners(board, stack)]
        try:
            summary = execute(scenario, backend, listeners, board)
        except KeyboardInterrupt:
            summary = board.summary(header_of(scenario, options.backend), "interrupted", [])
        except InvariantBroken as broken:
            raise InvariantBroken(f"{broken} ({_where_log_is(scenario, options)})") from broken
    summary["details"] = board.details()
    return Run(scenario, summary, board, by_table=options.demand == ALL, log_lost=bool(lost))


def execute(scenario: Scenario, backend: Backend, listeners: Sequence[Listener], board: Board) -> Summary:
    """The one place that knows how a run is started. An interrupted run has a summary too, if it got that far."""
    try:
        return core_run.execute(scenario, backend, listeners, accounting=board).summary
    except KeyboardInterrupt as stopped:
        if stopped.args and isinstance(stopped.args[0], core_run.Result):
            return stopped.args[0].summary
        raise


def _logs(scenario: Scenario, options: argparse.Namespace, stack: ExitStack, lost: list[Path]) -> list[Listener]:
    """The writers of the event log that were asked for; closed when the run is over. `lost`: logs that could not be
    written to their end."""
    found: list[Listener] = []
    if (log := output(options, "trace", scenario.demand)) is not None:
        writer = TraceWriter(log, header_of(scenario, options.backend))
        stack.callback(_check_log, writer, "--trace", log, lost)
        found.append(stack.enter_context(writer))
    if (picture := output(options, "perfetto", scenario.demand)) is not None:
        drawer = PerfettoWriter(picture, scenario)
        stack.callback(_check_log, drawer, "--perfetto", picture, lost)
        found.append(own(scenario, stack.enter_context(drawer)))
    return found


def own(scenario: Scenario, listener: Listener) -> Listener:
    """Tell a listener of this scenario's pipelines only: where runs share a scheduler, the log has others too."""
    names = {"": None} | {job.spec.id: None for job in scenario.jobs}

    def hear(i: int, t_ns: int, cause: int, item: Any) -> None:
        if getattr(item, "pipeline", "") in names:
            listener(i, t_ns, cause, item)

    return hear


def _check_log(writer: TraceWriter | PerfettoWriter, option: str, path: Path, lost: list[Path]) -> None:
    """A log that could not be written to its end is said, but does not end the run."""
    if writer.error:
        lost.append(path)
        complain(ConfigError(f"{option} {path}", f"the log is not complete: {writer.error.strerror}"), FAILED)


def _where_log_is(scenario: Scenario, options: argparse.Namespace) -> str:
    log = output(options, "trace", scenario.demand)
    return f"the log is {log}" if log else "run again with --trace FILE for the log"


# --- what people see --------------------------------------------------------------------------------------


class Paper(Console):
    """A console that leaves a broken pipe to us; rich would exit, and with the wrong code."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error


class Show:
    """Where and how much is printed. Nothing is printed for `--quiet --json -`; errors always are."""

    def __init__(self, options: argparse.Namespace) -> None:
        to_stderr = options.json == STDOUT
        self._mute = to_stderr and options.quiet
        self._quiet = options.quiet
        self._several = options.demand == ALL
        self._paper = Paper(stderr=to_stderr, highlight=False, markup=False, emoji=False)

    def opening(self, scenario: Scenario) -> None:
        self.line(topology_line(scenario))
        if not self._quiet:
            self.notes(remarks(scenario))

    def notes(self, found: Sequence[str]) -> None:
        if not self._quiet:
            for note in found:
                self.line(f"note: {note}")

    def policy(self, scenario: Scenario) -> None:
        """Which of several runs begins."""
        if self._several and not self._quiet:
            self.line(f"--- demand: {scenario.demand}")

    def listeners(self, board: Board, stack: ExitStack) -> list[Listener]:
        """The live view in a terminal, plain lines elsewhere, nothing if quiet."""
        if self._quiet:
            return []
        if self._paper.is_terminal:
            return [own(board.scenario, stack.enter_context(LiveView(board, self._paper)))]
        return [own(board.scenario, PlainLines(board, self.line))]

    def result(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._print(print_brief if self._quiet else print_run, run)
        if len(runs) > 1:
            self._print(print_comparison, runs)

    def line(self, text: str) -> None:
        self._print(say, text)

    def _print(self, printing: Callable[[Console, Any], None], what: object) -> None:
        """Print, unless nobody reads any more. What was not printed does not change how the run ended."""
        if self._mute:
            return
        try:
            printing(self._paper, what)
        except OSError as error:
            self._mute = True
            drop(self._paper.file)
            if not isinstance(error, BrokenPipeError):
                complain(error, FAILED)


def drop(stream: IO[str]) -> None:
    """Let a stream nobody reads swallow the rest, the flush at exit included."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def topology_line(scenario: Scenario) -> str:
    """The topology on one line, and where it came from."""
    cluster = scenario.cluster
    named = scenario.jobs[:PIPELINES_NAMED]
    parts = [f"{job.spec.id} train={_ids(job, Role.ACTOR_TRAIN)} infer={_ids(job, Role.ACTOR_INFER)}" for job in named]
    if len(scenario.jobs) > len(named):
        parts.append(f"and {len(scenario.jobs) - len(named)} more pipelines")
    size = f"{cluster.gpus} GPUs on {cluster.nodes} node" + ("s" if cluster.nodes > 1 else "")
    return f"topology: {size}; {'; '.join(parts)} (from: {scenario.topology_source})"


def _ids(job: Job, role: Role) -> str:
    """GPU ids in mapping order; a long run of consecutive ones as `0-31`."""
    group = job.spec.group(role)
    gpus = group.gpus if group is not None else ()
    if len(gpus) > 4 and gpus == tuple(range(gpus[0], gpus[0] + len(gpus))):
        return f"[{gpus[0]}-{gpus[-1]}]"
    shown = ",".join(str(gpu) for gpu in gpus[:16])
    return f"[{shown},...]" if len(gpus) > 16 else f"[{shown}]"


# --- files ------------------------------------------------------------------------------------------------


def _write(runs: Sequence[Run], options: argparse.Namespace, topology: str) -> int:
    """Write the result as JSON and HTML; FAILED if a file could not be written after all."""
    code = OK
    if options.json is not None:
        results = [run.summary for run in runs]
        text = json.dumps(results if options.demand == ALL else results[0], indent=2, allow_nan=False) + "\n"
        code = max(code, _write_text(options.json, text))
    if options.report is not None:
        code = max(code, _write_text(options.report, render(runs, topology)))
    return code


def _write_text(where: str, text: str) -> int:
    try:
        if where == STDOUT:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        if where == STDOUT:
            drop(sys.stdout)
        return complain(ConfigError(where, f"could not be written: {error.strerror or error}"), FAILED)
    return OK
