"""Random worlds: clusters, mappings, costs and habits of pipelines, all of which could exist.

1. Small beats large: most worlds have two or three pipelines on a few GPUs and a handful of trajectories. What cannot
   go wrong there seldom goes wrong elsewhere, and they run in milliseconds.
2. Ties are where races live: in a third of the worlds every duration is a multiple of one second.
3. Every world passes `check_world`; one that does not is drawn again with less memory.
4. Every trajectory fits into a turn (`room`), which is all that the bounds assume of a world.
"""

from typing import Any

import msgspec

from backends.sim.explore.case import Case
from backends.sim.explore.chance import Chance
from backends.sim.explore.room import with_room
from core import defaults
from core.config import Costs, Durations, Evaluation, Job, Scenario, Trigger
from core.errors import ConfigError
from core.lengths import SIGMA_UNIT, quantile
from core.model import (
    Cluster,
    Limits,
    MemoryNeeds,
    OnPreempt,
    Overlap,
    Partial,
    PipelineSpec,
    Role,
    WorkerGroup,
)
from core.topology import check_spec, check_world
from core.units import NS_PER_S, gib

PIPELINES = (1, 2, 2, 2, 2, 3, 3, 4, 5, 6, 8)
CLUSTERS = ((1, 1), (1, 2), (1, 2), (1, 2), (1, 4), (1, 4), (2, 2), (2, 1), (1, 8), (2, 4), (4, 2), (2, 8), (4, 4))
"""(nodes, GPUs a node)"""
STYLES = ("full", "full", "partial", "partial", "none", "any", "any")
"""How a pipeline's train and inference GPUs lie to each other."""
MS = NS_PER_S // 1000


def draw(seed: int, *, small: bool = False) -> Case:
    """The world of a seed, without faults or guests. `small`: for exhaustive search."""
    chance = Chance(seed, "world")
    for attempt in range(8):
        case = _draw(seed, chance, small, lean=attempt > 3)
        try:
            check_world(case.scenario)
        except ConfigError:
            continue
        return case
    raise AssertionError(f"seed {seed}: eight worlds in a row do not fit; draw smaller ones")


def _draw(seed: int, chance: Chance, small: bool, lean: bool) -> Case:
    nodes, per_node = chance.pick(CLUSTERS[:4] if small else CLUSTERS)
    cluster = Cluster(
        nodes=nodes, gpus_per_node=per_node, gpu_memory=gib(141), host_memory=gib(256),
        memory_margin=gib(chance.pick((0, 0, 1, 4))),
    )  # fmt: skip
    count = chance.pick((2, 2, 3)) if small else chance.pick(PIPELINES)
    clock = Pace(chance)
    jobs = tuple(with_room(seed, draw_job(chance, cluster, f"p{i + 1}", clock, small, lean)) for i in range(count))
    scenario = Scenario(name=f"seed-{seed}", cluster=cluster, jobs=_starts(chance, clock, jobs), seed=seed)
    return Case(scenario=scenario, release_lag=clock.lag(chance))


