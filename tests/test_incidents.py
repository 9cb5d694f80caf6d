"""Incidents I01 to I18: lost demand, starvation and deadlock; bad plans, thrash and idle GPUs.

Each is the shipped scenario or, where a scenario cannot say it, one decision of the core; then a few variations.
"""

import random
from itertools import chain, pairwise
from typing import Any

import msgspec
import pytest
from core_world import CoreWorld, spec
from incident_world import Run, incident, pipeline, under, world

from core import actions, events
from core.errors import Conflict, RequestError, TopologyError
from core.model import DemandPolicy, Priority, Role, WorkerGroup
from core.snapshot import plan_snapshot
from core.topology import check_world

STUCK = ("starved", "deadlock")


def rollout(name: str, gpus: list[int], awake: list[int], done: int | None = None, tp: int = 1) -> dict[str, Any]:
    """A pipeline of a snapshot, `done` of 100 trajectories delivered; None: it has no open batch."""
    batch = {} if done is None else {"batch": {"target": 100, "done": done}}
    return {"id": name, "infer": {"gpus": gpus, "tp": tp}, "awake": awake, **batch}


def claim(name: str, gpus: list[int], role: str = "actor_train", priority: str = "ACTOR_TRAINING") -> dict[str, Any]:
    return {"pipeline": name, "role": role, "priority": priority, "gpus": gpus}


# --- lost demand, starvation, deadlock -----------------------------------------------------------------------


def test_i01_a_pipeline_evicted_before_its_first_report_comes_back_by_itself():
    run = incident("i01")
    evicted = next(at for at, _ in run.all(actions.SleepEngine, pipeline="a"))
    assert not [at for at in run.times(events.TrajectoryCompleted, pipeline="a") if at < evicted]
    assert under("i01", "floor").outcome == "completed"
    starved = under("i01", "signal")
    assert starved.outcome in STUCK
    assert "a" in starved.result.diagnosis and "signal" in starved.result.diagnosis


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_i01_whoever_initialises_after_whom_everybody_comes_back(count: int, tp: int):
    """Each initialisation evicts all who came before it, none of whom has reported anything."""
    names = "abcd"[:count]
    order = {
        name: {"start_after": {"pipeline": before, "event": "rollout_granted"}}
        for before, name in pairwise(names)
    }
    for name in names[:-1]:
        order.setdefault(name, {})["dispatch_after"] = {"pipeline": names[-1], "event": "init_accepted"}
    gpus = list(range(2 * tp))
    jobs = [pipeline(n, gpus[i % 2 * tp :][:tp], gpus, tp, **order.get(n, {})) for i, n in enumerate(names)]
    assert Run(world(2 * tp, *jobs)).fine()


def test_i02_a_pipeline_evicted_before_its_first_report_does_not_wait_beside_idle_gpus():
    run = incident("i02")
    assert run.pipelines["a"]["steps_done"] == 2
    assert "injected" in run.pipelines["b"]["error"]
    assert under("i02", "signal").outcome in STUCK


def random_world(seed: int) -> Any:
    """2 to 4 pipelines on 2 to 8 GPUs, each on a random part, with up to 20 s between a grant and the first report."""
    chance = random.Random(seed)
    gpus = chance.randint(2, 8)
    jobs = []
    for name in "abcd"[: chance.randint(2, 4)]:
        tp = chance.choice([1, 1, 2]) if gpus >= 4 else 1
        bundles = [list(range(i, i + tp)) for i in range(0, gpus - tp + 1, tp)]
        infer = sorted(chance.sample(bundles, chance.randint(1, len(bundles))))
        jobs.append(
            pipeline(
                name, sorted(chance.sample(range(gpus), chance.randint(1, 2))), list(chain.from_iterable(infer)), tp,
                staleness=chance.choice([0, 0, 1]), on_preempt=chance.choice(["abort", "drain"]),
                partial=chance.choice(["restart", "resume"]), start_at=chance.choice([0, 0, 15, 40]),
                batch={"prompts": chance.choice([1, 3, 8, 20])}, eval={"every": 2, "trajectories": 3},
                costs={
                    "trajectory": {"uniform": [1, chance.choice([2, 20, 40])]}, "engine_slots": chance.choice([1, 4])
                },
            )
        )  # fmt: skip
    return world(gpus, *jobs, seed=seed)


