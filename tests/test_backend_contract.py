"""The plugin contract: one suite for every backend. A backend joins by a line in `BACKENDS`.

What is said here is in core/backend.py; nothing here depends on how long a thing takes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from core import events
from core.actions import Emptying
from core.backend import Attempt, Generation
from core.errors import OperationFailed
from core.model import Role
from tests.worlds import Hands, SimWorld, in_sim, make_job, make_scenario, pass_time

World = SimWorld  # what a backend's harness must offer: `Hands`, `seen`, `used()`
Run = Callable[[Callable[[World], Awaitable[Any]]], Any]

BACKENDS: dict[str, Run] = {
    "sim": lambda test: in_sim(make_scenario(make_job("p1"), make_job("p2", train=(1,))), test),
}


@pytest.fixture(params=list(BACKENDS))
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test in a fresh world of two pipelines on two GPUs, with p1 initialised."""

    def run_initialised(test: Callable[[World], Awaitable[Any]]) -> Any:
        async def initialised(world: World) -> Any:
            await world.initialise()
            return await test(world)

        return BACKENDS[request.param](initialised)

    return run_initialised


async def all_of(tasks: list["asyncio.Task[Generation]"]) -> list[Generation]:
    return [await task for task in tasks]


# --- rule 1: one outcome -----------------------------------------------------------------------------------


def test_what_cannot_be_done_is_an_outcome_and_not_an_exception(run: Run) -> None:
    async def test(world: World) -> None:
        assert "p1/7" in (await world.wake(7) or "")
        assert "p9/0" in (await _stranger(world).wake() or "")
        assert await world.sync() is not None  # asleep
        assert await world.open() is not None
        assert "no workers" in (await world.peer("p2").wake() or "")  # never initialised

    run(test)


def _stranger(world: World) -> Hands:
    stranger = Hands(world.backend, world.scenario)
    stranger.pipeline = "p9"
    return stranger


def test_a_phase_that_cannot_run_raises_operation_failed(run: Run) -> None:
    async def test(world: World) -> None:
        with pytest.raises(OperationFailed, match="offloaded"):
            await world.phase("train")
        with pytest.raises(OperationFailed, match="critic"):
            await world.phase("train", Role.CRITIC)
        with pytest.raises(OperationFailed, match="p9"):
            await _stranger(world).phase("onload")

    run(test)


# --- rule 2: doubled operations ----------------------------------------------------------------------------


def test_doubled_engine_operations_succeed_and_change_nothing(run: Run) -> None:
    async def test(world: World) -> None:
        for operation in (world.wake, world.sync, world.open):
            assert await operation() is None
            before = world.used()
            assert await operation() is None
            assert world.used() == before
        assert (await world.generate()).status == "completed"  # still open
        assert await world.sleep() is None
        assert await world.sleep() is None
        assert await world.kill() is None
        assert await world.kill() is None

    run(test)


