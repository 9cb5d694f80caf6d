"""Many seeds, orders and faults: `python -m scenarios.explore [NAME|FILE]`. What it does is in docs/exploring.md.

Exit codes: 0 nothing found; 1 something found, shrunk and saved; 2 bad input; 130 interrupted, with a summary.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from backends.sim.explore.artefact import Artefact, Replay, load, save
from backends.sim.explore.campaign import Failure, Plan, Result, campaign
from backends.sim.explore.case import Case, Strategy
from backends.sim.explore.shrink import Shrinker
from backends.sim.explore.swarm import CLASSES
from core.closeness import BANDS, MEANING
from core.errors import ConfigError
from core.reading import MOST_WHOLE, nearest
from core.topology import check_world
from scenarios import catalogue
from scenarios.common import guarded
from scenarios.options import ALL
from scenarios.outcome import FAILED, INTERRUPTED, OK
from scenarios.parsing import Parser, check_folder, one_of, whole

NONE = "none"
STRATEGIES = (*map(str, Strategy), ALL)
SEEDS = 200
OUT = "out/explore"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return guarded(lambda: _explore(options) if options.replay is None else _replay(options.replay))


def _parser() -> Parser:
    made = Parser(prog="python -m scenarios.explore", description="many worlds, every order, every fault")
    made.add_argument("scenario", metavar="NAME|FILE", nargs="?", help="one world; left out: a random one a seed")
    made.add_argument("--seeds", type=whole(1, MOST_WHOLE), default=SEEDS, metavar="N", help=f"how many ({SEEDS})")
    made.add_argument("--first-seed", type=whole(0, MOST_WHOLE), default=0, metavar="K", help="where to begin (0)")
    made.add_argument(
        "--strategy", default=ALL, metavar="|".join(STRATEGIES), type=one_of(STRATEGIES), help="how the order is chosen"
    )
    made.add_argument("--faults", default=ALL, type=_classes, metavar="all|none|LIST", help=", ".join(CLASSES))
    made.add_argument("--jobs", type=whole(1, 1024), default=os.cpu_count() or 1, metavar="J", help="processes")
    made.add_argument("--time", type=whole(1, MOST_WHOLE), metavar="S", help="stop after so many seconds")
    made.add_argument("--replay", metavar="FILE", help="run a saved failure again, and show it")
    made.add_argument("--out", default=OUT, metavar="DIR", help=f"where failures are saved ({OUT})")
    made.add_argument("--no-shrink", action="store_true", help="save failures as they are")
    made.add_argument("--quiet", action="store_true", help="only failures and the summary")
    return made


def _classes(text: str) -> tuple[str, ...]:
    if text in (ALL, NONE):
        return tuple(CLASSES) if text == ALL else ()
    named = tuple(text.split(","))
    for name in named:
        if name not in CLASSES:
            raise argparse.ArgumentTypeError(f"{name!r} is no kind of fault; {nearest(name, tuple(CLASSES))}")
    return named


# --- exploring --------------------------------------------------------------------------------------------


def _explore(options: argparse.Namespace) -> int:
    plan = _plan(options)
    check_folder(Path(options.out), "--out")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    explorer = Explorer(options, len(seeds))
    try:
        with explorer.progress:
            for result in campaign(plan, seeds, options.jobs, options.time):
                explorer.take(result)
    except KeyboardInterrupt:
        explorer.summary("interrupted")
        return INTERRUPTED
    explorer.summary("done")
    return FAILED if explorer.total.found else OK


def _plan(options: argparse.Namespace) -> Plan:
    scenario = None
    if options.scenario is not None:
        scenario = catalogue.load(options.scenario)
        check_world(scenario)
    strategy = None if options.strategy == ALL else Strategy(options.strategy)
    classes = _classes(options.faults) if isinstance(options.faults, str) else options.faults
    return Plan(strategy, classes, scenario)


class Explorer:
    """Adds results up, and deals with failures as they come."""

    def __init__(self, options: argparse.Namespace, seeds: int) -> None:
        self.total = Result()
        self._options = options
        self._paper = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._began = time.monotonic()
        self._known: dict[str, Path] = {}
        self.progress = Progress(
            TextColumn("exploring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=Console(stderr=True), disable=options.quiet or not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self._bar = self.progress.add_task("seeds", total=seeds)

    def take(self, result: Result) -> None:
        self.total.add(result)
        for failure in result.failures:
            self._failed(failure)
        self.progress.advance(self._bar)

    def _failed(self, failure: Failure) -> None:
        found = failure.finding
        where = f"seed {failure.seed} ({failure.case.schedule.strategy})"
        head = f"{where}: {found.rule} {found.outcome}: {_line(found.text)}"
        if found.signature in self._known:
            self._say(f"{head} (as in {self._known[found.signature]})")
            return
        self._say(head)
        path = self._save(failure)
        self._known[found.signature] = path
        self._say(f"  saved; see it with: python -m scenarios.explore --replay {path}")

    def _save(self, failure: Failure) -> Path:
        case, found, runs = failure.case, failure.finding, 0
        if not self._options.no_shrink:
            shrinker = Shrinker(case, found)
            case, runs = shrinker.shrink(), shrinker.runs
            found = shrinker.finding
            self._say(f"  shrunk in {runs} runs to {size(case)}: {_line(found.text)}")
        about = f"seed {failure.seed}"
        artefact = Artefact(about=about, case=case, expect=found, digest=Replay(case).digest)
        return save(artefact, Path(self._options.out), f"{found.signature}-{failure.seed}")

    def summary(self, how: str) -> None:
        total, took = self.total, time.monotonic() - self._began
        rate = total.runs / max(took, 1e-9)
        self._say(
            f"{how}: {total.seeds} seeds, {total.runs} runs in {took:.0f} s ({rate:.0f} a second), "
            f"{total.entries} entries, {total.decisions} choices, {total.twice} runs repeated bit for bit"
        )
        self._counts("orders", total.runs_of)
        self._counts("exhaustive searches", total.searched)
        self._counts("outcomes", total.outcomes)
        self._counts("faults that struck", total.struck)
        self._closeness()
        self._counts("found", total.found)
        if not total.found:
            self._say("found: nothing")

    def _counts(self, what: str, counts: Counter[str]) -> None:
        if counts:
            self._say(f"{what}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))

    def _closeness(self) -> None:
        """A line a rule: which wait of all runs used most of its bound, and how much of it the longest of each did."""
        for rule, (wait, seed) in sorted(self.total.closest.items()):
            runs = ((band, self.total.bands[rule, band]) for band in BANDS)
            told = ", ".join(f"{band} {count}" for band, count in runs if count)
            head = f"closest to its bound, {MEANING[rule]}: {wait.percent:.3g} %"
            self._say(f"{head} (seed {seed}: {wait}); runs by the part they used: {told}")

    def _say(self, text: str) -> None:
        self._paper.print(text)


def size(case: Case) -> str:
    """How large a case is, in words."""
    scenario = case.scenario
    parts = {
        "pipelines": len(scenario.jobs), "GPUs": scenario.cluster.gpus, "guests": len(case.guests),
        "faults": len(scenario.faults), "holds": len(case.schedule.holds),
    }  # fmt: skip
    return ", ".join(f"{count} {name}" for name, count in parts.items() if count)


def _line(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= 200 else f"{first[:197]}..."


# --- replaying --------------------------------------------------------------------------------------------


def _replay(file: str) -> int:
    artefact = load(Path(file))
    try:
        check_world(artefact.case.scenario)
    except ConfigError as bad:
        raise ConfigError(file, str(bad)) from None
    replay = Replay(artefact.case)
    print(f"{file}: {artefact.about or 'a saved failure'}; {size(artefact.case)}")
    print(replay.story())
    found = replay.judgement.finding
    if (found and found.signature) != (artefact.expect and artefact.expect.signature):
        wanted = artefact.expect.signature if artefact.expect else "nothing"
        print(f"recorded was: {wanted}")
    elif not artefact.digest:
        print("that is as recorded; no log was recorded to compare with")
    elif replay.digest == artefact.digest:
        print("the log is the recorded one, bit for bit")
    else:
        print("stale: the same finding, but not the log that was recorded")
    return FAILED if found else OK


if __name__ == "__main__":
    raise SystemExit(main())
