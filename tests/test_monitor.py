"""The oracles: each lets the right story pass and catches the one in which exactly its rule is broken."""

from typing import Any

import pytest

from core import actions, bounds, events
from core.actions import Emptying
from core.config import DriverPolicy
from core.model import BatchState, Cluster, DemandPolicy, PipelineState, Priority, RequestState, Role
from core.monitor import VIOLATIONS_KEPT, Monitor
from core.trace import Verdict
from core.units import gib, ns
from tests.stories import CLUSTER, MEMORY, Story, make_spec, one_step

FOUR_GPUS = Cluster(nodes=2, gpus_per_node=2, gpu_memory=gib(141), host_memory=gib(256), memory_margin=gib(1))


def judge(story: Story, outcome: str | None = None, **options: Any) -> Monitor:
    scenario = story.scenario
    monitor = story.told(Monitor(scenario.cluster, scenario.demand, **options))
    if outcome is not None:
        monitor.finish(outcome)
    else:
        monitor.tick(story.now + 1)
    return monitor


def broken(story: Story, **options: Any) -> list[str]:
    """The rules broken in it, in order, each once."""
    return list(dict.fromkeys(violation.rule for violation in judge(story, **options).violations))


def two(**fields: Any) -> Story:
    """Both pipelines of the incident."""
    return Story(make_spec("p1", train=(0,), **fields), make_spec("p2", train=(1,), **fields))


def ready(target: int = 100, **fields: Any) -> Story:
    """One pipeline with an open batch and both engines serving version 0."""
    return Story(make_spec(**fields)).initialise(batch=target).serve_all()


# --- all of them at once --------------------------------------------------------------------------------


def test_a_run_as_it_should_be_breaks_no_rule():
    story = one_step(one_step(two(), "p1"), "p2")
    monitor = judge(story, "completed")
    assert monitor.violations == []
    assert monitor.verdict == Verdict(outcome="completed")


def test_the_first_verdict_freezes_the_monitor():
    story = Story().initialise()
    story.verdict("interrupted")
    story.wake(0).wake(0)  # twice: S1, were anyone looking
    monitor = judge(story)
    assert monitor.verdict == Verdict(outcome="interrupted")
    assert monitor.violations == []
    monitor.on_quiescent("too late")
    assert monitor.verdict.outcome == "interrupted"


def test_violations_beyond_the_limit_are_counted_only():
    story = Story()
    for _ in range(VIOLATIONS_KEPT + 5):
        story.say(events.MemoryUsed(gpu=0, used=2, capacity=1))
    monitor = judge(story)
    assert (len(monitor.violations), monitor.not_kept) == (VIOLATIONS_KEPT, 5)


# --- S1 -------------------------------------------------------------------------------------------------


def test_s1_an_engine_is_not_woken_on_a_gpu_that_another_engine_holds():
    story = two().initialise("p1", batch=9).initialise("p2", batch=9).serve(0, "p1")
    story.engine(actions.WakeEngine, 0, "p2", gpus=(0,))
    assert "S1" in broken(story)


def test_s1_a_lease_is_not_granted_over_a_serving_engine():
    story = ready()
    story.request()
    story.grant()
    assert broken(story) == ["S1"]


def test_s1_a_lease_is_not_granted_to_whoever_cancelled_it():
    story = Story().initialise()
    request = story.request()
    story.tell(events.RequestCancelled, request=request)
    story.grant()
    assert broken(story) == ["S1"]


def test_s1_a_request_gets_its_whole_mapping_or_nothing():
    story = Story(make_spec(train=(0, 1))).initialise()
    story.request()
    story.grant(gpus=(0,))
    assert broken(story) == ["S1"]


def test_s1_a_lost_gpu_is_given_to_nobody():
    story = Story(make_spec(infer=(0, 1, 2, 3)), cluster=FOUR_GPUS).initialise(batch=9)
    story.say(events.NodeLeft(node=1))
    story.wake(2)
    assert "S1" in broken(story)


def test_s1_an_engine_is_woken_on_its_own_gpus_only():
    story = Story().initialise()
    story.engine(actions.WakeEngine, 0, gpus=(1,))
    assert broken(story) == ["S1"]


def test_s1_nobody_is_granted_a_gpu_that_does_not_exist():
    story = Story().initialise()
    story.request()
    story.grant(gpus=(0, 7))
    assert [violation.detail for violation in judge(story).violations] == [
        "actor_train of p1 asked for GPUs 0 and is granted 0, 7",
        "actor_train of p1 is given GPU 7, which does not exist",
    ]


