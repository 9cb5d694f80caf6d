"""The options that every scenario understands, and what they make of a declared scenario.

1. An error is one line that starts with `error:`, and exit code 2.
2. Everything that can be refused is refused here, before the run: names, numbers, topology, paths.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from core.config import Scenario
from core.defaults import COST_SETS
from core.errors import ConfigError
from core.model import DemandPolicy
from core.reading import MOST_WHOLE
from core.scenario_file import MOST_SEED, named_costs
from core.topology import DISJOINT_NAMES, OVERLAP_NAMES, check_world, topology_from, with_topology
from scenarios.backend_options import add_backend_options, with_workload
from scenarios.outcome import TABLE
from scenarios.parsing import Parser, check_writable, one_of, same_file, whole

ALL = "all"
STDOUT = "-"
OUTPUTS = ("json", "trace", "perfetto", "report")


def parser(prog: str, about: str, *, takes_file: bool = False) -> Parser:
    """The shared command line; with `takes_file` the scenario is named on it."""
    made = Parser(prog=f"python -m {prog}", description=about)
    if takes_file:
        made.add_argument("scenario", metavar="FILE", nargs="?", help="a scenario file, or the name of a shipped one")
        made.add_argument("--list", action="store_true", help="list the shipped scenarios and stop")
    made.add_argument("--backend", default="sim", metavar="NAME", help="sim (default), or another installed backend")
    policies = (*TABLE, ALL)
    help_ = "what counts as rollout demand"
    made.add_argument("--demand", type=one_of(policies), metavar="|".join(policies), help=help_)
    made.add_argument("--steps", type=whole(1, MOST_WHOLE), metavar="N", help="training steps of every pipeline")
    made.add_argument("--seed", type=whole(0, MOST_SEED), metavar="N", help="seed of every random draw")
    help_ = "simulator: what everything takes, for every pipeline, instead of what the scenario says"
    made.add_argument("--costs", type=_cost_set, metavar="|".join(COST_SETS), help=help_)
    made.add_argument("--quiet", action="store_true", help="only the first line and the result")
    _add_outputs(made.add_argument_group("files to write"))
    _add_topology(made.add_argument_group("topology", "all four or none; comma-separated GPU ids such as 0,1"))
    add_backend_options(made)
    return made


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help="the result as JSON; - for standard output, alone there")
    group.add_argument("--trace", metavar="FILE", help="the event log, JSON lines (--demand all: one a policy)")
    group.add_argument("--perfetto", metavar="FILE", help="the log for ui.perfetto.dev (--demand all: one a policy)")
    group.add_argument("--report", metavar="FILE.html", help="timeline and figures as one HTML page")


def _add_topology(group: argparse._ArgumentGroup) -> None:
    for name in OVERLAP_NAMES:
        pipeline, role = name.split("_")
        whose = {"p1": "first", "p2": "second"}[pipeline]
        doing = {"train": "trains on", "infer": "rolls out on"}[role]
        help_ = f"GPUs the {whose} pipeline {doing} (or TURNSTILE_{name.upper()})"
        group.add_argument(f"--{name.replace('_', '-')}", metavar="IDS", help=help_)
    help_ = "instead: a slice of GPUs for each pipeline, together all of them, as 0,1/2,3 (or TURNSTILE_SLICES)"
    group.add_argument("--slices", metavar="IDS/IDS", help=help_)
    help_ = "on how many GPUs of its slice each trains, as 1,2; default all (or TURNSTILE_TRAIN_SIZES)"
    group.add_argument("--train-sizes", metavar="N,N", help=help_)


def _cost_set(text: str) -> str:
    if text not in COST_SETS:
        problem = f"{text[:40]!r} is not one of {', '.join(COST_SETS)}"
        raise argparse.ArgumentTypeError(f"{problem}; a scenario file can have costs of its own")
    return text


def declared(scenario: Scenario, options: argparse.Namespace, environ: Mapping[str, str]) -> Scenario:
    """The scenario as the options and the environment change it, checked. Raises ConfigError."""
    jobs = scenario.jobs
    if options.steps is not None:
        jobs = tuple(msgspec.structs.replace(job, steps=options.steps) for job in jobs)
    if options.costs is not None:
        jobs = tuple(msgspec.structs.replace(job, costs=named_costs(options.costs, job)) for job in jobs)
    seed = scenario.seed if options.seed is None else options.seed
    scenario = msgspec.structs.replace(scenario, jobs=jobs, seed=seed)
    names = (*OVERLAP_NAMES, *DISJOINT_NAMES)
    given = topology_from({name: getattr(options, name) for name in names}, environ, scenario.cluster.gpus)
    if given is not None:
        scenario = with_topology(scenario, *given)
    scenario = with_workload(scenario, options)
    check_world(scenario)
    return scenario


def variants(scenario: Scenario, options: argparse.Namespace) -> list[Scenario]:
    """One scenario for each demand policy to run: the declared one, the one asked for, or all in order."""
    asked = list(TABLE) if options.demand == ALL else [options.demand or scenario.demand]
    return [msgspec.structs.replace(scenario, demand=DemandPolicy(policy)) for policy in asked]


# --- files to write ---------------------------------------------------------------------------------------


def output(options: argparse.Namespace, name: str, policy: str) -> Path | None:
    """Where one run's log goes; with `--demand all` each policy has a file of its own (`log-floor.jsonl`)."""
    given = getattr(options, name)
    if given is None:
        return None
    path = Path(given)
    return path.with_name(f"{path.stem}-{policy}{path.suffix}") if options.demand == ALL else path


def check_outputs(options: argparse.Namespace, inputs: Sequence[Path]) -> None:
    """Raises ConfigError if a file to write cannot be written, is asked for twice, or is the input."""
    taken = [(path, "the scenario") for path in inputs]
    for name in OUTPUTS:
        given = getattr(options, name)
        if given is None or (given == STDOUT and name == "json"):
            continue
        where = f"--{name}"
        if given == STDOUT:
            raise ConfigError(where, "needs a file name", "only --json writes to standard output")
        check_writable(Path(given), where)
        place = Path(given)
        other = next((what for path, what in taken if same_file(place, path)), None)
        if other is not None and not place.is_char_device():
            raise ConfigError(where, f"{given} is {other} too", "name another file")
        taken.append((place, where))
