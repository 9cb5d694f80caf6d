"""Topologies: what is refused, in which words, and the ways to declare one."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Scenario
from core.errors import ConfigError, TopologyError
from core.model import Cluster, Limits, MemoryNeeds, Overlap, PipelineSpec, Role, WorkerGroup
from core.scenario_file import parse_scenario
from core.topology import (
    Placement,
    check_fit,
    check_spec,
    check_world,
    disjoint_topology,
    overlap_topology,
    remarks,
    topology_from,
    with_topology,
)
from core.units import gib

CLUSTER = Cluster(nodes=2, gpus_per_node=4, gpu_memory=gib(141), host_memory=gib(256))
LIMITS = Limits(hold=1, init=1, wake=1, sync=1, sleep=1, drain=1, release=1, quarantine=1, turn=1, command=1)


def spec(
    train: Sequence[int] = (0,), infer: Sequence[int] = (0, 1), tp: int = 1, name: str = "p1", **more: object
) -> PipelineSpec:
    groups = (
        WorkerGroup(role=Role.ACTOR_TRAIN, gpus=tuple(train)),
        WorkerGroup(role=Role.ACTOR_INFER, gpus=tuple(infer), tp=tp),
    )
    return PipelineSpec(**{"id": name, "groups": groups, "limits": LIMITS, **more})  # type: ignore[arg-type]


def refusal(declared: PipelineSpec, cluster: Cluster = CLUSTER) -> str:
    with pytest.raises(TopologyError) as caught:
        check_spec(cluster, declared)
    return str(caught.value)


def scenario(*mappings: tuple[Sequence[int], Sequence[int]], gpus: int = 2, extra: str = "") -> Scenario:
    rows = "".join(
        f"  - {{id: p{i}, train: {{gpus: {list(train)}}}, infer: {{gpus: {list(infer)}}}, "
        "steps: 1, batch: {prompts: 1}}\n"
        for i, (train, infer) in enumerate(mappings, start=1)
    )
    return parse_scenario(f"cluster: {{gpus_per_node: {gpus}}}\npipelines:\n{rows}{extra}", "x.yaml")


# --- one pipeline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (spec(infer=(0, 8)), "p1.infer: GPU 8 does not exist; the cluster has 8 GPUs, 0 to 7"),
        (spec(train=(-1,)), "p1.train: GPU -1 is negative; ids start at 0"),
        (spec(infer=(0, 1, 0)), "p1.infer: GPU 0 is listed twice"),
        (spec(train=()), "p1.train: has no GPUs; the cluster has 8 GPUs, 0 to 7"),
        (spec(tp=0), "p1.infer: tp 0 is less than 1"),
        (spec(infer=(0, 1, 2), tp=2), "p1.infer: 3 GPUs cannot be divided into TP groups of 2"),
        (spec(infer=(0, 2), tp=2),
         "p1.infer: TP group 0, GPUs [0, 2], is not contiguous; list 2 consecutive ids, ascending"),
        (spec(infer=(1, 0), tp=2),
         "p1.infer: TP group 0, GPUs [1, 0], is not contiguous; list 2 consecutive ids, ascending"),
        (spec(infer=(0, 1, 3, 4), tp=2), "p1.infer: TP group 1, GPUs [3, 4], crosses nodes; a node has 4 GPUs"),
        (spec(infer=(1, 2, 3, 4), tp=4),
         "p1.infer: TP group 0, GPUs [1, 2, 3, 4], does not start at a node; nodes start at multiples of 4"),
        (spec(infer=range(6), tp=6), "p1.infer: tp 6 is more than the 4 GPUs of a node, but no multiple of them"),
        (spec(train=(2, 0), overlap=Overlap.PARTIAL),
         "p1.train: GPUs [2] are not in [0, 1]; partial overlap trains on a subset of the inference GPUs"),
        (spec(overlap=Overlap.NONE), "p1.train: GPUs [0] are in infer too, but overlap is none"),
        (spec(groups=(WorkerGroup(role=Role.ACTOR_TRAIN, gpus=(0,)),)),
         "p1: has no actor_infer group; declare 'infer' with its GPUs"),
        (spec(groups=(WorkerGroup(role=Role.ACTOR_INFER, gpus=(0,)),)),
         "p1: has no actor_train group; declare 'train' with its GPUs"),
        (spec(groups=(*spec().groups, WorkerGroup(role=Role.ACTOR_INFER, gpus=(2,)))),
         "p1.infer: declared 2 times; one group a role"),
        (spec(groups=(*spec().groups, WorkerGroup(role=Role.REWARD, gpus=(2,)))),
         "p1.reward: runs on CPU, but has GPUs [2]; remove them"),
    ],
)  # fmt: skip
def test_an_impossible_pipeline_is_refused_with_what_is_wrong(declared: PipelineSpec, said: str) -> None:
    assert refusal(declared) == said


def test_tp_may_be_whole_nodes_and_mappings_of_any_order() -> None:
    check_spec(CLUSTER, spec(infer=range(8), tp=8))
    check_spec(CLUSTER, spec(infer=(4, 5, 6, 7, 0, 1, 2, 3), tp=4))
    check_spec(CLUSTER, spec(infer=(7, 3, 5)))
    check_spec(CLUSTER, spec(groups=(*spec().groups, WorkerGroup(role=Role.REWARD, gpus=()))))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\n", "x" * 65])
def test_an_id_that_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_spec(CLUSTER, spec(name=name))


def test_numbers_below_zero_are_refused() -> None:
    for bad in (
        spec(limits=msgspec.structs.replace(LIMITS, wake=0)), spec(memory=MemoryNeeds(train=-1)), spec(staleness=-1)
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            check_spec(CLUSTER, bad)


groups_of_gpus = st.one_of(
    st.builds(lambda first, size: tuple(range(first, first + size)), st.integers(0, 4), st.integers(1, 8)),
    st.lists(st.integers(-1, 9), max_size=8).map(tuple),
)


@settings(max_examples=300, deadline=None)
@given(
    groups_of_gpus, groups_of_gpus, st.integers(-1, 9), st.sampled_from(Overlap), st.integers(1, 3), st.integers(1, 4)
)
def test_a_mapping_is_accepted_exactly_if_every_rule_holds(
    train: tuple[int, ...], infer: tuple[int, ...], tp: int, overlap: Overlap, nodes: int, per_node: int
) -> None:
    cluster = Cluster(nodes=nodes, gpus_per_node=per_node, gpu_memory=gib(1), host_memory=gib(1))
    try:
        check_spec(cluster, spec(train, infer, tp, overlap=overlap))
        accepted = True
    except TopologyError:
        accepted = False
    assert accepted == _legal(cluster, train, infer, tp, overlap)


def _legal(cluster: Cluster, train: tuple[int, ...], infer: tuple[int, ...], tp: int, overlap: Overlap) -> bool:
    """The rules once more, as sets: a group lies in one node, or is whole nodes."""
    for gpus in (train, infer):
        if not gpus or len(set(gpus)) < len(gpus) or not set(gpus) <= set(range(cluster.gpus)):
            return False
    if tp < 1 or len(infer) % tp:
        return False
    for i in range(0, len(infer), tp):
        bundle = infer[i : i + tp]
        if list(bundle) != list(range(min(bundle), min(bundle) + tp)):
            return False
        touched = {cluster.node_of(gpu) for gpu in bundle}
        if len(touched) > 1 and len(touched) * cluster.gpus_per_node != tp:
            return False
    promised = {Overlap.ANY: True, Overlap.PARTIAL: set(train) <= set(infer), Overlap.NONE: not set(train) & set(infer)}
    return promised[overlap]


# --- memory ---------------------------------------------------------------------------------------------


def needs(train: float = 40, engine: float = 60, residue: float = 1, init: float = 0, cache: float = 2) -> MemoryNeeds:
    return MemoryNeeds(
        train=gib(train), engine=gib(engine), residue=gib(residue), init_peak=gib(init), host_cache=gib(cache)
    )


def unfit(admitted: Sequence[PipelineSpec], declared: PipelineSpec, cluster: Cluster = CLUSTER) -> str:
    with pytest.raises(TopologyError) as caught:
        check_fit(cluster, admitted, declared)
    return str(caught.value)


def test_what_cannot_fit_is_refused_with_the_sum() -> None:
    first = spec(infer=(0, 3), memory=needs())
    second = spec(train=(3,), infer=(2, 3), name="p2", memory=needs(train=140))
    assert unfit([first], second) == (
        "GPU 3: sleeping residues p1 1 + p2 1 + largest tenant p2 train 140 + margin 0 = 142 GiB, but it has 141 GiB"
    )
    check_fit(CLUSTER, [first], spec(train=(3,), infer=(2, 3), name="p2", memory=needs(train=139)))


def test_the_margin_counts() -> None:
    cluster = msgspec.structs.replace(CLUSTER, memory_margin=gib(2.5))
    check_fit(cluster, [], spec(train=(7,), memory=needs(train=138.5)))
    assert unfit([], spec(train=(7,), memory=needs(train=139)), cluster) == (
        "GPU 7: largest tenant p1 train 139 + margin 2.5 = 141.5 GiB, but it has 141 GiB"
    )


def test_initialisation_peaks_beside_the_residues_of_others() -> None:
    first = spec(memory=needs(residue=2))
    assert unfit([first], spec(name="p2", memory=needs(init=138))) == (
        "GPU 0: sleeping residues p1 4 + largest tenant p2 init 138 + margin 0 = 142 GiB, but it has 141 GiB"
    )
    check_fit(CLUSTER, [first], spec(name="p2", memory=needs(init=137)))


def test_a_newcomer_whose_residue_leaves_no_room_for_those_admitted_is_refused() -> None:
    first = spec(train=(0,), infer=(1,), memory=needs(engine=140.5))
    assert "largest tenant p1 infer 140.5" in unfit([first], spec(train=(1,), infer=(2,), name="p2", memory=needs()))


def test_ten_sleeping_processes_are_all_counted() -> None:
    admitted = [spec(train=(5,), infer=(6,), name=f"p{i}", memory=needs(residue=0.5)) for i in range(10)]
    check_fit(CLUSTER, admitted, spec(train=(5,), infer=(6,), name="last", memory=needs(train=136)))
    said = unfit(admitted, spec(train=(5,), infer=(6,), name="last", memory=needs(train=136.5)))
    assert said.endswith("p8 0.5 + p9 0.5 + largest tenant last train 136.5 + margin 0 = 141.5 GiB, but it has 141 GiB")


def test_cached_weight_versions_fill_the_host_memory_of_a_node() -> None:
    first = spec(memory=needs(cache=100))
    check_fit(CLUSTER, [first], spec(train=(4,), infer=(4, 5), name="p2", memory=needs(cache=100)))
    assert unfit([first], spec(name="p2", staleness=1, memory=needs(cache=20))) == (
        "host memory of node 0: cached weight versions p1 2 x 100 + p2 3 x 20 = 260 GiB, but it has 256 GiB"
    )


memories = st.builds(needs, *[st.integers(8, 20)] * 2, st.integers(0, 8), st.integers(0, 30), st.just(0))
tenants = st.lists(st.tuples(memories, st.booleans(), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(tenants, st.integers(0, 2))
def test_the_budget_is_the_worst_moment_over_all_tenants(
    declared: list[tuple[MemoryNeeds, bool, bool]], margin: int
) -> None:
    cluster = Cluster(nodes=1, gpus_per_node=3, gpu_memory=gib(40), memory_margin=gib(margin), host_memory=0)
    specs = [spec((0 if t else 1,), (0 if i else 2,), name=f"p{n}", memory=m) for n, (m, t, i) in enumerate(declared)]
    try:
        for i, one in enumerate(specs):
            check_fit(cluster, specs[:i], one)
        fits = True
    except TopologyError:
        fits = False
    assert fits == all(_worst(specs, gpu) + gib(margin) <= gib(40) for gpu in range(3))


def _worst(specs: list[PipelineSpec], gpu: int) -> int:
    """Try every tenant: all its own processes here, and everyone else's, are asleep but the active one."""
    processes = [(s, g.role) for s in specs for g in s.groups if gpu in g.gpus]
    sums = [0]
    for active, role in processes:
        need = active.memory.engine if role is Role.ACTOR_INFER else active.memory.train
        sums.append(need + sum(s.memory.residue for s, r in processes if (s, r) != (active, role)))
        init = max(active.memory.init_peak, sum(s.memory.residue for s, _ in processes if s is active))
        sums.append(init + sum(s.memory.residue for s, _ in processes if s is not active))
    return max(sums)