def test_s1_a_trainer_phase_needs_the_lease():
    story = Story().initialise()
    story.phase("train", 1)
    assert broken(story) == ["S1"]


def test_s1_a_doubled_grant_message_is_not_a_second_tenant():
    story = Story().initialise()
    request = story.request()
    epoch = story.grant()
    story.order(actions.GrantLease, pipeline="p1", request=request, role=Role.ACTOR_TRAIN, epoch=epoch, gpus=(0,))
    story.done()
    assert broken(story) == []


# --- S2 -------------------------------------------------------------------------------------------------


def test_s2_a_gpu_is_not_passed_on_before_its_memory_was_seen_free():
    story = ready()
    story.sleep(0, confirmed=False)
    story.request()
    story.grant()
    assert "S2" in broken(story)


def test_s2_memory_seen_too_little_does_not_count():
    story = ready()
    story.sleep(0, confirmed=False)
    story.free(0, seen=gib(10))
    assert "S2" in broken(story)


def test_s2_memory_seen_must_cover_what_the_next_tenant_declared():
    story = ready()
    story.sleep(0, confirmed=False)
    story.free(0, seen=gib(39), need=gib(1))
    story.request()
    story.grant()
    assert "S2" in broken(story)


@pytest.mark.parametrize("seen, rules", [(gib(60), []), (gib(60) - 1, ["S2"])])
def test_s2_an_engine_needs_its_memory_and_the_margin_beyond_its_own_residue(seen: int, rules: list[str]):
    assert MEMORY.engine - MEMORY.residue + CLUSTER.memory_margin == gib(60)
    story = Story().initialise(batch=9)
    story.say(events.MemoryUsed(gpu=0, used=gib(141) - seen, capacity=gib(141)))
    story.serve_all()
    assert broken(story) == rules


def test_s2_a_watch_of_an_earlier_tenancy_frees_nothing():
    story = Story(make_spec(infer=(0,))).initialise(batch=9)
    story.request()
    story.order(actions.AwaitMemory, gpus=(0,), need=(0,))
    early = story.last_action
    epoch = story.grant()
    story.tell(events.LeaseReleased, epoch=epoch)
    story.done(early, {0: gib(138)})
    story.wake(0)
    assert broken(story) == ["S2"]


def test_s2_a_killed_engine_is_confirmed_too():
    story = ready()
    story.engine(actions.KillEngine, 0, reason="hung")
    story.done()
    story.request()
    story.grant()
    assert "S2" in broken(story)


def test_s2_nobody_is_given_a_gpu_in_quarantine():
    story = Story().initialise()
    story.note("quarantine", "p1", gpus=(0,))
    story.request()
    story.grant()
    assert broken(story) == ["S2"]
    story = Story().initialise()
    story.note("quarantine", "p1", gpus=(0,))
    story.free(0)
    story.request()
    story.grant()
    assert broken(story) == []


def test_s2_a_planned_release_is_not_confirmed_while_an_engine_holds_its_gpu():
    story = ready()
    story.tell(events.RolloutReleased)
    story.sleep(0).sleep(1, confirmed=False)
    story.order(actions.ConfirmRelease, pipeline="p1")
    assert broken(story)[0] == "S2"


def test_s2_an_early_release_message_releases_nothing():
    story = Story(make_spec(infer=(0,))).initialise(batch=9)
    story.request()
    epoch = story.grant()
    story.say(events.LeaseReleased(pipeline="p1", seq=99, epoch=epoch))  # messages before it are missing
    story.free(0)
    story.wake(0)
    assert broken(story) == ["S1"]


def test_s2_a_rejected_release_and_request_releases_nothing():
    story = Story(make_spec(infer=(0,))).initialise(batch=9)
    story.request()
    epoch = story.grant()
    asked = {"epoch": epoch, "request": 7, "role": Role.ACTOR_TRAIN, "priority": Priority.GENERATION}
    cause = story.tell(events.ReleasedAndRequested, **asked)
    story.note("rejected", "p1", cause)
    story.free(0)
    story.wake(0)
    assert broken(story) == ["S1"]


# --- S3 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [1, -1])
def test_s3_observed_memory_never_exceeds_a_gpu_or_a_host(gpu: int):
    story = Story()
    story.say(events.MemoryUsed(gpu=gpu, used=gib(141), capacity=gib(141)))
    assert broken(story) == []
    story.say(events.MemoryUsed(gpu=gpu, used=gib(141) + 1, capacity=gib(141)))
    assert broken(story) == ["S3"]