@pytest.mark.parametrize("seed", [*range(30), 1000, 1114, 1116, 1138, 1358])
def test_i02_no_random_topology_wedges(seed: int):
    run = Run(random_world(seed))
    assert run.fine(), (run.outcome, run.broken, run.result.diagnosis)


def test_i03_a_wish_without_an_estimate_is_served_or_refused_at_once():
    core = CoreWorld(2, DemandPolicy.SIGNAL)
    core.ready(spec("a"))
    core.say(events.RolloutSignalled, "a", batch=0)  # no batch, no report
    assert core.up("a") == [0]
    for policy in DemandPolicy:
        core = CoreWorld(2, policy)
        core.ready(spec("a"))
        assert isinstance(core.say(events.BatchOpened, "a", batch=0, target=0), RequestError)
        assert "open a rollout batch" in str(core.ask("a", Role.ACTOR_INFER, Priority.GENERATION))
        assert not core.up("a")


def test_i04_whoever_has_nothing_to_roll_out_is_the_donor():
    answer = plan_snapshot({"gpus": 2, "pipelines": [rollout("a", [0, 1], [0, 1]), rollout("b", [0, 1], [], 0)]})
    assert answer["shrink"] == {"a": [0, 1]}
    assert answer["expand"] == {"b": {"0": [0], "1": [1]}}
    full = plan_snapshot({"gpus": 2, "pipelines": [rollout("a", [0, 1], [0, 1], 100), rollout("b", [0, 1], [], 0)]})
    assert full == answer  # a batch that is full is no demand either
    assert incident("i04").wait("b") < 5


