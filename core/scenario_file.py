"""Scenario files: YAML in, `Scenario` out, or one `ConfigError` a person can act on. Reference: docs/scenarios.md.

1. The tuples of keys below are the whole schema; a key that is not in them is an error.
2. Seconds and GiB become ns and bytes here, and nowhere later.
3. What is left out comes from `core.defaults`.
4. A file that parses is well-formed and every name in it refers to something. Whether its world can exist is asked
   by `core.topology.check_world`, after options and environment had their say on the mappings.
"""

from pathlib import Path
from typing import Any, NamedTuple

from core import defaults
from core.config import (
    OUTCOMES,
    RULES,
    Cost,
    Costs,
    DriverPolicy,
    Evaluation,
    Expect,
    Fault,
    Job,
    Scenario,
    Trigger,
)
from core.errors import ConfigError
from core.lengths import most, read_cost, read_durations
from core.model import (
    ROLE_KEYS,
    Cluster,
    DemandPolicy,
    Limits,
    MemoryNeeds,
    OnPreempt,
    Overlap,
    Partial,
    PipelineSpec,
    Role,
    WorkerGroup,
)
from core.reading import Table, number, one_line, parse_yaml, read_text, read_whole, read_word
from core.topology import check_id, check_references, within
from core.units import show_gib
from core.workload import WORKLOAD_KEYS, read_workload

SCENARIO_KEYS = ("name", "cluster", "pipelines", "faults", "expect", "driver", "seed", "demand")
CLUSTER_KEYS = ("nodes", "gpus_per_node", "gpu_memory_gib", "host_memory_gib", "memory_margin_gib")
PIPELINE_KEYS = (
    "id", "train", "infer", "critic", "reference", "reward", "overlap", "steps", "batch", "eval", "staleness",
    "start_at", "start_after", "dispatch_after", "old_log_probs", "costs", "memory", "on_preempt", "partial",
    "in_flight_updates", "min_residence_s", "reissue_after_s", "max_attempts", "max_hold_s", "limits", "workload",
)  # fmt: skip
GROUP_KEYS = ("gpus", "tp")
REWARD_KEYS = ("seconds",)
BATCH_KEYS = ("prompts", "samples_per_prompt")
EVAL_KEYS = ("every", "trajectories")
TRIGGER_KEYS = ("pipeline", "event")
TRIGGER_EVENTS = ("rollout_granted", "init_accepted")
PHASE_KEYS = ("init", "train", "offload", "onload", "publish", "sync", "sleep", "wake")
LATENCY_KEYS = ("warmup", "gate", "command")
COST_KEYS = (
    "set", *PHASE_KEYS, "restart", "log_probs", "critic_train", "engine_slots", "trajectory", *LATENCY_KEYS, "release",
)  # fmt: skip
MEMORY_KEYS = ("train_gib", "engine_gib", "residue_gib", "init_peak_gib", "host_cache_gib")
LIMIT_KEYS = tuple(f"{name}_s" for name in Limits.__struct_fields__)
EXPECT_KEYS = ("outcome", "max_wait_s", "violations", "max_makespan_s", "min_handovers", "failed")
FAULT_KEYS = ("at", "kind", "pipeline", "dp_rank", "node", "duration", "factor", "gib", "count")

MOST_FACTOR = 1_000_000
MOST_SEED = 2**63 - 1


class FaultKind(NamedTuple):
    """Which keys a kind of fault needs beside `at` and `kind`, and which it takes."""

    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()


# A `dp_rank` that is only taken narrows the fault to one engine; left out, it hits whoever of the pipeline is next.
FAULT_KINDS: dict[str, FaultKind] = {
    "kill_engine": FaultKind(("pipeline", "dp_rank")),
    "hang_engine": FaultKind(("pipeline", "dp_rank")),
    "slow_engine": FaultKind(("pipeline", "dp_rank", "factor"), ("duration",)),
    "false_release": FaultKind(("pipeline",), ("dp_rank", "duration", "count")),
    "leak_residue": FaultKind(("pipeline", "gib"), ("dp_rank", "count")),
    "kill_trainer": FaultKind(("pipeline",)),
    "hang_trainer": FaultKind(("pipeline",)),
    "fail_sync": FaultKind(("pipeline",), ("dp_rank", "count")),
    "lose_message": FaultKind(("pipeline",), ("count",)),
    "delay_message": FaultKind(("pipeline", "duration"), ("count",)),
    "duplicate_message": FaultKind(("pipeline",), ("count",)),
    "kill_client": FaultKind(("pipeline",)),
    "remove_node": FaultKind(("node",)),
    "restart_control_plane": FaultKind((), ("duration",)),
}