def test_s3_pipelines_initialise_one_after_another():
    story = Story(make_spec("p1", infer=(0,)), make_spec("p2", train=(1,), infer=(1,)))
    for pipeline in ("p1", "p2"):
        story.register(pipeline)
        story.request(pipeline, Priority.INITIALIZATION)
        story.grant(pipeline, story.specs[pipeline].union)
    assert broken(story) == ["S3"]


# --- S4 -------------------------------------------------------------------------------------------------


def test_s4_a_gate_opens_only_at_the_version_the_engine_was_synced_to():
    story = Story(make_spec(infer=(0,))).initialise(batch=9).wake(0)
    story.gate(0)
    assert broken(story) == ["S4"]


def test_s4_a_gate_does_not_open_at_a_version_older_than_the_bound_allows():
    for bound, rules in ((0, ["S4"]), (1, [])):
        story = Story(make_spec(staleness=bound, infer=(0,))).initialise(batch=9).wake(0).sync(0)
        story.tell(events.WeightsPublished, version=1)
        story.gate(0)
        assert broken(story) == rules


def test_s4_a_sync_is_always_to_the_latest_version():
    story = Story(make_spec(staleness=1, infer=(0,))).initialise(batch=9)
    story.tell(events.WeightsPublished, version=1)
    story.wake(0).sync(0)
    assert broken(story) == ["S4"]


def test_s4_a_sleeping_engine_is_neither_synced_nor_opened():
    story = Story().initialise()
    story.sync(0)
    assert broken(story) == ["S4"]
    story = Story().initialise()
    story.gate(0)
    assert broken(story) == ["S4"]


def test_s4_versions_are_published_in_ascending_order():
    story = Story().initialise()
    story.tell(events.WeightsPublished, version=0)
    assert broken(story) == ["S4"]


def test_s4_no_engine_decodes_that_was_never_declared():
    story = Story().initialise()
    story.busy(9)
    assert broken(story) == ["S4"]


def test_s4_no_engine_begins_to_decode_behind_a_closed_gate():
    story = ready()
    story.busy(0)
    story.engine(actions.SleepEngine, 1, emptying=Emptying.DRAIN)
    story.busy(1)  # sent in the instant in which the gate closed
    story.idle(1)
    assert broken(story) == []
    story.wait(1).busy(1)
    assert broken(story) == ["S4"]


def test_s4_an_engine_may_go_on_decoding_while_an_in_flight_update_runs():
    story = ready(staleness=1)
    story.busy(0)
    story.tell(events.WeightsPublished, version=1)
    story.engine(actions.SyncEngine, 0, version=1, emptying=Emptying.KEEP)
    story.wait(1).idle(0)
    story.busy(0)
    assert broken(story) == []


@pytest.mark.parametrize(
    "segments, rules",
    [
        (((0, 10), (1, 10)), []),
        (((1, 10), (0, 10)), ["S4"]),
        (((0, 10), (2, 10)), ["S4"]),
    ],
)
def test_s4_segments_carry_published_versions_in_ascending_order(segments: Any, rules: list[str]):
    story = ready(staleness=2)
    story.tell(events.WeightsPublished, version=1)
    story.sync(1, 0).gate(1, 0)
    story.complete(0, segments=segments)
    assert broken(story) == rules


def test_s4_a_sample_is_not_newer_than_its_engine():
    story = ready(staleness=2)
    story.tell(events.WeightsPublished, version=1)
    story.sync(1, 0).gate(1, 0)
    story.complete(0, rank=1, segments=((1, 10),))
    assert broken(story) == ["S4"]


# --- S5 -------------------------------------------------------------------------------------------------


def test_s5_a_trajectory_is_accepted_once():
    story = ready()
    story.complete(0)
    story.complete(0, attempt=1, delivered=2)
    assert broken(story) == ["S5"]


def test_s5_a_message_delivered_twice_is_one_acceptance():
    story = ready()
    number = story.complete(0)
    story.say(story.entries[number].item)
    assert broken(story) == []


@pytest.mark.parametrize("delivered", [0, 1, 3])
def test_s5_delivered_counts_one_by_one(delivered: int):
    story = ready()
    story.complete(0)
    story.complete(1, delivered=delivered)
    assert broken(story) == ["S5"]


def test_s5_delivered_never_exceeds_the_target():
    story = ready(target=1)
    story.complete(0)
    story.complete(1)
    assert "S5" in broken(story)


def test_s5_delivered_falls_only_when_something_was_dropped():
    story = ready()
    story.complete(0)
    story.complete(1)
    story.drop(1)
    story.tell(events.DemandChanged, batch=0, target=100, delivered=1, reason="stale")
    story.complete(2, delivered=2)
    assert broken(story) == []
    story.tell(events.DemandChanged, batch=0, target=100, delivered=3, reason="made up")
    assert broken(story) == ["S5"]


