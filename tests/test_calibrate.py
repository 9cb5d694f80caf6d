"""Fitting the simulator to a log: what is fitted to the simulator's own log is what it was run with."""

import gzip
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.chance import Draws, Price, Stream
from core import events
from core.config import Cost, Costs, Durations, Scenario
from core.defaults import COST_SETS
from core.errors import ConfigError
from core.lengths import SIGMA_UNIT, most, quantile, read_cost, read_durations, usual
from core.model import OnPreempt, Partial
from core.run import execute
from core.scenario_file import load_scenario, parse_scenario
from core.trace import Entry, Header, Log, TraceWriter, header_of, read_log
from core.units import NS_PER_S, gib
from scenarios import calibrate, catalogue
from scenarios.calibration.compare import compare, figures, simulated
from scenarios.calibration.fit import EQUAL, constant, fit, fit_lengths, mean
from scenarios.calibration.measure import Measured, Observation, measure
from scenarios.calibration.picture import WIDTH, Window, foreseen, picture, seen
from scenarios.calibration.typical import typical
from scenarios.calibration.world import PHASES, calibrated, warm, with_costs
from scenarios.calibration.write import cost_of, to_yaml

replace = msgspec.structs.replace
MS = NS_PER_S // 1000
ROOT = Path(__file__).parent.parent
COSTS: dict[str, Any] = {
    "init": 9 * NS_PER_S, "train": 5 * NS_PER_S, "offload": 700 * MS, "onload": 300 * MS, "publish": 400 * MS,
    "sync": 600 * MS, "sleep": 200 * MS, "wake": 100 * MS, "restart": 8 * NS_PER_S, "engine_slots": 4,
    "trajectory": constant(2 * NS_PER_S), "gate": 20 * MS, "command": 30 * MS, "release": 40 * MS,
}  # fmt: skip


def incident(steps: int = 4, target: int = 8, **costs: Any) -> Scenario:
    """The incident's topology with these costs, each its own where nothing is said."""
    scenario = catalogue.load("overlap_2gpu")
    made = Costs(**(COSTS | costs))
    return replace(scenario, jobs=tuple(replace(job, steps=steps, target=target, costs=made) for job in scenario.jobs))


def recorded(scenario: Scenario) -> tuple[Header, list[Entry]]:
    log = Log()
    assert execute(scenario, "sim", [log]).outcome in ("completed", "failed")
    return header_of(scenario, "sim"), list(log.entries)


def fitted(scenario: Scenario) -> tuple[Scenario, list[str]]:
    header, entries = recorded(scenario)
    return calibrated(header.config, measure([(header, entries)]))


