"""The planner's decisions, one by one: snapshots in, plans out. No clock, no loop."""

import json
import random
from typing import Any

import pytest
from core_world import CoreWorld, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from core import actions, events
from core.errors import ConfigError
from core.ledger import Engine
from core.model import DemandPolicy, Priority, Role
from core.planner import plan
from core.regions import Regions
from core.rollouts import Market
from core.shares import Claim, balance, round_off
from core.snapshot import plan_snapshot, read_ledger


def pipeline(name: str, gpus: Any, awake: Any = (), target: int = 0, done: int = 0, tp: int = 1) -> dict[str, Any]:
    made: dict[str, Any] = {"id": name, "infer": {"gpus": list(gpus), "tp": tp}, "awake": list(awake)}
    if target:
        made["batch"] = {"target": target, "done": done}
    return made


def train(name: str, *gpus: int) -> dict[str, Any]:
    return {"pipeline": name, "role": "actor_train", "priority": "ACTOR_TRAINING", "gpus": list(gpus)}


def decision(gpus: int, pipelines: list[Any], held: Any = (), requests: Any = (), **more: Any) -> dict[str, Any]:
    return plan_snapshot(
        {"gpus": gpus, "pipelines": pipelines, "held": list(held), "requests": list(requests), **more}
    )


def engines(answer: dict[str, Any], before: list[Any]) -> dict[str, int]:
    """Engines each pipeline has once the plan is carried out."""
    return {
        p["id"]: len(p["awake"]) - len(answer["shrink"].get(p["id"], [])) + len(answer["expand"].get(p["id"], {}))
        for p in before
    }


def nothing(answer: dict[str, Any]) -> bool:
    return not (answer["shrink"] or answer["expand"] or answer["grant"])


# --- the contract's own example -----------------------------------------------------------------------------


def test_the_example_of_the_contract_gives_the_answer_of_the_contract() -> None:
    before = [pipeline("a", range(4), [1, 2, 3], 100, 10), pipeline("b", [2, 3], [], 100, 0)]
    answer = decision(4, before, [train("a", 0)], [train("b", 1)], gpus_per_node=4)
    assert answer == {
        "shrink": {"a": [1, 2]},
        "expand": {"b": {"0": [2]}},
        "grant": [{"pipeline": "b", "role": "actor_train", "gpus": [1]}],
        "wait": [],
    }


# --- rollout ------------------------------------------------------------------------------------------------


def test_three_equal_pipelines_use_all_four_gpus() -> None:
    before = [pipeline(name, range(4), [], 100) for name in "abc"]
    assert engines(decision(4, before), before) == {"a": 2, "b": 1, "c": 1}


def test_shares_follow_the_remaining_work_by_largest_remainder() -> None:
    before = [pipeline("a", range(7), [], 50), pipeline("b", range(7), [], 30), pipeline("c", range(7), [], 10)]
    assert engines(decision(7, before), before) == {"a": 4, "b": 2, "c": 1}


def test_what_rounding_leaves_over_is_a_newcomers_too_and_is_taken_from_the_donor() -> None:
    before = [pipeline("a", range(4), range(4), 50), pipeline("b", range(4), [], 100)]
    assert engines(decision(4, before), before) == {"a": 1, "b": 3}  # of 1.33 and 2.67


def test_everyone_with_demand_gets_one_engine_before_anyone_gets_two() -> None:
    before = [pipeline("big", range(4), range(4), 1000), *(pipeline(n, range(4), [], 1) for n in "xyz")]
    assert engines(decision(4, before), before) == {"big": 1, "x": 1, "y": 1, "z": 1}


def test_one_engine_each_and_nothing_else_to_give_is_left_alone() -> None:
    assert nothing(decision(2, [pipeline("a", [0, 1], [0], 100, 90), pipeline("b", [0, 1], [1], 100, 0)]))


def test_a_pipeline_without_demand_is_the_donor() -> None:
    answer = decision(2, [pipeline("a", [0, 1], [0, 1]), pipeline("b", [0, 1], [], 100)])
    assert answer["shrink"] == {"a": [0, 1]}
    assert answer["expand"] == {"b": {"0": [0], "1": [1]}}


