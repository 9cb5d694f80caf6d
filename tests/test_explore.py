"""The explorer: what it draws can be, what it finds replays and shrinks, and what was once found stays fixed."""

import gc
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.sim.crew import Crew
from backends.sim.explore import artefact, campaign, guests, judge, room, shrink, strategies, swarm, worlds
from backends.sim.explore.case import Case, Finding, Schedule, Strategy
from backends.sim.faults import STRIKES
from backends.sim.policies import Choice
from core import events, rollouts, turns
from core.backend import Attempt
from core.config import Fault
from core.errors import Conflict
from core.service import Service
from core.topology import check_world
from scenarios import explore
from tests.core_world import LIMITS, CoreWorld, S, spec
from tests.worlds import SECOND, constant, make_job, make_scenario

SEEDS = sorted((Path(__file__).parent / "seeds").glob("*.json"))
EVERYTHING = campaign.Plan(None, tuple(swarm.CLASSES))
LENGTH = Crew.length


def two_pipelines(**changes: Any) -> Case:
    jobs = (make_job("p1", (0,), (0, 1)), make_job("p2", (1,), (0, 1)))
    return Case(scenario=msgspec.structs.replace(make_scenario(*jobs), **changes))


# --- drawing ----------------------------------------------------------------------------------------------


def test_every_world_could_exist_and_is_the_same_when_drawn_again() -> None:
    for seed in range(100):
        case = campaign.draw(EVERYTHING, seed)
        check_world(guests.everybody(case))
        assert case == campaign.draw(EVERYTHING, seed)


def test_the_worlds_differ_in_everything_that_matters() -> None:
    cases = [worlds.draw(seed) for seed in range(200)]
    jobs = [job for case in cases for job in case.scenario.jobs]
    assert {len(case.scenario.jobs) for case in cases} == {1, 2, 3, 4, 5, 6, 8}
    assert {case.scenario.cluster.gpus for case in cases} == {1, 2, 4, 8, 16}
    assert {job.spec.infer.tp for job in jobs} == {1, 2, 4}
    assert {job.spec.staleness for job in jobs} == {0, 1, 2}
    assert {len(job.spec.groups) for job in jobs} == {2, 3, 4}
    assert any(len(set(msgspec.structs.astuple(job.costs)[:8])) == 1 for job in jobs), "ties"


def test_every_trajectory_of_a_drawn_world_fits_into_a_turn() -> None:
    assert all(room.has_room(campaign.draw(EVERYTHING, seed).scenario) for seed in range(200))
    # Found by a soak: two pipelines with one trajectory each that was longer than their turns, which starved both.
    case = campaign.draw(EVERYTHING, 32_015_658)
    assert [job.spec.limits.turn > job.spec.limits.drain for job in case.scenario.jobs[::5]] == [True, True]
    assert judge.judge(case).finding is None


def test_the_turn_that_is_needed_knows_every_trajectory_there_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: dict[str, int] = {}

    def length(crew: Crew, attempt: Attempt) -> int:
        taken = LENGTH(crew, attempt)
        decoded[crew.job.spec.id] = max(taken, decoded.get(crew.job.spec.id, 0))
        return taken

    monkeypatch.setattr(Crew, "length", length)
    evaluated = 0
    for seed in range(40):
        scenario = worlds.draw(seed).scenario
        decoded.clear()
        assert judge.judge(Case(scenario=scenario)).outcome == "completed"
        for job in scenario.jobs:
            evaluated += job.evaluation is not None
            needed = (room.turn_needed(scenario.seed, job) - job.reward_s) * 4 / 5
            if job.evaluation is None:
                assert decoded[job.spec.id] == pytest.approx(needed, abs=2)
            else:  # whose batches have another size, which is not told apart
                assert decoded[job.spec.id] <= needed + 2
    assert evaluated


def test_every_kind_of_fault_of_the_simulator_is_drawn_and_lies_before_the_healing() -> None:
    cases = [swarm.afflict(worlds.draw(seed), seed, swarm.CLASSES) for seed in range(200)]
    faults = [fault for case in cases for fault in case.scenario.faults]
    assert {fault.kind for fault in faults} == set(STRIKES)
    assert all(fault.at < case.heal_at for case in cases for fault in case.scenario.faults)


def test_some_runs_have_no_fault_and_none_has_a_class_that_was_not_asked_for() -> None:
    cases = [swarm.afflict(worlds.draw(seed), seed, ("kill_engine",)) for seed in range(50)]
    assert {fault.kind for case in cases for fault in case.scenario.faults} == {"kill_engine"}
    assert any(not case.scenario.faults for case in cases)