def test_a_doubled_sync_leaves_running_requests_alone(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = world.start()
        await pass_time(1)
        assert await world.sync() is None
        assert (await running).status == "completed"

    run(test)


def test_two_wakes_at_once_take_the_memory_once(run: Run) -> None:
    async def test(world: World) -> None:
        loop = asyncio.get_running_loop()
        outcomes = [await task for task in [loop.create_task(world.wake()) for _ in range(2)]]
        assert outcomes == [None, None]
        assert sum(world.held(0, "p1/0").values()) == world.spec.memory.engine

    run(test)


def test_doubled_phases_succeed_and_change_nothing(run: Run) -> None:
    async def test(world: World) -> None:
        await world.phase("onload")
        loaded = world.used()
        await world.phase("onload")
        assert world.used() == loaded
        await world.phase("offload")
        await world.phase("offload")
        with pytest.raises(OperationFailed):
            await world.phase("train")

    run(test)


# --- rule 3: epochs and gates ------------------------------------------------------------------------------


def test_an_older_epoch_is_refused_by_every_operation(run: Run) -> None:
    async def test(world: World) -> None:
        world.epoch = 5
        await world.serve()
        world.epoch = 4
        for operation in (world.wake, world.sync, world.open, world.sleep, world.kill):
            assert "epoch 4" in (await operation() or "")
        assert (await world.generate()).status == "completed"  # none of them did anything
        world.epoch = 6
        assert await world.sleep() is None

    run(test)


def test_a_phase_under_an_older_lease_is_refused(run: Run) -> None:
    async def test(world: World) -> None:
        await world.phase("onload", epoch=7)
        with pytest.raises(OperationFailed, match="epoch 6"):
            await world.phase("train", epoch=6)
        await world.phase("train", epoch=7)

    run(test)


def test_a_closed_gate_refuses_at_every_stage(run: Run) -> None:
    async def refused(world: World) -> bool:
        generation = await world.generate(prefix=((0, 3),))
        return (generation.status, generation.segments) == ("aborted", ((0, 3),))

    async def test(world: World) -> None:
        assert await refused(world)
        await world.wake()
        assert await refused(world)
        await world.sync()
        assert await refused(world)
        await world.open()
        assert not await refused(world)
        await world.sleep()
        assert await refused(world)
        await world.kill()
        assert await refused(world)

    run(test)


def test_a_gate_opens_only_for_the_version_that_is_loaded(run: Run) -> None:
    async def test(world: World) -> None:
        await world.train(1)
        await world.wake()
        assert await world.open(version=1) is not None  # nothing loaded yet
        await world.sync(version=1)
        assert await world.open(version=0) is not None
        assert await world.open(version=2) is not None
        assert await world.open(version=1) is None

    run(test)


def test_an_engine_wakes_without_weights_and_serves_nothing_old(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        await world.sleep()
        await world.wake()
        assert await world.open(version=0) is not None
        assert (await world.generate()).status != "completed"

    run(test)


def test_a_sync_to_a_version_that_was_never_published_fails(run: Run) -> None:
    async def test(world: World) -> None:
        await world.wake()
        assert "version 3" in (await world.sync(version=3) or "")

    run(test)


def test_a_new_version_closes_the_gate_until_it_is_opened_again(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        await world.train(1)
        running = world.start()
        await pass_time(1)
        assert await world.sync(version=1) is None
        assert (await running).status == "aborted"
        assert (await world.generate()).status == "aborted"
        assert await world.open(version=1) is None
        assert [version for version, _ in (await world.generate()).segments] == [1]

    run(test)


def test_an_update_in_flight_keeps_requests_and_marks_where_the_version_changed(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        alone = await world.generate(1)
        await world.train(1)
        running = world.start(1)
        await pass_time(4)
        assert await world.sync(version=1, how=Emptying.KEEP) is None
        assert await world.open(version=1) is None
        generation = await running
        assert generation.status == "completed"
        assert [version for version, _ in generation.segments] == [0, 1]
        assert sum(tokens for _, tokens in generation.segments) == sum(tokens for _, tokens in alone.segments)

    run(test)


# --- rule 4: requests end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", list(Emptying))
def test_a_sleep_ends_every_request_however_it_empties(run: Run, how: Emptying) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = [world.start(i) for i in range(world.backend.slots("p1"))]
        queued = [world.start(100 + i) for i in range(3)]
        await pass_time(4)
        assert await world.sleep(how=how, drain=1000) is None
        statuses = {generation.status for generation in await all_of(running)}
        assert statuses == ({"completed"} if how is Emptying.DRAIN else {"aborted"})
        assert {generation.status for generation in await all_of(queued)} == {"aborted"}

    run(test)


def test_a_drain_aborts_what_is_left_at_its_limit(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        early = world.start(0)
        await pass_time(4)
        late = world.start(1)
        await pass_time(4)
        assert await world.sleep(how=Emptying.DRAIN, drain=4) is None
        assert (await early).status == "completed"
        cut = await late
        assert cut.status == "aborted"
        assert cut.segments[0][1] > 0

    run(test)


def test_a_killed_engine_fails_its_requests_and_needs_a_cold_start(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = [world.start(i) for i in range(6)]
        await pass_time(1)
        assert await world.kill() is None
        assert {generation.status for generation in await all_of(running)} == {"failed"}
        assert await world.wake() is not None
        assert await world.wake(cold=True) is None
        assert await world.open() is not None
        assert await world.sync() is None
        assert await world.open() is None
        assert (await world.generate()).status == "completed"

    run(test)


def test_cancelling_a_request_frees_its_slot(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = [world.start(i) for i in range(world.backend.slots("p1"))]
        queued = world.start(100)
        await pass_time(1)
        assert not queued.done()
        running[0].cancel()
        await asyncio.wait(running[:1])
        assert running[0].cancelled()
        assert (await queued).status == "completed"
        assert await world.sleep() is None

    run(test)


def test_a_resumed_attempt_keeps_its_prefix_and_takes_only_the_rest(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        whole = await world.generate(1)
        running = world.start(1)
        await pass_time(6)
        await world.sleep()
        partial = (await running).segments
        await world.train(1)
        await world.serve(version=1)
        resumed = await world.generate(1, attempt=1, prefix=partial)
        assert resumed.segments[: len(partial)] == partial
        assert [version for version, _ in resumed.segments] == [0, 1]
        assert sum(tokens for _, tokens in resumed.segments) == whole.segments[0][1]

    run(test)


def test_an_attempt_on_an_unknown_engine_fails(run: Run) -> None:
    async def test(world: World) -> None:
        attempt = Attempt(pipeline="p9", batch=0, trajectory=0, attempt=0, dp_rank=0)
        assert (await world.backend.generate(attempt)).status == "failed"
        assert (await world.generate(rank=9)).status == "failed"

    run(test)


# --- memory ------------------------------------------------------------------------------------------------


def test_memory_is_awaited_until_it_is_really_free(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        need = world.scenario.cluster.gpu_memory - 2 * world.spec.memory.residue
        waiting = asyncio.get_running_loop().create_task(world.memory((0, 1), need))
        await pass_time(5)
        assert not waiting.done()
        await world.sleep()
        outcome = await waiting
        assert isinstance(outcome, events.ActionDone)
        assert list(outcome.free) == [0, 1]
        assert min(outcome.free.values()) >= need

    run(test)


def test_memory_that_stays_away_is_reported_at_the_limit_with_what_was_seen(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        outcome = await world.memory((0,), world.scenario.cluster.gpu_memory, limit=7)
        assert isinstance(outcome, events.ActionFailed)
        assert 0 <= outcome.free[0] < world.scenario.cluster.gpu_memory
        assert "free" in outcome.reason

    run(test)


def test_enough_memory_is_accepted_once_patience_for_the_rest_is_over(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        free = world.scenario.cluster.gpu_memory - world.spec.memory.engine - world.spec.memory.residue
        waiting = asyncio.get_running_loop().create_task(world.memory((0,), free, expect=free + 1, patience=2))
        await pass_time(1)
        assert not waiting.done()
        await pass_time(2)
        assert isinstance(await waiting, events.ActionDone)

    run(test)


def test_a_cancelled_wait_for_memory_leaves_no_trace(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        waiting = asyncio.get_running_loop().create_task(world.memory((0,), world.scenario.cluster.gpu_memory))
        await pass_time(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await world.sleep() is None

    run(test)


# --- stopping ----------------------------------------------------------------------------------------------


def test_a_stop_ends_everything_of_one_pipeline_and_nothing_of_the_other(run: Run) -> None:
    async def test(world: World) -> None:
        peer = world.peer("p2")
        await peer.initialise()
        await world.serve(0)
        await peer.serve(1)
        mine, theirs = world.start(rank=0), peer.start(rank=1)
        loop = asyncio.get_running_loop()
        phase = loop.create_task(world.phase("onload"))
        await pass_time(1)
        assert isinstance(await world.stop(), events.ActionDone)
        assert isinstance(await world.stop(), events.ActionDone)
        assert (await mine).status == "failed"
        with pytest.raises(OperationFailed):
            await phase
        with pytest.raises(OperationFailed):
            await world.phase("onload")
        assert await world.wake() is not None
        assert (await theirs).status == "completed"
        free = world.scenario.cluster.gpu_memory - 2 * peer.spec.memory.residue
        assert isinstance(await world.memory((0,), free), events.ActionDone)

    run(test)


def test_an_order_that_is_not_waited_for_any_more_is_carried_out_all_the_same(run: Run) -> None:
    async def test(world: World) -> None:
        impatient = asyncio.get_running_loop().create_task(world.wake())
        await pass_time(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert await world.wake() is None  # the same order again: a no-op, one way or the other
        assert await world.sync() is None

    run(test)


def test_close_ends_what_runs_and_leaves_nothing(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = world.start()
        loop = asyncio.get_running_loop()
        phase = loop.create_task(world.phase("onload"))
        waiting = loop.create_task(world.memory((0,), world.scenario.cluster.gpu_memory))
        await pass_time(1)
        await world.backend.close()
        said = len(world.seen)
        assert world.used() == 0
        assert (await running).status == "failed"
        with pytest.raises(OperationFailed):
            await phase
        assert isinstance(await waiting, events.ActionFailed)
        await world.backend.close()
        assert await world.wake() is not None
        with pytest.raises(OperationFailed):
            await world.phase("init")
        assert (await world.generate()).status != "completed"
        await pass_time(1000)
        assert world.used() == 0
        assert len(world.seen) == said

    run(test)


# --- messages ----------------------------------------------------------------------------------------------


def test_messages_arrive_once_and_in_order(run: Run) -> None:
    async def test(world: World) -> None:
        arrived: list[int] = []
        for seq in range(20):
            message = events.PipelineAdmitted(pipeline="p1", seq=seq)
            world.backend.carry(message, lambda message: arrived.append(message.seq))
        await pass_time(1)
        assert arrived == list(range(20))

    run(test)
