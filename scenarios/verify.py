"""Small worlds proved whole: every reachable state of the scheduler, every order of what may happen.

    python -m scenarios.verify --gpus 2 --pipelines 2                       the incident's world: nobody waits for ever
    python -m scenarios.verify --gpus 2 --pipelines 2 --demand signal       the incident's deadlock, as the shortest run
    python -m scenarios.verify --gpus 4 --pipelines 2 --tp 1,2 --resume big.search --max-states 1000000

Exit codes: 0 proved, 1 a rule is broken or the search is not finished, 2 bad input, 3 somebody may wait for ever.
What is walked and what is left out: `core.verify.world`.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from core.errors import ConfigError
from core.model import DemandPolicy
from core.verify.proof import BROKEN, PROVED, STUCK, UNFINISHED, Verdict, prove
from core.verify.search import Graph, resume, save
from core.verify.world import Mapping, Start, World, specs
from scenarios import outcome
from scenarios.common import guarded
from scenarios.parsing import Parser, check_writable

CODES = {PROVED: outcome.OK, BROKEN: outcome.FAILED, UNFINISHED: outcome.FAILED, STUCK: outcome.STUCK}
MOST = 10_000_000


def parser() -> Parser:
    made = Parser(prog="python -m scenarios.verify", description="prove a small world whole, or show how it goes wrong")
    made.add_argument("--gpus", type=int, default=2, metavar="G", help="GPUs (default 2)")
    made.add_argument("--pipelines", type=int, default=2, metavar="P", help="pipelines (default 2)")
    made.add_argument("--tp", type=_sizes, default=(1,), metavar="N,..",
                      help="GPUs an engine, by pipeline; the last also for those after it")  # fmt: skip
    made.add_argument("--mapping", choices=[*map(str, Mapping)], default=str(Mapping.INCIDENT),
                      help="train on one GPU each, or on all (full); partial: roll out on all but one")  # fmt: skip
    made.add_argument("--start", choices=[*map(str, Start)], default=str(Start.FREE),
                      help="incident: each initialises only after rollout was granted to the one before")  # fmt: skip
    made.add_argument("--demand", choices=[*map(str, DemandPolicy)], default=str(DemandPolicy.BATCH),
                      help="what counts as rollout demand (default batch)")  # fmt: skip
    made.add_argument("--target", type=int, default=1, metavar="N", help="trajectories a batch (default 1)")
    made.add_argument("--staleness", type=int, default=0, metavar="K", help="versions a sample may be old (default 0)")
    made.add_argument("--faults", type=int, default=0, metavar="N", help="faults that may happen in a run (default 0)")
    made.add_argument("--coarse", action="store_true", help="fewer steps: gates open and memory comes back at once")
    made.add_argument("--no-symmetry", action="store_true", help="walk states that differ only in names one by one")
    made.add_argument("--max-states", type=int, default=MOST, metavar="M", help=f"stop at so many (default {MOST:,})")
    made.add_argument("--resume", type=Path, metavar="FILE", help="go on with the search in FILE, and leave it there")
    made.add_argument("--save-every", type=float, default=60.0, metavar="S",
                      help="seconds between two savings of --resume FILE (default 60)")  # fmt: skip
    made.add_argument("--quiet", action="store_true", help="only the verdict")
    return made


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1,2") from None


def _world(options: argparse.Namespace) -> World:
    """Raises ConfigError for a world that is none."""
    for name, least, most in (("target", 1, 6), ("staleness", 0, 3), ("faults", 0, 9), ("max_states", 1, 2**32 - 1)):
        if not least <= getattr(options, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')}", f"must be from {least} to {most}")
    if not 0 <= options.save_every < math.inf:
        raise ConfigError("--save-every", f"must be 0 or a time in seconds, not {options.save_every:g}")
    if options.resume is not None:
        check_writable(options.resume, "--resume")
    world = World(
        gpus=options.gpus, pipelines=options.pipelines, tp=options.tp, mapping=Mapping(options.mapping),
        demand=DemandPolicy(options.demand), start=Start(options.start), faults=options.faults, target=options.target,
        staleness=options.staleness, coarse=options.coarse, symmetry=not options.no_symmetry,
    )  # fmt: skip
    specs(world)
    if len(options.tp) > options.pipelines:
        raise ConfigError("--tp", f"{len(options.tp)} sizes for {options.pipelines} pipelines", "at most one for each")
    return world


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    world, file = _world(options), options.resume
    graph = resume(world, file) if file is not None and file.exists() else Graph(world)
    if not options.quiet:
        for spec in specs(world):
            print(f"{spec.id}: " + ", ".join(f"{group.role} {list(group.gpus)} tp {group.tp}" for group in spec.groups))
    began = time.monotonic()
    try:
        verdict = prove(graph, options.max_states, _progress(began, file, options.save_every, quiet=options.quiet))
    finally:
        if file is not None and graph.keys:
            save(graph, file)
    if not options.quiet:
        print(*verdict.story, sep="\n" if verdict.story else "", end="\n" if verdict.story else "")
    print(_sentence(world, verdict, time.monotonic() - began), flush=True)
    return CODES[verdict.outcome]


def _progress(began: float, file: Path | None, every: float, *, quiet: bool) -> Callable[[Graph], None]:
    """A line that counts, on a terminal; and every so many seconds the search so far, into its file."""
    shows, saved = not quiet and sys.stderr.isatty(), began

    def show(graph: Graph) -> None:
        nonlocal saved
        if file is not None and time.monotonic() - saved >= every:
            save(graph, file)
            saved = time.monotonic()
        if not shows:
            return
        passed = time.monotonic() - began
        text = f"{len(graph.keys):,} states, {len(graph.keys) - graph.expanded:,} to expand, {passed:.0f} s"
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)

    return show


def _sentence(world: World, verdict: Verdict, seconds: float) -> str:
    meaning = {
        PROVED: "proved: every rule holds in every state, and nobody waits for ever",
        BROKEN: "a rule is broken",
        STUCK: "somebody may wait for ever",
        UNFINISHED: "not finished: no fault found so far",
    }[verdict.outcome]
    size = f"{world.pipelines} pipelines on {world.gpus} GPUs, demand {world.demand}, faults {world.faults}"
    return f"{size}: {meaning} ({verdict.states:,} states, {verdict.transitions:,} transitions, {seconds:.1f} s)"


if __name__ == "__main__":
    raise SystemExit(main())