def test_s5_nothing_is_accepted_for_a_closed_batch():
    story = ready()
    story.close()
    story.complete(0)
    assert broken(story) == ["S5"]


def test_s5_no_trajectory_is_dropped_twice_or_accepted_after_that():
    story = ready()
    story.complete(0)
    story.drop(0)
    story.drop(0)
    assert broken(story) == ["S5"]
    story = ready()
    story.complete(0)
    story.drop(0)
    story.complete(0, attempt=1, delivered=2)
    assert broken(story) == ["S5"]


@pytest.mark.parametrize("trained", [(0, 1, 1), (0, 1, 2)], ids=["twice", "never accepted"])
def test_s5_only_accepted_trajectories_are_trained_each_once(trained: tuple[int, ...]):
    story = ready(target=2)
    story.complete(0)
    story.complete(1)
    story.take(trained)
    story.close()
    assert "S5" in broken(story, outcome="completed")


@pytest.mark.parametrize(
    "ended",
    [
        None,
        events.ClientLost(pipeline="p1", reason="no heartbeat"),
        actions.Note(kind="failed", text="its trainer died", pipeline="p1"),
        actions.Note(kind="failed", text="its trainer died", pipeline="p2"),
    ],
)
def test_s5_what_a_client_had_not_said_when_it_was_lost_or_failed_proves_nothing(ended: Any):
    """Its batch was taken while the message about the last trajectory was on its way, and will never be repeated."""
    story = ready(target=2)
    story.complete(0)
    story.take((0, 1))
    if ended is not None:
        story.say(ended)
    mine = ended is not None and ended.pipeline == "p1"
    assert ("S5" in broken(story, outcome="failed")) == (not mine)


def test_s5_a_batch_contains_a_trajectory_once():
    story = ready(target=1)
    story.take((0, 0))
    story.complete(0)
    assert broken(story) == ["S5"]


@pytest.mark.parametrize("dropped_first", [True, False])
def test_s5_no_trajectory_is_both_trained_and_dropped(dropped_first: bool):
    story = ready(target=1)
    story.complete(0)
    if dropped_first:
        story.drop(0)
    story.take((0,))
    if not dropped_first:
        story.drop(0)
    assert broken(story) == ["S5"]


def test_s5_an_accepted_trajectory_is_not_forgotten():
    story = ready(target=2)
    story.complete(0)
    story.complete(1)
    story.take((0,))
    story.close()
    forgotten = broken(story, outcome="completed")
    story.drop(1, reason="surplus")
    assert ("S5" in forgotten, "S5" in broken(story, outcome="completed")) == (True, False)


def test_s5_a_batch_is_trained_once():
    story = ready(target=1)
    story.complete(0)
    story.take((0,))
    story.take((0,))
    assert broken(story) == ["S5"]


def test_s5_a_completion_that_arrives_after_its_batch_was_taken_is_no_offence():
    story = ready(target=2)
    story.complete(0)
    story.take((0, 1))
    story.complete(1)
    story.close()
    assert "S5" not in broken(story, outcome="completed")


def test_s5_completions_lost_on_the_way_prove_nothing():
    story = ready(target=2)
    lost = story.complete(0)
    del story.entries[lost]
    story.entries[lost:] = []
    state = PipelineState(batches=(BatchState(batch=0, target=2, delivered=2),), opened_through=0, published=0)
    story.tell(events.StateResent, state=state)
    story.take((0, 1))
    story.close()
    assert "S5" not in broken(story, outcome="completed")


# --- S6 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bound, told, rules",
    [(1, 1, []), (0, 1, ["S6"]), (1, 0, ["S6"])],
    ids=["within the bound", "beyond the bound", "told wrongly"],
)
def test_s6_a_trained_sample_is_no_staler_than_the_bound(bound: int, told: int, rules: list[str]):
    story = ready(target=1, staleness=bound)
    story.complete(0, segments=((0, 10),))
    story.tell(events.WeightsPublished, version=1)
    story.take((0,), version=1, staleness=(told,))
    assert broken(story) == rules


def test_s6_staleness_counts_from_the_oldest_segment():
    story = ready(target=1, staleness=1)
    story.tell(events.WeightsPublished, version=1)
    story.sync(1).gate(1)
    story.complete(0, segments=((0, 10), (1, 500)))
    story.tell(events.WeightsPublished, version=2)
    story.take((0,), version=2, staleness=(1,))
    assert broken(story) == ["S6"]