def load_scenario(path: Path) -> Scenario:
    """The scenario in a YAML file. Raises ConfigError, whatever is in the file or the way."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as bad:
        raise ConfigError(one_line(str(path)), bad.strerror or type(bad).__name__) from None
    except ValueError as bad:
        reason = "is not UTF-8 text" if isinstance(bad, UnicodeDecodeError) else str(bad)
        raise ConfigError(one_line(str(path)), reason) from None
    return parse_scenario(text, str(path))


def parse_scenario(text: str, where: str) -> Scenario:
    """The scenario in a YAML text. `where` names it in messages; CSV files are looked for beside it.

    Raises ConfigError.
    """
    name = one_line(where)
    document = parse_yaml(text, name)
    if document is None:
        raise ConfigError(name, "the file is empty")
    try:
        scenario = _scenario(Table(document, "", SCENARIO_KEYS), where)
        check_references(scenario)
    except ConfigError as bad:
        raise within(name, bad) from None
    return scenario


# --- the world ------------------------------------------------------------------------------------------


def _scenario(table: Table, where: str) -> Scenario:
    rows = table.rows("pipelines")
    if not rows:
        raise ConfigError("pipelines", "missing", "declare at least one pipeline")
    return Scenario(
        name=table.text("name", one_line(Path(where).stem) or "scenario"),
        cluster=_cluster(table.table("cluster", CLUSTER_KEYS)),
        jobs=tuple(_job(Table(row, at, PIPELINE_KEYS), Path(where).parent) for at, row in rows),
        driver=table.choice("driver", DriverPolicy.ISOLATE),
        demand=table.choice("demand", DemandPolicy.BATCH),
        seed=table.whole("seed", 0, most=MOST_SEED),
        faults=tuple(_fault(Table(row, at, FAULT_KEYS)) for at, row in table.rows("faults")),
        expect=_expect(table.table("expect", EXPECT_KEYS)) if table.has("expect") else None,
    )


def _cluster(table: Table) -> Cluster:
    cluster = Cluster(
        nodes=table.whole("nodes", defaults.CLUSTER_NODES, least=1),
        gpus_per_node=table.whole("gpus_per_node", least=1),
        gpu_memory=table.gib("gpu_memory_gib", defaults.GPU_MEMORY),
        host_memory=table.gib("host_memory_gib", defaults.HOST_MEMORY),
        memory_margin=table.gib("memory_margin_gib", 0),
    )
    if not cluster.gpu_memory:
        raise ConfigError(table.at("gpu_memory_gib"), "must be more than 0 GiB")
    return cluster


def _expect(table: Table) -> Expect:
    return Expect(
        outcome=read_word(table.get("outcome"), table.at("outcome"), OUTCOMES) if table.has("outcome") else None,
        max_wait=table.seconds("max_wait_s") if table.has("max_wait_s") else None,
        violations=tuple(read_word(rule, at, RULES) for at, rule in table.rows("violations")),
        max_makespan=table.seconds("max_makespan_s") if table.has("max_makespan_s") else None,
        min_handovers=table.whole("min_handovers") if table.has("min_handovers") else None,
        failed=tuple(read_text(name, at) for at, name in table.rows("failed")) if table.has("failed") else None,
    )


def _fault(table: Table) -> Fault:
    name = read_word(table.need("kind"), table.at("kind"), tuple(FAULT_KINDS))
    kind = FAULT_KINDS[name]
    for key in FAULT_KEYS[2:]:
        if key in kind.needs and not table.has(key):
            raise ConfigError(table.at(key), "missing", f"{name} needs {', '.join(kind.needs)}")
        if key not in kind.needs + kind.takes and table.has(key):
            takes = ", ".join(kind.needs + kind.takes)
            raise ConfigError(table.at(key), f"{name} takes no {key}", f"beside at and kind it takes {takes}")
    return Fault(
        at=table.seconds("at"),
        kind=name,
        pipeline=table.text("pipeline", ""),
        dp_rank=table.whole("dp_rank", -1),
        node=table.whole("node", -1),
        duration=table.seconds("duration", 0, positive=True),
        factor=_factor(table),
        bytes=table.gib("gib", 0),
        count=table.whole("count", 1, least=1),
    )


def _factor(table: Table) -> float:
    if not table.has("factor"):
        return 1.0
    factor = float(number(table.get("factor"), table.at("factor"), "a number", MOST_FACTOR))
    if factor < 1:
        raise ConfigError(table.at("factor"), f"{factor} would not slow anything down", "1 or more: times as slow")
    return factor


# --- one pipeline ---------------------------------------------------------------------------------------


def _job(table: Table, folder: Path) -> Job:
    costs = _costs(table, folder)
    prompts, samples = _batch(table)
    reissue_after = table.seconds("reissue_after_s", defaults.reissue_after(costs), positive=True)
    max_attempts = table.whole("max_attempts", defaults.MAX_ATTEMPTS, least=1)
    return Job(
        spec=_spec(table, costs, defaults.suspicion(reissue_after, max_attempts)),
        steps=table.whole("steps", least=1),
        target=prompts * samples,
        samples_per_prompt=samples,
        costs=costs,
        workload=read_workload(table.table("workload", WORKLOAD_KEYS), folder),
        start_at=table.seconds("start_at", 0),
        start_after=_trigger(table, "start_after"),
        dispatch_after=_trigger(table, "dispatch_after"),
        reissue_after=reissue_after,
        max_attempts=max_attempts,
        old_log_probs=table.flag("old_log_probs", False),
        evaluation=_evaluation(table),
        reward_s=_reward(table),
    )


def _spec(table: Table, costs: Costs, suspicion: int) -> PipelineSpec:
    residence = table.seconds("min_residence_s", defaults.min_residence(costs))
    name = table.text("id")
    check_id(name, table.at("id"))
    return PipelineSpec(
        id=name,
        groups=_groups(table),
        limits=_limits(table, defaults.limits(costs, residence)),
        memory=_memory(table.table("memory", MEMORY_KEYS)),
        staleness=table.whole("staleness", 0, most=1000),
        min_residence=residence,
        suspicion=suspicion,
        on_preempt=table.choice("on_preempt", OnPreempt.ABORT),
        partial=table.choice("partial", Partial.RESTART),
        in_flight_updates=table.flag("in_flight_updates", False),
        overlap=table.choice("overlap", Overlap.ANY),
    )


def _groups(table: Table) -> tuple[WorkerGroup, ...]:
    for role in (Role.ACTOR_TRAIN, Role.ACTOR_INFER):
        table.need(ROLE_KEYS[role])
    roles = [role for role in Role if role is not Role.REWARD and table.has(ROLE_KEYS[role])]
    return tuple(_group(table.table(ROLE_KEYS[role], GROUP_KEYS), role) for role in roles)


def _group(table: Table, role: Role) -> WorkerGroup:
    table.need("gpus")
    gpus = tuple(read_whole(gpu, at, least=-1_000_000) for at, gpu in table.rows("gpus"))
    return WorkerGroup(role=role, gpus=gpus, tp=table.whole("tp", 1, least=1))


def _reward(table: Table) -> int:
    value = table.get("reward")
    if isinstance(value, dict) and "gpus" in value:
        raise ConfigError(table.at("reward.gpus"), "reward runs on CPU and has no GPUs", "remove 'gpus'")
    return table.table("reward", REWARD_KEYS).seconds("seconds", 0)


def _batch(table: Table) -> tuple[int, int]:
    """(prompts, samples of each)."""
    table.need("batch")
    batch = table.table("batch", BATCH_KEYS)
    return batch.whole("prompts", least=1), batch.whole("samples_per_prompt", 1, least=1)


def _evaluation(table: Table) -> Evaluation | None:
    if not table.has("eval"):
        return None
    every = table.table("eval", EVAL_KEYS)
    return Evaluation(every=every.whole("every", least=1), trajectories=every.whole("trajectories", least=1))


def _trigger(table: Table, key: str) -> Trigger | None:
    if not table.has(key):
        return None
    trigger = table.table(key, TRIGGER_KEYS)
    event = read_word(trigger.need("event"), trigger.at("event"), TRIGGER_EVENTS)
    return Trigger(pipeline=trigger.text("pipeline"), event=event)


def _costs(pipeline: Table, folder: Path) -> Costs:
    """`costs` is a table, or the name of a set that it would have under `set`."""
    given = pipeline.get("costs")
    if isinstance(given, str):
        table = Table({"set": given}, pipeline.at("costs"), COST_KEYS)
    else:
        table = pipeline.table("costs", COST_KEYS)
    critic = pipeline.has("critic")
    passes = critic or pipeline.has("reference") or pipeline.flag("old_log_probs", False)
    return _read_costs(table, folder, critic=critic, passes=passes)


def named_costs(name: str, job: Job) -> Costs:
    """The costs of `job` if it had said no more than `costs: name`; it keeps its slots. Raises ConfigError."""
    table = Table({"set": name, "engine_slots": job.costs.engine_slots}, "costs", COST_KEYS)
    critic, reference = (job.spec.group(role) is not None for role in (Role.CRITIC, Role.REFERENCE))
    return _read_costs(table, Path(), critic=critic, passes=critic or reference or job.old_log_probs)


def _read_costs(table: Table, folder: Path, *, critic: bool, passes: bool) -> Costs:
    """`passes`: somebody asks for log-probs or values."""
    base: dict[str, Any] = {}
    if table.has("set"):
        base = defaults.COST_SETS[read_word(table.get("set"), table.at("set"), tuple(defaults.COST_SETS))].costs

    def value(key: str) -> object:
        return table.get(key) if table.has(key) else base.get(key)

    def cost(key: str, default: Cost) -> Cost:
        return default if value(key) is None else read_cost(value(key), table.at(key), folder)

    phases = {key: cost(key, defaults.cost(key)) for key in PHASE_KEYS}
    trajectory = value("trajectory")
    if trajectory is not None:
        trajectory = read_durations(trajectory, table.at("trajectory"), folder)
    return Costs(
        **phases,
        restart=cost("restart", phases["init"]),
        log_probs=cost("log_probs", defaults.log_probs(most(phases["train"])) if passes else 0),
        critic_train=cost("critic_train", phases["train"] if critic else 0),
        engine_slots=table.whole("engine_slots", defaults.ENGINE_SLOTS, least=1),
        trajectory=trajectory or defaults.TRAJECTORY,
        **{key: cost(key, 0) for key in LATENCY_KEYS},
        release=None if value("release") is None else cost("release", 0),
    )


def _memory(table: Table) -> MemoryNeeds:
    train = table.gib("train_gib", defaults.TRAIN_MEMORY)
    engine = table.gib("engine_gib", defaults.ENGINE_MEMORY)
    residue = table.gib("residue_gib", defaults.RESIDUE)
    if residue > min(train, engine):
        problem = f"{show_gib(residue)} asleep is more than {show_gib(min(train, engine))} active"
        raise ConfigError(table.at("residue_gib"), problem, "what is active holds at least what it keeps asleep")
    return MemoryNeeds(
        train=train,
        engine=engine,
        residue=residue,
        init_peak=table.gib("init_peak_gib", train + engine),
        host_cache=table.gib("host_cache_gib", defaults.HOST_CACHE),
    )


def _limits(pipeline: Table, formulas: Limits) -> Limits:
    table = pipeline.table("limits", LIMIT_KEYS)
    if table.has("hold_s") and pipeline.has("max_hold_s"):
        raise ConfigError(table.at("hold_s"), "max_hold_s gives the same limit", "keep one of the two")
    declared = {
        name: table.seconds(f"{name}_s", getattr(formulas, name), positive=True)
        for name in Limits.__struct_fields__
    }
    declared["hold"] = pipeline.seconds("max_hold_s", declared["hold"], positive=True)
    return Limits(**declared)
