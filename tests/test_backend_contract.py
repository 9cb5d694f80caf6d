"""The plugin contract: one suite for every backend. A backend joins by a line in `BACKENDS` and a `tests.worlds.World`.

What is said here is in core/backend.py; nothing here depends on how long a thing takes, but for two lower bounds. The
real backend is the whole of it, on CPU (`ray_contract`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from core import events
from core.actions import Emptying
from core.backend import Attempt, Generation
from core.errors import OperationFailed
from core.model import Role
from tests.worlds import Hands, World, in_sim, make_job, make_scenario

Test = Callable[[World], Awaitable[Any]]
Run = Callable[[Test], Any]

BACKENDS = ("sim", "ray_gpu")
IN_FLIGHT = ("sim",)
"""Backends whose engines take new weights while requests run. Real ones take them only while they are idle
(backends/ray_gpu/checks.py refuses a scenario that asks for more)."""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The real backend's cluster, started by the first test that needs it."""
    for package in ("ray", "torch", "megatron", "transformers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from ray_contract import House

    house = House(tmp_path_factory.mktemp("contract"))
    yield house
    house.close()


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test in a world of two pipelines on two GPUs, with p1 initialised, and nothing of it awake."""
    if request.param == "ray_gpu":
        return request.getfixturevalue("house").run
    return _in_sim


def _in_sim(test: Test) -> Any:
    async def initialised(world: World) -> Any:
        await world.initialise()
        return await test(world)

    return in_sim(make_scenario(make_job("p1"), make_job("p2", train=(1,), infer=(1,))), initialised)


async def all_of(tasks: list["asyncio.Task[Generation]"]) -> list[Generation]:
    return [await task for task in tasks]


# --- rule 1: one outcome -----------------------------------------------------------------------------------


def test_what_cannot_be_done_is_an_outcome_and_not_an_exception(run: Run) -> None:
    async def test(world: World) -> None:
        assert "p1/7" in (await world.wake(7) or "")
        assert "p9" in (await _stranger(world).wake() or "")
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
        await world.roll_out()
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


def test_a_doubled_cold_start_leaves_the_engine_that_it_started_alone(run: Run) -> None:
    async def test(world: World) -> None:
        await world.kill()
        outcomes = [await task for task in [asyncio.ensure_future(world.wake(cold=True)) for _ in range(2)]]
        assert outcomes == [None, None]
        assert await world.sync() is None
        assert await world.open() is None
        assert await world.wake(cold=True) is None
        assert (await world.generate()).status == "completed"  # still open

    run(test)


def test_a_doubled_sync_leaves_running_requests_alone(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = world.start()
        await world.decoding(1)
        assert await world.sync() is None
        assert not running.done()
        assert (await running).status == "completed"

    run(test)


def test_two_wakes_at_once_take_the_memory_once(run: Run) -> None:
    async def test(world: World) -> None:
        loop = asyncio.get_running_loop()
        outcomes = [await task for task in [loop.create_task(world.wake()) for _ in range(2)]]
        assert outcomes == [None, None]
        await world.wake(1)
        assert world.engine_bytes(0) == world.engine_bytes(1) > 0

    run(test)


def test_doubled_phases_succeed_and_change_nothing(run: Run) -> None:
    async def test(world: World) -> None:
        await world.roll_out()
        await world.phase("onload")
        loaded = world.used()
        await world.phase("onload")
        assert world.used() == loaded
        await world.phase("offload")
        await world.phase("offload")
        with pytest.raises(OperationFailed, match="offloaded"):
            await world.phase("train")

    run(test)


# --- rule 3: epochs and gates ------------------------------------------------------------------------------


def test_an_older_epoch_is_refused_by_every_operation(run: Run) -> None:
    async def test(world: World) -> None:
        world.epoch += 4
        await world.serve()
        world.epoch -= 1
        for operation in (world.wake, world.sync, world.open, world.sleep, world.kill):
            assert f"epoch {world.epoch}" in (await operation() or "")
        assert (await world.generate()).status == "completed"  # none of them did anything
        world.epoch += 2
        assert await world.sleep() is None

    run(test)


def test_an_older_epoch_is_refused_also_by_an_engine_that_has_to_be_started_again(run: Run) -> None:
    async def test(world: World) -> None:
        world.epoch += 4
        assert await world.kill() is None
        world.epoch -= 1
        assert f"epoch {world.epoch}" in (await world.wake(cold=True) or "")
        world.epoch += 1
        assert await world.wake(cold=True) is None
        world.epoch -= 1
        assert f"epoch {world.epoch}" in (await world.kill() or "")
        world.epoch += 1
        assert await world.sync() is None

    run(test)


def test_a_phase_under_an_older_lease_is_refused(run: Run) -> None:
    async def test(world: World) -> None:
        await world.roll_out()
        newer = world.epoch + 6
        await world.phase("onload", epoch=newer)
        with pytest.raises(OperationFailed, match=f"epoch {newer - 1}"):
            await world.phase("train", epoch=newer - 1)
        await world.phase("train", epoch=newer)

    run(test)


def test_a_closed_gate_refuses_at_every_stage(run: Run) -> None:
    async def test(world: World) -> None:
        begun = ((world.version, 3),)
        trajectories = iter(range(10))

        async def refused() -> bool:
            generation = await world.generate(next(trajectories), prefix=begun)
            return (generation.status, generation.segments) == ("aborted", begun)

        assert await refused()
        await world.wake()
        assert await refused()
        await world.sync()
        assert await refused()
        await world.open()
        assert not await refused()
        await world.sleep()
        assert await refused()
        await world.kill()
        generation = await world.generate(next(trajectories), prefix=begun)
        assert generation.status != "completed"  # whether a request reached the engine before its end may be unknown
        assert generation.segments == begun

    run(test)


def test_a_gate_opens_only_for_the_version_that_is_loaded(run: Run) -> None:
    async def test(world: World) -> None:
        old, new = world.version, world.version + 1
        await world.train(new)
        await world.wake()
        assert await world.open(version=new) is not None  # nothing loaded yet
        await world.sync(version=new)
        assert await world.open(version=old) is not None
        assert await world.open(version=new + 1) is not None
        assert await world.open(version=new) is None

    run(test)


def test_an_engine_wakes_without_weights_and_serves_nothing_old(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        await world.sleep()
        await world.wake()
        assert await world.open() is not None
        assert (await world.generate()).status != "completed"

    run(test)


def test_a_sync_to_a_version_that_was_never_published_fails(run: Run) -> None:
    async def test(world: World) -> None:
        never = world.version + 3
        await world.wake()
        assert f"version {never}" in (await world.sync(version=never) or "")

    run(test)


def test_a_new_version_closes_the_gate_until_it_is_opened_again(run: Run) -> None:
    async def test(world: World) -> None:
        new = world.version + 1
        await world.serve()
        await world.train(new)
        running = world.start(0)
        await world.decoding(1)
        assert await world.sync(version=new) is None
        assert (await running).status == "aborted"
        assert (await world.generate(1)).status == "aborted"
        assert await world.open(version=new) is None
        assert [version for version, _ in (await world.generate(2)).segments] == [new]

    run(test)


@pytest.mark.parametrize("run", IN_FLIGHT, indirect=True)
def test_an_update_in_flight_keeps_requests_and_marks_where_the_version_changed(run: Run) -> None:
    async def test(world: World) -> None:
        old, new = world.version, world.version + 1
        await world.serve()
        alone = await world.generate(1)
        await world.train(new)
        running = world.start(1)
        await world.decoding(1)
        assert await world.sync(version=new, how=Emptying.KEEP) is None
        assert await world.open(version=new) is None
        generation = await running
        assert generation.status == "completed"
        assert [version for version, _ in generation.segments] == [old, new]
        assert sum(tokens for _, tokens in generation.segments) == sum(tokens for _, tokens in alone.segments)

    run(test)


@pytest.mark.parametrize("run", [name for name in BACKENDS if name not in IN_FLIGHT], indirect=True)
def test_an_engine_that_cannot_be_updated_in_flight_says_so_and_harms_no_request(run: Run) -> None:
    async def test(world: World) -> None:
        old, new = world.version, world.version + 1
        await world.serve()
        await world.train(new)
        running = world.start()
        await world.decoding(1)
        assert await world.sync(version=new, how=Emptying.KEEP) is not None
        assert not running.done()
        generation = await running
        assert generation.status == "completed"
        assert [version for version, _ in generation.segments] == [old]
        assert await world.sync(version=new) is None
        assert await world.open(version=new) is None

    run(test)


# --- rule 4: requests end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", list(Emptying))
def test_a_sleep_ends_every_request_however_it_empties(run: Run, how: Emptying) -> None:
    async def test(world: World) -> None:
        await world.serve()
        slots = world.backend.slots("p1")
        running = [world.start(i) for i in range(slots)]
        await world.decoding(slots)
        queued = [world.start(100 + i) for i in range(3)]
        await world.decoding(slots, waiting=3)
        assert await world.sleep(how=how, drain=1000) is None
        statuses = {generation.status for generation in await all_of(running)}
        assert statuses == ({"completed"} if how is Emptying.DRAIN else {"aborted"})
        assert {generation.status for generation in await all_of(queued)} == {"aborted"}

    run(test)


def test_a_drain_aborts_what_is_left_at_its_limit(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        late = world.start()
        await world.decoding(1)
        assert await world.sleep(how=Emptying.DRAIN, drain=0.05) is None
        cut = await late
        assert cut.status == "aborted"
        assert cut.segments[0][1] > 0

    run(test)


def test_a_killed_engine_fails_its_requests_and_needs_a_cold_start(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        slots = world.backend.slots("p1")
        running = [world.start(i) for i in range(slots + 2)]
        await world.decoding(slots, waiting=2)
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
        slots = world.backend.slots("p1")
        running = [world.start(i) for i in range(slots)]
        await world.decoding(slots)
        queued = world.start(100)
        await world.decoding(slots, waiting=1)
        running[0].cancel()
        await asyncio.wait(running[:1])
        assert running[0].cancelled()
        await world.decoding(slots)
        assert not any(one.done() for one in running[1:])  # it did not wait for one of them to end
        assert (await queued).status == "completed"
        assert await world.sleep() is None

    run(test)


def test_a_resumed_attempt_keeps_its_prefix_and_takes_only_the_rest(run: Run) -> None:
    async def test(world: World) -> None:
        old, new = world.version, world.version + 1
        await world.serve()
        whole = await world.generate(1)
        running = world.start(2)
        await world.decoding(1)
        await world.sleep()
        partial = (await running).segments
        await world.train(new)
        await world.serve(version=new)
        resumed = await world.generate(2, attempt=1, prefix=partial)
        assert resumed.segments[: len(partial)] == partial
        assert [version for version, _ in resumed.segments] == [old, new]
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
        waiting = asyncio.ensure_future(world.memory((0, 1), need))
        await world.arrived()
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
        outcome = await world.memory((0,), world.scenario.cluster.gpu_memory, limit=0.5)
        assert isinstance(outcome, events.ActionFailed)
        assert 0 <= outcome.free[0] < world.scenario.cluster.gpu_memory
        assert "free" in outcome.reason

    run(test)


def test_enough_memory_is_accepted_once_patience_for_the_rest_is_over(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        free, before = world.free(0), world.now
        assert isinstance(await world.memory((0,), free, expect=free + 1, patience=0.5), events.ActionDone)
        assert world.now - before >= 0.5

    run(test)


def test_a_cancelled_wait_for_memory_leaves_no_trace(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        waiting = asyncio.ensure_future(world.memory((0,), world.scenario.cluster.gpu_memory))
        await world.arrived()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await world.sleep() is None

    run(test)


# --- stopping ----------------------------------------------------------------------------------------------


def test_an_order_that_is_not_waited_for_any_more_is_carried_out_all_the_same(run: Run) -> None:
    async def test(world: World) -> None:
        impatient = asyncio.ensure_future(world.wake())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert impatient.cancelled()
        assert await world.wake() is None  # the same order again: a no-op, one way or the other
        assert await world.sync() is None

    run(test)


def test_messages_arrive_once_and_in_order(run: Run) -> None:
    async def test(world: World) -> None:
        arrived: list[int] = []
        for seq in range(20):
            message = events.PipelineAdmitted(pipeline="p1", seq=seq)
            world.backend.carry(message, lambda message: arrived.append(message.seq))
        await world.arrived()
        assert arrived == list(range(20))

    run(test)


def test_a_stop_ends_everything_of_one_pipeline_and_nothing_of_the_other(run: Run) -> None:
    async def test(world: World) -> None:
        peer = world.peer("p2")
        await peer.initialise()
        await world.serve()
        await peer.serve()
        mine, theirs = world.start(), peer.start()
        await world.decoding(1)
        await world.decoding(1, pipeline="p2")
        await world.hang_trainer()
        phase = asyncio.ensure_future(world.phase("onload"))
        await world.arrived()
        assert isinstance(await world.stop(), events.ActionDone)
        assert isinstance(await world.stop(), events.ActionDone)
        assert (await mine).status == "failed"
        with pytest.raises(OperationFailed):
            await phase
        with pytest.raises(OperationFailed):
            await world.phase("onload")
        assert await world.wake() is not None
        assert await world.wake(cold=True) is not None
        assert (await theirs).status == "completed"
        assert isinstance(await world.memory((0,), world.scenario.cluster.gpu_memory), events.ActionDone)

    run(test)


def test_close_ends_what_runs_and_leaves_nothing(run: Run) -> None:
    async def test(world: World) -> None:
        await world.serve()
        running = world.start()
        await world.decoding(1)
        await world.hang_trainer()
        phase = asyncio.ensure_future(world.phase("onload"))
        waiting = asyncio.ensure_future(world.memory((0,), world.scenario.cluster.gpu_memory + 1))  # more than there is
        await world.arrived()
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
        assert await world.left() == []
        assert len(world.seen) == said

    run(test)
