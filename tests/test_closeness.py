"""How close runs come to their bounds: waits of known length against bounds that are computed by hand."""

import pytest

from backends.sim.explore import campaign, judge
from backends.sim.explore.case import Case
from core import bounds, events
from core.closeness import BANDS, Closest, Wait
from core.model import Priority
from core.monitor import Monitor
from core.units import ns
from scenarios import explore
from tests.stories import Story, make_spec
from tests.worlds import NO_LAG, constant, make_job, make_scenario

P1, P2 = make_spec("p1", train=(0,)), make_spec("p2", train=(1,))
ALONE = bounds.rollout(P1, [P1], [P1])
TWO = bounds.rollout(P1, [P1, P2], [P1, P2])


def monitor_of(story: Story, **options: object) -> Monitor:
    return story.told(Monitor(story.scenario.cluster, story.scenario.demand, **options))


def closest(story: Story, **options: object) -> dict[str, Wait]:
    """By rule, without the initialisation, which is granted at once."""
    return {wait.rule: wait for wait in monitor_of(story, **options).closest() if wait.waited_ns}


def ready(target: int = 100) -> Story:
    """p1 with an open batch since its initialisation; both engines serve after 4 s of its wait."""
    return Story().initialise(batch=target).serve_all()


# --- waits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waited", "band"),
    [(0, "< 0.1 %"), (1, "< 1 %"), (99, "< 10 %"), (100, "< 50 %"), (499, "< 50 %"), (500, "< 100 %"),
     (1000, ">= 100 %")],
)  # fmt: skip
def test_a_wait_has_the_band_that_its_part_of_the_bound_lies_in(waited: int, band: str) -> None:
    assert Wait("L1", "p1", "", waited, 1000).band == band
    assert band in BANDS


def test_the_closest_is_the_largest_part_and_not_the_longest_wait_and_of_equals_the_first() -> None:
    long, short = Wait("L1", "p1", "", 50, 1000), Wait("L1", "p2", "", 20, 100)
    equal, other_rule = Wait("L1", "p3", "", 2, 10), Wait("L3", "p1", "", 1, 1000)
    assert Closest([long, other_rule, short, equal]).waits() == (short, other_rule)
    assert Closest([short, other_rule, long]).waits() == (short, other_rule)


# --- what the oracles measure -----------------------------------------------------------------------------


def test_the_longest_wait_for_a_trajectory_counts_and_begins_again_with_each() -> None:
    story = ready()
    for trajectory, seconds in enumerate((7, 20, 3)):
        story.wait(seconds).complete(trajectory)
    assert closest(story) == {"L1": Wait("L1", "p1", "a trajectory", ns(20), ALONE)}


def test_a_wait_begins_with_the_demand_of_who_is_initialised() -> None:
    story = ready().wait(6)
    story.complete(0)
    assert closest(story)["L1"].waited_ns == ns(4 + 6)


def test_a_wait_that_is_still_open_counts_for_as_long_as_it_lasts() -> None:
    story = ready()
    monitor = monitor_of(story)
    assert monitor.closest()[0].waited_ns == ns(4)
    monitor.tick(story.now + ns(30))
    assert monitor.closest()[0].waited_ns == ns(4 + 30)


def test_a_failure_of_its_own_starts_the_wait_again_as_it_starts_the_clock_of_the_oracle() -> None:
    story = ready().wait(6)
    story.say(events.EngineSuspected(pipeline="p1", seq=-1, dp_rank=0, reason="silent"))
    story.wait(9).complete(0)
    assert closest(story)["L1"].waited_ns == ns(4 + 6)


def test_a_batch_that_is_closed_ends_a_wait() -> None:
    story = ready().wait(6).close()
    assert closest(story.pause(1000))["L1"].waited_ns == ns(4 + 6)


def test_a_wait_is_measured_by_the_bound_at_its_end() -> None:
    story = Story(P1, P2).initialise("p1", batch=100).serve_all("p1").wait(6)
    story.register("p2")
    story.wait(1).complete(0)
    assert closest(story)["L1"] == Wait("L1", "p1", "a trajectory", ns(4 + 6 + 1), TWO)