# --- the declared world ---------------------------------------------------------------------------------


def test_a_world_is_checked_as_a_whole() -> None:
    check_world(scenario(([0], [0, 1]), ([1], [0, 1])))
    with pytest.raises(TopologyError) as caught:
        check_world(scenario(([0], [0, 1]), ([1], [0, 2])))
    assert str(caught.value) == "p2.infer: GPU 2 does not exist; the cluster has 2 GPUs, 0 to 1"


def test_a_world_that_does_not_fit_is_refused_whatever_the_order() -> None:
    for order in ([0, 1], [1, 0]):
        world = scenario(([0], [0, 1]), ([1], [0, 1]))
        sizes = [needs(train=139), needs(residue=2)]
        jobs = [
            msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, memory=sizes[i]))
            for job, i in zip(world.jobs, order, strict=True)
        ]
        with pytest.raises(TopologyError, match="train 139"):
            check_world(msgspec.structs.replace(world, jobs=tuple(jobs)))


def test_a_cluster_needs_room_beside_its_margin() -> None:
    world = scenario(([0], [0, 1]))
    small = msgspec.structs.replace(world.cluster, memory_margin=gib(141))
    with pytest.raises(TopologyError, match="a margin of 141 GiB leaves nothing of a GPU's 141 GiB"):
        check_world(msgspec.structs.replace(world, cluster=small))