def observations(took: list[int], processes: int = 1) -> list[Observation]:
    return [Observation(i // processes, str(i % processes), i < processes, one) for i, one in enumerate(took)]


# --- what it was run with ---------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({phase: st.integers(200, 20_000).map(lambda ms: ms * MS) for phase in PHASES}))
def test_constant_costs_are_found_again_whatever_they_are(phases: dict[str, int]) -> None:
    scenario = incident(steps=2, **phases)
    made, remarks = fitted(scenario)
    for job, was in zip(made.jobs, scenario.jobs, strict=True):
        for name in (*PHASES, "gate", "command", "release", "trajectory"):
            assert getattr(job.costs, name) == getattr(was.costs, name), name
    assert not [remark for remark in remarks if "could not be followed" in remark]


def test_lognormal_phases_and_trajectories_are_found_again() -> None:
    train = Durations(parts=((1.0, "lognormal", 5 * NS_PER_S, 200_000),))
    trajectory = Durations(parts=((1.0, "lognormal", 3 * NS_PER_S, 500_000),))
    steps, target = 150, 8
    made, _ = fitted(incident(steps=steps, target=target, train=train, trajectory=trajectory))
    for job in made.jobs:
        for name, was, count in (("train", train, steps), ("trajectory", trajectory, steps * target)):
            found = getattr(job.costs, name)
            assert len(found.parts) == 1 and found.parts[0][1] == "lognormal", name
            (_, _, median, sigma), (_, _, was_median, was_sigma) = found.parts[0], was.parts[0]
            four_errors = 4 * was_sigma / SIGMA_UNIT / count**0.5
            assert abs(math.log(median / was_median)) < four_errors, name
            assert abs(sigma / was_sigma - 1) < 4 / (2 * count) ** 0.5, name


def test_the_first_of_a_process_is_told_from_the_others() -> None:
    train = replace(Durations(parts=((1.0, "uniform", 4 * NS_PER_S, 5 * NS_PER_S),)), first=20 * NS_PER_S)
    made, _ = fitted(incident(steps=6, train=train))
    for job in made.jobs:
        assert job.costs.train.first == 20 * NS_PER_S
        assert 4 * NS_PER_S <= mean(job.costs.train) <= 5 * NS_PER_S


def test_compiling_is_told_from_the_trajectories_that_wait_for_it() -> None:
    made, _ = fitted(incident(steps=6, warmup=30 * NS_PER_S))
    for job in made.jobs:
        assert job.costs.warmup == 30 * NS_PER_S
        assert job.costs.trajectory == constant(2 * NS_PER_S)


@pytest.mark.parametrize("partial", ["restart", "resume"])
@pytest.mark.parametrize("on_preempt", ["abort", "drain"])
def test_trajectories_are_followed_through_preemption_and_queues(partial: str, on_preempt: str) -> None:
    """P1 wants both GPUs for long, and P2's trainer takes one of them away every now and then."""
    scenario = incident(steps=4)
    specs = [replace(job.spec, partial=Partial(partial), on_preempt=OnPreempt(on_preempt)) for job in scenario.jobs]
    long, short = (replace(job, spec=spec) for job, spec in zip(scenario.jobs, specs, strict=True))
    scenario = replace(scenario, jobs=(replace(long, target=90), replace(short, target=6)))
    header, entries = recorded(scenario)
    completed = [entry.item for entry in entries if isinstance(entry.item, events.TrajectoryCompleted)]
    assert any(item.attempt for item in completed) or on_preempt == "drain", "nothing was preempted"
    for one in measure([(header, entries)]).values():
        took = [seen.took for seen in one.costs["trajectory"]]
        assert one.unexplained == 0
        assert min(took) == 2 * NS_PER_S or partial == "resume"
        assert sum(one == 2 * NS_PER_S for one in took) >= 0.95 * len(took)


@pytest.mark.parametrize("name", COST_SETS)
def test_costs_that_a_scenario_can_name_are_what_their_records_show(name: str, tmp_path: Path) -> None:
    logs = []
    for record in COST_SETS[name].records:
        log = tmp_path / Path(record).stem
        log.write_bytes(gzip.decompress((ROOT / record).read_bytes()))
        logs.append(read_log(log))
    assert typical(measure(logs)) == COST_SETS[name].costs


def test_a_cold_start_is_measured_and_one_that_never_was_is_said() -> None:
    text = to_yaml(incident(steps=6)) + "faults:\n- {at: 45, kind: kill_engine, pipeline: p1, dp_rank: 0}\n"
    header, entries = recorded(parse_scenario(text, "x.yaml"))
    measured = measure([(header, entries)])
    made, remarks = calibrated(header.config, measured)
    assert made.jobs[0].costs.restart == 8 * NS_PER_S
    assert made.jobs[1].costs.restart == 9 * NS_PER_S
    assert [remark for remark in remarks if "restarted" in remark] == [
        "p2: no engine was restarted; that is taken to last as long as the quickest init"
    ]


def test_memory_is_what_was_seen_of_active_and_sleeping_workers() -> None:
    made, _ = fitted(incident())
    for job in made.jobs:
        memory = job.spec.memory
        assert (memory.train, memory.engine, memory.residue) == (gib(40), gib(60), gib(1))


def test_a_log_fits_the_world_that_it_came_from() -> None:
    """The makespan of what was fitted is within 2 % of what was recorded, and so is every phase."""
    shapes = {
        "train": Durations(parts=((1.0, "lognormal", 5 * NS_PER_S, 150_000),)),
        "sync": Durations(parts=((1.0, "uniform", 400 * MS, 800 * MS),)),
        "trajectory": Durations(parts=((1.0, "lognormal", 2 * NS_PER_S, 400_000),)),
    }
    header, entries = recorded(incident(steps=40, target=16, **shapes))
    made, _ = calibrated(header.config, measure([(header, entries)]))
    lines = list(compare(figures(header, entries), simulated(with_costs(header.config, made), 3)))
    assert {line.name for line in lines} >= {"makespan, s", "GPUs busy", "p1 train, s", "p2 trajectory, s"}
    assert [line for line in lines if not line.ok] == []
    assert abs(lines[0].off) <= 0.02


# --- which shape ------------------------------------------------------------------------------------------


def test_what_hardly_varies_is_a_constant() -> None:
    assert fit(observations([1_000 * MS, 1_010 * MS, 1_005 * MS])) == 1_005 * MS
    spread = round(1_000 * MS * (1 + 2 * EQUAL))
    assert fit(observations([1_000 * MS, spread])) == Durations(samples=(1_000 * MS, spread))


def test_what_is_no_lognormal_stays_samples_and_a_long_list_keeps_its_mean() -> None:
    took = [MS * (100 if i % 2 else 900) + i % 7 * MS for i in range(600)]
    found = fit(observations(took))
    assert isinstance(found, Durations) and 0 < len(found.samples) <= 200
    assert mean(found) == pytest.approx(sum(took) / len(took), rel=0.02)


def test_what_changes_during_the_run_drifts_and_goes_on_as_it_ended() -> None:
    took = [MS * (100 + 20 * i + i % 3) for i in range(40)]
    found = fit(observations(took))
    assert isinstance(found, Durations) and len(found.drift) == 8 and found.every == 5
    draws = Draws(found, Stream(0, "x"))
    assert 100 * MS <= draws.of(0) <= 190 * MS
    assert draws.of(39) >= 790 * MS and draws.of(4_000) >= 790 * MS


def test_batches_keep_their_order_where_it_changes_what_they_take() -> None:
    """Full engines are slow and the tail is quick: in random orders a long one at the end holds everybody up."""
    seen = [
        Observation(batch, "", False, MS * (400 if i < 4 else 100) + batch % 3 * MS)
        for batch in range(6)
        for i in range(8)
    ]
    found = fit_lengths(seen, slots=4)
    assert found.in_order and len(found.drift) == 6
    draws = Draws(found, Stream(0, "x"), places=8)
    assert all(draws.of(0, i) >= 400 * MS for i in range(3))
    assert all(draws.of(0, i) <= 103 * MS for i in range(5, 8))
    mixed = [
        Observation(batch, "", False, MS * (1_000 + 37 * (5 * batch + i) % 60)) for batch in range(6) for i in range(8)
    ]
    assert not fit_lengths(mixed, slots=4).in_order


# --- costs that are drawn ---------------------------------------------------------------------------------


def test_a_drawn_cost_depends_on_who_does_what_for_which_time_alone() -> None:
    cost = Durations(parts=((1.0, "uniform", 0, NS_PER_S),), first=7 * NS_PER_S)
    one, again, other = (Price(cost, 0, "train", who) for who in ("p1", "p1", "p2"))
    took = [one.next() for _ in range(5)]
    assert took == [again.next() for _ in range(5)] != [other.next() for _ in range(5)]
    assert took[0] == 7 * NS_PER_S and len(dict.fromkeys(took)) == 5
    one.renew()
    assert one.next() == 7 * NS_PER_S and one.next() < NS_PER_S


def test_constants_draw_nothing_and_leave_old_logs_as_they_were() -> None:
    as_number, as_shape = (recorded(incident(train=train))[1] for train in (5 * NS_PER_S, constant(5 * NS_PER_S)))
    assert as_number == as_shape


def test_formulas_take_a_distribution_at_its_longest_and_at_its_middle() -> None:
    cost = Durations(samples=tuple(MS * i for i in range(1, 101)), first=NS_PER_S)
    assert (most(cost), usual(cost)) == (NS_PER_S, 50 * MS)
    assert (most(5), usual(5)) == (5, 5)
    assert quantile(Durations(drift=((MS,), (3 * MS, 9 * MS), (2 * MS,))), 0.99) == 9 * MS


# --- files ------------------------------------------------------------------------------------------------

SECONDS = st.integers(1, 10**9).map(lambda us: us * 1_000)
LISTS = st.lists(SECONDS, min_size=1, max_size=5).map(tuple)
PARTS = st.one_of(
    st.tuples(st.just("constant"), SECONDS, st.just(0)),
    st.tuples(st.just("lognormal"), SECONDS, st.integers(0, 3_000_000)),
    st.tuples(SECONDS, SECONDS).map(lambda ends: ("uniform", min(ends), max(ends))),
)
DURATIONS = st.one_of(
    st.builds(lambda part: Durations(parts=((1.0, *part),)), PARTS),
    st.builds(
        lambda parts: Durations(parts=tuple((float(i + 1), *part) for i, part in enumerate(parts))),
        st.lists(PARTS, min_size=2, max_size=4),
    ),
    st.builds(lambda samples: Durations(samples=samples), LISTS),
    st.builds(
        lambda lists, every, in_order: Durations(drift=tuple(lists), every=every, in_order=in_order),
        st.lists(LISTS, min_size=1, max_size=4), st.integers(1, 9), st.booleans(),
    ),
)  # fmt: skip
FIRST = st.one_of(st.just(0), SECONDS)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(st.integers(0, 10**12), st.builds(lambda d, first: replace(d, first=first), DURATIONS, FIRST)))
def test_a_cost_written_down_reads_back_as_the_same_cost(cost: Cost) -> None:
    if isinstance(cost, Durations):
        lengths = replace(cost, first=0)
        assert read_durations(cost_of(lengths), "costs.trajectory", Path()) == lengths
        cost = replace(cost, in_order=False)
    assert read_cost(cost_of(cost), "costs.train", Path()) == cost


def test_only_trajectories_have_an_order() -> None:
    with pytest.raises(ConfigError, match=r"costs\.train\.drift\.in_order: is for trajectories"):
        read_cost({"drift": {"in_order": True, "samples": [[1]]}}, "costs.train", Path())


@pytest.mark.parametrize("name", catalogue.names())
def test_a_scenario_written_down_reads_back_as_the_same_scenario(name: str) -> None:
    scenario = catalogue.load(name)
    assert parse_scenario(to_yaml(scenario, "a comment\nof two lines"), f"{name}.yaml") == scenario


def test_what_was_fitted_is_a_scenario_that_runs_as_it_is(tmp_path: Path) -> None:
    scenario = incident(trajectory=Durations(parts=((1.0, "uniform", MS, NS_PER_S),)), warmup=NS_PER_S)
    made, remarks = fitted(scenario)
    (tmp_path / "costs.yaml").write_text(to_yaml(made, "\n".join(remarks)))
    again = load_scenario(tmp_path / "costs.yaml")
    assert again == made
    assert [job.spec.groups for job in again.jobs] == [job.spec.groups for job in scenario.jobs]
    assert execute(again, "sim").outcome == "completed"


# --- the command ------------------------------------------------------------------------------------------


def traced(folder: Path, name: str, scenario: Scenario) -> str:
    path = folder / name
    with TraceWriter(path, header_of(scenario, "sim")) as log:
        execute(scenario, "sim", [log])
    return str(path)


def test_the_command_fits_writes_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = traced(tmp_path, "one.jsonl", incident(steps=6))
    costs = str(tmp_path / "costs.yaml")
    assert calibrate.main([log, "-o", costs, "--compare", log, "--runs", "1"]) == 0
    assert "0 of" in capsys.readouterr().out.splitlines()[-1]
    other = traced(tmp_path, "other.jsonl", incident(steps=6, train=30 * NS_PER_S))
    assert calibrate.main(["--costs", costs, "--compare", other, "--runs", "1"]) == 1
    told = capsys.readouterr().out
    assert "p1 train, s" in told.splitlines()[-1] and "makespan" in told.splitlines()[-1]


def rows(lines: list[str], what: str) -> list[str]:
    return [line.partition(f"{what} ")[2] for line in lines if f"{what} " in line]


def test_both_timelines_are_drawn_on_one_scale_the_recorded_one_above() -> None:
    scenario = incident(steps=2, target=4)
    _, entries = recorded(scenario)
    there, here = seen(scenario, entries), foreseen(scenario)
    lines = list(picture(scenario, there, here))
    assert rows(lines, "recorded") == rows(lines, "simulated") and len(rows(lines, "recorded")) == 2
    assert "A" in rows(lines, "recorded")[0] and "B" in rows(lines, "recorded")[1]
    shorter = foreseen(incident(steps=1, target=4))
    whole, half = picture(scenario, there, shorter), rows(list(picture(scenario, there, shorter)), "simulated")
    assert rows(list(whole), "recorded") == rows(lines, "recorded")
    assert 0 < len(half[0].rstrip()) < WIDTH  # blank where it was over


def test_a_window_shows_what_the_whole_picture_shows_there() -> None:
    scenario = incident(steps=2, target=4)
    _, entries = recorded(scenario)
    there = seen(scenario, entries)
    end = max(segments[-1].end for segments in there) / NS_PER_S
    whole, first = picture(scenario, there, there), picture(scenario, there, there, Window(0, end / 2))
    for wide, narrow in zip(rows(list(whole), "recorded"), rows(list(first), "recorded"), strict=True):
        assert {sign for sign in wide[: WIDTH // 2]} <= set(narrow)
    over = list(picture(scenario, there, there, Window(end, 2 * end)))
    assert [line.strip() for line in over[1:]] == ["gpu 0 recorded", "simulated", "gpu 1 recorded", "simulated"]


def test_a_prediction_for_a_warm_machine_compiles_nothing() -> None:
    first = incident(warmup=30 * NS_PER_S)
    cold = replace(
        first, jobs=(replace(first.jobs[0], costs=replace(first.jobs[0].costs, init=60 * NS_PER_S)), first.jobs[1])
    )
    assert [(job.costs.init, job.costs.warmup) for job in warm(cold).jobs] == [(9 * NS_PER_S, 0)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}/none.jsonl", "-o", "{folder}/x.yaml"], "none.jsonl: cannot be read"),
        (["{one}", "{disjoint}", "-o", "{folder}/x.yaml"], "fit logs of the same pipelines together"),
        (["{one}", "-o", "{folder}/no/x.yaml"], "there is no directory"),
        (["{one}", "-o", "{folder}"], "is a directory"),
        (["{one}", "{two}", "-o", "{folder}/../{name}/two.jsonl"], "two.jsonl is a log"),
        (["{one}", "--compare", "{two}", "-o", "{two}"], "two.jsonl is a log"),
        (["{one}", "{two}", "-o", "{linked}"], "linked.jsonl is a log"),
        (["{one}", "--costs", "x.yaml", "-o", "{folder}/x.yaml"], "with --costs, not both"),
        (["{one}", "--warm", "-o", "{folder}/x.yaml"], "--warm says how to compare"),
        (["{one}", "--typical", "--runs", "3"], "takes no other option"),
        (["{one}", "--compare", "{disjoint}"], "nothing is known of a"),
        (["{one}"], "say where the fit goes"),
        ([], "name the logs to fit, or"),
        (["--costs", "{one}", "-o", "{folder}/x.yaml"], "nothing to write"),
        (["{one}", "--compare", "{one}", "--window", "3", "2"], "--window 3 2: two times"),
        (["{one}", "--compare", "{one}", "--window", "nan", "2"], "--window nan 2: two times"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = incident(steps=1)
    names = {"p1": "a", "p2": "b"}
    jobs = tuple(
        replace(job, spec=replace(job.spec, id=names[job.spec.id]), start_after=None, dispatch_after=None)
        for job in one.jobs
    )
    places = {
        "folder": str(tmp_path),
        "name": tmp_path.name,
        "two": traced(tmp_path, "two.jsonl", one),
        "one": traced(tmp_path, "one.jsonl", one),
        "disjoint": traced(tmp_path, "disjoint.jsonl", replace(one, jobs=jobs)),
    }
    places["linked"] = str(tmp_path / "linked.jsonl")
    Path(places["linked"]).hardlink_to(places["two"])
    try:
        code = calibrate.main([argument.format(**places) for argument in arguments])
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    assert len(told) == 1 and said in told[0]
    assert read_log(places["two"])[0] == header_of(one, "sim") and not (printed.out and "-o" in arguments[-2])


def test_two_logs_are_fitted_together() -> None:
    logs = [recorded(incident(steps=2, init=init * NS_PER_S)) for init in (9, 27)]
    measured: dict[str, Measured] = measure(logs)
    made, _ = calibrated(logs[0][0].config, measured)
    assert [job.costs.init for job in made.jobs] == [Durations(samples=(9 * NS_PER_S, 27 * NS_PER_S))] * 2