def test_the_donor_with_most_of_its_batch_to_come_gives() -> None:
    before = [pipeline("a", [0, 1], [0], 100, 95), pipeline("b", [0, 1], [1], 100, 10), pipeline("c", [0, 1], [], 100)]
    assert decision(2, before)["shrink"] == {"b": [1]}


def test_a_nearly_finished_donor_gives_only_to_who_has_nothing() -> None:
    before = [pipeline("a", range(4), [0, 1], 100, 95), pipeline("b", range(4), [2, 3], 100, 10)]
    answer = decision(4, [*before, pipeline("c", range(4), [], 100)])
    assert answer["shrink"] == {"b": [2]}


def test_an_engine_more_than_there_are_trajectories_left_is_not_woken() -> None:
    before = [pipeline("a", range(4), [], 100, 98)]
    assert engines(decision(4, before), before) == {"a": 2}


def test_nobody_is_shrunk_where_both_are_off_by_less_than_an_engine() -> None:
    before = [pipeline("a", range(4), [0, 1, 2], 100, 45), pipeline("b", range(4), [3], 100, 55)]
    assert nothing(decision(4, before))


def test_an_engine_moves_once_both_are_off_by_a_whole_one() -> None:
    before = [pipeline("a", range(4), [0, 1, 2], 100, 60), pipeline("b", range(4), [3], 100, 0)]
    assert engines(decision(4, before), before) == {"a": 2, "b": 2}


def test_overlap_in_part_still_gives_proportional_shares() -> None:
    before = [pipeline("a", range(4), range(4), 100), pipeline("b", [0, 1], [], 100)]
    assert engines(decision(4, before), before) == {"a": 2, "b": 2}


def test_a_wide_engine_forms_against_narrow_holders() -> None:
    before = [pipeline("a", range(8), range(8), 100), pipeline("b", range(8), [], 100, tp=4)]
    assert engines(decision(8, before), before) == {"a": 4, "b": 1}


def test_a_wide_engine_that_makes_way_frees_all_its_gpus_for_use() -> None:
    before = [pipeline("a", range(4), [0], 100, tp=4), pipeline("b", range(4), [], 100)]
    answer = decision(4, before)
    assert answer["shrink"] == {"a": [0]}
    assert len(answer["expand"]["b"]) == 4


def test_a_wide_engine_is_not_started_while_one_of_its_gpus_is_leased() -> None:
    before = [pipeline("a", range(4), [1, 2, 3], 100), pipeline("b", range(4), [], 100, tp=4), pipeline("c", [0])]
    assert nothing(decision(4, before, [train("c", 0)]))


# --- requests -----------------------------------------------------------------------------------------------


def test_nothing_is_shrunk_for_a_request_that_cannot_be_completed() -> None:
    before = [pipeline("a", [0, 1]), pipeline("b", [0, 1], [1], 100), pipeline("c", [0])]
    answer = decision(2, before, [train("c", 0)], [train("a", 0, 1)])
    assert nothing(answer)
    assert "GPU 0 is held by c's actor_train" in answer["wait"][0]["reason"]


def test_a_small_request_does_not_overtake_the_large_one_before_it() -> None:
    before = [pipeline("a", [0, 1]), pipeline("b", [1]), pipeline("c", [0])]
    answer = decision(2, before, [train("c", 0)], [train("a", 0, 1), train("b", 1)])
    assert answer["grant"] == []
    assert [wait["pipeline"] for wait in answer["wait"]] == ["a", "b"]
    assert "reserved for a's request" in answer["wait"][1]["reason"]


def test_one_gpu_is_granted_once() -> None:
    before = [pipeline("a", [0, 1], [0, 1], 100), pipeline("b", [0, 1])]
    answer = decision(2, before, [], [train("a", 1), train("b", 1)])
    assert answer["grant"] == [{"pipeline": "a", "role": "actor_train", "gpus": [1]}]
    assert answer["wait"][0]["pipeline"] == "b"


def test_giving_way_to_own_training_and_growing_elsewhere_happen_in_one_plan() -> None:
    answer = decision(2, [pipeline("a", [0, 1], [1], 100)], [], [train("a", 1)])
    assert answer["shrink"] == {"a": [1]}
    assert answer["expand"] == {"a": {"0": [0]}}
    assert len(answer["grant"]) == 1