def test_remarks_name_unused_gpus_and_those_who_share_nothing() -> None:
    assert remarks(scenario(([0], [0, 1]), ([1], [0, 1]))) == []
    assert remarks(scenario(([0], [0, 1]), gpus=4)) == [
        "nobody uses 2 of the 4 declared GPUs: [2, 3]",
        "p1 is the only pipeline and shares its GPUs with nobody",
    ]
    assert remarks(scenario(([0], [0]), ([1], [1]))) == ["no two pipelines share a GPU"]
    assert remarks(scenario(([0], [0]), ([1], [0, 1]), ([2], [2]), gpus=3)) == [
        "p3 shares no GPU with any other pipeline"
    ]


def test_remarks_name_a_limit_below_what_it_limits() -> None:
    world = scenario(([0], [0, 1]), ([1], [0, 1]))
    limits = msgspec.structs.replace(world.jobs[0].spec.limits, sync=1_000_000)
    job = msgspec.structs.replace(world.jobs[0], spec=msgspec.structs.replace(world.jobs[0].spec, limits=limits))
    assert remarks(msgspec.structs.replace(world, jobs=(job, world.jobs[1]))) == [
        "p1: the sync limit of 0.001 s is below its usual 0.9 s"
    ]


# --- ways to declare a mapping --------------------------------------------------------------------------


