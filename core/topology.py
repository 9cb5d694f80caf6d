"""What was declared, validated: mappings, TP groups, nodes, memory budgets. And the ways to declare a mapping.

1. Every check is pure and raises `TopologyError`, whose place is `pipeline.role` and whose text has the numbers.
2. `check_spec` looks at one pipeline, `check_fit` at its memory beside everyone admitted, `check_world` at a whole
   scenario before time 0. The scheduler runs the first two again at registration and admission.
3. Declaring is not checking: a mapping from options or the environment is checked like one from the file.

Whether memory suffices is `core.budget`'s to say.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from core.budget import check_fit as check_fit
from core.budget import check_memory
from core.config import Fault, Job, Scenario
from core.errors import ConfigError, TopologyError
from core.lengths import usual
from core.model import ROLE_KEYS, Cluster, Overlap, PipelineSpec, Role, WorkerGroup
from core.units import show_gib, show_s

NEEDED = (Role.ACTOR_TRAIN, Role.ACTOR_INFER)
MOST_ID = 64
# A bound for mistyped numbers, a hundred times the largest cluster this is built for.
MOST_GPUS = 100_000


# --- one pipeline ---------------------------------------------------------------------------------------


def check_cluster(cluster: Cluster) -> None:
    """Raises TopologyError unless the cluster has nodes, GPUs and memory."""
    if cluster.nodes < 1 or cluster.gpus_per_node < 1:
        raise TopologyError("cluster", f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs are no cluster")
    if cluster.gpus > MOST_GPUS:
        raise TopologyError("cluster", f"{cluster.gpus} GPUs are too many", f"at most {MOST_GPUS}")
    if not 0 <= cluster.memory_margin < cluster.gpu_memory:
        margin, memory = show_gib(cluster.memory_margin), show_gib(cluster.gpu_memory)
        raise TopologyError("cluster", f"a margin of {margin} leaves nothing of a GPU's {memory}")
    if cluster.host_memory < 0:
        raise TopologyError("cluster", "host memory is negative")


def check_id(name: str, where: str) -> None:
    """Raises ConfigError unless `name` can name a pipeline: it appears in messages, file names and `pipeline/rank`."""
    if not name:
        raise ConfigError(where, "the id is empty")
    if len(name) > MOST_ID:
        raise ConfigError(where, f"the id has {len(name)} characters", f"at most {MOST_ID}")
    if not name.isprintable() or "/" in name or any(c.isspace() for c in name):
        raise ConfigError(where, f"the id {name!r} must be printable, without '/' and spaces")


def check_spec(cluster: Cluster, spec: PipelineSpec) -> None:
    """Raises TopologyError (or ConfigError, for its id and numbers) if this pipeline cannot exist by itself."""
    check_id(spec.id, "pipeline")
    roles = [group.role for group in spec.groups]
    for role in NEEDED:
        if role not in roles:
            raise TopologyError(spec.id, f"has no {role} group", f"declare {ROLE_KEYS[role]!r} with its GPUs")
    for role in roles:
        if roles.count(role) > 1:
            raise TopologyError(_place(spec, role), f"declared {roles.count(role)} times", "one group a role")
    for group in spec.groups:
        check_group(cluster, group, _place(spec, group.role))
    _check_overlap(spec)
    _check_numbers(spec)


def _place(spec: PipelineSpec, role: Role) -> str:
    return f"{spec.id}.{ROLE_KEYS[role]}"


def check_group(cluster: Cluster, group: WorkerGroup, where: str) -> None:
    if group.role is Role.REWARD:
        if group.gpus:
            raise TopologyError(where, f"runs on CPU, but has GPUs {_ids(group.gpus)}", "remove them")
        return
    if not group.gpus:
        raise TopologyError(where, "has no GPUs", f"the cluster has {_range(cluster)}")
    seen: set[int] = set()
    for gpu in group.gpus:
        _check_gpu(cluster, gpu, where)
        if gpu in seen:
            raise TopologyError(where, f"GPU {gpu} is listed twice")
        seen.add(gpu)
    _check_bundles(cluster, group, where)


def _check_gpu(cluster: Cluster, gpu: int, where: str) -> None:
    if gpu < 0:
        raise TopologyError(where, f"GPU {gpu} is negative", "ids start at 0")
    if gpu >= cluster.gpus:
        raise TopologyError(where, f"GPU {gpu} does not exist", f"the cluster has {_range(cluster)}")


def _check_bundles(cluster: Cluster, group: WorkerGroup, where: str) -> None:
    tp, node = group.tp, cluster.gpus_per_node
    if tp < 1:
        raise TopologyError(where, f"tp {tp} is less than 1")
    if len(group.gpus) % tp:
        raise TopologyError(where, f"{len(group.gpus)} GPUs cannot be divided into TP groups of {tp}")
    if tp > node and tp % node:
        raise TopologyError(where, f"tp {tp} is more than the {node} GPUs of a node, but no multiple of them")
    for rank in range(group.size):
        bundle = group.bundle(rank)
        if (found := _bundle_problem(bundle, node)) is not None:
            problem, remedy = found
            raise TopologyError(where, f"TP group {rank}, GPUs {_ids(bundle)}, {problem}", remedy)


def _bundle_problem(bundle: tuple[int, ...], node: int) -> tuple[str, str] | None:
    """Why these GPUs cannot be one TP group, and the remedy. `node`: GPUs of a node."""
    first, tp = bundle[0], len(bundle)
    if bundle != tuple(range(first, first + tp)):
        return "is not contiguous", f"list {tp} consecutive ids, ascending"
    if tp >= node and first % node:
        return "does not start at a node", f"nodes start at multiples of {node}"
    if tp < node and first // node != bundle[-1] // node:
        return "crosses nodes", f"a node has {node} GPUs"
    return None


def _check_overlap(spec: PipelineSpec) -> None:
    train, infer = spec.group(Role.ACTOR_TRAIN), spec.infer
    assert train is not None, "check_spec looks for the needed groups first"
    shared = set(train.gpus) & set(infer.gpus)
    outside = [gpu for gpu in train.gpus if gpu not in shared]
    if spec.overlap is Overlap.PARTIAL and outside:
        remedy = "partial overlap trains on a subset of the inference GPUs"
        raise TopologyError(_place(spec, train.role), f"GPUs {_ids(outside)} are not in {_ids(infer.gpus)}", remedy)
    if spec.overlap is Overlap.NONE and shared:
        problem = f"GPUs {_ids(sorted(shared))} are in infer too, but overlap is none"
        raise TopologyError(_place(spec, train.role), problem)


def _check_numbers(spec: PipelineSpec) -> None:
    for name, limit in msgspec.structs.asdict(spec.limits).items():
        if limit <= 0:
            raise ConfigError(f"{spec.id}.limits.{name}", f"{limit} ns is no limit", "it must be more than 0")
    for name, amount in msgspec.structs.asdict(spec.memory).items():
        if amount < 0:
            raise ConfigError(f"{spec.id}.memory.{name}", f"{amount} bytes is negative")
    if spec.staleness < 0 or spec.min_residence < 0:
        raise ConfigError(spec.id, f"staleness {spec.staleness} or min_residence {spec.min_residence} is negative")


def _ids(gpus: Iterable[int]) -> str:
    """GPU ids for a message; of a long list the first ones."""
    listed = list(gpus)
    return "[" + ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "") + "]"


def _range(cluster: Cluster) -> str:
    return f"{cluster.gpus} GPUs, 0 to {cluster.gpus - 1}" if cluster.gpus > 1 else "1 GPU, 0"


# --- the declared world ---------------------------------------------------------------------------------


def check_world(scenario: Scenario) -> None:
    """Everything that can be refused before time 0. Raises ConfigError, or TopologyError."""
    check_cluster(scenario.cluster)
    specs = [job.spec for job in scenario.jobs]
    for spec in specs:
        check_spec(scenario.cluster, spec)
    check_references(scenario)
    check_memory(scenario.cluster, specs, range(scenario.cluster.gpus))


def check_references(scenario: Scenario) -> None:
    """Ids are unique, and whatever names a pipeline, a rank or a node names one that exists. Raises ConfigError."""
    ids: dict[str, int] = {}
    for i, job in enumerate(scenario.jobs):
        if job.spec.id in ids:
            raise ConfigError(f"pipelines[{i}].id", f"{job.spec.id!r} is also the id of pipelines[{ids[job.spec.id]}]")
        ids[job.spec.id] = i
    for i, job in enumerate(scenario.jobs):
        for key, trigger in (("start_after", job.start_after), ("dispatch_after", job.dispatch_after)):
            if trigger:
                _check_pipeline(trigger.pipeline, ids, f"pipelines[{i}].{key}.pipeline")
    _check_order(scenario.jobs, ids)
    for i, fault in enumerate(scenario.faults):
        _check_fault(scenario, fault, ids, f"faults[{i}]")
    for i, name in enumerate((scenario.expect and scenario.expect.failed) or ()):
        _check_pipeline(name, ids, f"expect.failed[{i}]")


def _check_pipeline(name: str, ids: Iterable[str], where: str) -> None:
    known = list(ids)
    if name not in known:
        raise ConfigError(where, f"no pipeline is called {name!r}", f"known: {', '.join(known[:20])}")


def _check_order(jobs: Sequence[Job], ids: Mapping[str, int]) -> None:
    """Nobody starts after itself, through others neither."""
    for i, job in enumerate(jobs):
        chain = [job.spec.id]
        while (trigger := jobs[ids[chain[-1]]].start_after) is not None and len(chain) <= len(jobs):
            chain.append(trigger.pipeline)
            if trigger.pipeline == job.spec.id:
                problem = f"{' starts after '.join(chain)}: none of them can ever start"
                raise TopologyError(f"pipelines[{i}].start_after", problem)


def _check_fault(scenario: Scenario, fault: Fault, ids: Mapping[str, int], where: str) -> None:
    if fault.pipeline:
        _check_pipeline(fault.pipeline, ids, f"{where}.pipeline")
    if fault.dp_rank >= 0:
        size = scenario.jobs[ids[fault.pipeline]].spec.infer.size
        if fault.dp_rank >= size:
            problem = f"{fault.pipeline} has no engine {fault.dp_rank}"
            raise ConfigError(f"{where}.dp_rank", problem, f"it has {size}, counted from 0")
    if fault.node >= scenario.cluster.nodes:
        problem = f"node {fault.node} does not exist"
        raise ConfigError(f"{where}.node", problem, f"the cluster has {scenario.cluster.nodes}, counted from 0")


def remarks(scenario: Scenario) -> list[str]:
    """What is legal but probably not meant; said once, at the start."""
    users: dict[int, list[str]] = {gpu: [] for gpu in range(scenario.cluster.gpus)}
    for job in scenario.jobs:
        for gpu in job.spec.union:
            users.setdefault(gpu, []).append(job.spec.id)
    found = []
    unused = [gpu for gpu, names in users.items() if not names]
    if unused:
        found.append(f"nobody uses {len(unused)} of the {scenario.cluster.gpus} declared GPUs: {_ids(unused)}")
    alone = [job.spec.id for job in scenario.jobs if all(len(users[gpu]) == 1 for gpu in job.spec.union)]
    if len(scenario.jobs) == 1:
        found.append(f"{alone[0]} is the only pipeline and shares its GPUs with nobody")
    elif len(alone) == len(scenario.jobs):
        found.append("no two pipelines share a GPU")
    else:
        found += [f"{name} shares no GPU with any other pipeline" for name in alone]
    return found + [line for job in scenario.jobs for line in _short_limits(job)]


def _short_limits(job: Job) -> list[str]:
    """Limits below the usual duration of what they limit: the pipeline would be cut off every time."""
    costs, limits, found = job.costs, job.spec.limits, []
    usually = {
        "hold": usual(costs.onload) + usual(costs.train) + usual(costs.publish) + usual(costs.offload),
        "init": usual(costs.init),
        "wake": usual(costs.wake),
        "sync": usual(costs.sync),
        "sleep": usual(costs.sleep),
    }
    for name, needs in usually.items():
        limit = getattr(limits, name)
        if limit < needs:
            found.append(f"{job.spec.id}: the {name} limit of {show_s(limit)} is below its usual {show_s(needs)}")
    return found


# --- ways to declare a mapping --------------------------------------------------------------------------


class Placement(NamedTuple):
    """Train and inference GPUs of one pipeline."""

    train: tuple[int, ...]
    infer: tuple[int, ...]


OVERLAP_NAMES = ("p1_train", "p1_infer", "p2_train", "p2_infer")
"""The explicit topology: who trains and rolls out where, in GPU ids."""

DISJOINT_NAMES = ("slices", "train_sizes")
"""The disjoint topology: each pipeline's own slice, as in `0,1/2,3`, and on how many of its GPUs it trains (all)."""