# --- S7 -------------------------------------------------------------------------------------------------


def failed(story: Story, pipeline: str = "p2") -> Story:
    story.order(actions.FailPipeline, pipeline=pipeline, reason="because")
    story.done()
    return story


def test_s7_nobody_fails_for_the_fault_of_another():
    story = two().initialise("p1").initialise("p2")
    story.say(events.TrainerFailed(pipeline="p1", reason="died"))
    assert broken(failed(story, "p1")) == []
    assert broken(failed(story, "p2")) == ["S7"]


def test_s7_nobody_ends_in_an_error_without_saying_so_or_being_told():
    story = two().initialise("p1").initialise("p2")
    story.say(events.PipelineEnded(pipeline="p2", error="why?"))
    assert broken(story) == ["S7"]
    assert broken(two().initialise("p1").leave("p1", error="my own mistake")) == []


def test_s7_does_not_hold_under_fail_fast():
    story = failed(two().initialise("p1").initialise("p2"))
    assert broken(story, driver=DriverPolicy.FAIL_FAST) == []


@pytest.mark.parametrize(
    "cause",
    [
        events.EngineDied(pipeline="p2", dp_rank=0, reason="died"),
        events.ClientLost(pipeline="p2", reason="silent"),
        events.NodeLeft(node=0),
        events.FaultInjected(kind="kill_trainer", target="p2"),
        events.FaultInjected(kind="kill_engine", target="p2/0"),
        events.PhaseEnded(pipeline="p2", role=Role.ACTOR_TRAIN, phase="train", error="out of memory"),
    ],
)
def test_s7_a_fault_of_its_own_is_a_cause(cause: Any):
    story = two().initialise("p1").initialise("p2")
    story.say(cause)
    assert broken(failed(story)) == []


@pytest.mark.parametrize("target", ["p2", "p2/0"])
def test_s7_a_fault_that_strikes_before_a_pipeline_is_heard_of_is_its_own(target: str):
    """Found by a soak: a client was killed while its registration was under way."""
    story = two().initialise("p1")
    story.say(events.FaultInjected(kind="kill_client", target=target))
    story.register("p2")
    story.say(events.PipelineEnded(pipeline="p2", error="its client vanished"))
    assert broken(story) == []
    story = two().initialise("p1")
    story.say(events.FaultInjected(kind="kill_client", target="p1"))
    story.register("p2")
    story.say(events.PipelineEnded(pipeline="p2", error="its client vanished"))
    assert broken(story) == ["S7"], "another one's is not"


def test_s7_holding_a_lease_beyond_its_limit_is_a_cause():
    for seconds, rules in ((99, ["S7"]), (100, [])):
        story = two().initialise("p1").initialise("p2")
        story.request("p2")
        story.grant("p2")
        story.wait(seconds)
        assert broken(failed(story)) == rules


# --- L1, L2 ---------------------------------------------------------------------------------------------


def bound_of(story: Story, pipeline: str = "p1") -> int:
    specs = list(story.specs.values())
    spec = story.specs[pipeline]
    return bounds.rollout(spec, bounds.sharers_of(spec, specs), specs)


def test_l1_demand_without_a_completed_trajectory_starves_at_the_bound():
    story = ready()
    began = next(entry.t for entry in story.entries if isinstance(entry.item, events.LeaseReleased))
    deadline = began + bound_of(story)
    monitor = judge(story)
    monitor.tick(deadline)
    assert monitor.verdict is None
    monitor.tick(deadline + ns(1000))
    assert monitor.verdict is not None
    assert (monitor.verdict.outcome, monitor.verdict.rule, monitor.verdict_at_ns) == ("starved", "L1", deadline)
    assert [(v.rule, v.at_ns) for v in monitor.violations] == [("L1", deadline)]


def test_how_long_a_stranger_waits_is_not_this_runs_verdict():
    story = ready()
    monitor = judge(story, own=("p2",))
    monitor.tick(story.now + 2 * bound_of(story))
    assert monitor.verdict is None and monitor.violations == []


def test_what_a_stranger_has_in_flight_when_a_run_ends_is_not_its_fault():
    story = ready()
    story.engine(actions.SyncEngine, 0, version=0, emptying=Emptying.ABORT)
    assert broken(story, outcome="completed") == ["outcome"]
    assert broken(story, outcome="completed", own=("p2",)) == []


def test_l1_every_completed_trajectory_starts_the_clock_again():
    story = ready()
    bound = bound_of(story)
    story.complete(0)
    for trajectory in range(1, 5):
        story.now += bound
        story.complete(trajectory)
    assert broken(story) == []
    story.now += bound + 1
    story.complete(5)
    assert broken(story) == ["L1"]