def test_disjoint_slices_train_on_their_first_gpus_and_use_every_gpu() -> None:
    assert disjoint_topology(4, [[0, 1], [2, 3]], [1, 2]) == (Placement((0,), (0, 1)), Placement((2, 3), (2, 3)))
    for slices, sizes, said in (
        ([[0, 1], [2]], [1, 1], "disjoint: no slice has GPUs [3]; the slices must use every GPU"),
        ([[0, 1], [1, 2, 3]], [1, 1], "slice 1: GPU 1 is also in slice 0; slices share no GPU"),
        ([[0, 1], [2, 4]], [1, 1], "slice 1: GPU 4 does not exist; there are 4, counted from 0"),
        ([[0, 1], [2, 3]], [1, 3], "slice 1: cannot train on 3 of 2 GPUs; 1 or more, and at most all"),
        ([[0, 1], [2, 3]], [1], "disjoint: 2 slices and 1 train sizes do not match"),
    ):
        with pytest.raises(TopologyError) as caught:
            disjoint_topology(4, slices, sizes)
        assert str(caught.value) == said


def test_an_overlap_is_given_as_a_whole_or_not_at_all() -> None:
    assert overlap_topology(None, None, None, None) is None
    assert overlap_topology([0], [0, 1], [1], [0, 1]) == (Placement((0,), (0, 1)), Placement((1,), (0, 1)))
    with pytest.raises(ConfigError) as caught:
        overlap_topology([0], None, [1], None)
    assert str(caught.value) == "overlap topology: p1_infer, p2_infer missing; give all four mappings or none"


OPTIONS = {"p1_train": "0", "p1_infer": "0,1", "p2_train": "1", "p2_infer": "0, 1"}
ENVIRON = {f"TURNSTILE_{name.upper()}": text for name, text in OPTIONS.items()} | {"HOME": "/"}
OVERLAP = (Placement((0,), (0, 1)), Placement((1,), (0, 1)))