@pytest.mark.parametrize("idle_tp, hungry_tp", [(1, 2), (2, 1), (1, 4), (4, 2)])
def test_i04_an_idle_holder_gives_way_to_engines_of_any_width(idle_tp: int, hungry_tp: int):
    gpus = [0, 1, 2, 3]
    holder = rollout("a", gpus, list(range(4 // idle_tp)), tp=idle_tp)
    answer = plan_snapshot({"gpus": 4, "pipelines": [holder, rollout("b", gpus, [], 0, hungry_tp)]})
    assert sorted(chain.from_iterable(answer["expand"]["b"].values())) == gpus


def test_i05_three_pipelines_on_two_gpus_progress_by_turns():
    run = incident("i05")
    first_full = min(at for at, _ in run.all(events.BatchTaken))
    for name in "abc":
        before = [at for at in run.times(events.TrajectoryCompleted, pipeline=name) if at < first_full]
        assert len(before) > 200, f"{name} had to wait for somebody to finish"


@pytest.mark.parametrize("count, gpus, tp", [(3, 1, 1), (5, 2, 1), (4, 2, 2), (3, 4, 4)])
def test_i05_more_pipelines_than_engines_take_turns(count: int, gpus: int, tp: int):
    """Batches far longer than a turn: nobody waits longer than everybody else's turn and the switches between."""
    shared, turn = list(range(gpus)), 60
    jobs = [
        pipeline(
            f"p{i}", [gpus + i], shared, tp, steps=1, batch={"prompts": 60}, min_residence_s=turn,
            costs={"engine_slots": 2, "trajectory": {"uniform": [5, 15]}},
        )
        for i in range(count)
    ]  # fmt: skip
    run = Run(world(gpus + count, *jobs))
    assert run.fine(), run.broken
    others = -(-count // (gpus // tp)) - 1 or 1
    assert max(map(run.wait, run.pipelines)) < 25 * count + (others + 1) * (turn + 10)


def test_i06_log_probs_are_granted_within_their_bound_although_two_peers_train_without_a_pause():
    run = incident("i06")
    asked = run.times(events.LeaseRequested, pipeline="c", priority=Priority.OLD_LOG_PROBS)
    granted = [at for at, lease in run.all(actions.GrantLease, pipeline="c")][1::2]
    peers = [at for name in "ab" for at in run.times(actions.GrantLease, pipeline=name)]
    assert len(asked) == len(granted) == 8
    for wanted, got in zip(asked, granted, strict=True):
        assert sum(wanted < at < got for at in peers) <= 6  # 120 s of ageing, at 34 s a hand-over, and one more


def test_i07_an_engine_starts_at_once_on_what_is_free_and_on_the_rest_later():
    core = CoreWorld(2)
    core.ready(spec("a", (0,), (0, 1)), spec("b", (1,), (1,)))
    core.ask("b")
    core.settle()
    core.open("a")
    core.settle()
    assert core.holder(1) == "b" and core.serving("a") == [0]
    core.release("b")
    core.settle()
    assert core.serving("a") == [0, 1]
    run = incident("i07")
    assert run.wait("a") < 5 and run.wait("b") < 25  # while B trains for 400 s


def test_i08_of_two_first_requests_in_one_instant_one_is_granted_at_once_and_the_other_queued():
    run = incident("i08")
    assert run.times(events.LeaseRequested, priority=Priority.INITIALIZATION) == [0, 0]
    (first, a), (second, b) = list(run.all(actions.GrantLease))[:2]
    assert (first, a.pipeline, b.pipeline) == (0, "a", "b")
    assert 22 <= second <= 26


def test_i09_requests_queued_on_an_engine_that_is_taken_away_go_on_when_it_is_back():
    run = incident("i09")
    gone = run.times(actions.SleepEngine, pipeline="a")
    back = run.times(actions.WakeEngine, pipeline="a")
    reports = run.times(events.TrajectoryCompleted, pipeline="a")
    assert len(gone) >= 3
    for away, here in zip(gone, back[1:], strict=False):
        assert here - away > 30 and not [at for at in reports if away < at < here]
    assert len(reports) == 40 and not list(run.all(events.TrajectoryDropped))


def both_roles(name: str, train: int, critic: int) -> Any:
    groups = (
        WorkerGroup(role=Role.ACTOR_TRAIN, gpus=(train,)),
        WorkerGroup(role=Role.ACTOR_INFER, gpus=(2,)),
        WorkerGroup(role=Role.CRITIC, gpus=(critic,)),
    )
    return msgspec.structs.replace(spec(name), groups=groups)


def test_i10_nobody_may_hold_one_pool_and_wait_for_another():
    core = CoreWorld(3)
    core.ready(both_roles("a", 0, 1), both_roles("b", 1, 0))
    core.ask("a")
    core.ask("b")
    core.settle()
    assert core.holder(0) == "a" and core.holder(1) == "b"
    for name in "ab":
        refused = core.ask(name, Role.CRITIC, Priority.CRITIC_TRAINING)
        assert isinstance(refused, Conflict) and "actor_train" in str(refused)
    epoch = min(core.leases["a"])
    assert core.say(
        events.ReleasedAndRequested, "a", epoch=epoch, request=7, role=Role.CRITIC, priority=Priority.CRITIC_TRAINING
    ) is None  # fmt: skip
    del core.leases["a"][epoch]
    core.settle()
    core.release("b")
    core.settle()
    assert core.holder(1) == "a"


def test_i10_two_requests_at_once_are_refused_for_they_could_be_granted_one_by_one():
    core = CoreWorld(3)
    core.ready(both_roles("a", 0, 1), both_roles("b", 1, 0))
    core.ask("a")
    core.settle()
    assert core.ask("b", Role.CRITIC, Priority.CRITIC_TRAINING) is None  # waits for A's GPU, and holds nothing
    assert isinstance(core.ask("b"), Conflict)


def test_i10_two_pools_in_opposite_order_do_not_lock():
    run = incident("i10")
    assert all(figures["steps_done"] == 4 for figures in run.pipelines.values())


# --- bad plans, thrash, idle GPUs ----------------------------------------------------------------------------


def test_i11_an_engine_is_not_flipped_for_a_request_whose_other_gpu_stays_busy():
    core = CoreWorld(3)
    core.ready(spec("a", (0, 1), (2,)), spec("b", (0,), (2,)), spec("c", (2,), (1,)))
    core.ask("b")
    core.open("c", 100)
    core.settle()
    assert core.serving("c") == [0] and core.holder(0) == "b"
    core.ask("a")
    for _ in range(20):
        core.complete("c")
        core.sleep(25)
        core.settle()
        assert core.serving("c") == [0]
    shrinks = [note for note in core.notes if note.kind == "shrink"]
    assert not shrinks
    core.release("b")
    core.settle()
    assert core.holder(0) == core.holder(1) == "a"


def test_i12_no_gpu_of_four_is_lost_to_rounding_between_three():
    equal = [rollout(name, [0, 1, 2, 3], [], 0) for name in "abc"]
    answer = plan_snapshot({"gpus": 4, "pipelines": equal})
    given = [gpus for engines in answer["expand"].values() for gpus in engines.values()]
    assert sorted(chain.from_iterable(given)) == [0, 1, 2, 3]
    assert set(answer["expand"]) == {"a", "b", "c"}
    assert incident("i12").result.summary["makespan_s"] < 700  # 1,800 trajectories of 10 s on 32 slots need 563 s


@pytest.mark.parametrize("count, gpus, tp", [(3, 5, 1), (3, 7, 1), (5, 8, 1), (3, 8, 2), (7, 16, 2), (3, 16, 4)])
def test_i12_no_usable_gpu_is_lost_to_rounding(count: int, gpus: int, tp: int):
    mapped = list(range(gpus))
    answer = plan_snapshot({"gpus": gpus, "pipelines": [rollout(f"p{i}", mapped, [], 0, tp) for i in range(count)]})
    assert sum(len(engine) for engines in answer["expand"].values() for engine in engines.values()) == gpus
    assert len(answer["expand"]) == count


@pytest.mark.parametrize("first, second", [(90, 0), (0, 90), (99, 0), (50, 0), (1, 99)])
def test_i13_one_gpu_each_and_nothing_else_to_give_means_no_resize_and_no_more_planning(first: int, second: int):
    both = [rollout("a", [0, 1], [0], first), rollout("b", [0, 1], [1], second)]
    answer = plan_snapshot({"gpus": 2, "pipelines": both})
    assert answer == {"shrink": {}, "expand": {}, "grant": [], "wait": []}


def test_i13_a_settled_world_sets_no_timer_to_plan_again():
    core = CoreWorld(2)
    core.ready(spec("a"), spec("b", (1,)))
    for name in "ab":
        core.open(name, 100)
        core.settle()
    core.sleep(1000)
    core.settle()
    for _ in range(90):
        core.complete("a")
    resized = len([note for note in core.notes if note.kind in ("shrink", "expand")])
    core.sleep(3600)
    assert (core.up("a"), core.up("b")) in (([0], [1]), ([1], [0]))
    assert len([note for note in core.notes if note.kind in ("shrink", "expand")]) == resized
    assert "review" not in core.timers
    run = incident("i13")
    begun, ended = run.times(events.TrajectoryCompleted, pipeline="b")[0], run.times(events.BatchTaken, pipeline="a")[0]
    assert ended - begun > 40 and len(run.times(events.TrajectoryCompleted, pipeline="a")) == 400
    resizes = [*run.times(actions.SleepEngine), *run.times(actions.WakeEngine)]
    assert not [at for at in resizes if begun < at < ended]


def test_i14_the_gpu_that_is_free_first_stays_reserved_for_the_request_that_needs_two():
    core = CoreWorld(3)
    core.ready(spec("a", (0, 1), (2,)), spec("quick", (2,), (0,)), spec("slow", (2,), (1,)))
    core.open("quick", 50)
    core.open("slow", 50)
    core.settle()
    core.ask("a")
    quick, slow = (action for action in core.pending.values() if isinstance(action, actions.SleepEngine))
    core.sleep(2)
    core.end(quick)
    core.settle(actions.AwaitMemory)
    assert core.holder(0) == "free"
    core.sleep(1)
    core.close("quick")
    core.open("quick", 50)  # asks again at 3 s
    core.settle(actions.AwaitMemory, actions.WakeEngine)
    assert core.holder(0) == "free" and not core.up("quick")
    core.sleep(17)
    core.end(slow)
    core.settle()
    assert core.holder(0) == core.holder(1) == "a"


def test_i14_the_wide_request_does_not_wait_for_one_victim_after_the_other():
    run = incident("i14")
    asked = run.times(events.LeaseRequested, pipeline="a", priority=Priority.ACTOR_TRAINING)
    granted = [at for at, lease in run.all(actions.GrantLease, pipeline="a") if lease.request > 0]
    assert len(asked) == len(granted) == 3
    assert max(got - wanted for wanted, got in zip(asked, granted, strict=True)) < 47  # 20 to sleep, a train, a switch


@pytest.mark.parametrize(
    "wrong, says",
    [
        (pipeline("a", [0], [0, 1, 2], 2), "divided"),
        (pipeline("a", [0], [1, 2], 2), "node"),
        (pipeline("a", [0], [0, 2], 2), "consecutive"),
        (pipeline("a", [9], [0, 1]), "9"),
        (pipeline("a", [0, 0], [0, 1]), "twice"),
    ],
)
def test_i15_what_can_never_be_met_is_refused_before_anything_starts(wrong: dict[str, Any], says: str):
    declared = world(2, wrong, cluster={"nodes": 2})
    with pytest.raises(TopologyError) as refused:
        check_world(declared)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_i15_a_refused_registration_preempts_nobody():
    core = CoreWorld(4, nodes=2)
    core.ready(spec("a", (0,), (0, 1)))
    core.open("a", 50)
    core.settle()
    for infer, tp in [((1, 2), 2), ((0, 1, 2), 2), ((0, 7), 1)]:
        assert core.join(spec("b", (0,), infer, tp)) is not None
        core.seq.pop("b")
    core.settle()
    assert core.serving("a") == [0, 1] and not [note for note in core.notes if note.kind == "shrink"]


def test_i16_an_engine_gives_way_to_its_own_training_while_another_grows_onto_an_idle_gpu():
    answer = plan_snapshot(
        {"gpus": 2, "pipelines": [rollout("a", [0, 1], [1], 10)], "requests": [claim("a", [1])]}
    )  # fmt: skip
    assert answer["shrink"] == {"a": [1]} and answer["expand"] == {"a": {"0": [0]}}
    assert answer["grant"] == [{"pipeline": "a", "role": "actor_train", "gpus": [1]}]


def test_i16_a_donor_finds_something_instead_on_gpus_that_the_plan_was_not_about():
    core = CoreWorld(3)
    core.ready(spec("a", (2,), (1,)), spec("b", (2,), (0, 1)), spec("c", (2,), (0,)))
    for name in "cb":
        core.open(name, 1)
        core.settle()
    core.open("a", 5)
    core.say(events.PipelineLeft, "c")
    core.settle()
    assert core.up("b") == [1] and not core.up("a") and core.holder(0) == "free"
    core.sleep(301)  # B's turn is over
    core.settle()
    assert core.serving("a") == [0] and core.serving("b") == [0]


def test_i16_what_a_broken_promise_leaves_is_used_at_once():
    core = CoreWorld(3)
    core.ready(spec("a", (2,), (1,)), spec("b", (0, 1), (0,)))
    core.open("a", 50)
    core.open("b", 50)
    core.settle()
    core.ask("b")
    core.feed(events.EngineDied(pipeline="b", dp_rank=0, reason="it died"))  # both were to give way
    assert core.holder(0) == "quarantined" and core.up("a") == [0]
    core.settle()
    assert core.holder(0) == core.holder(1) == "b"


@pytest.mark.parametrize("order", [("b", "c"), ("c", "b")])
def test_i17_a_gpu_that_one_preemption_frees_is_given_away_once(order: tuple[str, str]):
    shared = [rollout("a", [0], [0], 10), rollout("b", [1], []), rollout("c", [1], [])]
    answer = plan_snapshot({"gpus": 2, "pipelines": shared, "requests": [claim(name, [0]) for name in order]})
    assert answer["shrink"] == {"a": [0]}
    assert [grant["pipeline"] for grant in answer["grant"]] == [order[0]]
    assert [wait["pipeline"] for wait in answer["wait"]] == [order[1]]


def test_i17_a_rollout_and_a_request_in_one_instant_do_not_both_get_the_gpu():
    core = CoreWorld(2)
    core.ready(spec("a", (1,), (0,)), spec("b", (0,), (1,)), spec("c", (1,), (0,)))
    core.open("a", 50)
    core.settle()
    core.ask("b")
    core.open("c", 50)
    core.settle()
    assert core.holder(0) == "b" and not core.up("c") and not core.up("a")


@pytest.mark.parametrize("nearly, fresh", [("a", "b"), ("b", "a")])
def test_i18_the_donor_with_most_of_its_batch_to_come_gives(nearly: str, fresh: str):
    done = {nearly: 95, fresh: 10}
    ranks = {"a": [0, 1], "b": [2, 3]}
    holders = [rollout(name, [0, 1, 2, 3], ranks[name], done[name]) for name in "ab"]
    answer = plan_snapshot({"gpus": 4, "pipelines": [*holders, rollout("c", [0, 1, 2, 3], [], 0)]})
    assert list(answer["shrink"]) == [fresh] and "c" in answer["expand"]