def test_a_shorter_wait_is_looked_at_again_once_the_bound_is_another_one() -> None:
    story = Story(P1, P2).initialise("p1", batch=100).serve_all("p1").wait(6)
    story.complete(0)
    story.register("p2").request("p2", Priority.INITIALIZATION)
    story.wait(5).complete(1)
    assert closest(story)["L1"] == Wait("L1", "p1", "a trajectory", ns(4 + 6), ALONE)
    story.wait(11).complete(2)  # longer, but against a bound that has grown by more
    assert ns(11) * ALONE < ns(10) * TWO
    assert closest(story)["L1"].bound_ns == ALONE
    story.wait(30).complete(3)
    assert closest(story)["L1"] == Wait("L1", "p1", "a trajectory", ns(30), TWO)


@pytest.mark.parametrize("end", ["granted", "cancelled", "open"])
def test_a_request_waits_until_it_is_granted_or_gone_or_the_run_is_over(end: str) -> None:
    story = Story().initialise()
    request = story.request()
    story.wait(12)
    if end == "granted":
        story.grant()
    elif end == "cancelled":
        story.tell(events.RequestCancelled, request=request)
    else:
        story.note("ignored")
    bound = bounds.grant(P1, Priority.ACTOR_TRAINING, [P1], [P1])
    assert closest(story) == {"L3": Wait("L3", "p1", "ACTOR_TRAINING", ns(12), bound)}


def test_who_is_cut_off_from_its_engines_waits_for_its_end_and_not_for_a_trajectory() -> None:
    story = ready()
    story.say(events.NodeLeft(node=0))
    story.wait(25).tell(events.PipelineLeft, error="its node left")
    found = closest(story)
    assert (found["L1"].waited_ns, found["L2"].waited_ns) == (ns(4), ns(25))
    assert found["L2"].bound_ns == ALONE


def test_who_starves_has_used_all_of_its_bound() -> None:
    story = ready()
    monitor = monitor_of(story)
    monitor.tick(story.now + ALONE + 1)
    [wait, _] = monitor.closest()
    assert (wait.rule, wait.band) == ("L1", ">= 100 %")


def test_how_long_a_stranger_waits_is_not_measured() -> None:
    story = ready().wait(6)
    story.complete(0)
    story.request()
    assert closest(story.pause(3), own=("p2",)) == {}


# --- over many runs ---------------------------------------------------------------------------------------


def one_pipeline(trajectory_s: float = 10) -> Case:
    """One GPU, one engine, memory seen at once."""
    job = make_job("p1", (0,), (0,), engine_slots=1, trajectory=constant(trajectory_s))
    return Case(scenario=make_scenario(job, gpus_per_node=1), release_lag=NO_LAG)


def test_the_simulator_waits_as_long_as_its_costs_say() -> None:
    case = one_pipeline()
    rollout, grant = judge.judge(case).closest
    spec = case.scenario.jobs[0].spec
    assert rollout == Wait("L1", "p1", "a trajectory", ns(1 + 3 + 10), bounds.rollout(spec, [spec], [spec]))
    bound = bounds.grant(spec, Priority.ACTOR_TRAINING, [spec], [spec])
    assert grant == Wait("L3", "p1", "ACTOR_TRAINING", ns(1), bound)  # its engine falls asleep


def test_the_closest_of_several_runs_has_its_seed_and_the_first_of_equals_stays() -> None:
    total = campaign.Result()
    for seed, trajectory_s in ((5, 10), (6, 30), (7, 30)):
        result, case = campaign.Result(), one_pipeline(trajectory_s)
        result.take(seed, case, judge.judge(case))
        total.add(result)
    assert (total.closest["L1"].seed, total.closest["L1"].wait.waited_ns) == (6, ns(1 + 3 + 30))
    assert total.closest["L3"].seed == 5
    assert total.bands == {("L1", "< 0.1 %"): 1, ("L1", "< 1 %"): 2, ("L3", "< 0.1 %"): 3}


def test_the_explorer_ends_with_what_came_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert explore.main(["--seeds", "12", "--faults", "lose_message,slow_engine", "--jobs", "1", "--quiet"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("closest")]
    assert [line.split(":")[0] for line in said] == ["closest to its bound, rollout", "closest to its bound, grant"]
    assert all("(seed " in line and "; runs by the part they used: < " in line for line in said)
