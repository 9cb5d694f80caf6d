"""Scenario files: what they mean, and that whatever is wrong with one is a single line with its place."""

import json
import math
from copy import deepcopy
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from core import defaults, scenario_file
from core.config import Costs, DriverPolicy, Durations, Evaluation, Expect, Scenario, Trigger
from core.errors import ConfigError, TopologyError
from core.lengths import quantile
from core.model import DemandPolicy, Limits, OnPreempt, Overlap, Partial, Role
from core.scenario_file import FAULT_KINDS, load_scenario, parse_scenario
from core.units import gib, ns, ns_written
from core.workload import NUMBERS, WORKLOAD_KEYS, Workload, changed, settled

MINIMAL = """\
cluster: {gpus_per_node: 2}
pipelines:
  - id: p1
    train: {gpus: [0]}
    infer: {gpus: [0, 1]}
    steps: 3
    batch: {prompts: 8, samples_per_prompt: 4}
"""


def minimal(**pipeline: object) -> str:
    """The smallest scenario, its pipeline with other values for some keys."""
    document = yaml.safe_load(MINIMAL)
    document["pipelines"][0].update(pipeline)
    return json.dumps(document)


def with_fault(**fault: object) -> str:
    return json.dumps(yaml.safe_load(MINIMAL) | {"faults": [{"at": 1, **fault}]})


def error(text: str) -> str:
    """The one line a person reads."""
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text, "x.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what a file means ----------------------------------------------------------------------------------


