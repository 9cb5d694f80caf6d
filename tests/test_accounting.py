"""The figures: they add up, they say what happened, and a log gives the same as the run did."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import actions, events
from core.accounting import Accounting
from core.actions import Emptying
from core.model import BatchState, PipelineState, Priority
from core.timeline import IDLE, STATES
from core.trace import TraceWriter, Violation, feed, header_of, read_log
from core.units import gib, ns
from tests.stories import Story, make_spec, one_step


def count(story: Story, **options: int) -> Accounting:
    accounting = story.told(Accounting(story.scenario, **options))
    accounting.finish()
    return accounting


def two() -> Story:
    return Story(make_spec("p1", train=(0,)), make_spec("p2", train=(1,)))


def seconds_of(accounting: Accounting, gpu: int = 0) -> dict[str, float]:
    return {kind: time / 1e9 for kind, time in accounting.sums[gpu].items()}


def test_a_whole_life_is_counted_to_the_second():
    accounting = count(one_step(Story()))
    # init 40, wake 1, sync 3, decode 20, sleep 1 (and 1 for the other engine's sleep, one after the other), train 20
    assert accounting.makespan_ns == ns(40 + 1 + 3 + 20 + 2 + 20)
    assert seconds_of(accounting, 0) == {"busy": 40.0, "switching": 45.0, "idle": 1.0}
    assert seconds_of(accounting, 1) == {"busy": 20.0, "switching": 45.0, "idle": 21.0}
    account = accounting.accounts["p1"]
    assert (account.steps_done, account.trained, account.resizes, account.tokens) == (1, 4, 4, 400)
    assert account.error is None


def test_the_summary_has_the_fields_of_the_contract_and_no_others():
    story = one_step(two(), "p1")
    header = header_of(story.scenario, "sim")
    summary = count(story).summary(header, "completed", [Violation("S1", ns(1.5), "why")], "text", story.now)
    assert list(summary) == [
        "scenario", "backend", "demand", "seed", "outcome", "makespan_s", "handovers", "gpus", "pipelines",
        "violations", "diagnosis",
    ]  # fmt: skip
    assert list(summary["gpus"][0]) == ["id", "busy_s", "switching_s", "idle_s"]
    assert list(summary["pipelines"][0]) == ["id", "steps_done", "trajectories", "max_wait_s", "resizes", "error"]
    assert [pipeline["id"] for pipeline in summary["pipelines"]] == ["p1", "p2"]  # declared, never seen
    assert summary["violations"] == [{"rule": "S1", "at_s": 1.5, "detail": "why"}]
    assert (summary["backend"], summary["demand"], summary["diagnosis"]) == ("sim", "batch", "text")


def test_a_log_file_gives_the_same_figures_as_the_run(tmp_path: Path):
    story = one_step(one_step(two(), "p1"), "p2")
    story.verdict()
    header = header_of(story.scenario, "sim")
    live = Accounting(story.scenario)
    with TraceWriter(tmp_path / "log.jsonl", header) as writer:
        feed(story.entries, live, writer)
    read, entries = read_log(tmp_path / "log.jsonl")
    again = Accounting(read.config)
    feed(entries, again)
    assert again.summary(read, "completed", []) == live.summary(header, "completed", [])
    assert again.details() == live.details()


# --- time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase, kind", [("train", "busy"), ("publish", "busy"), ("onload", "switching"), ("offload", "switching")]
)
def test_a_trainer_phase_counts_by_its_kind(phase: str, kind: str):
    story = Story().initialise(seconds=0)
    story.request()
    story.grant()
    story.wait(1).phase(phase, 5)
    assert seconds_of(count(story)) == {"busy": 0.0, "switching": 0.0, "idle": 1.0} | {kind: 5.0}


def test_a_draining_engine_is_switching_though_it_decodes():
    story = Story().initialise(batch=9, seconds=0).serve_all()
    before = seconds_of(count(story))
    story.busy(0)
    story.wait(2)
    story.engine(actions.SleepEngine, 0, emptying=Emptying.DRAIN)
    story.wait(3).idle(0)
    story.wait(1).done()
    assert seconds_of(count(story)) == {"busy": 2.0, "switching": before["switching"] + 4, "idle": 0.0}


def test_memory_that_does_not_come_back_is_quarantine_and_switching():
    story = Story().initialise(batch=9, seconds=0).serve_all().sleep(0, confirmed=False)
    story.order(actions.AwaitMemory, gpus=(0,), need=(gib(61),))
    story.wait(10).say(events.ActionFailed(action=story.last_action, reason="not back"))
    story.wait(5).free(0)
    accounting = count(story, keep_segments=99)
    last = [(segment.state, segment.end - segment.start) for segment in accounting.segments[0][-2:]]
    assert last == [("release", ns(10)), ("quarantine", ns(5))]
    assert seconds_of(accounting)["switching"] == 4 + 1 + 15


def test_segments_are_contiguous_and_equal_neighbours_are_one():
    accounting = count(one_step(Story()), keep_segments=999)
    for segments in accounting.segments:
        assert segments[0].start == 0
        assert segments[-1].end == accounting.makespan_ns
        for one, following in pairwise(segments):
            assert one.end == following.start
            assert (one.state, one.pipeline) != (following.state, following.pipeline)


def test_no_more_segments_are_kept_than_asked_for():
    accounting = count(one_step(Story()), keep_segments=3)
    everything = count(one_step(Story()), keep_segments=999)
    assert [len(kept) for kept in accounting.segments] == [3, 3]
    assert accounting.segments_left_out == sum(len(kept) - 3 for kept in everything.segments)
    assert accounting.sums == everything.sums


STEPS: list[Callable[[Story], object]] = [
    lambda story: story.wake(0),
    lambda story: story.sync(0, 0),
    lambda story: story.gate(0, 0),
    lambda story: story.busy(0),
    lambda story: story.idle(0),
    lambda story: story.sleep(0),
    lambda story: story.sleep(0, confirmed=False),
    lambda story: story.free(0, 1),
    lambda story: story.engine(actions.KillEngine, 0, reason="hung"),
    lambda story: story.done(),
    lambda story: story.request(),
    lambda story: story.grant(),
    lambda story: story.phase("train", 3),
    lambda story: story.say(events.PhaseStarted(pipeline="p1", role="actor_train", phase="onload", gpus=(0,))),
    lambda story: story.tell(events.LeaseReleased, epoch=story._epoch),
    lambda story: story.open(9),
    lambda story: story.close(),
    lambda story: story.note("quarantine", "p1", gpus=(1,)),
    lambda story: story.note("grant", "p1", gpus=(0,)),
    lambda story: story.say(events.EngineDied(pipeline="p1", dp_rank=0, reason="died")),
    lambda story: story.say(events.NodeLeft(node=0)),
    lambda story: story.wait(1),
]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3))), st.integers(0, 5))
def test_busy_switching_and_idle_are_the_makespan_exactly_whatever_happens(steps: list, rest: int):
    story = Story().initialise(seconds=7)
    for step, pause in steps:
        step(story)
        story.now += pause * 333_333_333
    accounting = story.told(Accounting(story.scenario, keep_segments=10_000))
    accounting.finish()
    accounting.finish(story.now + rest)
    assert accounting.makespan_ns == max(story.entries[-1].t, story.now + rest)
    for gpu, sums in enumerate(accounting.sums):
        assert sum(sums.values()) == accounting.makespan_ns
        assert all(time >= 0 for time in sums.values())
        assert sum(s.end - s.start for s in accounting.segments[gpu]) == accounting.makespan_ns
        assert 0 <= accounting.reserved_idle_ns(gpu) <= accounting.makespan_ns
    assert 0 <= accounting.idle_holders.attracted_ns <= 2 * accounting.makespan_ns


def test_every_state_of_a_gpu_is_busy_switching_or_idle():
    assert set(STATES.values()) == {"busy", "switching", "idle"}
    assert STATES["free"] == IDLE


# --- hand-overs, resizes, waits -------------------------------------------------------------------------


def test_a_hand_over_is_a_gpu_passing_from_one_pipeline_to_another():
    story = two().initialise("p1", batch=4)
    assert count(story).handovers == 0
    story.serve_all("p1")
    assert count(story).handovers == 0  # from p1's initialisation to p1's engines
    story.sleep(0, "p1").sleep(1, "p1").initialise("p2")
    assert count(story).handovers == 2
    story.serve(0, "p1")
    assert count(story).handovers == 3


def test_shrinks_and_expands_count_when_they_start():
    story = Story().initialise(batch=4).serve_all()
    story.engine(actions.SleepEngine, 0, emptying=Emptying.ABORT)
    assert count(story).accounts["p1"].resizes == 3


def test_the_longest_wait_is_for_a_routable_engine():
    story = Story().initialise(batch=4).wait(6).serve_all().wait(50)
    assert count(story).max_wait_ns("p1") == ns(10)


def test_an_unfinished_wait_counts_to_the_end():
    story = Story().initialise(batch=4).wait(25)
    accounting = story.told(Accounting(story.scenario))
    accounting.finish(story.now)
    assert accounting.max_wait_ns("p1") == ns(25)


def test_waiting_for_a_lease_counts_too():
    story = two().register("p1").register("p2")
    story.request("p1", Priority.INITIALIZATION)
    story.wait(30)
    story.grant("p1", (0, 1))
    story.request("p2", Priority.INITIALIZATION)
    story.pause(45)
    accounting = count(story)
    assert (accounting.max_wait_ns("p1"), accounting.max_wait_ns("p2")) == (ns(30), ns(45))


def test_a_full_batch_waits_for_nothing():
    story = Story().initialise(batch=1).serve_all()
    story.complete(0)
    story.sleep(0).sleep(1).pause(100)
    assert count(story).max_wait_ns("p1") == ns(4)


def test_what_was_dropped_and_how_stale_the_rest_was_is_told():
    story = Story(make_spec(staleness=1)).initialise(batch=3).serve_all()
    for trajectory in range(3):
        story.complete(trajectory)
    story.drop(2)
    story.take((0, 1), version=1, staleness=(1, 0))
    details = count(story).details()["pipelines"]["p1"]
    assert details == {"dropped": {"stale": 1}, "staleness": {"0": 1, "1": 1}, "tokens": 300, "lost_turns": 0}


@pytest.mark.parametrize(("seconds", "completed", "lost"), [(60, False, 1), (59, False, 0), (60, True, 0)])
def test_a_turn_is_lost_if_it_was_a_whole_one_and_nothing_was_completed(seconds: int, completed: bool, lost: int):
    story = Story().initialise(batch=2, seconds=0).serve(0).pause(seconds)
    if completed:
        story.complete(0)
    assert count(story.sleep(0)).details()["pipelines"]["p1"]["lost_turns"] == lost


def test_a_completion_that_only_the_state_resent_tells_of_counts():
    story = Story().initialise(batch=2, seconds=0).serve(0).pause(60)
    batches = (BatchState(batch=0, target=2, delivered=1),)
    state = PipelineState(batches=batches, opened_through=0, requests_through=0, published=0)
    story.tell(events.StateResent, state=state)
    assert count(story.sleep(0)).details()["pipelines"]["p1"]["lost_turns"] == 0


def test_an_engine_that_nobody_needs_any_more_lost_no_turn():
    story = Story().initialise(batch=1, seconds=0).serve(0).pause(100)
    story.tell(events.BatchClosed, batch=0, reason="cancelled")
    assert count(story.sleep(0)).details()["pipelines"]["p1"]["lost_turns"] == 0


# --- what idle holders cost -----------------------------------------------------------------------------


def test_an_engine_woken_without_open_batch_demand_is_attracted():
    story = two().initialise("p1").initialise("p2").serve(0, "p1").wait(6).pause(0)
    details = count(story).details()
    assert (details["attracted"], details["attracted_gpu_s"]) == (1, 10.0)
    story.open(4, "p1").pause(5)
    assert count(story).details()["attracted_gpu_s"] == 10.0  # now it has something to do


def test_an_idle_holder_costs_only_while_somebody_else_could_use_its_gpu():
    story = two().initialise("p1", batch=1).initialise("p2").serve_all("p1")
    story.complete(0, "p1")
    story.pause(5)
    assert count(story).details()["idle_held_gpu_s"] == 0.0
    story.open(9, "p2").pause(7)
    assert count(story).details()["idle_held_gpu_s"] == 14.0
    story.sleep(0, "p1", seconds=0).serve(0, "p2")
    assert count(story).details()["idle_held_gpu_s"] == 14.0 + 4.0


def test_free_but_promised_is_reserved_idle_time():
    story = Story(make_spec(train=(0, 1))).initialise(batch=9).serve_all()
    story.request()
    story.note("grant", "p1", gpus=(0, 1))
    story.sleep(0).sleep(1, seconds=5)
    story.grant()
    story.pause(3)
    assert count(story).details()["reserved_idle_s"] == [5.0, 0.0]


def test_a_promise_that_is_void_reserves_nothing_any_more():
    story = Story(make_spec(train=(0, 1))).initialise(batch=9).serve_all()
    request = story.request()
    story.note("grant", "p1", gpus=(0, 1))
    story.sleep(0).wait(5)
    story.tell(events.RequestCancelled, request=request)
    story.pause(100)
    assert count(story).details()["reserved_idle_s"] == [5.0, 0.0]


def test_a_run_that_joins_others_counts_from_its_own_first_word():
    story = one_step(one_step(two(), "p1"), "p2")
    whole = count(story)
    registered = [entry for entry in story.entries if isinstance(entry.item, events.PipelineRegistered)]
    began = next(entry.t for entry in registered if entry.item.pipeline == "p2")
    late = story.told(Accounting(msgspec.structs.replace(story.scenario, jobs=story.scenario.jobs[1:])))
    figures = late.figures()
    assert began > 0 and figures["makespan_s"] == (whole.makespan_ns - began) / 1e9
    for gpu in figures["gpus"]:
        assert gpu["busy_s"] + gpu["switching_s"] + gpu["idle_s"] == figures["makespan_s"]
    assert figures["handovers"] == whole.handovers
