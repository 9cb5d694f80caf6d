"""A scenario as a file that reads back as the same scenario.

Numbers are decimal seconds and GiB as short as they can be; whatever a scenario does not say by itself is written down
too, for defaults follow the costs, and the costs may be fitted later than the rest was declared.
"""

from pathlib import Path
from typing import Any

import yaml

from core.config import Cost, Durations, Expect, Fault, Job, Scenario, Trigger
from core.lengths import SIGMA_UNIT
from core.model import ROLE_KEYS, MemoryNeeds, PipelineSpec
from core.scenario_file import LATENCY_KEYS
from core.units import BYTES_PER_GIB, NS_PER_S
from core.workload import MIB, Workload

Plain = dict[str, Any]


def to_yaml(scenario: Scenario, comment: str = "") -> str:
    """The text of a scenario file. `comment` goes before it, a line each."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    body = yaml.dump(plain(scenario), Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
    return f"{head}\n{body}" if head else body


class _Dumper(yaml.SafeDumper):
    """Lists and small mappings on one line, no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        flat = not any(isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flat)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flat = not any(isinstance(value, dict | list) for value in mapping.values())
        return super().represent_mapping(tag, mapping, flow_style=flat and bool(mapping))


# --- the world --------------------------------------------------------------------------------------------


def plain(scenario: Scenario) -> Plain:
    cluster = scenario.cluster
    found: Plain = {
        "name": scenario.name,
        "cluster": {
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu_memory_gib": gib_of(cluster.gpu_memory),
            "host_memory_gib": gib_of(cluster.host_memory),
            "memory_margin_gib": gib_of(cluster.memory_margin),
        },
        "driver": scenario.driver.value,
        "seed": scenario.seed,
        "demand": scenario.demand.value,
        "pipelines": [_job(job) for job in scenario.jobs],
    }
    if scenario.faults:
        found["faults"] = [_fault(fault) for fault in scenario.faults]
    if scenario.expect is not None:
        found["expect"] = _expect(scenario.expect)
    return found


def _job(job: Job) -> Plain:
    spec = job.spec
    found: Plain = {"id": spec.id}
    for group in spec.groups:
        found[ROLE_KEYS[group.role]] = {"gpus": list(group.gpus), "tp": group.tp}
    found |= {
        "steps": job.steps,
        "batch": {"prompts": job.target // job.samples_per_prompt, "samples_per_prompt": job.samples_per_prompt},
        "start_at": seconds_of(job.start_at),
        "reissue_after_s": seconds_of(job.reissue_after),
        "max_attempts": job.max_attempts,
        "old_log_probs": job.old_log_probs,
    }
    found |= {key: _trigger(getattr(job, key)) for key in ("start_after", "dispatch_after") if getattr(job, key)}
    if job.evaluation is not None:
        found["eval"] = {"every": job.evaluation.every, "trajectories": job.evaluation.trajectories}
    if job.reward_s:
        found["reward"] = {"seconds": seconds_of(job.reward_s)}
    found |= _policies(spec)
    found["costs"] = costs_of(job)
    found["memory"] = memory_of(spec.memory)
    if job.workload != Workload():
        found["workload"] = _workload(job.workload)
    return found


def _policies(spec: PipelineSpec) -> Plain:
    limits = {f"{name}_s": seconds_of(getattr(spec.limits, name)) for name in spec.limits.__struct_fields__}
    return {
        "overlap": spec.overlap.value,
        "staleness": spec.staleness,
        "on_preempt": spec.on_preempt.value,
        "partial": spec.partial.value,
        "in_flight_updates": spec.in_flight_updates,
        "min_residence_s": seconds_of(spec.min_residence),
        "limits": limits,
    }


def memory_of(memory: MemoryNeeds) -> Plain:
    return {f"{name}_gib": gib_of(getattr(memory, name)) for name in memory.__struct_fields__}


def _trigger(trigger: Trigger) -> Plain:
    return {"pipeline": trigger.pipeline, "event": trigger.event}


def _workload(workload: Workload) -> Plain:
    found: Plain = {}
    for name in workload.__struct_fields__:
        value = getattr(workload, name)
        if value == getattr(Workload(), name) or (name == "task" and workload.prompts):
            continue
        match name:
            case "reward_limit":
                found["reward_limit_s"] = seconds_of(value)
            case "bucket_bytes":
                found["bucket_mib"] = value // MIB
            case "prompts":
                found[name] = str(Path(value).resolve())
            case _:
                found[name] = value
    return found


def _fault(fault: Fault) -> Plain:
    found: Plain = {"at": seconds_of(fault.at), "kind": fault.kind}
    empty = Fault(at=0, kind="")
    for name in ("pipeline", "dp_rank", "node", "factor", "count"):
        if getattr(fault, name) != getattr(empty, name):
            found[name] = getattr(fault, name)
    if fault.duration:
        found["duration"] = seconds_of(fault.duration)
    if fault.bytes:
        found["gib"] = gib_of(fault.bytes)
    return found


def _expect(expect: Expect) -> Plain:
    found: Plain = {} if expect.outcome is None else {"outcome": expect.outcome}
    for name in ("max_wait", "max_makespan"):
        if getattr(expect, name) is not None:
            found[f"{name}_s"] = seconds_of(getattr(expect, name))
    if expect.violations:
        found["violations"] = list(expect.violations)
    if expect.min_handovers is not None:
        found["min_handovers"] = expect.min_handovers
    if expect.failed is not None:
        found["failed"] = list(expect.failed)
    return found


# --- costs ------------------------------------------------------------------------------------------------


def costs_of(job: Job) -> Plain:
    costs = job.costs
    left_out = {key: 0 for key in LATENCY_KEYS} | {"release": None}
    found: Plain = {}
    for name in costs.__struct_fields__:
        value = getattr(costs, name)
        if name in left_out and value == left_out[name]:
            continue
        found[name] = value if name == "engine_slots" else cost_of(value)
    return found


def cost_of(cost: Cost) -> Any:
    """A number of seconds, or a distribution as scenario files write it."""
    if isinstance(cost, int):
        return seconds_of(cost)
    found = _shape_of(cost)
    return {"first": seconds_of(cost.first)} | found if cost.first else found


def _shape_of(durations: Durations) -> Plain:
    if durations.drift:
        lists = [[seconds_of(value) for value in values] for values in durations.drift]
        order = {"in_order": True} if durations.in_order else {}
        return {"drift": {"every": durations.every, **order, "samples": lists}}
    if durations.samples:
        return {"samples": [seconds_of(value) for value in durations.samples]}
    shapes = [(weight, _part_of(kind, a, b)) for weight, kind, a, b in durations.parts]
    if len(shapes) == 1:
        return shapes[0][1]
    return {"mixture": [{"weight": weight} | shape for weight, shape in shapes]}


def _part_of(kind: str, a: int, b: int) -> Plain:
    match kind:
        case "lognormal":
            return {kind: {"median": seconds_of(a), "sigma": b / SIGMA_UNIT}}
        case "uniform":
            return {kind: [seconds_of(a), seconds_of(b)]}
        case _:
            return {kind: seconds_of(a)}


# --- numbers ----------------------------------------------------------------------------------------------


def seconds_of(nanos: int) -> int | float:
    """Seconds that read back as so many ns."""
    return nanos // NS_PER_S if nanos % NS_PER_S == 0 else nanos / NS_PER_S


def gib_of(n_bytes: int) -> int | float:
    """GiB that read back as so many bytes."""
    return n_bytes // BYTES_PER_GIB if n_bytes % BYTES_PER_GIB == 0 else n_bytes / BYTES_PER_GIB