def test_a_file_with_every_key_means_what_it_says() -> None:
    scenario = parse_scenario(
        """
        name: everything
        cluster: {nodes: 2, gpus_per_node: 4, gpu_memory_gib: 80, host_memory_gib: 100.5, memory_margin_gib: 1}
        driver: fail_fast
        seed: 7
        demand: floor
        pipelines:
          - id: p1
            train: {gpus: [0, 1], tp: 2}
            infer: {gpus: [0, 1, 2, 3], tp: 2}
            critic: {gpus: [4]}
            reference: {gpus: [5]}
            reward: {seconds: 1.5}
            overlap: partial
            steps: 3
            batch: {prompts: 8, samples_per_prompt: 4}
            eval: {every: 2, trajectories: 5}
            staleness: 1
            start_at: 8.3
            start_after: {pipeline: p2, event: rollout_granted}
            dispatch_after: {pipeline: p2, event: init_accepted}
            old_log_probs: true
            costs: {init: 40, train: 23.5, offload: 2, onload: 2, publish: 2, sync: 3, sleep: 1, wake: 1, restart: 30,
                    log_probs: 4, critic_train: 5, engine_slots: 8, trajectory: {uniform: [1, 2]}}
            memory: {train_gib: 40, engine_gib: 60, residue_gib: 1, init_peak_gib: 70, host_cache_gib: 2}
            on_preempt: drain
            partial: resume
            in_flight_updates: true
            min_residence_s: 5
            reissue_after_s: 50
            max_attempts: 2
            max_hold_s: 100
            limits: {init_s: 1, wake_s: 2, sync_s: 3, sleep_s: 4, drain_s: 5, release_s: 6, quarantine_s: 7,
                     turn_s: 8, command_s: 9}
          - {id: p2, train: {gpus: [6]}, infer: {gpus: [6, 7]}, steps: 1, batch: {prompts: 1}}
        faults:
          - {at: 120, kind: leak_residue, pipeline: p1, dp_rank: 1, gib: 0.5, count: 3}
          - {at: 130, kind: slow_engine, pipeline: p2, dp_rank: 0, factor: 2.5, duration: 10}
          - {at: 140, kind: remove_node, node: 1}
        expect: {outcome: failed, max_wait_s: 120, violations: [S4, L5], max_makespan_s: 900, min_handovers: 1,
                 failed: [p2]}
        """,
        "x.yaml",
    )
    assert (scenario.name, scenario.driver, scenario.seed, scenario.demand) == (
        "everything", DriverPolicy.FAIL_FAST, 7, DemandPolicy.FLOOR
    )  # fmt: skip
    assert (scenario.cluster.gpus, scenario.cluster.host_memory) == (8, gib(100.5))
    job = scenario.jobs[0]
    assert [(g.role, g.gpus, g.tp) for g in job.spec.groups] == [
        (Role.ACTOR_TRAIN, (0, 1), 2), (Role.ACTOR_INFER, (0, 1, 2, 3), 2), (Role.CRITIC, (4,), 1),
        (Role.REFERENCE, (5,), 1),
    ]  # fmt: skip
    assert (job.steps, job.target, job.evaluation) == (3, 32, Evaluation(every=2, trajectories=5))
    assert (job.start_at, job.reward_s, job.reissue_after) == (8_300_000_000, ns(1.5), ns(50))
    assert job.start_after == Trigger(pipeline="p2", event="rollout_granted")
    assert job.dispatch_after == Trigger(pipeline="p2", event="init_accepted")
    assert (job.old_log_probs, job.max_attempts, job.costs.restart, job.costs.engine_slots) == (True, 2, ns(30), 8)
    assert job.costs.trajectory == Durations(parts=((1.0, "uniform", ns(1), ns(2)),))
    assert (job.spec.on_preempt, job.spec.partial, job.spec.overlap) == (
        OnPreempt.DRAIN, Partial.RESUME, Overlap.PARTIAL
    )  # fmt: skip
    assert (job.spec.staleness, job.spec.min_residence, job.spec.in_flight_updates) == (1, ns(5), True)
    assert job.spec.memory.init_peak == gib(70)
    assert msgspec.structs.astuple(job.spec.limits) == tuple(ns(s) for s in (100, 1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert [(f.kind, f.dp_rank, f.node, f.count) for f in scenario.faults] == [
        ("leak_residue", 1, -1, 3), ("slow_engine", 0, -1, 1), ("remove_node", -1, 1, 1)
    ]  # fmt: skip
    assert (scenario.faults[0].bytes, scenario.faults[1].factor, scenario.faults[1].duration) == (
        gib(0.5), 2.5, ns(10)
    )  # fmt: skip
    assert scenario.expect == Expect(
        outcome="failed", max_wait=ns(120), violations=("S4", "L5"), max_makespan=ns(900), min_handovers=1,
        failed=("p2",),
    )  # fmt: skip


def test_the_smallest_file_gets_every_default() -> None:
    scenario = parse_scenario(MINIMAL, "folder/small.yaml")
    spec, job = scenario.jobs[0].spec, scenario.jobs[0]
    assert (scenario.name, scenario.seed, scenario.faults, scenario.expect) == ("small", 0, (), None)
    assert (scenario.cluster.nodes, scenario.cluster.gpu_memory, scenario.cluster.memory_margin) == (1, gib(141), 0)
    assert (job.costs.init, job.costs.restart, job.costs.log_probs, job.costs.critic_train) == (
        ns(38.8), ns(38.8), 0, 0
    )  # fmt: skip
    assert (spec.memory.train, spec.memory.engine, spec.memory.init_peak) == (gib(40), gib(60), gib(100))
    assert spec.min_residence == ns(30)
    assert spec.limits.release == ns(30) and spec.limits.quarantine == ns(600) and spec.limits.command == ns(10)


def test_limits_are_formulas_of_the_declared_costs() -> None:
    costs = {"init": 200, "train": 300, "onload": 10, "offload": 20, "publish": 30, "sync": 40, "sleep": 50,
             "wake": 60, "restart": 70, "log_probs": 5, "trajectory": 100}  # fmt: skip
    job = parse_scenario(minimal(costs=costs), "x").jobs[0]
    assert job.spec.min_residence == ns(4 * (60 + 40 + 50))
    assert job.reissue_after == ns(1000)
    assert job.spec.limits == Limits(
        hold=ns(4 * (10 + 300 + 30 + 20 + 5)), init=ns(800), wake=ns(280), sync=ns(160), sleep=ns(200),
        drain=ns(400), release=ns(30), quarantine=ns(600), turn=ns(600), command=ns(10),
    )  # fmt: skip


def costs_of(costs: object) -> Costs:
    return parse_scenario(minimal(costs=costs), "x.yaml").jobs[0].costs


def test_a_scenario_can_name_measured_costs_and_change_some_of_them() -> None:
    kept = defaults.COST_SETS["h200"].costs
    named = costs_of("h200")
    for key in ("train", "restart", "release"):
        assert getattr(named, key) == ns_written(kept[key])
    usual, first = kept["offload"]["constant"], kept["offload"]["first"]
    assert named.offload == Durations(parts=((1.0, "constant", ns_written(usual), 0),), first=ns_written(first))
    assert costs_of({"set": "h200"}) == named
    changed_ = costs_of({"set": "h200", "train": 5, "engine_slots": 4})
    assert (changed_.train, changed_.engine_slots, changed_.sync) == (ns_written(5), 4, named.sync)


def test_costs_that_nobody_measured_are_refused_with_those_there_are() -> None:
    said = "x.yaml: pipelines[0].costs.set: 'h20' is not one of h200; did you mean 'h200'?"
    assert error(minimal(costs="h20")) == said
    assert "costs.set" in error(minimal(costs={"set": 3}))
    assert "costs" in error(minimal(costs=["h200"]))


def test_costs_from_the_command_line_are_those_a_file_would_name() -> None:
    job = parse_scenario(minimal(costs={"train": 5, "engine_slots": 4}), "x.yaml").jobs[0]
    assert scenario_file.named_costs("h200", job) == costs_of({"set": "h200", "engine_slots": 4})


def test_log_probs_cost_something_only_for_those_who_ask_for_them() -> None:
    asked = parse_scenario(minimal(old_log_probs=True, costs={"train": 415}), "x").jobs[0].costs
    critic = parse_scenario(minimal(critic={"gpus": [1]}, costs={"train": 415}), "x").jobs[0].costs
    assert (asked.log_probs, asked.critic_train) == (ns(33), 0)
    assert (critic.log_probs, critic.critic_train) == (ns(33), ns(415))


def test_null_means_not_given() -> None:
    assert parse_scenario(MINIMAL + "faults:\nexpect: ~\nseed: null\n", "x") == parse_scenario(MINIMAL, "x")


def test_anchors_and_merge_keys_may_be_used() -> None:
    text = MINIMAL.replace("- id: p1", "- &p\n    id: p1") + "  - {<<: *p, id: p2}\n"
    jobs = parse_scenario(text, "x").jobs
    assert [job.spec.id for job in jobs] == ["p1", "p2"]
    assert jobs[1].spec.groups == jobs[0].spec.groups


def test_a_csv_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("prompt,seconds\na, 1.5\n\nb,2\n")
    (tmp_path / "bare.csv").write_text("3\n4.5\n")
    for name, samples in (("lengths.csv", (ns(1.5), ns(2))), ("bare.csv", (ns(3), ns(4.5)))):
        (tmp_path / "s.yaml").write_text(minimal(costs={"trajectory": {"csv": name}}))
        assert load_scenario(tmp_path / "s.yaml").jobs[0].costs.trajectory == Durations(samples=samples)


def test_the_reference_names_every_key_and_every_kind_of_fault() -> None:
    text = (Path(__file__).parent.parent / "docs" / "scenarios.md").read_text()
    schemas = [value for name, value in vars(scenario_file).items() if name.endswith("_KEYS") and name != "ROLE_KEYS"]
    words = {key for schema in schemas for key in schema} | set(FAULT_KINDS)
    assert [word for word in sorted(words) if f"`{word}`" not in text] == []
    for key, (value, _) in defaults.COSTS.items():
        assert f"| `{key}` | {value} |" in text


# --- distributions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "p50", "p99"),
    [
        (12, 12, 12),
        ({"constant": 12}, 12, 12),
        ({"uniform": [0, 100]}, 50, 99),
        ({"lognormal": {"median": 10, "sigma": 0}}, 10, 10),
        ({"constant": 2_000_000}, 2_000_000, 2_000_000),
        ({"lognormal": {"median": 10, "sigma": 0.5}}, 10, 10 * math.exp(2.326348 * 0.5)),
        ({"mixture": [{"weight": 98, "constant": 1}, {"weight": 2, "constant": 50}]}, 1, 50),
    ],
)
def test_quantiles_are_those_of_the_declared_distribution(declared: object, p50: float, p99: float) -> None:
    durations = parse_scenario(minimal(costs={"trajectory": declared}), "x").jobs[0].costs.trajectory
    assert quantile(durations, 0.5) == pytest.approx(ns(p50), abs=2_000_000)
    assert quantile(durations, 0.99) == pytest.approx(ns(p99), abs=2_000_000)


def test_quantiles_of_samples_are_the_nearest_rank() -> None:
    samples = Durations(samples=tuple(ns(s) for s in range(100, 0, -1)))
    assert [quantile(samples, q) for q in (0.0, 0.5, 0.99, 1.0)] == [ns(100), ns(50), ns(99), ns(100)]


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({}, "trajectory: is empty, but needs exactly one of lognormal, constant, uniform, csv, mixture"),
        ({"constant": 1, "uniform": [1, 2]}, "has constant and uniform, but needs exactly one of"),
        ({"constant": 0}, "trajectory.constant: must be more than 0 seconds"),
        ({"uniform": [3, 2]}, "trajectory.uniform: 3 is more than 2; the smaller one comes first"),
        ({"uniform": [3]}, "trajectory.uniform: must be two numbers of seconds, not 1"),
        ({"lognormal": {"median": 1}}, "trajectory.lognormal.sigma: missing"),
        ({"lognormal": {"median": 0, "sigma": 1}}, "trajectory.lognormal.median: must be more than 0 seconds"),
        ({"mixture": []}, "trajectory.mixture: must have 1 to 100 parts, not 0"),
        ({"mixture": [{"weight": 0, "constant": 1}]}, "trajectory.mixture[0].weight: must be more than 0"),
        ({"mixture": [{"constant": 1}]}, "trajectory.mixture[0].weight: missing"),
        ({"csv": "none.csv"}, "trajectory.csv: cannot read 'none.csv': No such file or directory"),
        ("12", "trajectory: must be a number of seconds, not the text '12'; write it as 12.0, without quotes"),
    ],
)
def test_a_distribution_that_is_none_is_refused(declared: object, said: str) -> None:
    assert said in error(minimal(costs={"trajectory": declared}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seconds\n1\nabc\n", "lengths.csv:3: 'abc' is not a duration in seconds"),
        ("id,seconds\n1,2\n3\n", "lengths.csv:3: '' is not a duration in seconds"),
        ("1\n-2\n", "lengths.csv:2: must be a number of seconds, and -2.0 is negative"),
        ("nan\n", "lengths.csv:1: must be a number of seconds, not nan"),
        ("a,b\n1,2\n", "lengths.csv: has several columns and none is called 'seconds'; name it in the first line"),
        ("seconds\n\n", "lengths.csv: holds no durations"),
        ("", "lengths.csv: holds no durations"),
    ],
)
def test_a_bad_csv_names_its_file_and_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "lengths.csv").write_text(content)
    (tmp_path / "s.yaml").write_text(minimal(costs={"trajectory": {"csv": "lengths.csv"}}))
    with pytest.raises(ConfigError) as caught:
        load_scenario(tmp_path / "s.yaml")
    assert str(caught.value).endswith(said)
    assert "pipelines[0].costs.trajectory.csv: " in str(caught.value)


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps: 3", "stps: 3", "x.yaml: pipelines[0].stps: unknown key; did you mean 'steps'?"),
        ("steps: 3", "steps: 3\n    costs: {trane: 2}",
         "x.yaml: pipelines[0].costs.trane: unknown key; did you mean 'train'?"),
        ("steps: 3", "steps: 3\n    limits: {qqq: 2}",
         "x.yaml: pipelines[0].limits.qqq: unknown key; known: hold_s, init_s, wake_s, sync_s, sleep_s, drain_s, "
         "release_s, quarantine_s, turn_s, command_s"),
        ("    steps: 3\n", "", "x.yaml: pipelines[0].steps: missing; pipelines[0] needs 'steps'"),
        ("steps: 3", "steps: 3\n    steps: 4", "x.yaml:7: the key 'steps' is given twice"),
        ("steps: 3", "steps: 0", "x.yaml: pipelines[0].steps: must be a whole number from 1 to 1000000000, not 0"),
        ("steps: 3", "steps: true", "x.yaml: pipelines[0].steps: must be a whole number, not true"),
        ("steps: 3", "steps: 2.5", "x.yaml: pipelines[0].steps: must be a whole number, not 2.5"),
        ("steps: 3", "steps: 010", "x.yaml:6: '010' is no plain decimal number"),
        ("steps: 3", "steps: 3\n    start_at: 1:30", "x.yaml:7: '1:30' is no plain decimal number"),
        ("steps: 3", "steps: 3\n    start_at: -1",
         "x.yaml: pipelines[0].start_at: must be a number of seconds, and -1 is negative"),
        ("steps: 3", "steps: 3\n    start_at: true",
         "x.yaml: pipelines[0].start_at: must be a number of seconds, not true"),
        ("steps: 3", "steps: 3\n    start_at: .nan",
         "x.yaml: pipelines[0].start_at: must be a number of seconds, not nan"),
        ("steps: 3", "steps: 3\n    start_at: .inf",
         "x.yaml: pipelines[0].start_at: must be a number of seconds, not inf"),
        ("steps: 3", "steps: 3\n    start_at: 1e3",
         "x.yaml: pipelines[0].start_at: must be a number of seconds, not the text '1e3'; "
         "write it as 1000.0, without quotes"),
        ("steps: 3", "steps: 3\n    start_at: 1e-5",
         "x.yaml: pipelines[0].start_at: must be a number of seconds, not the text '1e-5'; "
         "write it as 1.0e-05, without quotes"),
        ("steps: 3", "steps: 3\n    memory: {train_gib: -4}",
         "x.yaml: pipelines[0].memory.train_gib: must be a number of GiB, and -4 is negative"),
        ("steps: 3", "steps: 3\n    memory: {residue_gib: 50}",
         "x.yaml: pipelines[0].memory.residue_gib: 50 GiB asleep is more than 40 GiB active; what is active holds "
         "at least what it keeps asleep"),
        ("steps: 3", "steps: 3\n    on_preempt: abrt",
         "x.yaml: pipelines[0].on_preempt: 'abrt' is not one of abort, drain; did you mean 'abort'?"),
        ("steps: 3", "steps: 3\n    in_flight_updates: 1",
         "x.yaml: pipelines[0].in_flight_updates: must be true or false, not 1"),
        ("steps: 3", "steps: 3\n    reward: {gpus: [0]}",
         "x.yaml: pipelines[0].reward.gpus: reward runs on CPU and has no GPUs; remove 'gpus'"),
        ("steps: 3", "steps: 3\n    max_hold_s: 5\n    limits: {hold_s: 5}",
         "x.yaml: pipelines[0].limits.hold_s: max_hold_s gives the same limit; keep one of the two"),
        ("steps: 3", "steps: 3\n    start_after: {pipeline: p9, event: init_accepted}",
         "x.yaml: pipelines[0].start_after.pipeline: no pipeline is called 'p9'; known: p1"),
        ("prompts: 8", "prompts: 0",
         "x.yaml: pipelines[0].batch.prompts: must be a whole number from 1 to 1000000000, not 0"),
        ("id: p1", "id: 1", "x.yaml: pipelines[0].id: must be text, not 1; put it in quotes"),
        ("id: p1", "id: a/b", "x.yaml: pipelines[0].id: the id 'a/b' must be printable, without '/' and spaces"),
        ("id: p1", "id: ''", "x.yaml: pipelines[0].id: must be one line of text, not ''"),
        ("[0, 1]", "[0, one]", "x.yaml: pipelines[0].infer.gpus[1]: must be a whole number, not the text 'one'"),
        ("{gpus: [0]}", "[0]", "x.yaml: pipelines[0].train: must be a mapping of keys to values, not a list"),
        ("cluster: {gpus_per_node: 2}", "", "x.yaml: cluster.gpus_per_node: missing; cluster needs 'gpus_per_node'"),
        ("cluster: {gpus_per_node: 2}", "cluster: {gpus_per_node: 2, gpu_memory_gib: 0}",
         "x.yaml: cluster.gpu_memory_gib: must be more than 0 GiB"),
        ("cluster: {", "cluster: [", "x.yaml:1: expected ',' or ']', but got '}'"),
        ("cluster:", "expect: {violations: [S9]}\ncluster:",
         "x.yaml: expect.violations[0]: 'S9' is not one of S1, S2, S3, S4, S5, S6, S7, L1, L2, L3, L4, L5; "
         "did you mean 'S7'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place_and_a_remedy(old: str, new: str, said: str) -> None:
    assert old in MINIMAL
    assert error(MINIMAL.replace(old, new, 1)) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "x.yaml: the file is empty"),
        ("# nothing\n", "x.yaml: the file is empty"),
        ("- a\n", "x.yaml: must be a mapping of keys to values, not a list"),
        ("name: x\n", "x.yaml: pipelines: missing; declare at least one pipeline"),
        ("a: b: c", "x.yaml:1: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: expected a single document in the stream, but found another document"),
        ("\n\nname: \x07", "x.yaml:3: the character U+0007 is not allowed"),
        ("name: 2020-99-99", "x.yaml:1: the value cannot be read; put text in quotes"),
        ("name: !!bool maybe", "x.yaml:1: the value cannot be read; put text in quotes"),
        ("name: !!int ''", "x.yaml:1: the value cannot be read; put text in quotes"),
        ("1: 2",
         "x.yaml: the key 1 must be text; known: name, cluster, pipelines, faults, expect, driver, seed, demand"),
        ("[" * 600, "x.yaml: nested too deeply"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_scenario_is_refused(text: str, said: str) -> None:
    assert error(text) == said


def test_aliases_that_multiply_cost_neither_time_nor_memory() -> None:
    lists = "l0: &l0 [1]\n" + "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12))
    maps = "m0: &m0 {k: 1}\n" + "".join(
        f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
    )
    assert "unknown key" in error(lists)
    assert "unknown key" in error(maps) or "more than 1000 entries" in error(maps), "by version of PyYAML"
    assert error("".join(f"k{i}: 1\n" for i in range(1001))) == "x.yaml:1: the mapping has more than 1000 entries"
    assert error("name: &a [*a]") == "x.yaml: pipelines: missing; declare at least one pipeline"


def test_an_id_can_be_used_once() -> None:
    document = yaml.safe_load(MINIMAL)
    document["pipelines"].append(deepcopy(document["pipelines"][0]))
    assert error(json.dumps(document)) == "x.yaml: pipelines[1].id: 'p1' is also the id of pipelines[0]"


def test_pipelines_that_wait_for_each_other_to_start_are_refused() -> None:
    document = yaml.safe_load(MINIMAL)
    first = document["pipelines"][0]
    after = [{**first, "id": f"p{i}", "start_after": {"pipeline": f"p{(i + 1) % 3}", "event": "init_accepted"}}
             for i in range(3)]  # fmt: skip
    document["pipelines"] = after
    with pytest.raises(TopologyError) as caught:
        parse_scenario(json.dumps(document), "x.yaml")
    assert str(caught.value) == (
        "x.yaml: pipelines[0].start_after: p0 starts after p1 starts after p2 starts after p0: "
        "none of them can ever start"
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "kil_engine"}, "did you mean 'kill_engine'?"),
        ({"kind": "kill_engine", "pipeline": "p1"}, "faults[0].dp_rank: missing; kill_engine needs pipeline, dp_rank"),
        ({"kind": "kill_engine", "dp_rank": 0}, "faults[0].pipeline: missing; kill_engine needs pipeline, dp_rank"),
        ({"kind": "kill_engine", "pipeline": "p2", "dp_rank": 0},
         "x.yaml: faults[0].pipeline: no pipeline is called 'p2'; known: p1"),
        ({"kind": "kill_engine", "pipeline": "p1", "dp_rank": 2},
         "x.yaml: faults[0].dp_rank: p1 has no engine 2; it has 2, counted from 0"),
        ({"kind": "kill_engine", "pipeline": "p1", "dp_rank": 0, "node": 0},
         "faults[0].node: kill_engine takes no node; beside at and kind it takes pipeline, dp_rank"),
        ({"kind": "remove_node", "node": 1},
         "faults[0].node: node 1 does not exist; the cluster has 1, counted from 0"),
        ({"kind": "kill_client", "pipeline": "p1", "count": 2}, "beside at and kind it takes pipeline"),
        ({"kind": "restart_control_plane", "count": 2}, "beside at and kind it takes duration"),
        ({"kind": "slow_engine", "pipeline": "p1", "dp_rank": 0, "factor": 0.5}, "would not slow anything down"),
        ({"kind": "leak_residue", "pipeline": "p1"}, "faults[0].gib: missing; leak_residue needs pipeline, gib"),
    ],
)  # fmt: skip
def test_a_fault_names_what_it_needs_and_nothing_else(fault: dict[str, object], said: str) -> None:
    assert said in error(with_fault(**fault))