def test_a_case_survives_being_written_and_read() -> None:
    for seed in range(30):
        case = campaign.draw(EVERYTHING, seed)
        assert msgspec.json.decode(msgspec.json.encode(case), type=Case) == case


# --- excuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "excused"),
    [
        ([Fault(at=0, kind="kill_client", pipeline="p1")], True),
        ([Fault(at=0, kind="kill_client", pipeline="p2")], False),
        ([Fault(at=0, kind="remove_node", node=0)], True),
        ([Fault(at=0, kind="kill_engine", pipeline="p1", dp_rank=0)] * 2, False),
        ([Fault(at=0, kind="kill_engine", pipeline="p1", dp_rank=0)] * 3, True),
        ([Fault(at=0, kind="lose_message", pipeline="p1", count=3)] * 3, False),
        ([Fault(at=0, kind="leak_residue", pipeline="p2", bytes=1)], True),
    ],
)
def test_a_pipeline_may_fail_only_for_what_happened_to_it(faults: list[Fault], excused: bool) -> None:
    case = two_pipelines()
    assert bool(swarm.excuse(case.scenario, case.scenario.jobs[0], faults)) is excused


# --- orders -----------------------------------------------------------------------------------------------


def choice(index: int, *births: int) -> Choice:
    return Choice(index, 0, births, ("",) * len(births), len(births) - 1)


def test_pct_runs_the_same_task_first_wherever_it_stands() -> None:
    policy = strategies.Pct(seed=1, depth=1, length=1)
    chosen = set()
    for births in itertools.permutations((1, 2, 3)):
        chosen.add(births[policy.holds(choice(0, *births))])
    assert len(chosen) == 1


def test_pct_puts_the_best_task_behind_all_others_at_a_demotion() -> None:
    policy = strategies.Pct(seed=1, depth=2, length=1)
    plain = strategies.Pct(seed=1, depth=1, length=1)
    births = (1, 2, 3)
    assert births[policy.holds(choice(0, *births))] != births[plain.holds(choice(0, *births))]


class Runs:
    """Three decisions with one to hold at each; a fourth appears once the second was held."""

    def __init__(self) -> None:
        self.seen: list[dict[int, int]] = []

    def __call__(self, schedule: Schedule) -> Any:
        self.seen.append(schedule.holds)
        return type("Ran", (), {"decisions": [1, 1, 1] + [1] * (1 in schedule.holds)})()


def test_an_exhaustive_search_tries_every_schedule_once_fewest_holds_first() -> None:
    runs = Runs()
    search = strategies.FewHolds(runs, budget=2, most_runs=100)
    assert len(list(search)) == len(runs.seen)
    assert runs.seen[:4] == [{}, {0: 1}, {1: 1}, {2: 1}]
    assert runs.seen[4:] == [{0: 1, 1: 1}, {0: 1, 2: 1}, {1: 1, 2: 1}, {1: 1, 3: 1}]
    assert search.complete


def test_a_search_that_is_too_large_says_so() -> None:
    search = strategies.FewHolds(Runs(), budget=2, most_runs=5)
    assert len(list(search)) == 5
    assert not search.complete


def test_a_drawn_order_written_down_as_holds_gives_the_same_log() -> None:
    case = msgspec.structs.replace(two_pipelines(), schedule=strategies.draw(3, Strategy.WALK))
    drawn = artefact.Replay(case)
    assert drawn.judgement.holds, "the walk went like FIFO"
    written = artefact.Replay(msgspec.structs.replace(case, schedule=strategies.written_down(drawn.judgement.holds)))
    assert written.digest == drawn.digest
    assert written.digest != artefact.Replay(two_pipelines()).digest


# --- judging ----------------------------------------------------------------------------------------------


def test_a_quiet_world_has_nothing_against_it() -> None:
    run = judge.judge(two_pipelines(), thorough=True)
    assert (run.finding, run.outcome, run.struck) == (None, "completed", {})


def test_a_pipeline_that_fails_without_an_excuse_is_found() -> None:
    limits = {"hold": SECOND}  # shorter than its training: it exceeds what it declared itself
    case = two_pipelines()
    [p1, p2] = case.scenario.jobs
    hasty = msgspec.structs.replace(p1, spec=msgspec.structs.replace(
        p1.spec, limits=msgspec.structs.replace(p1.spec.limits, **limits)))  # fmt: skip
    scenario = msgspec.structs.replace(case.scenario, jobs=(hasty, p2))
    found = judge.judge(msgspec.structs.replace(case, scenario=scenario)).finding
    assert found is not None and found.signature == "unexcused-PipelineFailed"
    assert "p1" in found.text