def test_l1_counts_completed_trajectories_and_not_grants():
    story = ready()
    for _ in range(20):
        story.now += bound_of(story) // 10
        story.engine(actions.SyncEngine, 0, version=0)
        story.done()
        story.gate(0)
    assert broken(story) == ["L1"]


def test_l1_holds_only_for_who_wants_something():
    story = Story().initialise()
    story.now += 10 * bound_of(story)
    story.note("ignored")
    assert broken(story) == []


def test_l1_failures_of_its_own_excuse_a_pipeline_but_not_for_ever():
    story = ready()
    for _ in range(30):
        story.now += bound_of(story) - 1
        story.say(events.EngineSuspected(pipeline="p1", seq=-1, dp_rank=0, reason="silent"))
    assert broken(story) == ["L1"]


def test_l2_a_pipeline_cut_off_from_its_engines_must_end():
    story = Story(make_spec(train=(0,), infer=(2, 3)), cluster=FOUR_GPUS).initialise(batch=9).serve_all()
    story.say(events.NodeLeft(node=1))
    story.now += bound_of(story) + 1
    story.note("ignored")
    assert broken(story) == ["L2"]


def test_l2_quiescence_while_somebody_waits_is_a_deadlock():
    monitor = judge(Story().initialise(batch=1))
    monitor.on_quiescent("p1 waits for GPU 0")
    assert monitor.verdict == Verdict(outcome="deadlock", rule="L2", text="p1 waits for GPU 0")
    assert monitor.violations[-1].rule == "L2"


def test_the_bound_of_the_incident_is_hours_and_grows_linearly_with_the_pipelines_that_share():
    def rollout(count: int) -> int:
        specs = [make_spec(f"p{i}") for i in range(count)]
        return bounds.rollout(specs[0], bounds.sharers_of(specs[0], specs), specs)

    assert ns(60) < rollout(2) < ns(3600)
    assert rollout(3) - rollout(2) == rollout(20) - rollout(19) > 0


def test_the_bound_counts_those_who_share_through_others_and_nobody_else():
    chain = [make_spec(f"p{i}", train=(i,), infer=(i, i + 1)) for i in range(4)]
    apart = make_spec("apart", train=(9,), infer=(9,))
    assert bounds.sharers_of(chain[0], [*chain, apart]) == chain


# --- L3 -------------------------------------------------------------------------------------------------


def test_l3_a_request_that_is_never_granted_starves_at_its_bound():
    story = Story().initialise()
    story.request()
    spec = story.specs["p1"]
    deadline = story.now + bounds.grant(spec, Priority.ACTOR_TRAINING, [spec], [spec])
    monitor = judge(story)
    monitor.tick(deadline)
    assert monitor.verdict is None
    monitor.tick(deadline + 1)
    assert monitor.verdict is not None
    assert (monitor.verdict.rule, monitor.verdict_at_ns) == ("L3", deadline)


@pytest.mark.parametrize("end", ["granted", "cancelled", "rejected", "resent without it"])
def test_l3_does_not_count_a_request_that_is_over(end: str):
    story = Story().initialise()
    request = story.request()
    if end == "granted":
        story.grant()
    elif end == "cancelled":
        story.tell(events.RequestCancelled, request=request)
    elif end == "rejected":
        story.note("rejected", "p1", len(story.entries) - 1)
    else:
        story.tell(events.StateResent, state=PipelineState(requests_through=request, published=0))
    monitor = judge(story)
    monitor.tick(story.now + ns(1_000_000))
    assert monitor.verdict is None


def test_l3_a_request_known_only_from_the_resent_state_counts():
    story = Story().initialise()
    asked = RequestState(request=5, role=Role.ACTOR_TRAIN, priority=Priority.ACTOR_TRAINING)
    story.tell(events.StateResent, state=PipelineState(waiting=(asked,), requests_through=5, published=0))
    monitor = judge(story)
    monitor.tick(story.now + ns(1_000_000))
    assert monitor.verdict is not None
    assert monitor.verdict.rule == "L3"


# --- L4 -------------------------------------------------------------------------------------------------


def test_l4_no_gpu_stays_idle_beside_demand():
    story = Story().initialise(batch=9)
    story.pause(1)
    assert broken(story) == ["L4"]


def test_l4_whatever_happens_within_the_instant_is_in_time():
    assert broken(Story().initialise(batch=9).serve_all().wait(1)) == []


