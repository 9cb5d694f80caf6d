"""The recorded world with the costs that were measured in it, and what had to be guessed."""

from collections.abc import Mapping
from typing import Any

import msgspec

from core.config import Cost, Costs, Job, Scenario
from core.model import MemoryNeeds
from scenarios.calibration.fit import constant, fit, fit_lengths, mean
from scenarios.calibration.measure import TRAJECTORY, Measured

replace = msgspec.structs.replace

PHASES = ("init", "onload", "train", "offload", "publish", "sync", "sleep", "wake")
"""Every pipeline does these; one that was never seen is told."""
SOMETIMES = ("restart", "log_probs", "critic_train")
LATENCIES = ("warmup", "gate", "command", "release")


def calibrated(scenario: Scenario, measured: Mapping[str, Measured]) -> tuple[Scenario, list[str]]:
    """The scenario as it was measured, and remarks: what was not seen and what stands there instead."""
    remarks: list[str] = []
    inits = [fit(one.costs["init"]) for one in measured.values() if "init" in one.costs]
    quickest = min(inits, key=mean) if inits else None
    jobs = tuple(_job(job, measured[job.spec.id], quickest, remarks) for job in scenario.jobs)
    return replace(scenario, name=f"{scenario.name}-calibrated", jobs=jobs, faults=(), expect=None), remarks


def warm(scenario: Scenario) -> Scenario:
    """The same on a machine that has run it before, and so has all compiled code in its caches: nobody waits for
    kernels, and every pipeline initialises as the quickest of them did."""
    quickest = min((job.costs.init for job in scenario.jobs), key=mean)
    return replace(
        scenario,
        jobs=tuple(replace(job, costs=replace(job.costs, init=quickest, warmup=0)) for job in scenario.jobs),
    )


def with_costs(scenario: Scenario, other: Scenario) -> Scenario:
    """`scenario` with what things cost in `other`, by pipeline, and as long before anybody begins. Pipelines that
    `other` has not keep theirs."""
    known = {job.spec.id: job for job in other.jobs}

    lead = min(job.start_at for job in other.jobs if job.start_after is None)

    def changed(job: Job) -> Job:
        found = known.get(job.spec.id)
        if found is None:
            return job
        costs = replace(found.costs, engine_slots=job.costs.engine_slots)
        return replace(job, costs=costs, start_at=max(job.start_at, 0 if job.start_after else lead))

    return replace(scenario, jobs=tuple(changed(job) for job in scenario.jobs))


def _job(job: Job, measured: Measured, quickest: Cost | None, remarks: list[str]) -> Job:
    costs = _costs(job, measured, quickest, remarks)
    memory = _memory(job.spec.memory, measured, f"{job.spec.id}: ", remarks)
    if measured.unexplained:
        remarks.append(f"{job.spec.id}: {measured.unexplained} trajectories could not be followed, and were left out")
    # What waits for another pipeline's event starts by that.
    starts = measured.started_at if job.start_after is None else []
    start_at = round(sum(starts) / len(starts)) // 1000 * 1000 if starts else job.start_at
    return replace(job, costs=costs, start_at=start_at, spec=replace(job.spec, memory=memory))


def _costs(job: Job, measured: Measured, quickest: Cost | None, remarks: list[str]) -> Costs:
    found: dict[str, Any] = {
        name: fit(measured.costs[name]) for name in (*PHASES, *SOMETIMES, *LATENCIES) if name in measured.costs
    }
    missing = [name for name in PHASES if name not in found]
    if missing:
        remarks.append(f"{job.spec.id}: never seen, as it was declared: {', '.join(missing)}")
    if "restart" not in found and quickest is not None:
        found["restart"] = quickest
        remarks.append(f"{job.spec.id}: no engine was restarted; that is taken to last as long as the quickest init")
    if TRAJECTORY in measured.costs:
        found[TRAJECTORY] = fit_lengths(measured.costs[TRAJECTORY], job.costs.engine_slots)
    else:
        found[TRAJECTORY] = job.costs.trajectory or constant(1)
        remarks.append(f"{job.spec.id}: no trajectory was completed; trajectory is as it was declared")
    return replace(job.costs, **found)


def _memory(declared: MemoryNeeds, measured: Measured, whose: str, remarks: list[str]) -> MemoryNeeds:
    """What was seen, where it was. A look now and then may miss the worst moment, so more was declared for good reason:
    an active worker counts as seen only if it was seen to hold more than it does asleep."""
    seen = measured.memory
    residue = declared.residue if seen.residue is None else seen.residue
    found = {"residue": residue}
    for name, held in (("train", seen.train), ("engine", seen.engine)):
        if held is not None and held > residue:
            found[name] = held
        else:
            found[name] = max(getattr(declared, name), residue)
            remarks.append(f"{whose}memory of an active {name} was never seen; it is as it was declared")
    return replace(declared, **found, init_peak=max(found["train"] + found["engine"], residue))