def test_what_has_not_struck_by_the_healing_never_does() -> None:
    fault = Fault(at=0, kind="fail_sync", pipeline="p1", count=1000)
    case = msgspec.structs.replace(two_pipelines(faults=(fault,)), heal_at=1)
    assert judge.judge(case).outcome == "completed"


def test_a_guest_with_every_habit_there_is_harms_nobody() -> None:
    kinds = [kind for kind in guests.MOVES if kind not in ("leave", "fail", "vanish")]
    moves = tuple(guests.Move(kind=kind, wait=SECOND, number=i) for i, kind in enumerate(kinds))
    guest = guests.Guest(job=make_job("g1", (0,), (1,)), moves=moves)
    run = judge.judge(msgspec.structs.replace(two_pipelines(), guests=(guest,)), thorough=True)
    assert run.finding is None and run.outcome == "completed"


# --- a planted bug ----------------------------------------------------------------------------------------


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines change hands the moment they are routable: nobody ever completes anything."""

    def turn_end(engine: Any, only: bool, stays: int | None = None) -> int | None:
        return None if engine.routable_since < 0 else engine.routable_since

    monkeypatch.setattr(rollouts, "turn_end", turn_end)
    monkeypatch.setattr(turns, "turn_end", turn_end)


def contended() -> Case:
    """Two pipelines that share one GPU, and a third beside them with a fault that has nothing to do with it."""
    limits = dict.fromkeys(make_job().spec.limits.__struct_fields__, 5 * SECOND)
    costs = dict.fromkeys(("init", "train", "sync", "sleep", "wake", "publish", "offload", "onload"), SECOND)
    jobs = []
    for name, gpu in (("p1", 0), ("p2", 0), ("p3", 1)):
        job = make_job(name, (gpu,), (gpu,))
        spec = msgspec.structs.replace(job.spec, limits=msgspec.structs.replace(job.spec.limits, **limits))
        cheap = msgspec.structs.replace(job.costs, **costs, trajectory=constant(2))
        jobs.append(msgspec.structs.replace(job, spec=spec, costs=cheap))
    fault = Fault(at=30 * SECOND, kind="slow_engine", pipeline="p3", dp_rank=0, factor=2.0, duration=SECOND)
    return Case(scenario=make_scenario(*jobs, faults=(fault,)), heal_at=40 * SECOND)


@pytest.mark.usefixtures("short_turns")
def test_a_planted_bug_is_found_shrunk_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    case = contended()
    found = judge.judge(case).finding
    assert found is not None and found.signature == "L1-starved"
    shrinker = shrink.Shrinker(case, found, runs_most=12)
    small = shrinker.shrink()
    assert len(small.scenario.jobs) == 2 and not small.scenario.faults
    assert shrinker.finding.signature == found.signature and shrinker.runs <= 12
    saved = artefact.Artefact(case=small, expect=shrinker.finding, digest=artefact.Replay(small).digest)
    path = artefact.save(saved, tmp_path, "planted")
    again = artefact.Replay(artefact.load(path).case)
    assert again.digest == saved.digest
    story = again.story()
    assert "L1" in story and "expand" in story and "waits for a rollout engine" in story
    assert explore.main(["--replay", str(path)]) == 1


def test_what_is_shrunk_keeps_room_for_its_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would starve for another reason than what was found."""
    judged: list[bool] = []

    def everything_fails(case: Case, *, thorough: bool = False) -> judge.Judgement:
        judged.append(room.has_room(case.scenario))
        failed = judge.Judgement()
        failed.finding = found
        return failed

    found = Finding(rule="L1", outcome="starved", text="")
    monkeypatch.setattr(shrink, "judge", everything_fails)
    shrink.Shrinker(contended(), found, runs_most=100).shrink()
    assert judged and all(judged)


def test_a_seed_without_a_log_is_not_called_stale(capsys: pytest.CaptureFixture[str]) -> None:
    seed = Path(__file__).parent / "seeds/a-lie-that-was-refused.json"
    assert explore.main(["--replay", str(seed)]) == 0
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said == ["nothing was found", "that is as recorded; no log was recorded to compare with"]


def test_the_planted_bug_was_the_only_thing_wrong_with_that_world() -> None:
    assert judge.judge(contended(), thorough=True).finding is None


# --- what was found, where the pure core shows it best ------------------------------------------------------


