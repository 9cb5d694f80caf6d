"""The gateway: which trajectory runs where, and what happens to one that does not come back."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.loop import run_sim
from backends.sim.policies import Holds
from core import events
from core.backend import Generation
from core.errors import OperationFailed, PipelineFailed
from core.gateway import FAILURES_IN_A_ROW, REST_NS, Gateway
from core.model import BatchKind, Partial
from core.units import NS_PER_S
from tests.fakes import FakeBackend, FakePort, make_job


class Desk:
    """A gateway on a fake backend, with the hands to open, close, end and wait."""

    def __init__(self, *, slots: int = 4, takes: int | None = None, reward: Any = None, **job: Any) -> None:
        self.job = make_job(**job)
        self.backend = FakeBackend(slots=slots, takes=takes)
        self.port = FakePort("p1", self.backend)
        self.gateway = Gateway(self.job, self.port, self.backend, reward)
        self.port.gates = self.gateway

    async def open(self, rank: int, version: int = 0, epoch: int = 0) -> None:
        self.port.open_engine(rank, version, epoch)
        await self.settle()

    async def close(self, rank: int) -> None:
        self.port.close_engine(rank)
        await self.settle()

    async def end(self, rank: int, status: str, count: int = 1) -> None:
        for request in self.backend.on(rank)[:count]:
            request.end(status, reason="because")
        await self.settle()

    async def settle(self, nanos: int = 1) -> None:
        await asyncio.get_running_loop().sleep_ns(nanos)

    def loads(self, ranks: int = 2) -> list[int]:
        return [len(self.backend.on(rank)) for rank in range(ranks)]

    def delivered(self) -> list[tuple[int, int]]:
        """(batch, trajectory) of every progress report."""
        return [(said[1], said[3]) for said in self.port.said if said[0] == "trajectory_completed"]

    def drops(self) -> list[tuple[int, str]]:
        return [(event.trajectory, event.reason) for event in self.port.seen(events.TrajectoryDropped)]


def desk(script: Callable[[Desk], Awaitable[None]], policy: Any = None, **options: Any) -> Desk:
    """Run `script` at a desk whose version 0 is published."""
    made: list[Desk] = []

    async def main() -> None:
        made.append(Desk(**options))
        made[0].gateway.published(0)
        async with made[0].gateway:
            await script(made[0])
        assert asyncio.get_running_loop().env.peek() == float("inf"), "a timer outlives its gateway"

    run_sim(main, policy=policy)
    return made[0]


# --- where trajectories go ------------------------------------------------------------------------------


def test_the_queue_waits_while_there_is_no_engine_and_resumes_with_the_first():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 3)
        await d.settle(1000)
        assert not d.backend.running
        await d.open(1)
        assert d.loads() == [0, 3]
        await d.end(1, "completed", 3)
        await d.gateway.filled(batch)

    assert desk(script).delivered() == [(0, 0), (0, 1), (0, 2)]


def test_load_goes_to_the_engine_with_the_least_in_flight_and_ties_to_the_lowest_rank():
    async def script(d: Desk) -> None:
        await d.open(1)
        d.gateway.open_batch(0, 5)
        await d.settle()
        assert [a.dp_rank for a in d.backend.attempts] == [1, 1, 1, 1]
        await d.open(0)
        assert d.loads() == [1, 4]
        await d.end(1, "completed", 4)
        d.gateway.open_batch(1, 3, BatchKind.EVAL)
        await d.settle()
        assert [a.dp_rank for a in d.backend.attempts[5:]] == [1, 0, 1]

    desk(script)


def test_an_engine_never_gets_more_than_its_slots():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 20)
        await d.open(0)
        await d.open(1)
        assert d.loads() == [3, 3]
        await d.end(0, "completed", 2)
        assert d.loads() == [3, 3]
        assert len(d.backend.attempts) == 8

    desk(script, slots=3)


def test_a_closed_gate_gets_nothing_while_its_requests_drain():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 6)
        await d.open(0)
        d.gateway.close_gate(0)
        await d.end(0, "completed", 2)
        assert d.loads() == [2, 0]
        assert len(d.delivered()) == 2

    desk(script)


def test_a_new_epoch_is_a_new_engine_whose_slots_are_all_free():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 8)
        await d.open(0, epoch=1)
        d.gateway.open_gate(0, 0, epoch=2)
        await d.settle()
        assert d.loads() == [8, 0]

    desk(script)


def test_an_in_flight_update_keeps_counting_what_the_engine_still_runs():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 8)
        await d.open(0, epoch=1)
        d.gateway.close_gate(0)
        d.gateway.open_gate(0, 1, epoch=1)
        await d.settle()
        assert d.loads() == [4, 0]

    desk(script)


def test_nothing_is_dispatched_while_held_back():
    async def script(d: Desk) -> None:
        d.gateway.hold_back()
        d.gateway.open_batch(0, 1)
        await d.open(0)
        assert d.loads() == [0, 0]
        d.gateway.let_go()
        await d.settle()
        assert d.loads() == [1, 0]

    desk(script)


# --- versions -------------------------------------------------------------------------------------------


def test_each_open_batch_accepts_only_versions_that_cannot_be_stale_when_it_is_taken():
    async def script(d: Desk) -> None:
        first, *_ = [d.gateway.open_batch(batch, 1) for batch in range(3)]
        await d.open(0, version=0)
        assert [a.batch for a in d.backend.attempts] == [0, 1]
        await d.end(0, "completed")
        await d.gateway.take(first, 0)
        d.gateway.published(1)
        await d.settle()
        assert [a.batch for a in d.backend.attempts] == [0, 1]
        await d.open(1, version=1)
        assert [a.batch for a in d.backend.attempts] == [0, 1, 2]

    desk(script, staleness=1)


def test_while_a_step_trains_the_next_batch_waits_for_its_weights_on_policy():
    async def script(d: Desk) -> None:
        first = d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.end(0, "completed")
        await d.gateway.take(first, 0)
        d.gateway.open_batch(1, 1)
        await d.settle()
        assert d.loads() == [0, 0]
        d.gateway.published(1)
        await d.settle()
        assert d.loads() == [0, 0]
        await d.open(0, version=1)
        assert d.loads() == [1, 0]

    desk(script)


def test_a_step_without_new_weights_lets_the_next_batch_use_the_old_ones():
    async def script(d: Desk) -> None:
        first = d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.end(0, "completed")
        await d.gateway.take(first, 0)
        d.gateway.open_batch(1, 1)
        d.gateway.step_ended()
        await d.settle()
        assert d.loads() == [1, 0]

    desk(script)


def test_stale_samples_are_dropped_when_taken_and_asked_for_again_under_new_indices():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 2)
        await d.open(0)
        await d.end(0, "completed", 2)
        d.gateway.published(1)
        d.backend.takes = NS_PER_S
        d.port.open_engine(1, 1)
        samples = await d.gateway.take(batch, 1)
        assert sorted((s.trajectory, s.version) for s in samples) == [(2, 1), (3, 1)]

    done = desk(script)
    assert done.drops() == [(0, "stale"), (1, "stale")]
    assert ("demand_changed", 0, 2, 0, "stale") in done.port.said


def test_an_evaluation_runs_on_the_version_of_its_first_trajectory_alone():
    async def script(d: Desk) -> None:
        d.gateway.published(1)
        await d.open(0, version=0)
        d.gateway.open_batch(0, 6, BatchKind.EVAL)
        await d.open(1, version=1)
        assert d.loads() == [4, 0]
        await d.end(0, "completed", 2)
        assert d.loads() == [4, 0]

    desk(script, staleness=1)


def test_an_evaluation_whose_version_is_gone_starts_over_on_a_newer_one():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 2, BatchKind.EVAL)
        await d.open(0, version=0)
        await d.end(0, "completed")
        d.gateway.published(1)
        d.backend.takes = NS_PER_S
        await d.open(0, version=1)
        await d.gateway.filled(batch)
        assert {s.version for s in batch.samples} == {1}

    done = desk(script, staleness=1)
    assert [trajectory for trajectory, _ in done.drops()] == [0]
    assert ("demand_changed", 0, 2, 0) in [said[:4] for said in done.port.said]


def test_an_evaluation_sample_whose_version_changed_under_it_is_generated_again():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 1, BatchKind.EVAL)
        await d.open(0)
        request = d.backend.on(0)[0]
        request.generation = Generation(status="completed", segments=((0, 5), (1, 5)))
        request.ended.set()
        await d.settle()
        assert d.delivered() == []
        await d.end(0, "completed")
        await d.gateway.filled(batch)

    desk(script, in_flight_updates=True)


def test_evaluation_and_training_share_an_engine_by_turns():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 50)
        d.gateway.open_batch(1, 50, BatchKind.EVAL)
        await d.open(0)
        for _ in range(20):
            await d.end(0, "completed")
        kinds = [a.evaluation for a in d.backend.attempts]
        assert kinds == [False, True] * (len(kinds) // 2)

    desk(script)


# --- attempts that end early ----------------------------------------------------------------------------


def test_a_preempted_trajectory_restarts_from_its_prompt():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.close(0)
        await d.open(1)

    attempts = desk(script).backend.attempts
    assert [(a.attempt, a.dp_rank, a.prefix) for a in attempts] == [(0, 0, ()), (1, 1, ())]


def test_a_preempted_trajectory_resumes_with_its_segments_where_the_pipeline_allows_it():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.close(0)
        d.gateway.published(1)
        await d.open(1, version=1)
        await d.close(1)
        await d.open(1, version=1)

    attempts = desk(script, partial=Partial.RESUME, staleness=1).backend.attempts
    assert [a.prefix for a in attempts] == [(), ((0, 1),), ((0, 1), (1, 1))]


def test_a_prefix_that_would_be_stale_when_taken_is_thrown_away():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.close(0)
        d.gateway.published(1)
        await d.open(1, version=1)

    assert [a.prefix for a in desk(script, partial=Partial.RESUME).backend.attempts] == [(), ()]


def test_preemptions_do_not_count_as_attempts():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 1)
        for _ in range(10):
            await d.open(0)
            await d.close(0)
        await d.open(0)
        await d.end(0, "completed")
        await d.gateway.filled(batch)
        assert batch.samples[0].attempt == 10

    desk(script, max_attempts=2)


def test_a_failed_trajectory_tries_another_engine_and_never_enters_the_batch_as_failed():
    async def script(d: Desk) -> None:
        await d.open(0)
        await d.open(1)
        batch = d.gateway.open_batch(0, 1)
        await d.settle()
        await d.end(0, "failed")
        assert d.loads() == [0, 1]
        await d.end(1, "completed")
        await d.gateway.filled(batch)
        assert [(s.attempt, s.dp_rank) for s in batch.samples] == [(1, 1)]

    desk(script)


def test_an_error_of_the_world_in_generate_is_a_failed_attempt():
    async def script(d: Desk) -> None:
        async def refuse(attempt: Any) -> Any:
            raise OperationFailed("no such engine")

        d.backend.generate = refuse
        batch = d.gateway.open_batch(0, 1)
        await d.open(0)
        with pytest.raises(PipelineFailed, match="no such engine"):
            await d.gateway.filled(batch)

    desk(script, max_attempts=2)


def test_a_bug_in_a_backend_is_not_taken_for_a_failed_attempt():
    async def script(d: Desk) -> None:
        async def bug(attempt: Any) -> Any:
            raise ZeroDivisionError("a bug")

        d.backend.generate = bug
        d.gateway.open_batch(0, 1)
        await d.open(0)

    with pytest.raises(ExceptionGroup) as caught:
        desk(script)
    assert caught.group_contains(ZeroDivisionError)


def test_one_trajectory_given_up_closes_the_batch_short():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 2)
        await d.open(0)
        await d.end(0, "completed")
        for _ in range(2):
            await d.end(0, "failed")
            await d.settle(REST_NS)
        await d.gateway.filled(batch)
        assert [s.trajectory for s in batch.samples] == [0]

    done = desk(script, max_attempts=2)
    assert done.drops() == [(1, "given up after 2 attempts: because")]
    assert done.port.said[-1][:4] == ("demand_changed", 0, 1, 1)


def test_a_batch_of_which_nothing_came_back_fails_the_pipeline_with_the_reason():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 2)
        await d.open(0)
        await d.end(0, "failed", 2)
        with pytest.raises(PipelineFailed, match="given up after 1 attempts: because"):
            await d.gateway.filled(batch)

    desk(script, max_attempts=1)


def test_an_engine_that_fails_at_once_cannot_burn_every_attempt_before_anyone_heard_of_it():
    async def script(d: Desk) -> None:
        async def refuse(attempt: Any) -> Any:
            d.backend.attempts.append(attempt)
            raise OperationFailed("process is gone")

        d.backend.generate = refuse
        d.gateway.open_batch(0, 32)
        await d.open(0)
        await d.settle(REST_NS // 2)
        assert len(d.backend.attempts) <= FAILURES_IN_A_ROW + d.backend.slots_each

    assert desk(script).drops() == []


def test_what_fails_after_the_engine_answered_is_not_held_against_the_engine():
    """A reward that fails for every trajectory must not make an engine rest that serves every request."""

    async def script(d: Desk) -> None:
        async def answer(attempt: Any) -> Any:
            d.backend.attempts.append(attempt)
            return Generation(status="failed", reason="the reward is broken", answered=True)

        d.backend.generate = answer
        batch = d.gateway.open_batch(0, 32)
        await d.open(0)
        await d.settle()
        assert len(d.backend.attempts) == 64
        with pytest.raises(PipelineFailed, match="given up after 2 attempts: the reward is broken"):
            await d.gateway.filled(batch)

    desk(script, max_attempts=2)


def test_an_engine_that_refuses_behind_an_open_gate_is_not_asked_again_in_the_same_instant():
    async def script(d: Desk) -> None:
        async def refuse(attempt: Any) -> Any:
            d.backend.attempts.append(attempt)
            return Generation(status="aborted", reason="my gate is closed")

        d.backend.generate = refuse
        d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.settle(2 * REST_NS)
        assert len(d.backend.attempts) == 3

    desk(script)


def test_failures_with_a_success_or_a_fresh_gate_in_between_are_not_in_a_row():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 20)
        await d.open(0)
        await d.end(0, "failed")
        await d.end(0, "completed")
        await d.end(0, "failed")
        assert d.loads()[0] == 4
        await d.open(0)
        await d.end(0, "failed")
        assert d.loads()[0] == 4
        await d.end(0, "failed")
        assert d.loads()[0] == 3

    desk(script)


def test_a_fresh_gate_ends_the_rest_of_an_engine():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 8)
        await d.open(0)
        await d.end(0, "failed", 4)
        before = d.loads()[0]
        await d.open(0, epoch=1)
        assert d.loads()[0] > before

    desk(script)


# --- limits ---------------------------------------------------------------------------------------------


def test_an_attempt_past_its_limit_is_aborted_and_given_to_another_engine():
    async def script(d: Desk) -> None:
        await d.open(0)
        await d.open(1)
        batch = d.gateway.open_batch(0, 2)
        await d.settle()
        await d.end(0, "completed")
        await d.settle(10 * NS_PER_S)
        assert d.loads() == [1, 0]
        await d.end(0, "completed")
        assert [(s.trajectory, s.attempt) for s in batch.samples] == [(0, 0), (1, 1)]

    desk(script, reissue_after=10 * NS_PER_S)


def test_a_result_that_comes_after_its_attempt_was_given_up_is_counted_once():
    async def script(d: Desk) -> None:
        async def stubborn(attempt: Any) -> Any:
            with anyio.CancelScope(shield=True):
                return await FakeBackend.generate(d.backend, attempt)

        d.backend.generate = stubborn
        await d.open(0)
        await d.open(1)
        batch = d.gateway.open_batch(0, 1)
        await d.settle(10 * NS_PER_S)
        assert d.loads() == [1, 1]
        await d.end(0, "completed")
        assert d.delivered() == []
        await d.end(1, "completed")
        assert [(s.trajectory, s.attempt) for s in batch.samples] == [(0, 1)]
        assert len(d.delivered()) == 1

    desk(script, reissue_after=10 * NS_PER_S)


def test_a_result_in_the_instant_of_its_limit_costs_no_later_attempt():
    async def script(d: Desk) -> None:
        first = d.gateway.open_batch(0, 1)
        await d.open(0)
        await d.settle(5 * NS_PER_S)
        d.backend.takes = 10 * NS_PER_S  # due in the instant of its limit, and before it: that timer is armed later
        second = d.gateway.open_batch(1, 1)
        await d.settle(NS_PER_S)
        d.backend.takes = NS_PER_S
        await d.gateway.filled(first)
        await d.settle(8 * NS_PER_S)
        third = d.gateway.open_batch(2, 3)
        for batch in (second, third):
            await d.gateway.filled(batch)
        assert second.samples[0].attempt <= 1
        assert [s.attempt for s in third.samples] == [0, 0, 0]

    for held_step in range(40):
        done = desk(script, policy=Holds({held_step: 1}), reissue_after=10 * NS_PER_S, staleness=2)
        assert sorted(done.delivered()) == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_a_suspected_engine_gets_nothing_new_until_it_had_a_rest_or_a_fresh_gate():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 2)
        await d.open(0)
        await d.settle(10 * NS_PER_S)
        assert d.loads() == [0, 0]
        await d.settle(REST_NS)
        assert d.loads() == [2, 0]
        await d.settle(10 * NS_PER_S)
        assert d.loads() == [0, 0]
        await d.open(0, epoch=1)
        assert d.loads() == [2, 0]

    desk(script, reissue_after=10 * NS_PER_S, max_attempts=9)


def test_a_straggler_of_a_closed_batch_gives_its_slot_back_at_its_limit():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 1)
        await d.open(0)
        d.gateway.close_batch(batch)
        await d.settle(10 * NS_PER_S)
        assert d.loads() == [0, 0]

    assert desk(script, reissue_after=10 * NS_PER_S).drops() == []


def test_a_silent_engine_is_suspected_once_a_ring():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 4)
        await d.open(0)
        await d.settle(10 * NS_PER_S)
        assert d.port.words().count("engine_suspected") == 1

    desk(script, reissue_after=10 * NS_PER_S)


def test_one_long_trajectory_alone_on_its_engine_is_no_proof_against_it_until_its_last_attempt():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 1)
        await d.open(0)
        for attempts in (1, 2):
            await d.settle(10 * NS_PER_S)
            assert (len(d.backend.attempts), "engine_suspected" in d.port.words()) == (attempts + 1, False)
        await d.settle(10 * NS_PER_S)
        assert "engine_suspected" in d.port.words()

    desk(script, reissue_after=10 * NS_PER_S, max_attempts=4)


def test_stragglers_do_not_make_an_engine_suspect_that_answered_others_meanwhile():
    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 4)
        await d.open(0)
        await d.settle(5 * NS_PER_S)
        await d.end(0, "completed", 1)
        await d.settle(5 * NS_PER_S)
        assert d.loads() == [3, 0]
        assert [a.attempt for a in d.backend.attempts[4:]] == [1, 1, 1]
        assert "engine_suspected" not in d.port.words()

    desk(script, reissue_after=10 * NS_PER_S)


def test_trajectories_that_never_return_end_in_a_short_batch_after_a_limit():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 8)
        await d.open(0)
        await d.open(1)
        hung = {0, 3, 5}
        while batch.demand:
            for request in d.backend.running:
                if request.attempt.trajectory not in hung:
                    request.end("completed")
            await d.settle(NS_PER_S)
        assert sorted(s.trajectory for s in batch.samples) == [1, 2, 4, 6, 7]

    done = desk(script, reissue_after=10 * NS_PER_S, max_attempts=3)
    assert [trajectory for trajectory, _ in done.drops()] == [0, 3, 5]


def test_no_timer_is_left_once_nothing_is_in_flight():
    async def script(d: Desk) -> None:
        batch = d.gateway.open_batch(0, 4)
        await d.open(0)
        await d.end(0, "completed", 4)
        await d.gateway.filled(batch)
        assert asyncio.get_running_loop().env.peek() == float("inf")

    desk(script, reissue_after=1000 * NS_PER_S)


# --- rewards --------------------------------------------------------------------------------------------


def test_the_slot_is_free_while_the_reward_is_computed_and_only_then_is_it_progress():
    async def reward(sample: Any) -> None:
        await asyncio.get_running_loop().sleep_ns(100)

    async def script(d: Desk) -> None:
        d.gateway.open_batch(0, 2)
        await d.open(0)
        await d.end(0, "completed")
        assert d.loads() == [1, 0]
        assert d.delivered() == []
        await d.settle(100)
        assert d.delivered() == [(0, 0)]

    desk(script, slots=1, reward=reward)


# --- whatever happens -----------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("close"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["completed", "failed", "aborted"]), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("wait"), st.integers(1, 12)),
        st.tuples(st.just("publish")),
        st.tuples(st.just("take")),
    ),
    max_size=40,
)


class Story(Desk):
    """A desk that follows a random script and keeps its own books of versions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.latest = 0
        self.batches = [self.gateway.open_batch(0, 4), self.gateway.open_batch(1, 3)]
        self.evaluation = self.gateway.open_batch(2, 3, BatchKind.EVAL)
        self.taken: list[list[Any]] = []
        self.epoch = 0

    async def play(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("open", rank, fresh):
                self.epoch += fresh
                await self.open(rank, self.latest, self.epoch)
            case ("close", rank):
                await self.close(rank)
            case ("wait", nanos):
                await self.settle(nanos * NS_PER_S)
            case ("publish",) if self.taken and self.latest < len(self.taken):
                self.publish()
            case ("take",) if self.latest == len(self.taken) and self.batches and not self.batches[0].demand:
                if self.batches[0].samples:
                    self.taken.append(await self.gateway.take(self.batches.pop(0), self.latest))
            case ("completed" | "failed" | "aborted" as status, rank, count):
                await self.end(rank, status, count)

    def publish(self) -> None:
        self.latest += 1
        for rank in range(3):
            if self.backend.versions.get(("p1", rank), self.latest) < self.latest - self.job.spec.staleness:
                self.port.close_engine(rank)
        self.gateway.published(self.latest)

    async def finish(self) -> None:
        """From here on everything works."""
        self.backend.takes = NS_PER_S
        for batch in list(self.batches):
            for rank in range(3):
                self.epoch += 1
                await self.open(rank, self.latest, self.epoch)
            if len(self.taken) == self.latest:
                await self._take(batch)
            self.publish()
        self.port.open_engine(0, self.latest, self.epoch + 1)
        await self.evaluation.filled()

    async def _take(self, batch: Any) -> None:
        try:
            self.taken.append(await self.gateway.take(batch, self.latest))
            self.batches.remove(batch)
        except PipelineFailed:
            assert batch.target == 0


def _check_story(d: Story) -> None:
    trained = Counter((s.batch, s.trajectory) for samples in d.taken for s in samples)
    assert all(count == 1 for count in trained.values())
    dropped = [(e.batch, e.trajectory) for e in d.port.seen(events.TrajectoryDropped)]
    assert len(dropped) == len(set(dropped))
    assert not set(dropped) & set(trained)
    assert len(d.delivered()) == len(set(d.delivered()))
    for version, samples in enumerate(d.taken):
        assert all(version - s.version <= d.job.spec.staleness for s in samples)
    evaluated = {d.backend.served[s.batch, s.trajectory, s.attempt] for s in d.evaluation.samples}
    assert len(evaluated) <= 1
    stale = [reason for _, reason in d.drops() if reason == "stale"]
    assert not stale, "nothing goes stale by construction"
    for said in d.port.said:
        if said[0] == "trajectory_completed":
            assert 1 <= said[2] <= 4


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(0, 1), st.sampled_from(list(Partial)), st.dictionaries(st.integers(0, 99), st.just(1)))
def test_whatever_engines_do_every_trajectory_ends_once_and_none_goes_where_it_may_not(
    operations, staleness, partial, holds
):
    # The fake backend itself refuses an attempt on an engine whose gate is closed.
    async def main() -> None:
        d = Story(slots=2, staleness=staleness, partial=partial, max_attempts=3, reissue_after=20 * NS_PER_S)
        d.gateway.published(0)
        async with d.gateway:
            d.gateway.dispatch()
            for operation in operations:
                await d.play(operation)
                assert all(len(d.backend.on(rank)) <= 2 * (1 + d.epoch) for rank in range(3))
            await d.finish()
        _check_story(d)
        assert d.evaluation.demand == 0

    run_sim(main, policy=Holds(holds))
