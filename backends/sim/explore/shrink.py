"""From a case that fails to the smallest one that fails in the same way.

1. The signature stays fixed: the rule and how the run ended. Never the message, the pipeline or the time.
2. Candidates are data: a candidate that is no possible world costs nothing, each other one a run, at most `RUNS_MOST`
   (and `ENTRIES_MOST` entries of their logs together: a run that starves is a long one).
3. Large cuts before small ones: the schedule to FIFO, limits (so that starving takes less time), then guests,
   pipelines, faults, moves, nodes and GPUs, engines, holds, steps, then simpler numbers. Again from the start, until
   nothing more can go.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from backends.sim.explore import guests, strategies
from backends.sim.explore.case import Case, Finding, Guest, Schedule
from backends.sim.explore.judge import judge
from backends.sim.explore.room import has_room
from core.config import Durations, Fault, Job, Scenario
from core.errors import ConfigError
from core.lengths import most
from core.model import Limits, MemoryNeeds, PipelineSpec, Role, WorkerGroup
from core.topology import check_world
from core.units import NS_PER_S

RUNS_MOST = 300
ENTRIES_MOST = 1_000_000
LIMIT_LEAST = 5 * NS_PER_S
LATENCIES = {"warmup": 0, "gate": 0, "command": 0, "release": None}
"""Costs that a world can do without."""

T = TypeVar("T")
set_ = msgspec.structs.replace


class Shrinker:
    """Shrinks one case. `best` is the smallest so far, `runs` what it cost."""

    def __init__(self, case: Case, finding: Finding, runs_most: int = RUNS_MOST) -> None:
        self.best = case
        self.finding = finding
        self.runs = 0
        self._has_room = has_room(case.scenario)
        self._runs_most = runs_most
        self._entries = 0

    @property
    def _left(self) -> bool:
        return self.runs < self._runs_most and self._entries < ENTRIES_MOST

    def shrink(self) -> Case:
        """The smallest case found."""
        self._write_schedule_down()
        improved = True
        while improved and self._left:
            improved = False
            for candidates in PASSES:
                while self._left and self._first_that_fails(candidates):
                    improved = True
        return self.best

    def _write_schedule_down(self) -> None:
        """FIFO if that fails too; else the order as holds."""
        if self._fails(set_(self.best, schedule=Schedule())):
            return
        holds = judge(self.best).holds
        self._fails(set_(self.best, schedule=strategies.written_down(holds)))

    def _first_that_fails(self, candidates: Callable[[Case], Iterator[Case]]) -> bool:
        return any(self._fails(candidate) for candidate in candidates(self.best) if self._left)

    def _fails(self, candidate: Case) -> bool:
        if candidate == self.best or not possible(candidate):
            return False
        if self._has_room and not has_room(candidate.scenario):
            return False  # it would starve for that reason, and no longer for the one that was found
        self.runs += 1
        run = judge(candidate, thorough=self.finding.rule == "books")
        self._entries += run.entries
        found = run.finding
        if found is None or found.signature != self.finding.signature:
            return False
        self.best, self.finding = candidate, found
        return True


def possible(case: Case) -> bool:
    """Whether this world can exist."""
    try:
        check_world(guests.everybody(case))
    except (ConfigError, ZeroDivisionError):
        return False
    return True


# --- cuts -------------------------------------------------------------------------------------------------


def _without(items: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """All of them away, halves away, each one away."""
    n = len(items)
    size = n
    while size:
        for start in range(0, n, size):
            yield (*items[:start], *items[start + size :])
        size //= 2


def _with_jobs(case: Case, jobs: Sequence[Job], **changes: Any) -> Case:
    return set_(case, scenario=set_(case.scenario, jobs=tuple(jobs), **changes))


def shorter_limits(case: Case) -> Iterator[Case]:
    """All limits a quarter of what they are, down to some seconds: the bounds are formulas of them."""
    jobs = [set_(job, spec=set_(job.spec, limits=_quarter(job.spec.limits))) for job in case.scenario.jobs]
    yield _with_jobs(case, jobs)


def _quarter(limits: Limits) -> Limits:
    return Limits(
        **{name: min(value, max(value // 4, LIMIT_LEAST)) for name, value in msgspec.structs.asdict(limits).items()}
    )


def fewer_guests(case: Case) -> Iterator[Case]:
    for kept in _without(case.guests):
        yield set_(case, guests=kept)


def fewer_pipelines(case: Case) -> Iterator[Case]:
    for kept in _without(case.scenario.jobs):
        if kept:
            yield _only(case, kept)


def _only(case: Case, jobs: Sequence[Job]) -> Case:
    """Without the other pipelines, and without what refers to them."""
    ids = [job.spec.id for job in jobs]

    def known(trigger: Any) -> Any:
        return trigger if trigger is not None and trigger.pipeline in ids else None

    jobs = [
        set_(job, start_after=known(job.start_after), dispatch_after=known(job.dispatch_after)) for job in jobs
    ]
    faults = tuple(fault for fault in case.scenario.faults if not fault.pipeline or fault.pipeline in ids)
    return _with_jobs(case, jobs, faults=faults)


def fewer_faults(case: Case) -> Iterator[Case]:
    for kept in _without(case.scenario.faults):
        yield set_(case, scenario=set_(case.scenario, faults=kept))


def fewer_moves(case: Case) -> Iterator[Case]:
    for i, guest in enumerate(case.guests):
        for kept in _without(guest.moves):
            yield _with_guest(case, i, set_(guest, moves=kept))


def _with_guest(case: Case, i: int, guest: Guest) -> Case:
    return set_(case, guests=(*case.guests[:i], guest, *case.guests[i + 1 :]))


def fewer_nodes(case: Case) -> Iterator[Case]:
    """Without one node, or on one node without one GPU; who used it does without, if it can."""
    cluster = case.scenario.cluster
    per_node = cluster.gpus_per_node
    for node in reversed(range(cluster.nodes)):
        gone = range(node * per_node, (node + 1) * per_node)
        yield from _without_gpus(case, gone, set_(cluster, nodes=cluster.nodes - 1))
    for gpu in reversed(range(cluster.gpus)):
        yield from _without_gpus(case, (gpu,), set_(cluster, nodes=1, gpus_per_node=cluster.gpus - 1))


def _without_gpus(case: Case, gone: Sequence[int], cluster: Any) -> Iterator[Case]:
    if cluster.gpus < 1:
        return
    number = {old: new for new, old in enumerate(gpu for gpu in range(case.scenario.cluster.gpus) if gpu not in gone)}
    jobs = [_moved(job, number) for job in case.scenario.jobs]
    hosts = [set_(guest, job=_moved(guest.job, number)) for guest in case.guests]
    faults = tuple(fault for fault in case.scenario.faults if fault.node < cluster.nodes)
    yield set_(_with_jobs(case, jobs, cluster=cluster, faults=_in_range(faults, jobs)), guests=tuple(hosts))


def _moved(job: Job, number: dict[int, int]) -> Job:
    """The job with GPUs renumbered; bundles that lost one are gone."""
    groups = []
    for group in job.spec.groups:
        bundles = [group.bundle(rank) for rank in range(group.size)]
        kept = [gpu for bundle in bundles if all(gpu in number for gpu in bundle) for gpu in bundle]
        if kept or group.role in (Role.ACTOR_TRAIN, Role.ACTOR_INFER):
            groups.append(set_(group, gpus=tuple(number[gpu] for gpu in kept)))
    return set_(job, spec=set_(job.spec, groups=tuple(groups)))


def _in_range(faults: Sequence[Fault], jobs: Sequence[Job]) -> tuple[Fault, ...]:
    sizes = {job.spec.id: job.spec.infer.size for job in jobs}
    return tuple(fault for fault in faults if not fault.pipeline or fault.dp_rank < sizes.get(fault.pipeline, 0))


def fewer_engines(case: Case) -> Iterator[Case]:
    """Without one TP group of one worker group, or without a whole optional group."""
    for i, job in enumerate(case.scenario.jobs):
        for place, group in enumerate(job.spec.groups):
            for smaller in _smaller(group):
                groups = [*job.spec.groups]
                groups[place : place + 1] = [smaller] if smaller is not None else []
                jobs = [*case.scenario.jobs]
                jobs[i] = set_(job, spec=set_(job.spec, groups=tuple(groups)))
                yield _with_jobs(case, jobs, faults=_in_range(case.scenario.faults, jobs))


def _smaller(group: WorkerGroup) -> Iterator[WorkerGroup | None]:
    if group.role not in (Role.ACTOR_TRAIN, Role.ACTOR_INFER):
        yield None
    if group.size > 1:
        for rank in range(group.size):
            yield set_(group, gpus=(*group.gpus[: rank * group.tp], *group.gpus[(rank + 1) * group.tp :]))
    if group.tp > 1:
        yield set_(group, tp=1)


# --- simpler ----------------------------------------------------------------------------------------------


def _each_job(case: Case, change: Callable[[Job], Iterator[Job]]) -> Iterator[Case]:
    """Every change, to one pipeline or guest at a time."""
    for i, job in enumerate(case.scenario.jobs):
        for changed in change(job):
            yield _with_jobs(case, (*case.scenario.jobs[:i], changed, *case.scenario.jobs[i + 1 :]))
    for i, guest in enumerate(case.guests):
        for changed in change(guest.job):
            yield _with_guest(case, i, set_(guest, job=changed))


def less_work(case: Case) -> Iterator[Case]:
    yield from _each_job(case, _less_work)


def _less_work(job: Job) -> Iterator[Job]:
    for steps in range(1, job.steps):
        yield set_(job, steps=steps)
    for target in (1, 2, job.target // 2):
        if 0 < target < job.target:
            yield set_(job, target=target)
    yield set_(job, evaluation=None)
    yield set_(job, old_log_probs=False, reward_s=0)


def simpler_jobs(case: Case) -> Iterator[Case]:
    yield from _each_job(case, _simpler)


def _simpler(job: Job) -> Iterator[Job]:
    plain = PipelineSpec(id=job.spec.id, groups=job.spec.groups, limits=job.spec.limits)
    for name in ("staleness", "min_residence", "on_preempt", "partial", "in_flight_updates", "overlap"):
        yield set_(job, spec=set_(job.spec, **{name: getattr(plain, name)}))
    yield set_(job, spec=set_(job.spec, memory=MemoryNeeds()))
    yield set_(job, start_at=0)
    yield set_(job, start_after=None)
    yield set_(job, dispatch_after=None)
    yield set_(job, costs=set_(job.costs, engine_slots=16))


def simpler_costs(case: Case) -> Iterator[Case]:
    """One second for everything; whole seconds; one by one."""
    yield set_(case, release_lag=_constant(0))
    yield from _each_job(case, _simpler_costs)


def _constant(nanos: int) -> Durations:
    return Durations(parts=((1.0, "constant", nanos, 0),))


def _simpler_costs(job: Job) -> Iterator[Job]:
    names = [name for name in job.costs.__struct_fields__ if name not in ("engine_slots", "trajectory", *LATENCIES)]
    second = dict.fromkeys(names, NS_PER_S) | LATENCIES
    yield set_(job, costs=set_(job.costs, **second, trajectory=_constant(NS_PER_S)))
    for nanos in (NS_PER_S, 10 * NS_PER_S):
        yield set_(job, costs=set_(job.costs, trajectory=_constant(nanos)))
    yield set_(job, costs=set_(job.costs, **second))
    whole = {name: -(-most(getattr(job.costs, name)) // NS_PER_S) * NS_PER_S for name in names}
    yield set_(job, costs=set_(job.costs, **whole))


def simpler_faults(case: Case) -> Iterator[Case]:
    """Whole seconds, one hit, short; and the end of all faults right after the last."""
    for i, fault in enumerate(case.scenario.faults):
        for changed in _simpler_fault(fault):
            faults = (*case.scenario.faults[:i], changed, *case.scenario.faults[i + 1 :])
            yield set_(case, scenario=set_(case.scenario, faults=faults))
    last = max((fault.at for fault in case.scenario.faults), default=0)
    if case.heal_at != last:
        yield set_(case, heal_at=last)


def _simpler_fault(fault: Fault) -> Iterator[Fault]:
    if fault.count > 1:
        yield set_(fault, count=1)
    if fault.duration > NS_PER_S:
        yield set_(fault, duration=NS_PER_S)
    for unit in (10 * NS_PER_S, NS_PER_S):
        if fault.at % unit:
            yield set_(fault, at=fault.at - fault.at % unit)


def simpler_moves(case: Case) -> Iterator[Case]:
    for i, guest in enumerate(case.guests):
        for place, move in enumerate(guest.moves):
            for changed in (set_(move, wait=0), set_(move, number=0)):
                moves = (*guest.moves[:place], changed, *guest.moves[place + 1 :])
                yield _with_guest(case, i, set_(guest, moves=moves))


def fewer_holds(case: Case) -> Iterator[Case]:
    """None, halves away, each away; then one step held instead of several."""
    holds = tuple(case.schedule.holds.items())
    for kept in _without(holds):
        yield set_(case, schedule=strategies.written_down(dict(kept)))
    for index, count in holds:
        if count > 1:
            yield set_(case, schedule=strategies.written_down({**case.schedule.holds, index: 1}))


def plain_seed(case: Case) -> Iterator[Case]:
    """Seed 0 and a plain name."""
    scenario: Scenario = case.scenario
    if scenario.seed:
        yield set_(case, scenario=set_(scenario, seed=0))


PASSES: tuple[Callable[[Case], Iterator[Case]], ...] = (
    shorter_limits, fewer_guests, fewer_pipelines, fewer_faults, fewer_moves, fewer_nodes, fewer_engines, fewer_holds,
    less_work, simpler_jobs, simpler_costs, simpler_faults, simpler_moves, plain_seed,
)  # fmt: skip