def test_l4_can_be_given_time_to_settle():
    story = Story().initialise(batch=9)
    story.pause(1)
    assert broken(story, settle_ns=ns(2)) == []


@pytest.mark.parametrize("demand", [DemandPolicy.FLOOR, DemandPolicy.SIGNAL])
def test_l4_is_asked_of_the_durable_policy_only(demand: DemandPolicy):
    story = Story(demand=demand).initialise(batch=9)
    story.pause(1)
    assert broken(story) == []


def test_l4_an_engine_beyond_one_a_trajectory_is_not_worth_the_switch():
    story = Story().initialise(batch=1).serve(0)
    story.pause(1)
    assert broken(story) == []


def test_l4_a_gpu_may_wait_for_a_request_whose_other_gpus_are_being_freed():
    story = Story(make_spec(train=(0, 1))).initialise(batch=9).serve_all()
    story.request()
    story.sleep(0)
    story.engine(actions.SleepEngine, 1, emptying=Emptying.DRAIN)
    story.pause(5)
    assert broken(story) == []


def test_l4_a_gpu_may_wait_for_an_engine_that_is_to_sleep_once_it_is_synced():
    story = Story(make_spec(train=(0, 1))).initialise(batch=9).serve_all()
    story.request()
    story.sleep(0)
    story.note("shrink", "p1", dp_rank=1)
    story.pause(5)
    assert broken(story) == []


def test_l4_an_engine_that_is_promised_and_only_waits_for_its_memory_counts():
    def promised(to: int) -> Story:
        story = Story().initialise(batch=1, confirmed=False)
        story.order(actions.AwaitMemory, gpus=(0,), need=(0,))
        story.free(1)
        story.note("expand", "p1", dp_rank=to)
        return story.pause(1)

    assert broken(promised(to=0)) == []
    story = promised(to=0)
    story.note("shrink", "p1", dp_rank=0)
    assert broken(story.pause(1)) == ["L4"]


@pytest.mark.parametrize("confirmed", [True, False])
def test_l4_a_gpu_may_wait_for_a_wider_engine_whose_other_gpus_are_being_freed(confirmed: bool):
    """p1 could use GPU 0 alone; p2's engine needs both, and the memory of GPU 1 is being watched."""
    story = Story(make_spec("p1", infer=(0,)), make_spec("p2", train=(1,), infer=(0, 1), tp=2))
    story.initialise("p1", batch=9).initialise("p2", batch=9, confirmed=False)
    story.note("expand", "p2", dp_rank=0)
    story.order(actions.AwaitMemory, gpus=(1,), need=(0,))
    story.free(0)
    if confirmed:
        story.done(story.last_action - 1, {1: gib(138)})
    assert broken(story.pause(1)) == (["L4"] if confirmed else [])


@pytest.mark.parametrize("stopped", [True, False])
def test_l4_a_gpu_may_be_kept_for_a_request_whose_other_gpu_comes_back_from_a_stopped_pipeline(stopped: bool):
    """p2's engine died on GPU 1, which is in quarantine until all of p2's workers are stopped."""
    story = Story(make_spec("p1", train=(0, 1)), make_spec("p2", train=(1,), infer=(1,)))
    story.initialise("p1").initialise("p2", batch=9).serve(0, "p2")
    story.say(events.EngineDied(pipeline="p2", dp_rank=0, reason="gone"))
    story.note("quarantine", "p2", gpus=(1,))
    story.order(actions.StopPipeline, pipeline="p2", reason="gone")
    if stopped:
        story.done(story.last_action)
    else:
        story.say(events.ActionFailed(action=story.last_action, reason="nobody answers"))
    story.order(actions.AwaitMemory, gpus=(1,), need=(0,))
    story.request("p1")
    story.open(9, "p1")
    story.pause(1)
    assert broken(story) == ([] if stopped else ["L4"])


def test_l4_is_asked_of_the_last_instant_too():
    monitor = judge(Story())
    assert monitor.violations == []
    story = Story().initialise(batch=1)
    monitor = story.told(Monitor(story.scenario.cluster, story.scenario.demand))
    monitor.on_quiescent("nothing happens any more")
    assert [violation.rule for violation in monitor.violations] == ["L4", "L4", "L2"]


def test_l4_a_gpu_must_not_wait_for_a_request_that_others_hold_up():
    story = Story(make_spec(train=(0, 1))).initialise(batch=9).serve_all()
    story.request()
    story.sleep(0)
    story.pause(5)
    assert broken(story) == ["L4"]