def disjoint_topology(
    n_gpus: int, slices: Sequence[Sequence[int]], train_sizes: Sequence[int]
) -> tuple[Placement, ...]:
    """Each pipeline its own slice: inference on all of it, training on its first `train_sizes[i]` GPUs.

    Raises TopologyError unless the slices share no GPU and use every one of `n_gpus`.
    """
    if not slices or len(slices) != len(train_sizes):
        raise TopologyError("disjoint", f"{len(slices)} slices and {len(train_sizes)} train sizes do not match")
    owner: dict[int, int] = {}
    for i, part in enumerate(slices):
        for gpu in part:
            if not 0 <= gpu < n_gpus:
                raise TopologyError(f"slice {i}", f"GPU {gpu} does not exist", f"there are {n_gpus}, counted from 0")
            if gpu in owner:
                raise TopologyError(f"slice {i}", f"GPU {gpu} is also in slice {owner[gpu]}", "slices share no GPU")
            owner[gpu] = i
        if not 1 <= train_sizes[i] <= len(part):
            problem = f"cannot train on {train_sizes[i]} of {len(part)} GPUs"
            raise TopologyError(f"slice {i}", problem, "1 or more, and at most all")
    unused = [gpu for gpu in range(n_gpus) if gpu not in owner]
    if unused:
        raise TopologyError("disjoint", f"no slice has GPUs {_ids(unused)}", "the slices must use every GPU")
    return tuple(Placement(tuple(part[:n]), tuple(part)) for part, n in zip(slices, train_sizes, strict=True))