class Pace:
    """What durations look like in one world."""

    def __init__(self, chance: Chance) -> None:
        self._kind = chance.pick(("ties", "whole", "scattered"))
        self._most = chance.pick((3, 10, 40))

    def span(self, chance: Chance, share: float = 1.0) -> int:
        """A duration (ns). `share`: how long it usually is beside the longest of this world."""
        if self._kind == "ties":
            return NS_PER_S
        most = max(1, int(self._most * share))
        if self._kind == "whole":
            return chance.between(1, most) * NS_PER_S
        return chance.between(MS, most * NS_PER_S)

    def trajectory(self, chance: Chance) -> Durations:
        span = self.span(chance)
        if self._kind == "ties" or chance.often(0.2):
            return Durations(parts=((1.0, "constant", span * chance.between(1, 4), 0),))
        if chance.often(0.5):
            return Durations(parts=((1.0, "uniform", span, 4 * span),))
        return Durations(parts=((1.0, "lognormal", span, chance.between(SIGMA_UNIT // 10, SIGMA_UNIT)),))

    def lag(self, chance: Chance) -> Durations:
        if self._kind == "ties":
            return Durations(parts=((1.0, "constant", chance.pick((0, NS_PER_S)), 0),))
        return Durations(parts=((1.0, "uniform", 0, chance.pick((MS, NS_PER_S // 2, 3 * NS_PER_S))),))


def _starts(chance: Chance, pace: Pace, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """When each pipeline comes: at once, later, or on an event of an earlier one, as in the incident."""
    started = []
    for i, job in enumerate(jobs):
        change: dict[str, Any] = {}
        if chance.often(0.4):
            change["start_at"] = chance.between(0, 4) * pace.span(chance)
        elif i and chance.often(0.4):
            earlier = jobs[chance.below(i)].spec.id
            change["start_after"] = Trigger(pipeline=earlier, event=chance.pick(("rollout_granted", "init_accepted")))
        elif i + 1 < len(jobs) and chance.often(0.2):
            change["dispatch_after"] = Trigger(pipeline=jobs[i + 1].spec.id, event="init_accepted")
        started.append(msgspec.structs.replace(job, **change))
    return tuple(started)


# --- one pipeline -----------------------------------------------------------------------------------------


def draw_job(chance: Chance, cluster: Cluster, name: str, pace: Pace, small: bool = False, lean: bool = False) -> Job:
    costs = _costs(chance, pace)
    spec = _spec(chance, cluster, name, costs, lean)
    reissue_after = defaults.reissue_after(costs)
    return Job(
        spec=msgspec.structs.replace(spec, suspicion=defaults.suspicion(reissue_after, defaults.MAX_ATTEMPTS)),
        steps=1 if small else chance.between(1, 3),
        target=chance.between(1, 2) if small else chance.pick((1, 2, 3, 4, 4, 8)),
        costs=costs,
        reissue_after=reissue_after,
        old_log_probs=chance.often(0.2),
        evaluation=Evaluation(every=chance.between(1, 2), trajectories=chance.between(1, 3))
        if chance.often(0.2) and not small
        else None,
        reward_s=pace.span(chance, 0.1) if chance.often(0.2) else 0,
    )


def _costs(chance: Chance, pace: Pace) -> Costs:
    return Costs(
        init=pace.span(chance),
        train=pace.span(chance),
        offload=pace.span(chance, 0.1),
        onload=pace.span(chance, 0.1),
        publish=pace.span(chance, 0.1),
        sync=pace.span(chance, 0.2),
        sleep=pace.span(chance, 0.1),
        wake=pace.span(chance, 0.1),
        restart=pace.span(chance),
        log_probs=pace.span(chance, 0.2),
        critic_train=pace.span(chance, 0.5),
        engine_slots=chance.pick((1, 2, 4, 16)),
        trajectory=pace.trajectory(chance),
    )


def _spec(chance: Chance, cluster: Cluster, name: str, costs: Costs, lean: bool) -> PipelineSpec:
    style = chance.pick(STYLES)
    groups, overlap = _groups(chance, cluster, style)
    residence = chance.pick((0, 0, NS_PER_S, 5 * NS_PER_S, defaults.min_residence(costs)))
    spec = PipelineSpec(
        id=name,
        groups=groups,
        limits=_limits(chance, costs, residence),
        memory=_memory(chance, lean),
        staleness=chance.pick((0, 0, 0, 1, 2)),
        min_residence=residence,
        on_preempt=chance.pick(tuple(OnPreempt)),
        partial=chance.pick(tuple(Partial)),
        in_flight_updates=chance.often(0.2),
        overlap=overlap,
    )
    check_spec(cluster, spec)
    return spec


def _groups(chance: Chance, cluster: Cluster, style: str) -> tuple[tuple[WorkerGroup, ...], Overlap]:
    every = tuple(range(cluster.gpus))
    infer = _group(chance, cluster, Role.ACTOR_INFER, every, whole=style == "full")
    rest = tuple(gpu for gpu in every if gpu not in infer.gpus)
    if style == "none" and rest:
        where, overlap = rest, Overlap.NONE
    elif style in ("full", "partial"):
        where, overlap = infer.gpus, Overlap.PARTIAL
    else:
        where, overlap = every, Overlap.ANY
    groups = [_group(chance, cluster, Role.ACTOR_TRAIN, where), infer]
    groups += [_group(chance, cluster, role, every) for role in (Role.CRITIC, Role.REFERENCE) if chance.often(0.15)]
    return tuple(groups), overlap


def _group(
    chance: Chance, cluster: Cluster, role: Role, where: tuple[int, ...], whole: bool = False
) -> WorkerGroup:
    """A worker group on some of the GPUs `where`, or on all that its TP size can use."""
    tp = chance.pick((1, 1, 1, 2, 4))
    while not (bundles := _bundles(chance, cluster, tp, where)):
        tp //= 2
    count = len(bundles) if whole else chance.between(1, len(bundles))
    chosen = chance.some(bundles, count)
    if chance.often(0.7):
        chosen.sort()
    return WorkerGroup(role=role, gpus=tuple(gpu for bundle in chosen for gpu in bundle), tp=tp)


def _bundles(chance: Chance, cluster: Cluster, tp: int, where: tuple[int, ...]) -> list[tuple[int, ...]]:
    """TP groups that share no GPU, on `where`. Mostly aligned, sometimes off by one."""
    node = cluster.gpus_per_node
    offset = 1 if 1 < tp < node and chance.often(0.25) else 0
    found = []
    for first in range(offset, cluster.gpus - tp + 1, tp):
        bundle = tuple(range(first, first + tp))
        one_node = bundle[0] // node == bundle[-1] // node
        whole_nodes = tp % node == 0 and first % node == 0
        if (one_node if tp <= node else whole_nodes) and all(gpu in where for gpu in bundle):
            found.append(bundle)
    return found


def _memory(chance: Chance, lean: bool) -> MemoryNeeds:
    residue = 0 if lean else chance.pick((0, 1, 1, 2))
    train, engine = chance.between(4, 40), chance.between(4, 60)
    peak = max(train, engine) if lean else chance.pick((train + engine, max(train, engine)))
    return MemoryNeeds(
        train=gib(train), engine=gib(engine), residue=gib(residue), init_peak=gib(peak),
        host_cache=gib(chance.between(0, 2)),
    )  # fmt: skip


UNHEARD = 90 * NS_PER_S
"""How long the faults of `swarm` may keep a client unheard: several outages of at most 10 s, a few messages lost."""


def _limits(chance: Chance, costs: Costs, residence: int) -> Limits:
    usual = defaults.limits(costs, residence)
    if chance.often(0.5):
        return usual
    # As tight as a careful person would set them: four times what each thing takes, and a few seconds. What ends with a
    # client's message must outlast outages, and losses of that message and of its repetitions between them.
    slow = 4 * quantile(costs.trajectory, 0.99)
    floor = 5 * NS_PER_S
    work = max(costs.train, costs.critic_train) + costs.log_probs
    return Limits(
        hold=4 * (costs.onload + work + costs.publish + costs.offload) + UNHEARD,
        init=4 * (costs.init + costs.publish + costs.offload) + UNHEARD,
        wake=4 * max(costs.wake, costs.restart) + floor,
        sync=4 * costs.sync + floor,
        sleep=4 * costs.sleep + floor,
        drain=slow,
        release=2 * floor,
        quarantine=12 * floor,
        turn=max(slow, residence),
        command=floor,
    )
