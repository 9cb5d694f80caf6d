"""The simulator, fitted to real runs: `python -m scenarios.calibrate LOG [LOG ...] -o costs.yaml`.

What was written is a scenario like any other: `python -m scenarios.run costs.yaml`. With `--compare LOG` the world of
that log is simulated with these costs and set beside what was recorded; with `--costs costs.yaml --compare LOG`, those
of an earlier fit, so that a prediction can be older than the run. `--typical` prints one short set of costs for all
pipelines together instead, such as `core.defaults.COST_SETS` keeps under a name.

Exit 0: written, and whatever was compared is within its bounds; 1: something is not; 2: bad input.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from core.config import Cost, Job, Scenario
from core.errors import ConfigError
from core.scenario_file import load_scenario
from core.trace import read_log
from core.units import show_gib, show_s
from scenarios.calibration.compare import RUNS, Line, compare, figures, simulated
from scenarios.calibration.fit import mean
from scenarios.calibration.measure import measure
from scenarios.calibration.picture import Window, foreseen, picture, seen
from scenarios.calibration.typical import typical
from scenarios.calibration.world import LATENCIES, PHASES, SOMETIMES, calibrated, warm, with_costs
from scenarios.calibration.write import to_yaml
from scenarios.common import guarded
from scenarios.outcome import FAILED, OK
from scenarios.parsing import Parser, check_writable, same_file, whole

MOST_RUNS = 1_000
MOST_S = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    made = Parser(prog="python -m scenarios.calibrate", description="fit the simulator's costs to logs of real runs")
    made.add_argument("logs", metavar="LOG", nargs="*", help="files that --trace wrote, of the same pipelines")
    made.add_argument("-o", "--output", metavar="FILE.yaml", help="where the fitted scenario goes")
    made.add_argument("--costs", metavar="FILE.yaml", help="instead of logs: a scenario whose costs are taken")
    made.add_argument("--compare", metavar="LOG", help="simulate this log's world with these costs, and compare")
    made.add_argument(
        "--runs", type=whole(1, MOST_RUNS), metavar="N", help=f"of --compare: how many runs to simulate ({RUNS})"
    )
    made.add_argument("--typical", action="store_true", help="instead: print what is usual, as one short set of costs")
    help_ = "of --compare: for a machine whose caches of compiled code a run has filled (the first one is recorded)"
    made.add_argument("--warm", action="store_true", help=help_)
    help_ = "of --compare: draw the timelines between these two times only (the whole run)"
    made.add_argument("--window", type=float, nargs=2, metavar=("FROM", "TO"), help=help_ + "; s")
    options = made.parse_args(argv)
    if options.window is not None and not 0 <= options.window[0] < options.window[1] < MOST_S:
        made.error(f"--window {options.window[0]:g} {options.window[1]:g}: two times since the run began, in order")
    if options.logs and options.costs is not None:
        made.error("name the logs to fit or a scenario with --costs, not both")
    if not options.logs and options.costs is None:
        made.error("name the logs to fit, or a scenario with --costs")
    of_compare = [name for name in ("runs", "warm", "window") if getattr(options, name) not in (None, False)]
    if options.typical:
        if options.costs is not None or options.output is not None or options.compare is not None or of_compare:
            made.error("--typical prints what logs show, and takes no other option")
        return guarded(lambda: _print_typical(options.logs))
    if options.output is None and options.compare is None:
        made.error("say where the fit goes (-o FILE.yaml) or what to set beside it (--compare LOG)")
    if options.output is not None and options.costs is not None:
        made.error("--costs names what is fitted already, so there is nothing to write")
    if options.compare is None and of_compare:
        made.error(f"--{of_compare[0]} says how to compare; say what with (--compare LOG)")
    return guarded(lambda: _calibrate(options))


def _calibrate(options: argparse.Namespace) -> int:
    if options.output is not None:
        _check_output(Path(options.output), [*options.logs, *([options.compare] if options.compare else [])])
    if options.costs is not None:
        fitted = load_scenario(Path(options.costs))
    else:
        fitted, remarks = _fitted(options.logs)
        for job in fitted.jobs:
            _show(job)
        for remark in remarks:
            print(f"note: {remark}")
        if options.output is not None:
            _write(options.output, fitted, remarks)
    if options.compare is None:
        return OK
    if options.warm:
        fitted = warm(fitted)
    return _compare(fitted, options.compare, options.runs or RUNS, options.window and Window(*options.window))


def _check_output(path: Path, logs: Sequence[str]) -> None:
    """Raises ConfigError, before anything is read, if the fit cannot be written, or would be written over a log."""
    check_writable(path, "-o")
    if any(same_file(path, Path(log)) for log in logs):
        raise ConfigError("-o", f"{path} is a log", "name another file")


# --- fitting ----------------------------------------------------------------------------------------------


def _fitted(paths: Sequence[str]) -> tuple[Scenario, list[str]]:
    logs = [read_log(path) for path in paths]
    first = logs[0][0].config
    names = [job.spec.id for job in first.jobs]
    for path, (header, _) in zip(paths, logs, strict=True):
        other = [job.spec.id for job in header.config.jobs]
        if other != names:
            problem = f"it has the pipelines {', '.join(other)}, and {paths[0]} has {', '.join(names)}"
            raise ConfigError(path, problem, "fit logs of the same pipelines together")
    measured = measure(logs)
    for name in names:
        if name not in measured:
            raise ConfigError(paths[0], f"{name} never began", "record a run in which every pipeline takes part")
    fitted, remarks = calibrated(first, measured)
    remarks += [f"{path}: {log.truncated}" for path, (_, log) in zip(paths, logs, strict=True) if log.truncated]
    return fitted, remarks


def _print_typical(paths: Sequence[str]) -> int:
    print(json.dumps(typical(measure([read_log(path) for path in paths])), indent=2))
    return OK


def _write(where: str, fitted: Scenario, remarks: Sequence[str]) -> None:
    comment = "\n".join(["Fitted to recorded runs by python -m scenarios.calibrate.", *remarks])
    try:
        Path(where).write_text(to_yaml(fitted, comment), encoding="utf-8")
    except OSError as failed:
        raise ConfigError(f"-o {where}", f"cannot be written: {failed.strerror}") from None


def _show(job: Job) -> None:
    memory = job.spec.memory
    held = ", ".join(f"{name} {show_gib(getattr(memory, name))}" for name in ("train", "engine", "residue"))
    print(f"{job.spec.id}: starts at {show_s(job.start_at)}; on a GPU: {held}")
    for name in (*PHASES, *SOMETIMES, "trajectory", *LATENCIES):
        cost = getattr(job.costs, name)
        if cost:
            print(f"  {name:<12} mean {mean(cost) / 1e9:9.4f} s   {_kind(cost)}")


def _kind(cost: Cost) -> str:
    """The shape that was chosen, in words."""
    if isinstance(cost, int):
        return "constant"
    first = f", the first of a process {show_s(cost.first)}" if cost.first else ""
    if cost.drift:
        return f"samples that drift, {len(cost.drift)} lists of {cost.every}{first}"
    if cost.samples:
        return f"{len(cost.samples)} samples{first}"
    kind, a, b = cost.parts[0][1:]
    shape = f"lognormal, median {show_s(a)}, sigma {b / 1e6:.3f}" if kind == "lognormal" else kind
    return f"{shape}{first}"


# --- comparing --------------------------------------------------------------------------------------------


def _compare(fitted: Scenario, path: str, runs: int, window: Window | None) -> int:
    header, log = read_log(path)
    entries = list(log)
    recorded = figures(header, entries)
    known = {job.spec.id for job in fitted.jobs}
    strange = [job.spec.id for job in header.config.jobs if job.spec.id not in known]
    if strange:
        raise ConfigError(path, f"nothing is known of {', '.join(strange)}", "fit a log that has the same pipelines")
    world = with_costs(header.config, fitted)
    found = simulated(world, runs)
    lines = list(compare(recorded, found))
    print(f"\n{path}: recorded, and the mean of {len(found)} simulated runs (± their standard deviation)")
    _show_ends(recorded.outcome, recorded.steps, [(run.outcome, run.steps) for run in found])
    for line in lines:
        _show_line(line)
    print()
    for row in picture(header.config, seen(header.config, entries), foreseen(world), window):
        print(row)
    print()
    missed = [line.name for line in lines if not line.ok]
    judged = sum(line.within is not None for line in lines)
    print(f"{len(missed)} of {judged} are not within their bounds: {'; '.join(missed) or '-'}")
    return FAILED if missed else OK


def _show_ends(outcome: str, steps: dict[str, int], runs: Sequence[tuple[str, dict[str, int]]]) -> None:
    print(f"  ended            recorded: {outcome}, steps {steps}")
    for other in dict.fromkeys((outcome, tuple(steps.items())) for outcome, steps in runs):
        print(f"                   simulated: {other[0]}, steps {dict(other[1])}")


def _show_line(line: Line) -> None:
    share = line.name.startswith("GPUs")
    off = f"{100 * line.off:+7.2f} " + ("points" if share else "%     ")
    verdict = "" if line.within is None else "ok" if line.ok else f"MISSED ({100 * line.within:g})"
    shown = f"{line.recorded:10.4f} {line.simulated:10.4f} ± {line.spread:7.4f}  {off}  {verdict}"
    print(f"  {line.name:<22} {shown}".rstrip())


if __name__ == "__main__":
    raise SystemExit(main())