def overlap_topology(
    p1_train: Sequence[int] | None,
    p1_infer: Sequence[int] | None,
    p2_train: Sequence[int] | None,
    p2_infer: Sequence[int] | None,
) -> tuple[Placement, Placement] | None:
    """Two pipelines with explicit mappings: all four or none (None). Raises ConfigError naming what is missing."""
    given = dict(zip(OVERLAP_NAMES, (p1_train, p1_infer, p2_train, p2_infer), strict=True))
    return _all_or_none(given, "overlap topology", {name: name for name in OVERLAP_NAMES})


def _all_or_none(
    given: Mapping[str, Sequence[int] | None], where: str, label: Mapping[str, str]
) -> tuple[Placement, Placement] | None:
    missing = [label[name] for name in OVERLAP_NAMES if given.get(name) is None]
    if len(missing) == len(OVERLAP_NAMES):
        return None
    if missing:
        raise ConfigError(where, f"{', '.join(missing)} missing", "give all four mappings or none")
    p1_train, p1_infer, p2_train, p2_infer = (tuple(given[name] or ()) for name in OVERLAP_NAMES)
    return Placement(p1_train, p1_infer), Placement(p2_train, p2_infer)


def topology_from(
    options: Mapping[str, str | None], environ: Mapping[str, str], n_gpus: int
) -> tuple[tuple[Placement, ...], str] | None:
    """The mappings given outside the scenario and their source: `options` first, else `environment`, else None.

    `options` has `p1_train` and so on (or `slices` and `train_sizes`) as text; the environment has
    `TURNSTILE_P1_TRAIN` and so on. Raises ConfigError for half a topology, for two at once, and for a disjoint one
    that does not use every one of `n_gpus`.
    """
    names = (*OVERLAP_NAMES, *DISJOINT_NAMES)
    flags = {name: "--" + name.replace("_", "-") for name in names}
    variables = {name: "TURNSTILE_" + name.upper() for name in names}
    for source, texts, labels in (
        ("options", options, flags),
        ("environment", {name: environ.get(variable) for name, variable in variables.items()}, variables),
    ):
        found = _declared({name: texts.get(name) for name in names}, source, labels, n_gpus)
        if found is not None:
            return found, source
    return None