def test_options_come_before_the_environment_and_both_before_nothing() -> None:
    assert topology_from(OPTIONS, {"TURNSTILE_P1_TRAIN": "junk"}, 4) == (OVERLAP, "options")
    assert topology_from(dict.fromkeys(OPTIONS), ENVIRON, 4) == (OVERLAP, "environment")
    assert topology_from({}, {"HOME": "/"}, 4) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,x", "TURNSTILE_P1_INFER: 'x' is no GPU id; comma-separated GPU ids such as 0,1"),
        ("0,-1", "TURNSTILE_P1_INFER: '-1' is no GPU id; comma-separated GPU ids such as 0,1"),
        ("0,,1", "TURNSTILE_P1_INFER: an id is missing in '0,,1'; comma-separated GPU ids such as 0,1"),
        ("", "TURNSTILE_P1_INFER: an id is missing in ''; comma-separated GPU ids such as 0,1"),
        ("1,0,1", "TURNSTILE_P1_INFER: GPU 1 is listed twice"),
        (None, "environment: TURNSTILE_P1_INFER missing; give all four mappings or none"),
    ],
)
def test_a_bad_variable_is_named(text: str | None, said: str) -> None:
    environ = {k: v for k, v in (ENVIRON | {"TURNSTILE_P1_INFER": text}).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        topology_from({}, environ, 4)
    assert str(caught.value) == said


def test_a_partial_set_of_options_is_not_completed_from_the_environment() -> None:
    with pytest.raises(ConfigError) as caught:
        topology_from({"p1_train": "0"}, ENVIRON, 4)
    assert str(caught.value) == "options: --p1-infer, --p2-train, --p2-infer missing; give all four mappings or none"


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({}, optional={name: st.text(max_size=6) | st.just("0,1") for name in OPTIONS}))
def test_any_option_text_is_a_topology_or_a_config_error(options: dict[str, str]) -> None:
    try:
        found = topology_from(options, {}, 4)
    except ConfigError:
        return
    assert (found is None) == (not options)


def test_a_topology_replaces_the_mappings_of_the_first_pipelines_only() -> None:
    world = scenario(([0], [0]), ([1], [1]), ([0], [1]))
    changed = with_topology(world, OVERLAP, "environment")
    assert changed.topology_source == "environment"
    assert [[g.gpus for g in job.spec.groups] for job in changed.jobs] == [
        [(0,), (0, 1)], [(1,), (0, 1)], [(0,), (1,)]
    ]  # fmt: skip
    assert changed.cluster == world.cluster


def test_a_topology_that_does_not_fit_the_scenario_is_refused_with_its_source() -> None:
    with pytest.raises(TopologyError) as caught:
        with_topology(scenario(([0], [0]), ([1], [1])), (OVERLAP[0], Placement((1,), (1, 2))), "options")
    assert str(caught.value) == "options: p2.infer: GPU 2 does not exist; the cluster has 2 GPUs, 0 to 1"
    with pytest.raises(TopologyError) as caught:
        with_topology(scenario(([0], [0])), OVERLAP, "options")
    assert str(caught.value) == "options: maps 2 pipelines, but x has 1"


def test_a_fault_on_a_rank_that_a_new_topology_lacks_is_refused() -> None:
    fault = "faults: [{at: 1, kind: kill_engine, pipeline: p1, dp_rank: 1}]\n"
    changed = with_topology(scenario(([0], [0, 1]), extra=fault), (Placement((0,), (0,)),), "options")
    with pytest.raises(ConfigError, match="p1 has no engine 1; it has 1"):
        check_world(changed)


def test_slices_give_a_disjoint_topology_from_options_and_environment() -> None:
    both = (Placement((0,), (0, 1)), Placement((2, 3), (2, 3)))
    assert topology_from({"slices": "0,1/2,3", "train_sizes": "1,2"}, {}, 4) == (both, "options")
    environ = {"TURNSTILE_SLICES": "0,1 / 2,3", "TURNSTILE_TRAIN_SIZES": "1,2"}
    assert topology_from({}, environ, 4) == (both, "environment")
    whole = (Placement((0, 1), (0, 1)), Placement((2, 3), (2, 3)))
    assert topology_from({"slices": "0,1/2,3"}, {}, 4) == (whole, "options")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slices": "0,1/2"}, "options: disjoint: no slice has GPUs [3]; the slices must use every GPU"),
        ({"slices": "0,1/1,2,3"}, "options: slice 1: GPU 1 is also in slice 0; slices share no GPU"),
        ({"slices": "0,1/2,3,4"}, "options: slice 1: GPU 4 does not exist; there are 4, counted from 0"),
        ({"slices": "0,1/2,3", "train_sizes": "3,1"}, "options: slice 0: cannot train on 3 of 2 GPUs"),
        ({"slices": "0,1/2,3", "train_sizes": "1"}, "options: disjoint: 2 slices and 1 train sizes do not match"),
        ({"slices": "0,1/2,3", "train_sizes": "x,1"}, "--train-sizes: 'x,1' is no list of sizes"),
        ({"slices": "0,1/"}, "--slices: an id is missing in ''"),
        ({"train_sizes": "1,1"}, "options: --slices missing"),
        ({**OPTIONS, "slices": "0,1/2,3"}, "options: gives mappings and slices"),
    ],
)
def test_half_a_disjoint_topology_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        topology_from(options, {}, 4)
    assert str(refused.value).startswith(said)
