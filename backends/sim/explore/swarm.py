"""Which faults a run has, and how bad: drawn first, as records with a time, a kind and a target.

1. Swarm testing: each class of faults is on or off for a whole run, so that some runs have much of little. Never "all
   faults, seldom". Those that end a pipeline are on less often, or there would be nobody left to watch.
2. All faults lie before `heal_at`; from then on the world must come to rest by itself, and every pipeline that nothing
   fatal happened to must finish.
3. What each class excuses is said here too (`excuse`), beside what it does.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from backends.sim.explore.case import Case
from backends.sim.explore.chance import Chance
from core.config import Fault, Job, Scenario
from core.lengths import quantile, usual
from core.units import NS_PER_S, gib

PHASES = ("onload", "train", "publish", "offload", "wake", "sync", "sleep")
"""Of one step."""

QUIET = 0.1
"""How many runs have no fault at all."""
DENSITIES = (0.1, 0.25, 0.5)
"""How many of the classes are on, drawn for each run."""
FATAL_SHARE = 0.25
"""How much less often the fatal ones are."""
MOST_OF_A_CLASS = 3
STRIKES = 3
"""Failures that engines of one pipeline must survive are fewer than this: then the scheduler gives an engine up."""


def horizon(scenario: Scenario) -> int:
    """About how long (ns) a run takes if everybody had to wait for everybody else."""
    return sum(_alone(job) for job in scenario.jobs)


def _alone(job: Job) -> int:
    costs = job.costs
    step = sum(usual(getattr(costs, phase)) for phase in PHASES)
    rounds = -(-job.target // (costs.engine_slots * job.spec.infer.size))
    return job.start_at + usual(costs.init) + job.steps * (step + rounds * quantile(costs.trajectory, 0.5))


def afflict(case: Case, seed: int, classes: Iterable[str]) -> Case:
    """The case with faults of some of the `classes`. The scenario's own faults stay."""
    chance = Chance(seed, "faults")
    end = max(NS_PER_S, horizon(case.scenario))
    density = 0.0 if chance.often(QUIET) else chance.pick(DENSITIES)
    on = [name for name in classes if chance.often(density * (FATAL_SHARE if name in FATAL else 1.0))]
    drawn: list[Fault] = []
    for name in on:
        stream = Chance(seed, "faults", name)
        for _ in range(stream.between(1, MOST_OF_A_CLASS)):
            drawn += CLASSES[name].draw(stream, case.scenario, _when(stream, end))
    faults = tuple(sorted((*case.scenario.faults, *drawn), key=lambda fault: fault.at))
    last = max((fault.at for fault in faults), default=0)
    return msgspec.structs.replace(
        case, scenario=msgspec.structs.replace(case.scenario, faults=faults), heal_at=last + chance.below(end) + 1
    )


def _when(chance: Chance, end: int) -> int:
    """An instant of the run; often a whole second, where other things happen too."""
    at = chance.below(end)
    return at - at % NS_PER_S if chance.often(0.6) else at


# --- classes ----------------------------------------------------------------------------------------------


class FaultClass(NamedTuple):
    draw: Callable[[Chance, Scenario, int], list[Fault]]
    about: str


def _job(chance: Chance, scenario: Scenario) -> Job:
    return chance.pick(scenario.jobs)