def test_who_loses_an_engine_grows_at_once_where_the_plan_did_not_look() -> None:
    world = CoreWorld(gpus=2)
    world.ready(spec("a", (0,), (0, 1)), spec("b", (0,), (0,)))
    world.open("a", target=1)
    world.settle()
    assert world.up("a") == [0]
    world.sleep(LIMITS.turn / S + 1)
    world.open("b")  # its region is GPU 0 alone
    assert (world.up("a"), world.up("b")) == ([1], [0])


def test_nobody_counts_as_dropped_what_was_never_delivered() -> None:
    world = CoreWorld(gpus=2)
    world.ready(spec("a"))
    batch = world.open("a", target=4)
    for target, delivered in ((4, 1), (5, 0)):
        told = {"batch": batch, "target": target, "delivered": delivered, "reason": "so it says"}
        assert isinstance(world.say(events.DemandChanged, "a", **told), Conflict)
    assert world.state.ledger.books["a"].open_demand == 4
    assert world.say(events.DemandChanged, "a", batch=batch, target=3, delivered=0, reason="given up") is None


# --- campaigns --------------------------------------------------------------------------------------------


def figures(result: campaign.Result) -> tuple[Any, ...]:
    counts = result.runs_of, result.struck, result.outcomes, result.bands, result.found
    return result.runs, result.entries, result.decisions, result.closest, *counts


def test_worlds_that_are_over_take_no_memory() -> None:
    for _ in campaign.campaign(campaign.Plan(classes=("lose_message",)), range(10), jobs=1):
        pass
    assert sum(isinstance(left, Service) for left in gc.get_objects()) == 0


def test_what_is_found_does_not_depend_on_the_number_of_jobs() -> None:
    alone = [figures(result) for result in campaign.campaign(EVERYTHING, range(6), jobs=1)]
    together = [figures(result) for result in campaign.campaign(EVERYTHING, range(6), jobs=2)]
    assert alone == together


def test_a_few_hundred_seeds_under_every_order_and_fault_find_nothing() -> None:
    total = campaign.Result()
    for result in campaign.campaign(EVERYTHING, range(100_000, 100_120), jobs=1):
        total.add(result)
        assert not result.failures, result.failures[0].finding
    assert total.runs >= 240 and total.twice > 0


@pytest.mark.parametrize("file", SEEDS, ids=lambda file: file.stem)
def test_what_was_found_once_stays_fixed(file: Path) -> None:
    saved = artefact.load(file)
    assert saved.about and saved.expect is None, f"{file.name} says neither what it was nor that it is fixed"
    found = judge.judge(saved.case, thorough=True).finding
    assert found is None, found


# --- the command line -------------------------------------------------------------------------------------


def test_a_clean_campaign_exits_0_and_counts_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["overlap_2gpu", "--seeds", "3", "--jobs", "1", "--faults", "none", "--out", str(tmp_path / "out")]
    assert explore.main(arguments) == 0
    said = capsys.readouterr().out
    assert "done: 3 seeds, 6 runs" in said and "found: nothing" in said
    assert not (tmp_path / "out").exists()


def test_a_failure_is_one_line_with_its_seed_and_a_file_and_exit_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_failure(plan: campaign.Plan, seed: int) -> campaign.Result:
        result = campaign.Result()
        result.seeds = 1
        result.fail(seed, two_pipelines(), Finding(rule="L4", outcome="completed", text="GPU 0 is idle"))
        return result

    monkeypatch.setattr(campaign, "explore", one_failure)
    arguments = ["--seeds", "2", "--jobs", "1", "--no-shrink", "--out", str(tmp_path), "--first-seed", "7"]
    assert explore.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed 7 (fifo): L4 completed: GPU 0 is idle"
    assert lines[2].startswith("seed 8 (fifo): L4 completed") and "as in" in lines[2]
    assert [file.name for file in tmp_path.iterdir()] == ["L4-completed-7.json"]


@pytest.mark.parametrize(
    "arguments",
    [["--seeds", "0"], ["--strategy", "wlak"], ["--faults", "kill_engine,kill_engin"], ["--replay", "missing.json"],
     ["no_such_scenario"], ["--jobs", "-1"], ["--replay", ""], ["--out", __file__], ["--out", f"{__file__}/out"]],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = explore.main(arguments)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and said.err.startswith("error:") and said.err.count("\n") == 1 and not said.out


def test_an_interrupted_campaign_sums_up_and_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: campaign.Plan, seed: int) -> campaign.Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "explore", interrupted)
    assert explore.main(["--jobs", "1"]) == 130
    assert "interrupted: 0 seeds" in capsys.readouterr().out