def test_priority_comes_before_age() -> None:
    before = [pipeline("a", [0]), pipeline("b", [0])]
    log_probs = {"pipeline": "a", "role": "actor_train", "priority": "OLD_LOG_PROBS", "gpus": [0]}
    answer = decision(1, before, [], [log_probs, train("b", 0)])
    assert answer["grant"][0]["pipeline"] == "b"


def test_one_pipeline_initialises_at_a_time() -> None:
    before = [pipeline("a", [0]), pipeline("b", [1])]
    init = [dict(train(name, gpu), priority="INITIALIZATION") for name, gpu in (("a", 0), ("b", 1))]
    answer = decision(2, before, [], init)
    assert [grant["pipeline"] for grant in answer["grant"]] == ["a"]
    assert "initialising" in answer["wait"][0]["reason"]


# --- bad snapshots ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        ({}, "gpus"),
        ([], "Expected `object`"),
        ({"gpus": 0}, "at least one"),
        ({"gpus": 2, "gpuz": 2}, "gpuz"),
        ({"gpus": 4, "gpus_per_node": 3}, "does not divide"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0, 2])]}, "GPU 2"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0, 0])]}, "GPU 0"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0]), pipeline("a", [1])]}, "once"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0, 1], [2])]}, "dp_rank 2"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0], [0]), pipeline("b", [0], [0])]}, "S1"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0], [0])], "held": [train("a", 0)]}, "S1"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0])], "held": [train("x", 0)]}, "no pipeline 'x'"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0], target=2, done=3)]}, "done <= target"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0])], "requests": [dict(train("a", 0), role="cook")]}, "cook"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0])], "requests": [dict(train("a", 0), priority="HIGH")]}, "HIGH"),
        ({"gpus": 2, "pipelines": [pipeline("a", [0, 1, 2], tp=2)]}, "infer"),
    ],
)
def test_a_bad_snapshot_is_one_clear_error(snapshot: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_snapshot(snapshot)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# --- properties ---------------------------------------------------------------------------------------------


@st.composite
def snapshots(draw: Any) -> dict[str, Any]:
    """Any world the planner may meet: partial overlaps, mixed TP, leases, requests, half-done batches."""
    gpus = draw(st.integers(1, 8))
    taken: set[int] = set()
    pipelines = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        tp = draw(st.sampled_from([t for t in (1, 2, 4) if t <= gpus]))
        bundles = [tuple(range(i, i + tp)) for i in range(0, gpus - tp + 1, tp)]
        chosen = draw(st.lists(st.sampled_from(bundles), min_size=1, unique=True).map(sorted))
        awake = []
        for rank, bundle in enumerate(chosen):
            if not taken & set(bundle) and draw(st.booleans()):
                taken |= set(bundle)
                awake.append(rank)
        target = draw(st.integers(0, 20))
        done = draw(st.integers(0, target)) if target else 0
        pipelines.append(pipeline(name, [gpu for bundle in chosen for gpu in bundle], awake, target, done, tp))
    held = []
    for gpu in range(gpus):
        if gpu not in taken and draw(st.integers(0, 5)) == 0:
            taken.add(gpu)
            held.append(train(draw(st.sampled_from([p["id"] for p in pipelines])), gpu))
    requests = [
        train(draw(st.sampled_from([p["id"] for p in pipelines])), *sorted(mapping))
        for mapping in draw(st.lists(st.sets(st.integers(0, gpus - 1), min_size=1, max_size=3), max_size=3))
    ]
    return {"gpus": gpus, "pipelines": pipelines, "held": held, "requests": requests}


def carried_out(snapshot: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The snapshot after the plan: what it granted is held, what it shrank sleeps, what it expanded is awake."""
    pipelines = []
    for p in snapshot["pipelines"]:
        awake = set(p["awake"]) - set(answer["shrink"].get(p["id"], []))
        awake |= {int(rank) for rank in answer["expand"].get(p["id"], {})}
        pipelines.append({**p, "awake": sorted(awake)})
    granted = [dict(train(g["pipeline"], *g["gpus"]), role=g["role"]) for g in answer["grant"]]
    waiting = [train(w["pipeline"], *w["gpus"]) for w in answer["wait"]]
    return {**snapshot, "pipelines": pipelines, "held": snapshot["held"] + granted, "requests": waiting}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(snapshots())
def test_a_plan_is_possible_leaves_no_usable_gpu_idle_and_shrinks_nobody_for_nothing(snapshot: dict[str, Any]) -> None:
    answer = plan_snapshot(snapshot)
    after = carried_out(snapshot, answer)
    plan_snapshot(after)  # S1: the world it leads to is a legal one
    owner = {gpu: claim["pipeline"] for claim in after["held"] for gpu in claim["gpus"]}
    demand = {}
    for p in after["pipelines"]:
        batch = p.get("batch", {"target": 0, "done": 0})
        demand[p["id"]] = batch["target"] - batch["done"]
        for rank in p["awake"]:
            for gpu in p["infer"]["gpus"][rank * p["infer"]["tp"] : (rank + 1) * p["infer"]["tp"]]:
                owner[gpu] = p["id"]
    for p in after["pipelines"]:
        tp, gpus, wants = p["infer"]["tp"], p["infer"]["gpus"], demand[p["id"]]
        idle = [
            rank
            for rank in range(len(gpus) // tp)
            if rank not in p["awake"] and not any(gpu in owner for gpu in gpus[rank * tp : (rank + 1) * tp])
        ]
        assert not idle or len(p["awake"]) >= wants, f"{p['id']} could use engines {idle}: {json.dumps(answer)}"
    needed = {gpu for grant in answer["grant"] for gpu in grant["gpus"]}
    needed |= {gpu for ranks in answer["expand"].values() for gpus in ranks.values() for gpu in gpus}
    for p in snapshot["pipelines"]:
        tp = p["infer"]["tp"]
        for rank in answer["shrink"].get(p["id"], []):
            assert needed & set(p["infer"]["gpus"][rank * tp : (rank + 1) * tp]), f"{p['id']}/{rank} shrunk for nobody"


def crowd(seed: int) -> dict[str, Any]:
    """A random world that is full: wide and narrow engines hold every GPU, and everybody wants more of them."""
    draw = random.Random(seed)
    gpus, taken = 16, set[int]()
    pipelines = []
    for name in "abcdefgh"[: draw.randint(3, 8)]:
        tp = draw.choice((1, 2, 4, 8))
        bundles = [tuple(range(i, i + tp)) for i in range(0, gpus, tp) if draw.random() < 0.8] or [tuple(range(tp))]
        awake = []
        for rank, bundle in enumerate(bundles):
            if not taken & {*bundle} and draw.random() < 0.5:
                taken |= {*bundle}
                awake.append(rank)
        target = draw.randint(1, 60)
        mapping = [gpu for bundle in bundles for gpu in bundle]
        pipelines.append(pipeline(name, mapping, awake, target, draw.randint(0, target), tp))
    return {"gpus": gpus, "pipelines": pipelines, "held": [], "requests": []}


def planned(snapshot: dict[str, Any]) -> list[list[str]]:
    ledger = read_ledger(snapshot)
    made = plan(ledger, Regions(ledger))
    steps = (made.grants, made.revoked, made.shrinks, made.expands)
    return [*([f"{subject}: {why}" for subject, why in step] for step in steps), sorted(book.id for book in made.unmet)]


def test_pricing_again_only_what_was_left_over_gives_the_plan_of_pricing_everything_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wide engine makes way for a narrow one: what lies on its other GPUs is priced again, and nothing else."""
    worlds = [crowd(seed) for seed in range(600)]
    quick = [planned(world) for world in worlds]
    left_over = []

    def sold(self: Market, engine: Engine) -> None:
        left = [gpu for victim in self.draft.gone_last for gpu in victim.gpus if gpu not in engine.gpus]
        if left:
            left_over.append(left)
            self.survey.idle.extend(left)
            self._heaps.clear()

    monkeypatch.setattr(Market, "sold", sold)
    assert [planned(world) for world in worlds] == quick
    assert len(left_over) > 100


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 64))
def test_shares_use_every_gpu_and_stay_within_one_engine_of_proportional(weights: list[int], gpus: int) -> None:
    claims = [Claim(weight, 1, 1000, 0) for weight in weights]
    balance([(gpus, claims)])
    got = round_off([(claim.share, 1, 1000) for claim in claims], gpus)
    if gpus >= len(weights):
        assert sum(got) == gpus
        assert min(got) >= 1
    for number, weight, claim in zip(got, weights, claims, strict=True):
        assert number == 1 or abs(number - claim.share) < 1 + 1e-6
        exact = gpus * weight / sum(weights)
        assert claim.share <= max(exact, 1) + 1e-6  # floors only ever take from the others


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_balancing_overlapping_classes_leaves_nobody_rich_beside_somebody_poor(data: Any) -> None:
    claims = [Claim(data.draw(st.integers(1, 50)), 1, 1000, 0) for _ in range(data.draw(st.integers(2, 5)))]
    classes = [
        (data.draw(st.integers(1, 8)), [claim for claim in claims if data.draw(st.booleans())] or claims[:1])
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    for (_, members), parts in zip(classes, balance(classes), strict=True):
        for rich, part in zip(members, parts, strict=True):
            for poor in members:
                if rich.share > 1.05 and rich.share / rich.weight > 1.1 * max(poor.share, 1) / poor.weight:
                    assert part < 0.2, "the rich keep what the poor beside them could use"


# --- over time ----------------------------------------------------------------------------------------------


def test_pipelines_without_an_engine_take_turns_once_the_holder_has_completed_something() -> None:
    world = CoreWorld(1)
    world.ready(spec("a", (0,), (0,)), spec("b", (0,), (0,)))
    world.open("a")
    world.settle()
    world.open("b")
    world.sleep(25)  # past a's residence, but a has completed nothing
    assert world.serving("a") == [0]
    world.complete("a")
    world.settle()
    assert world.serving("b") == [0]
    assert world.serving("a") == []


def test_a_turn_ends_at_its_limit_even_if_nothing_was_completed() -> None:
    world = CoreWorld(1)
    world.ready(spec("a", (0,), (0,)), spec("b", (0,), (0,)))
    world.open("a")
    world.settle()
    world.open("b")
    world.sleep(310)
    world.settle()
    assert world.serving("b") == [0]


@pytest.mark.parametrize("policy", [DemandPolicy.BATCH, DemandPolicy.FLOOR])
def test_who_gave_way_to_somebodys_turn_is_looked_at_when_that_turn_is_over(policy: DemandPolicy) -> None:
    """It had an engine when the plan that took it began, and waits from then on like one that never had any."""
    world = CoreWorld(1, policy)
    world.ready(spec("a", (0,), (0,)), spec("b", (0,), (0,)))
    for name in ("a", "b"):
        world.open(name)
        world.say(events.RolloutSignalled, name, batch=0)
    world.settle()
    world.complete("a")
    world.sleep(25)
    world.settle()
    assert world.serving("b") == [0]
    world.sleep(310)  # b completes nothing in its turn
    world.settle()
    assert world.serving("a") == [0]


def three_on_two() -> CoreWorld:
    """The engines of a and b have had their turn, and both want more; c comes and takes one of them."""
    world = CoreWorld()
    world.ready(*(spec(name, (0,)) for name in "abc"))
    world.open("a", 20)
    world.open("b", 20)
    world.settle()
    world.sleep(25)
    world.settle()
    world.complete("b")
    world.sleep(1)
    world.complete("a")
    world.sleep(25)
    world.settle()
    world.open("c", 20)
    return world


def test_one_newcomer_takes_one_turn_and_who_gave_way_takes_none_in_the_same_plan() -> None:
    world = three_on_two()
    assert world.kinds() == ["SleepEngine"]
    assert [len(world.up(name)) for name in "abc"].count(1) == 2 and world.up("c")


def test_who_gave_way_takes_a_turn_itself_after_one_residence_though_nothing_else_happens() -> None:
    world = three_on_two()
    [loser] = [name for name in "ab" if not world.up(name)]
    world.sleep(19)
    assert world.up(loser) == []
    world.sleep(2)
    assert len(world.up(loser)) == 1


def test_who_gave_way_and_was_given_idle_gpus_since_need_not_rest_any_more() -> None:
    world = three_on_two()
    [loser] = [name for name in "ab" if not world.up(name)]
    [other] = {"a", "b"} - {loser}
    world.sleep(5)
    world.close(other)
    assert world.up(loser)
    assert world.state.ledger.books[loser].gave_way_at == -1


def test_an_engine_that_was_to_sleep_and_may_stay_begins_a_new_turn() -> None:
    """Its old one was over. It must not be taken away by the very plan that leaves it, or by the next."""
    world = CoreWorld(1)
    world.ready(*(spec(name, (0,), (0,), staleness=1) for name in "abc"))
    world.open("a")
    world.settle()
    world.open("b")
    world.complete("a")
    world.sleep(1)
    world.open("c")
    world.say(events.WeightsPublished, "a", version=1)
    world.sleep(20)
    engine = world.state.ledger.books["a"].engines[0]
    assert engine.state == "syncing" and engine.doomed and world.up("b") == [0]
    world.say(events.PipelineLeft, "b")
    assert not engine.doomed and world.up("a") == [0] and world.up("c") == []
    world.settle()
    assert world.serving("a") == [0]
    world.complete("a")
    world.sleep(25)
    world.settle()
    assert world.serving("c") == [0]


def test_a_wide_engine_is_looked_for_where_only_one_of_its_gpus_came_free() -> None:
    """The GPUs it lies on are shared by different pipelines, so they are planned for apart, but not for this."""
    world = CoreWorld(3)
    world.ready(spec("w", (2,), (0, 1), 2), spec("x", (2,), (1,)), spec("y", (2,), (0,)))
    world.open("x", 1)
    world.open("y", 40)
    world.settle()
    world.open("w", 40)
    world.complete("y")
    world.sleep(25)  # the turn of y is over, and w gets both GPUs or none
    assert world.up("w") == []
    world.complete("x")
    assert world.up("w") == [0]


def test_nothing_is_planned_while_nothing_changes() -> None:
    world = CoreWorld()
    world.ready(spec("a"), spec("b", (1,)))
    world.open("a", 100)
    world.open("b", 100)
    world.settle()
    world.sleep(25)
    world.settle()
    before = len(world.log)
    world.sleep(10_000)
    assert len(world.log) - before <= 2  # no timer rings again and again
    assert sorted(world.serving("a") + world.serving("b")) == [0, 1]


def test_training_may_not_take_the_only_engine_of_a_pipeline_that_has_been_hungry_for_very_long() -> None:
    world = CoreWorld()
    world.ready(spec("a", (0,), (0,)), spec("b", (0,), (1,)))
    world.open("a")
    for taken in range(20):  # noqa: B007  b trains on a's only GPU, again and again
        world.ask("b")
        world.settle()
        if not world.leases["b"]:
            break
        world.sleep(60)
        world.release("b")
        world.settle()
        world.sleep(1)
    assert 3 <= taken <= 7  # a step of priority is worth a minute, and there are five between the two
    assert world.holder(0) == "a"
    world.complete("a")
    world.settle()
    assert world.holder(0) == "b"


def test_own_training_is_never_kept_waiting_by_own_rollout() -> None:
    world = CoreWorld(1)
    world.ready(spec("a", (0,), (0,)))
    world.open("a")
    world.settle()
    world.sleep(5000)
    world.ask("a")
    world.settle()
    assert world.leases["a"]


def test_a_demand_lost_under_signal_is_kept_under_batch_and_floor() -> None:
    for policy, served in ((DemandPolicy.BATCH, True), (DemandPolicy.FLOOR, True), (DemandPolicy.SIGNAL, False)):
        world = CoreWorld(policy=policy)
        world.ready(spec("p1", (0,)))
        world.open("p1")
        world.say(events.RolloutSignalled, "p1", batch=0)
        assert any(note.kind == "rollout_granted" for note in world.notes)
        world.join(spec("p2", (1,)))
        world.ask("p2", Role.ACTOR_TRAIN, Priority.INITIALIZATION)
        world.settle()
        world.say(events.WeightsPublished, "p2", version=0)
        world.open("p2")
        world.say(events.RolloutSignalled, "p2", batch=0)
        world.release("p2")
        world.settle()
        world.sleep(5000)
        world.settle()
        assert bool(world.serving("p1")) is served, policy


def test_an_expand_waits_only_for_the_shrinks_that_free_its_own_gpus() -> None:
    world = CoreWorld()
    world.ready(spec("a"), spec("b", (1,)))
    world.open("a", 100)
    world.settle()
    world.sleep(25)
    world.close("a")
    world.open("b", 100)
    stuck, quick = [a for a in world.pending.values() if isinstance(a, actions.SleepEngine)]
    world.end(quick)
    world.settle(actions.AwaitMemory, actions.WakeEngine, actions.SyncEngine, actions.OpenGate)
    assert world.serving("b") == [quick.dp_rank]
    assert stuck.action in world.pending


def test_a_progress_report_that_changes_nothing_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    import core.scheduler as scheduler

    world = CoreWorld()
    world.ready(spec("a"), spec("b", (1,)))
    world.open("a", 100)
    world.open("b", 100)
    world.settle()
    world.sleep(25)
    world.settle()
    world.complete("a")
    world.complete("b")
    world.check = lambda: None  # type: ignore[method-assign]
    plans = []
    monkeypatch.setattr(scheduler, "plan", lambda *args: plans.append(args) or pytest.fail("planned"))
    for _ in range(9):
        world.complete("a")
    assert plans == []


def plans_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each plan that is made from now on."""
    import core.scheduler as scheduler

    made: list[Any] = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return plan(*args)

    monkeypatch.setattr(scheduler, "plan", counted)
    return made


def test_a_pipeline_that_nobody_waits_beside_is_planned_for_once_its_batch_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However far it comes: only others could want what it has, and they have all they can use."""
    world = CoreWorld(4)
    world.ready(spec("a", (0,), (0, 1)), spec("b", (1,), (1, 2, 3)))
    world.open("a", 64)
    world.open("b", 2)
    world.settle()
    assert (len(world.serving("a")), len(world.serving("b"))) == (2, 2)
    world.complete("a")
    plans = plans_of(monkeypatch)
    for _ in range(62):
        world.complete("a")
    assert plans == []
    world.complete("a")
    assert len(plans) == 1  # it is done, and others may have its GPUs


def test_a_pipeline_that_somebody_waits_beside_is_planned_for_as_its_work_shrinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = CoreWorld(4)
    world.ready(spec("a", (0,), (0, 1, 2, 3)), spec("b", (1,), (0, 1, 2, 3)))
    world.open("a", 64)
    world.open("b", 64)
    world.settle()
    for name in ("a", "b"):
        for rank in world.serving(name):
            world.complete(name, rank)
    plans = plans_of(monkeypatch)
    for _ in range(30):
        world.complete("a")
    assert len(plans) == 3


def test_a_full_batch_that_is_closed_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = CoreWorld(2)
    world.ready(spec("a"), spec("b", (1,)))
    world.open("a", 2)
    world.open("b", 64)
    world.settle()
    world.complete("a")
    world.complete("a")
    world.settle()
    plans = plans_of(monkeypatch)
    world.close("a")
    assert plans == []
    world.close("b")
    assert len(plans) == 1


def test_a_report_that_a_policy_learns_demand_from_is_planned_for() -> None:
    """Under `floor` a pipeline whose signal was consumed counts as one trajectory until it reports."""
    world = CoreWorld(2, DemandPolicy.FLOOR)
    world.ready(spec("a", (0, 1)))
    world.open("a", 40)
    world.say(events.RolloutSignalled, "a", batch=0)
    world.settle()
    assert len(world.serving("a")) == 2
    world.feed(events.EngineDied(pipeline="a", dp_rank=1, reason="it died"))
    world.settle()
    assert world.serving("a") == [0]
    world.complete("a")  # `check` plans again and finds nothing to do
    world.settle()
    assert len(world.serving("a")) == 2


def test_a_late_trajectory_ends_the_hunger_that_kept_a_request_waiting() -> None:
    world = CoreWorld(2)
    world.ready(spec("b", (0,), (0, 1), 2), spec("c", (1,), (1,)), spec("d", (0,), (0,)))
    world.open("b", 64)
    world.settle()
    world.complete("b", 0)
    world.ask("c")
    world.settle()
    assert world.holder(1) == "c" and world.serving("b") == []
    world.sleep(320)
    world.ask("d")
    world.settle()
    assert world.holder(0) == "free"  # reserved for b, which has completed nothing for longer than d may overtake it
    world.complete("b", 0)  # from before it went to sleep
    world.settle()
    assert world.holder(0) == "d"


def test_a_freed_gpu_is_looked_at_again_before_a_larger_tenant_gets_it() -> None:
    """What was seen free was enough for the last tenant, not for the next."""
    world = CoreWorld(1)
    world.ready(spec("a", (0,), (0,)))
    world.state.ledger.gpus[0].free = 10
    world.open("a")
    assert world.kinds() == ["AwaitMemory"]
    world.settle()
    assert world.serving("a") == [0]