def test_l4_looks_again_when_the_request_it_was_reserved_for_is_gone():
    story = Story(make_spec(train=(0, 1))).initialise(batch=9).serve_all()
    request = story.request()
    story.sleep(0).sleep(1)
    story.pause(1)
    assert broken(story) == []
    story.tell(events.RequestCancelled, request=request)
    story.pause(1)
    assert broken(story) == ["L4"]


def test_l4_quarantine_is_not_idleness():
    story = ready()
    story.sleep(0, confirmed=False)
    story.order(actions.AwaitMemory, gpus=(0,), need=(gib(61),))
    story.say(events.ActionFailed(action=story.last_action, reason="not back", free={0: gib(20)}))
    story.pause(5)
    assert broken(story) == []


# --- L5 -------------------------------------------------------------------------------------------------


def handover(after: float, **fields: Any) -> Story:
    """p1's engine on GPU 0 goes to p2's rollout this long after it became routable."""
    story = Story(make_spec("p1", infer=(0,), **fields), make_spec("p2", train=(1,), infer=(0,)))
    story.initialise("p1").initialise("p2", batch=9).open(9, "p1").serve(0, "p1")
    return story.wait(after).sleep(0, "p1").serve(0, "p2")


def test_l5_an_engine_keeps_its_gpus_against_other_rollouts_for_its_residence():
    assert broken(handover(30)) == []
    assert broken(handover(29)) == ["L5"]


def test_l5_residence_protects_nobody_without_demand():
    story = Story(make_spec("p1", infer=(0,)), make_spec("p2", train=(1,), infer=(0,)))
    story.initialise("p1").initialise("p2", batch=9).open(1, "p1").serve(0, "p1")
    story.complete(0, "p1")
    assert broken(story.sleep(0, "p1").serve(0, "p2")) == []


def test_l5_residence_never_protects_against_a_request():
    story = ready()
    story.request()
    story.sleep(0)
    story.grant()
    assert broken(story) == []


def test_l5_nothing_is_put_to_sleep_just_to_be_woken_again():
    assert broken(ready().wait(60).sleep(0).serve(0)) == ["L5"]


def test_l5_waking_again_is_right_when_the_request_was_cancelled():
    story = ready().wait(60)
    request = story.request()
    story.sleep(0)
    story.tell(events.RequestCancelled, request=request)
    assert broken(story.serve(0)) == []


def test_l5_waking_again_is_right_after_somebody_used_the_gpu():
    story = ready().wait(60)
    story.request()
    story.sleep(0)
    epoch = story.grant()
    story.tell(events.LeaseReleased, epoch=epoch)
    story.free(0)
    assert broken(story.serve(0)) == []


def test_l5_waking_again_is_right_after_a_planned_release():
    story = ready().wait(60)
    story.tell(events.RolloutReleased)
    story.sleep(0).sleep(1)
    story.order(actions.ConfirmRelease, pipeline="p1")
    story.done()
    assert broken(story.serve_all()) == []


# --- every action ends once -----------------------------------------------------------------------------


def test_an_action_ends_in_one_outcome():
    story = Story().initialise()
    story.done()
    assert broken(story) == ["outcome"]


def test_an_answer_after_an_unknown_outcome_is_late_and_no_offence():
    story = ready()
    story.engine(actions.KillEngine, 0, reason="hung")
    story.say(events.ActionUnknown(action=story.last_action, reason="no answer"))
    story.done()
    assert broken(story) == []
    story.done()
    assert broken(story) == ["outcome"]


def test_two_actions_in_flight_never_share_a_number():
    story = Story().initialise()
    story.order(actions.AwaitMemory, gpus=(0,), need=(0,))
    story.say(actions.AwaitMemory(action=story.last_action, gpus=(1,), need=(0,)))
    assert broken(story) == ["outcome"]


def test_a_run_that_ended_by_itself_left_no_action_in_flight():
    story = Story().initialise()
    story.order(actions.AwaitMemory, gpus=(0,), need=(0,))
    assert broken(story, outcome="completed") == ["outcome"]
    assert broken(story, outcome="interrupted") == []


def test_messages_nobody_can_make_sense_of_break_no_oracle():
    story = Story()
    bad = make_spec("p9", infer=(7, 8))
    story.say(events.PipelineRegistered(pipeline="p9", seq=0, spec=bad))
    story.say(events.LeaseRequested(pipeline="p9", seq=1, request=0, role=Role.CRITIC, priority=Priority.GENERATION))
    story.say(events.EngineDied(pipeline="p9", dp_rank=4, reason="died"))
    story.say(events.LeaseReleased(pipeline="nobody", seq=0, epoch=1))
    assert broken(story) == []