def _declared(
    texts: Mapping[str, str | None], source: str, labels: Mapping[str, str], n_gpus: int
) -> tuple[Placement, ...] | None:
    """The one topology that one source declares, if it does."""
    overlap = _all_or_none({name: _parse_ids(texts[name], labels[name]) for name in OVERLAP_NAMES}, source, labels)
    slices, sizes = (texts[name] for name in DISJOINT_NAMES)
    if slices is None and sizes is None:
        return overlap
    if overlap is not None:
        raise ConfigError(source, "gives mappings and slices", "one topology, explicit or disjoint, not both")
    if slices is None:
        raise ConfigError(source, f"{labels['slices']} missing", f"{labels['train_sizes']} speaks of slices")
    parts = [_parse_ids(part, labels["slices"]) or () for part in slices.split("/")]
    trained = [len(part) for part in parts] if sizes is None else _parse_sizes(sizes, labels["train_sizes"])
    try:
        return disjoint_topology(n_gpus, parts, trained)
    except ConfigError as bad:
        raise within(source, bad) from None


def _parse_sizes(text: str, where: str) -> list[int]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        raise ConfigError(where, f"{text[:80]!r} is no list of sizes", "comma-separated numbers such as 1,2")
    return [int(size) for size in sizes]


def _parse_ids(text: str | None, where: str) -> tuple[int, ...] | None:
    """`0,1` as ids. None stays None; anything else that is no list of distinct ids raises ConfigError."""
    if text is None:
        return None
    ids: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        if not item:
            raise ConfigError(where, f"an id is missing in {text[:80]!r}", "comma-separated GPU ids such as 0,1")
        if not (item.isascii() and item.isdigit() and len(item) < 10):
            raise ConfigError(where, f"{item[:40]!r} is no GPU id", "comma-separated GPU ids such as 0,1")
        if int(item) in ids:
            raise ConfigError(where, f"GPU {int(item)} is listed twice")
        ids.append(int(item))
    return tuple(ids)