def test_files_that_cannot_be_read_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    cases = {"none.yaml": "No such file or directory", "latin.yaml": "is not UTF-8 text", ".": "Is a directory"}
    for name, reason in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_scenario(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: {reason}"


# --- workloads ------------------------------------------------------------------------------------------


def workload(**keys: object) -> Workload:
    return parse_scenario(minimal(workload=keys), "x.yaml").jobs[0].workload


def test_a_workload_with_every_key_means_what_it_says() -> None:
    numbers = {"temperature": 0.7, "top_p": 0.9, "learning_rate": 0.001, "adam_beta1": 0.8, "adam_beta2": 0.99,
               "weight_decay": 0.1, "grad_clip": 2, "clip_low": 0.1, "clip_high": 0.3, "kl": 0.05}  # fmt: skip
    tokens = {"max_tokens": 5, "micro_batch_tokens": 6, "kv_tokens": 7}
    common = {"model": "smollm2", "reward": "a.b:c", "dtype": "bfloat16", **numbers, **tokens}
    read = workload(task="sort", size=4, reward_limit_s=2.5, bucket_mib=3, **common)
    expected = Workload(task="sort", size=4, reward_limit=ns(2.5), bucket_bytes=3 * 2**20, **common)
    assert read == expected
    assert set(numbers) == set(NUMBERS)
    given = {"task", "size", "prompts", "reward_limit_s", "bucket_mib", *common}
    assert given == set(WORKLOAD_KEYS)
    assert read != Workload() and all(getattr(read, key) != getattr(Workload(), key) for key in common)


def test_without_a_workload_the_tiny_model_copies() -> None:
    (job,) = parse_scenario(MINIMAL, "x.yaml").jobs
    assert (job.workload, job.workload.model, job.workload.task) == (Workload(), "tiny", "copy")
    assert (job.target, job.samples_per_prompt) == (32, 4)


def test_paths_of_a_workload_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    keys = {"model": "./mine", "prompts": "p.jsonl", "reward": "a:b"}
    (tmp_path / "s.yaml").write_text(minimal(workload=keys))
    read = load_scenario(tmp_path / "s.yaml").jobs[0].workload
    assert (read.model, read.prompts, read.task) == (str(tmp_path / "mine"), str(tmp_path / "p.jsonl"), "")
    assert workload(model="owner/model").model == "owner/model", "an id of the hub stays one"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"modle": "tiny"}, "modle: unknown key; did you mean 'model'?"),
        ({"task": "srot"}, "task: 'srot' is not one of arithmetic, copy, sort; did you mean 'sort'?"),
        ({"task": "copy", "prompts": "p", "reward": "a:b"},
         "task: there are prompts too; keep task or prompts, not both"),
        ({"prompts": "p"}, "prompts: needs a reward beside it; add reward: module:function"),
        ({"prompts": "p", "reward": "a:b", "size": 2},
         "size: is how hard a built-in task is, and there are prompts; remove it"),
        ({"reward": "a.b"}, "reward: 'a.b' names no function; write module:function, such as my_rewards:exact"),
        ({"reward": "a-b:c"}, "reward: 'a-b:c' names no function; write module:function, such as my_rewards:exact"),
        ({"size": 0}, "size: must be a whole number from 1 to 64, not 0"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number from 1 to 16777216, not 0"),
        ({"learning_rate": 0}, "learning_rate: must be more than 0, not 0"),
        ({"learning_rate": -1}, "learning_rate: must be a number, and -1 is negative"),
        ({"temperature": 0}, "temperature: must be more than 0, not 0"),
        ({"top_p": 1.5}, "top_p: 1.5 is too large; at most 1"),
        ({"adam_beta1": 1}, "adam_beta1: 1 is too large; at most 0.999999"),
        ({"dtype": "float16"}, "dtype: 'float16' is not one of float32, bfloat16; did you mean 'bfloat16'?"),
        ({"reward_limit_s": 0}, "reward_limit_s: must be more than 0 seconds"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_workload_is_one_line(keys: dict[str, object], said: str) -> None:
    assert error(minimal(workload=keys)) == f"x.yaml: pipelines[0].workload.{said}"


def test_what_is_asked_for_takes_the_place_of_what_excludes_it() -> None:
    file = Workload(prompts="p", task="", reward="a:b")
    assert changed(file) is not None and changed(file) == file
    assert changed(file, task="sort") == Workload(task="sort"), "the reward was for the prompts"
    assert changed(file, task="sort", reward="c:d") == Workload(task="sort", reward="c:d")
    assert changed(Workload(task="sort", size=9), task="sort").size == 9
    assert changed(Workload(task="sort", size=9), task="copy").size is None
    assert changed(Workload(task="sort", size=9), prompts="q", reward="c:d") == Workload(
        task="", prompts="q", reward="c:d"
    )


def test_what_was_left_open_follows_from_model_task_and_device() -> None:
    tiny = settled(Workload(), "cuda")
    assert (tiny.size, tiny.max_tokens, tiny.dtype, tiny.learning_rate) == (3, 3, "float32", 0.003)
    chat = settled(Workload(model="smollm2", task="arithmetic", size=2), "cuda")
    assert (chat.size, chat.max_tokens, chat.dtype, chat.learning_rate) == (2, 38, "bfloat16", 1e-5)
    mine = settled(Workload(model="x/y", prompts="p", task="", reward="a:b"), "cpu")
    assert (mine.size, mine.max_tokens, mine.dtype, mine.learning_rate) == (None, 512, "float32", 1e-6)
    given = Workload(size=5, max_tokens=9, dtype="bfloat16", learning_rate=0.5)
    assert settled(given, "cpu") == given


# --- whatever comes -------------------------------------------------------------------------------------


def parses_or_says_why(text: str) -> Scenario | None:
    """Any exception but ConfigError fails the test that calls this."""
    try:
        return parse_scenario(text, "x.yaml")
    except ConfigError as bad:
        assert "\n" not in str(bad) and str(bad).startswith("x.yaml")
        return None


PIECES = [
    *"{}[]:,-?&*!|>%@`'\"#\n ", "  ", "- ", ": ", "<<: ", "&a ", "*a", "!!int ", "!!float ", "!!bool ", "!!set ",
    "!!binary ", "!!timestamp ", "!x ", "---\n", "...", "%YAML 1.1\n", "0", "1", "0x_", "1:2", "0b", "1e999",
    "9" * 5000, ".inf", ".nan", "~", "yes", "2020-13-41", "=", "name", "cluster", "pipelines", "id", "costs",
    "trajectory", "csv", "gpus", "faults", "kind", "\x00", "\ud800", "\ufeff", "\t", "é",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=15).map("".join))
def test_any_text_parses_or_is_refused(text: str) -> None:
    parses_or_says_why(text)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_valid_text_with_pieces_put_in_or_cut_out_parses_or_is_refused(data: st.DataObject) -> None:
    text = MINIMAL + "faults: [{at: 1, kind: kill_engine, pipeline: p1, dp_rank: 0}]\nexpect: {outcome: completed}\n"
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 8)))
        text = text[:start] + data.draw(st.sampled_from(["", *PIECES])) + text[end:]
    parses_or_says_why(text)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.just(10**400), st.floats(),
    st.sampled_from(["", "p1", "x y", "1e3"]),
)  # fmt: skip
KEYS = st.sampled_from(["gpus", "csv", "x"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=4
)


def _paths(node: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(path for key, value in inner for path in _paths(value, (*at, key)))]


def _replaced(node: object, path: tuple[object, ...], value: object) -> object:
    if not path:
        return value
    copy = node.copy()  # type: ignore[attr-defined]
    copy[path[0]] = _replaced(copy[path[0]], path[1:], value)
    return copy


# --- round trip -----------------------------------------------------------------------------------------

SECONDS = st.integers(1, 10**9).map(lambda ms: ms / 1000) | st.integers(0, 10**6)
POSITIVE = st.integers(1, 10**9).map(lambda ms: ms / 1000)
GIB = st.integers(60 * 1024, 200 * 1024).map(lambda mib: mib / 1024)
SHAPE = st.one_of(
    st.fixed_dictionaries({"constant": POSITIVE}),
    st.fixed_dictionaries({"lognormal": st.fixed_dictionaries({"median": POSITIVE, "sigma": st.floats(0, 3)})}),
    st.fixed_dictionaries({"uniform": st.lists(POSITIVE, min_size=2, max_size=2).map(sorted)}),
)
TRAJECTORY = st.one_of(
    POSITIVE,
    SHAPE,
    st.lists(st.builds(lambda s, w: {"weight": w, **s}, SHAPE, st.integers(1, 9)), min_size=1, max_size=3).map(
        lambda parts: {"mixture": parts}
    ),
)
OPTIONAL = {
    "staleness": st.integers(0, 4), "start_at": SECONDS, "on_preempt": st.sampled_from(["abort", "drain"]),
    "partial": st.sampled_from(["restart", "resume"]), "in_flight_updates": st.booleans(), "min_residence_s": SECONDS,
    "reissue_after_s": POSITIVE, "max_attempts": st.integers(1, 9), "max_hold_s": POSITIVE,
    "old_log_probs": st.booleans(), "overlap": st.sampled_from(["any", "partial", "none"]),
    "reward": st.fixed_dictionaries({"seconds": SECONDS}),
    "eval": st.fixed_dictionaries({"every": st.integers(1, 5), "trajectories": st.integers(1, 5)}),
    "costs": st.fixed_dictionaries({}, optional={**{key: SECONDS for key in scenario_file.PHASE_KEYS},
                                                 "trajectory": TRAJECTORY, "engine_slots": st.integers(1, 99)}),
    "workload": st.fixed_dictionaries({}, optional={
        "model": st.sampled_from(["tiny", "a/b"]), "task": st.sampled_from(["copy", "sort"]), "size": st.integers(1, 9),
        "kl": st.floats(0, 9), "max_tokens": st.integers(1, 99), "reward_limit_s": POSITIVE}),
    "memory": st.fixed_dictionaries({}, optional={"train_gib": GIB, "engine_gib": GIB, "init_peak_gib": GIB}),
    "limits": st.fixed_dictionaries({}, optional={"init_s": POSITIVE, "turn_s": POSITIVE, "drain_s": POSITIVE}),
}  # fmt: skip


@st.composite
def documents(draw: st.DrawFn) -> dict[str, object]:
    """Well-formed scenario documents."""
    pipelines = []
    for i in range(draw(st.integers(1, 3))):
        gpus = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
        few = st.integers(1, 9)
        needed = {"train": {"gpus": draw(gpus)}, "infer": {"gpus": draw(gpus)}, "steps": draw(few),
                  "batch": {"prompts": draw(few), "samples_per_prompt": draw(few)}}  # fmt: skip
        pipelines.append({"id": f"p{i}", **needed, **draw(st.fixed_dictionaries({}, optional=OPTIONAL))})
    document = {"name": draw(st.sampled_from(["a", "a b", "ü"])), "cluster": {"nodes": 1, "gpus_per_node": 4}}
    top = {"seed": st.integers(0, 2**63 - 1), "demand": st.sampled_from(["batch", "floor", "signal"])}
    return {**document, "pipelines": pipelines, **draw(st.fixed_dictionaries({}, optional=top))}


@settings(max_examples=60, deadline=None)
@given(documents())
def test_every_value_of_a_well_formed_document_arrives(document: dict[str, object]) -> None:
    scenario = parse_scenario(yaml.safe_dump(document, allow_unicode=True), "x.yaml")
    assert (scenario.name, scenario.seed) == (document["name"], document.get("seed", 0))
    for job, declared in zip(scenario.jobs, document["pipelines"], strict=True):  # type: ignore[arg-type]
        batch = declared["batch"]
        assert (job.spec.id, job.steps) == (declared["id"], declared["steps"])
        assert job.target == batch["prompts"] * batch["samples_per_prompt"]
        assert list(job.spec.infer.gpus) == declared["infer"]["gpus"]
        assert job.start_at / 1e9 == pytest.approx(declared.get("start_at", 0), rel=1e-15)
        assert job.start_at % 1_000_000 == 0, "milliseconds in the file are milliseconds here"
        for key, value in declared.get("costs", {}).items():
            if key in scenario_file.PHASE_KEYS:
                assert getattr(job.costs, key) == round(value * 1000) * 1_000_000
        for key, value in declared.get("memory", {}).items():
            assert getattr(job.spec.memory, key.removesuffix("_gib")) == value * 2**30
        for key, value in declared.get("limits", {}).items():
            assert getattr(job.spec.limits, key.removesuffix("_s")) == round(value * 1000) * 1_000_000


@settings(max_examples=25, deadline=None)
@given(documents())
def test_a_scenario_survives_json_whichever_way_its_file_was_written(document: dict[str, object]) -> None:
    scenario = parse_scenario(yaml.safe_dump(document, default_flow_style=True), "x.yaml")
    assert msgspec.json.decode(msgspec.json.encode(scenario), type=Scenario) == scenario


@settings(max_examples=120, deadline=None)
@given(documents(), st.data())
def test_a_document_with_any_value_replaced_parses_or_is_refused(
    document: dict[str, object], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(_paths(document)))
    mutant = _replaced(document, path, data.draw(VALUES))
    scenario = parses_or_says_why(yaml.safe_dump(mutant))
    if scenario is not None:
        msgspec.json.encode(scenario)  # every number fits what the log can hold