def _on_engine(kind: str) -> Callable[[Chance, Scenario, int], list[Fault]]:
    def draw(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
        spec = _job(chance, scenario).spec
        return [Fault(at=at, kind=kind, pipeline=spec.id, dp_rank=chance.below(spec.infer.size))]

    return draw


def _on_pipeline(kind: str) -> Callable[[Chance, Scenario, int], list[Fault]]:
    def draw(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
        return [Fault(at=at, kind=kind, pipeline=_job(chance, scenario).spec.id)]

    return draw


def _slow(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    [fault] = _on_engine("slow_engine")(chance, scenario, at)
    factor = chance.pick((1.5, 2.0, 3.0))
    return [msgspec.structs.replace(fault, factor=factor, duration=chance.between(1, 60) * NS_PER_S)]


def _false_release(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    spec = _job(chance, scenario).spec
    rank = chance.between(-1, spec.infer.size - 1)
    late = chance.pick((0, 1, 3, 20, 60)) * NS_PER_S
    return [Fault(at=at, kind="false_release", pipeline=spec.id, dp_rank=rank, duration=late)]


def _leak(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    size = gib(chance.pick((1, 2, 8, 40)))
    return [Fault(at=at, kind="leak_residue", pipeline=_job(chance, scenario).spec.id, bytes=size)]


def _fail_sync(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    return [Fault(at=at, kind="fail_sync", pipeline=_job(chance, scenario).spec.id, count=chance.between(1, 4))]


def _messages(kind: str) -> Callable[[Chance, Scenario, int], list[Fault]]:
    def draw(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
        late = chance.pick((1, 2, 5, 20)) * NS_PER_S if kind != "lose_message" else 0
        pipeline = _job(chance, scenario).spec.id
        return [Fault(at=at, kind=kind, pipeline=pipeline, duration=late, count=chance.between(1, 3))]

    return draw


def _reorder(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    """The next messages arrive in another order: each is late by a time of its own."""
    pipeline = _job(chance, scenario).spec.id
    lates = [chance.between(1, 3_000) * NS_PER_S // 1_000 for _ in range(chance.between(2, 4))]
    return [Fault(at=at, kind="delay_message", pipeline=pipeline, duration=late) for late in lates]


def _node(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    return [Fault(at=at, kind="remove_node", node=chance.below(scenario.cluster.nodes))]


def _restart(chance: Chance, scenario: Scenario, at: int) -> list[Fault]:
    return [Fault(at=at, kind="restart_control_plane", duration=chance.pick((0, 1, 3, 10)) * NS_PER_S)]


CLASSES: dict[str, FaultClass] = {
    "kill_engine": FaultClass(_on_engine("kill_engine"), "an engine's process dies"),
    "hang_engine": FaultClass(_on_engine("hang_engine"), "an engine never answers again"),
    "slow_engine": FaultClass(_slow, "an engine takes 1.5 to 3 times as long for a while"),
    "false_release": FaultClass(_false_release, "memory comes back later than said, or never"),
    "leak_residue": FaultClass(_leak, "a process keeps more asleep than declared"),
    "kill_trainer": FaultClass(_on_pipeline("kill_trainer"), "a trainer's process dies"),
    "hang_trainer": FaultClass(_on_pipeline("hang_trainer"), "a trainer never answers again"),
    "fail_sync": FaultClass(_fail_sync, "weights do not arrive on an engine"),
    "lose_message": FaultClass(_messages("lose_message"), "messages are lost"),
    "delay_message": FaultClass(_messages("delay_message"), "messages are late"),
    "duplicate_message": FaultClass(_messages("duplicate_message"), "messages arrive twice, the second time late"),
    "reorder_message": FaultClass(_reorder, "messages overtake each other"),
    "kill_client": FaultClass(_on_pipeline("kill_client"), "a client vanishes without a word"),
    "remove_node": FaultClass(_node, "a node leaves for good"),
    "restart_control_plane": FaultClass(_restart, "the scheduler dies and comes back"),
    "strange_client": FaultClass(lambda chance, scenario, at: [], "clients that cancel, retry, vanish, talk nonsense"),
}
"""By the names that `--faults` takes. `strange_client` brings guests instead of faults (`guests.draw`)."""

ON_ENGINES = ("kill_engine", "hang_engine", "slow_engine", "false_release", "fail_sync", "leak_residue")
FATAL = ("kill_client", "kill_trainer", "hang_trainer", "remove_node")


# --- what excuses what ------------------------------------------------------------------------------------


def excuse(scenario: Scenario, job: Job, struck: Iterable[Fault]) -> str:
    """Why this pipeline may fail after the faults that struck; empty if it must not."""
    spec = job.spec
    engines = 0
    for fault in struck:
        if fault.pipeline == spec.id and fault.kind in FATAL:  # remove_node names no pipeline
            return f"{fault.kind} hit it"
        if fault.kind == "remove_node" and any(scenario.cluster.node_of(gpu) == fault.node for gpu in spec.union):
            return f"node {fault.node} left"
        if fault.pipeline == spec.id and fault.kind in ON_ENGINES:
            if fault.kind == "false_release" and fault.dp_rank < 0:
                return "its release was a lie"
            engines += fault.count
        if fault.kind == "leak_residue" and _meets(scenario, fault.pipeline, spec.union):
            return f"{fault.pipeline} leaks memory on its GPUs"
    return f"{engines} faults hit its engines" if engines >= STRIKES else ""


def _meets(scenario: Scenario, pipeline: str, gpus: tuple[int, ...]) -> bool:
    return any(gpu in gpus for job in scenario.jobs if job.spec.id == pipeline for gpu in job.spec.union)