def with_topology(scenario: Scenario, topology: Sequence[Placement], source: str) -> Scenario:
    """The scenario with these mappings for its first pipelines; TP sizes, other groups and the cluster stay.

    Raises ConfigError, naming the source, if there are too few pipelines or a mapping does not fit the cluster.
    """
    if len(topology) > len(scenario.jobs):
        problem = f"maps {len(topology)} pipelines, but {scenario.name} has {len(scenario.jobs)}"
        raise TopologyError(source, problem)
    jobs = list(scenario.jobs)
    for i, placement in enumerate(topology):
        spec = _placed(jobs[i].spec, placement)
        try:
            check_spec(scenario.cluster, spec)
        except ConfigError as bad:
            raise within(source, bad) from None
        jobs[i] = msgspec.structs.replace(jobs[i], spec=spec)
    return msgspec.structs.replace(scenario, jobs=tuple(jobs), topology_source=source)


def _placed(spec: PipelineSpec, placement: Placement) -> PipelineSpec:
    gpus = {Role.ACTOR_TRAIN: placement.train, Role.ACTOR_INFER: placement.infer}
    groups = (msgspec.structs.replace(group, gpus=gpus.get(group.role, group.gpus)) for group in spec.groups)
    return msgspec.structs.replace(spec, groups=tuple(groups))


def within(where: str, error: ConfigError) -> ConfigError:
    """The same error, its place inside another (a file, say)."""
    return type(error)(f"{where}: {error.where}" if error.where else where, error.problem, error.remedy)
