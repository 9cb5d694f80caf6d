"""The simulated world without faults: what things cost in time and in bytes, and what chance decides."""

import asyncio
import gc
import math
from collections import Counter

import pytest

from backends.sim.calendar import SimEnv
from backends.sim.chance import Draws, Stream, sampler
from backends.sim.engine import NS_PER_TOKEN
from backends.sim.link import PINNED_COPY_PER_GPU, Link, transfer
from backends.sim.memory import Kind, Memory
from core import events
from core.actions import Emptying
from core.config import Durations
from core.errors import OperationFailed, OutOfMemory, SimulationError
from core.model import Cluster, Role, WorkerGroup
from core.units import gib
from tests.worlds import NO_LAG, SECOND, SimWorld, constant, in_sim, make_job, make_scenario, pass_time

# --- time --------------------------------------------------------------------------------------------------


def test_every_phase_and_operation_takes_its_declared_time() -> None:
    async def test(world: SimWorld) -> None:
        marks = []

        async def timed(work) -> None:
            before = world.now
            assert await work is None
            marks.append(world.now - before)

        critic = WorkerGroup(role=Role.CRITIC, gpus=(0, 1))
        assert critic in world.spec.groups
        await timed(world.phase("init"))
        await timed(world.phase("publish", version=0))
        await timed(world.phase("offload"))
        for phase in ("onload", "train", "log_probs", "values", "offload"):
            await timed(world.phase(phase))
        await timed(world.phase("onload", Role.CRITIC))
        await timed(world.phase("train", Role.CRITIC))
        await timed(world.phase("offload", Role.CRITIC))
        for operation in (world.wake, world.sync, world.open, world.sleep, world.kill):
            await timed(operation())
        await timed(world.wake(cold=True))
        assert marks == [40, 2, 2, 2, 20, 5, 5, 2, 2, 7, 2, 1, 3, 0, 1, 0, 30]

    critic = WorkerGroup(role=Role.CRITIC, gpus=(0, 1))
    in_sim(make_scenario(make_job(more_groups=(critic,))), test)


def test_requests_up_to_the_slots_run_at_full_speed_and_the_rest_queue() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        start = world.now
        ended = []

        async def one(i: int) -> None:
            await world.generate(i)
            ended.append(world.now - start)

        tasks = [asyncio.get_running_loop().create_task(one(i)) for i in range(10)]
        await asyncio.wait(tasks)
        assert ended == [10] * 4 + [20] * 4 + [30] * 2

    in_sim(make_scenario(make_job(engine_slots=4)), test)


def test_a_trajectory_is_as_long_at_every_attempt_and_on_every_engine() -> None:
    spread = Durations(parts=((1.0, "lognormal", 10 * SECOND, 600_000),))

    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve(0)
        await world.serve(1)
        first = [await world.generate(i, rank=0) for i in range(5)]
        again = [await world.generate(i, rank=1, attempt=1) for i in range(5)]
        other = [await world.generate(i, rank=1, batch=1) for i in range(5)]
        assert first == again
        assert first != other
        assert len({generation.segments for generation in first}) == 5

    in_sim(make_scenario(make_job(trajectory=spread)), test)


def test_tokens_are_the_decoding_time() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        before = world.now_ns
        generation = await world.generate()
        assert generation.segments == ((0, (world.now_ns - before) // NS_PER_TOKEN),)
        running = world.start(1)
        await pass_time(4)
        await world.sleep()
        assert (await running).segments == ((0, 4 * SECOND // NS_PER_TOKEN),)
        await world.serve()
        before = world.now
        await world.generate(1, attempt=1, prefix=(await running).segments)
        assert world.now - before == 6

    in_sim(make_scenario(), test)


def test_an_update_in_flight_pauses_decoding_for_its_length() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        await world.train(1)
        before = world.now
        running = world.start()
        await pass_time(4)
        await world.sync(version=1, how=Emptying.KEEP)
        assert (await running).segments == ((0, 200), (1, 300))
        assert world.now - before == 13

    in_sim(make_scenario(), test)


def test_a_trajectory_costs_one_calendar_entry_and_leaves_no_garbage() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        env = world.backend.world.env
        await world.generate()
        gc.collect()
        before = next(env._eid)
        for i in range(100):
            await world.generate(i)
        assert (next(env._eid) - before) // 2 - 1 == 100
        assert gc.collect() == 0

    in_sim(make_scenario(), test)


def test_operations_and_phases_leave_no_garbage() -> None:
    """The collector is off during a run, so whatever they left in cycles would stay until its end."""

    async def test(world: SimWorld) -> None:
        await world.initialise()
        gc.collect()
        for version in range(1, 4):
            await world.train(version)
            await world.serve(version=version)
            await world.sleep()
            await world.memory((0,), gib(130))
            await world.kill()
            await world.wake(cold=True)
            await world.sleep()
        assert gc.collect() == 0

    in_sim(make_scenario(), test)


def test_a_drain_ends_with_its_last_request() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        before = world.now
        world.start()
        await pass_time(4)
        await world.sleep(how=Emptying.DRAIN, drain=100)
        assert world.now - before == 10 + 1

    in_sim(make_scenario(), test)


# --- memory ------------------------------------------------------------------------------------------------


def test_each_owner_holds_what_it_declared_and_no_more() -> None:
    async def test(world: SimWorld) -> None:
        await world.phase("init")
        assert world.held(0, "p1/actor_train") == {"residue": gib(1), "weights": gib(2), "optimizer": gib(37)}
        await world.phase("offload")
        await pass_time(1)
        assert world.held(0, "p1/actor_train") == {"residue": gib(1)}
        assert [world.free(gpu) for gpu in (0, 1)] == [gib(139), gib(140)]
        await world.phase("publish", version=0)
        await world.wake()
        held = world.held(0, "p1/0")
        assert sum(held.values()) == gib(60)
        assert held["residue"] == gib(1)
        assert held["weights"] == gib(2)
        assert min(held["kv_cache"], held["graphs"]) > 0

    in_sim(make_scenario(), test)


def test_tensor_parallel_ranks_share_the_weights() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.wake()
        assert [world.held(gpu, "p1/0")["weights"] for gpu in (0, 1)] == [gib(1), gib(1)]

    in_sim(make_scenario(make_job(tp=2)), test)


def test_initialisation_holds_its_peak_on_every_gpu_of_the_pipeline() -> None:
    async def test(world: SimWorld) -> None:
        phase = asyncio.get_running_loop().create_task(world.phase("init"))
        await pass_time(39)
        assert [world.free(gpu) for gpu in (0, 1)] == [gib(41), gib(41)]
        await phase

    in_sim(make_scenario(), test)


def test_two_initialisations_that_do_not_fit_together_run_out_of_memory() -> None:
    async def test(world: SimWorld) -> None:
        peer = world.peer("p2")
        first = asyncio.get_running_loop().create_task(world.phase("init"))
        await pass_time(1)
        with pytest.raises(OperationFailed, match=r"p2/init asked for 100 GiB on GPU 0.*41 GiB of 141 GiB free"):
            await peer.phase("init")
        assert [event.pipeline for event in world.events(events.TrainerFailed)] == ["p2"]
        await first
        await world.phase("offload")
        await world.memory((0, 1), gib(139))
        await peer.phase("init")  # alone, it fits

    in_sim(make_scenario(make_job("p1"), make_job("p2", train=(1,))), test)


def test_a_wake_that_does_not_fit_kills_the_engine_and_says_the_numbers() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        peer = world.peer("p2")
        await peer.initialise()
        await world.wake()
        why = await peer.wake()
        assert why is not None
        assert "p2/0 asked for 80 GiB on GPU 0, which has 79 GiB" in why
        assert "p1/0 60 GiB" in why
        assert [(event.pipeline, event.dp_rank, event.reason) for event in world.events(events.EngineDied)] == [
            ("p2", 0, why)
        ]
        assert await peer.wake() is not None  # it is dead
        await pass_time(1)
        assert world.free(0) == gib(80)  # without the residue of the dead
        await world.sleep()
        await world.memory((0,), gib(81))
        assert await peer.wake(cold=True) is None

    in_sim(make_scenario(make_job("p1"), make_job("p2", train=(1,), engine=gib(81))), test)


def test_released_memory_comes_back_after_its_lag() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await pass_time(10)
        await world.serve()
        await world.sleep()
        assert world.held(0, "p1/0") == {"residue": gib(1), "releasing": gib(59)}
        before = world.now
        await world.memory((0,), gib(139))
        assert world.now - before == 5
        assert world.held(0, "p1/0") == {"residue": gib(1)}

    in_sim(make_scenario(), test, release_lag=constant(5))


def test_the_transfer_buffer_lives_in_the_margin() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.wake()
        syncing = asyncio.get_running_loop().create_task(world.sync())
        await pass_time(1)
        assert world.held(0, "p1/0")["transfer_buffer"] == gib(0.25)
        await syncing
        assert "transfer_buffer" not in world.held(0, "p1/0")

    in_sim(make_scenario(memory_margin=gib(0.25)), test)


def test_memory_is_reported_when_it_changes_and_adds_up() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        await world.sleep()
        reports = [event for event in world.events(events.MemoryUsed) if event.gpu == 0]
        assert [sum(event.by.values()) for event in reports] == [event.used for event in reports]
        assert all(event.used <= event.capacity for event in reports)
        last = reports[-1]
        assert (last.used, last.by) == (gib(2), {"p1/actor_train": gib(1), "p1/0": gib(1)})

    in_sim(make_scenario(), test, release_lag=NO_LAG)


def test_the_same_memory_is_never_given_twice() -> None:
    memory = Memory(SimEnv(), Cluster(nodes=1, gpus_per_node=2, gpu_memory=100, host_memory=100), None)
    memory.take("a", memory.gpus, ((Kind.WEIGHTS, 60),))
    with pytest.raises(OutOfMemory):
        memory.take("b", memory.gpus, ((Kind.WEIGHTS, 41),))
    memory.take("b", memory.gpus, ((Kind.WEIGHTS, 40),))
    memory.release("a", memory.gpus, (Kind.WEIGHTS,), 10, leak=5)
    memory.vacate("a", memory.gpus, 3)
    assert [gpu.free for gpu in memory.gpus] == [0, 0]
    memory._env.run()
    assert [gpu.free for gpu in memory.gpus] == [60, 60]
    assert memory._env.now == 3


def test_a_watch_sees_all_its_devices_free_at_one_instant() -> None:
    env = SimEnv()
    memory = Memory(env, Cluster(nodes=1, gpus_per_node=2, gpu_memory=100, host_memory=100), None)
    first, second = memory.on((0,)), memory.on((1,))
    memory.take("a", first, ((Kind.WEIGHTS, 60),))
    memory.take("b", second, ((Kind.WEIGHTS, 60),))
    watch = memory.watch(memory.gpus, (50, 50))
    memory.drop("a", first, Kind.WEIGHTS)
    memory.take("c", first, ((Kind.WEIGHTS, 60),))
    memory.drop("b", second, Kind.WEIGHTS)
    assert not watch.seen.triggered
    memory.drop("c", first, Kind.WEIGHTS)
    assert watch.seen.triggered
    assert not any(gpu.watches for gpu in memory.gpus)


# --- weights -----------------------------------------------------------------------------------------------


def test_the_cache_keeps_two_versions_at_most_and_one_more_while_it_is_read() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        cache, host = world.backend.crew("p1").cache, world.backend.world.memory.hosts[0]
        await world.phase("publish", version=1)
        assert cache.versions == (0, 1)
        await world.wake()
        slow = asyncio.get_running_loop().create_task(world.sync(version=0))
        await pass_time(0)
        await world.phase("publish", version=2)
        assert cache.versions == (0, 1, 2)
        assert host.used == 3 * gib(2)
        assert await slow is None
        await world.phase("publish", version=3)
        assert cache.versions == (2, 3)
        assert "latest: 3" in (await world.sync(version=1) or "")

    in_sim(make_scenario(make_job(sync=20 * SECOND)), test)


def test_an_engine_synced_during_a_publish_gets_the_version_it_asked_for() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.wake()
        publish = asyncio.get_running_loop().create_task(world.phase("publish", version=1))
        await pass_time(1)
        assert await world.sync(version=1) is not None  # not complete yet
        assert await world.sync(version=0) is None
        await publish
        assert await world.open(version=0) is None
        assert [version for version, _ in (await world.generate()).segments] == [0]

    in_sim(make_scenario(), test)


def test_host_memory_is_counted_and_running_out_of_it_kills_the_trainer() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        with pytest.raises(OperationFailed, match="host memory of node 0"):
            await world.phase("publish", version=1)
        assert len(world.events(events.TrainerFailed)) == 1
        assert await world.wake() is None
        assert await world.sync() is None  # the weights published before are still there

    in_sim(make_scenario(host_memory=gib(3)), test)


def test_transfers_that_fit_the_link_together_do_not_slow_each_other() -> None:
    assert _transfer_times(bandwidth=200, sizes=[300, 300]) == [3, 3]


def test_transfers_that_do_not_fit_the_link_queue_in_order() -> None:
    assert _transfer_times(bandwidth=250, sizes=[300, 300, 450]) == [3, 3, 6]


def test_a_link_slower_than_the_declared_cost_decides() -> None:
    assert _transfer_times(bandwidth=50, sizes=[300]) == [6]


def _transfer_times(bandwidth: int, sizes: list[int]) -> list[float]:
    """When transfers ended that take 3 s alone and start together."""
    env = SimEnv()
    link = Link(env, bandwidth)
    ends: list[float] = []

    def work(nanos: int):
        yield env.timeout(nanos)

    def one(size: int):
        yield from transfer((link,), size, 3 * SECOND, work)
        ends.append(env.now / SECOND)

    for size in sizes:
        env.process(one(size))
    env.run()
    return ends


def test_a_killed_transfer_gives_its_bandwidth_back() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        loop = asyncio.get_running_loop()
        await world.wake(0)
        await world.wake(1)
        first, second = (loop.create_task(world.sync(rank)) for rank in (0, 1))
        await pass_time(1)
        assert not second.done()
        await world.kill(0)
        assert "died" in (await first or "")
        before = world.now
        assert await second is None
        assert world.now - before == 3

    in_sim(make_scenario(), test, link_bytes_per_s=gib(1))


def test_the_default_link_carries_every_gpu_of_its_node_at_once() -> None:
    async def test(world: SimWorld) -> None:
        assert world.backend.world.links[0].bytes_per_s == 2 * PINNED_COPY_PER_GPU

    in_sim(make_scenario(), test)


# --- telemetry ---------------------------------------------------------------------------------------------


def test_busy_and_idle_are_reported_at_the_transitions_only() -> None:
    async def test(world: SimWorld) -> None:
        await world.initialise()
        await world.serve()
        await asyncio.wait([world.start(i) for i in range(10)])
        await world.generate(11)
        kinds = [type(event).__name__ for event in world.events(events.EngineBusy, events.EngineIdle)]
        assert kinds == ["EngineBusy", "EngineIdle"] * 2

    in_sim(make_scenario(), test)


# --- chance ------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_its_key_and_on_nothing_else() -> None:
    stream = Stream(7, "trajectory", "p1")
    kept = stream.pair(3, 4)
    for i in range(50):
        stream.pair(i, i)
    assert Stream(7, "trajectory", "p1").pair(3, 4) == kept
    others = [
        Stream(8, "trajectory", "p1").pair(3, 4), Stream(7, "release", "p1").pair(3, 4),
        Stream(7, "trajectory", "p2").pair(3, 4), stream.pair(4, 3), stream.pair(34), stream.pair(3, 4, 0),
    ]  # fmt: skip
    assert len({kept, *others}) == 7


def test_draws_are_the_same_on_every_machine() -> None:
    draws = Draws(Durations(parts=((1.0, "lognormal", 12 * SECOND, 600_000),)), Stream(0, "trajectory", "p1"))
    assert [draws.of(0, i) for i in range(3)] == GOLDEN


GOLDEN = [6_983_823_000, 7_237_722_000, 18_433_816_000]


def test_uniforms_are_uniform() -> None:
    stream = Stream(1, "test")
    values = [value for i in range(4000) for value in stream.pair(i)]
    assert 0 < min(values) < max(values) < 1
    counts = Counter(int(value * 10) for value in values)
    assert all(700 < count < 900 for count in counts.values())


@pytest.mark.parametrize(
    ("durations", "median", "low", "high"),
    [
        (Durations(parts=((1.0, "constant", 5_000, 0),)), 5_000, 5_000, 5_000),
        (Durations(parts=((1.0, "uniform", 1_000_000, 3_000_000),)), 2_000_000, 1_000_000, 3_000_000),
        (Durations(parts=((1.0, "lognormal", 10**9, 500_000),)), 10**9, 1, 10**11),
        (Durations(samples=(1, 2, 3)), 2, 1, 3),
    ],
)
def test_distributions_have_the_declared_middle_and_ends(
    durations: Durations, median: int, low: int, high: int
) -> None:
    draws = Draws(durations, Stream(2, "test"))
    values = sorted(draws.of(i) for i in range(2001))
    assert low <= values[0]
    assert values[-1] <= high
    assert math.isclose(values[1000], median, rel_tol=0.05)


def test_a_mixture_is_drawn_by_weight() -> None:
    mixture = Durations(parts=((3.0, "constant", 1, 0), (1.0, "constant", 2, 0)))
    draws = Draws(mixture, Stream(3, "test"))
    share = sum(draws.of(i) == 1 for i in range(2000)) / 2000
    assert abs(share - 0.75) < 0.03


def test_every_sample_of_a_csv_can_be_drawn() -> None:
    sample = sampler(Durations(samples=(5, 6, 7)))
    assert [sample(u, 0.5) for u in (1e-12, 0.5, 1 - 2**-53)] == [5, 6, 7]


# --- where it runs -----------------------------------------------------------------------------------------


def test_the_simulator_refuses_a_real_event_loop() -> None:
    world = SimWorld(make_scenario())
    with pytest.raises(SimulationError, match="run_sim"):
        asyncio.run(world.backend.open(world.emit))


def test_the_same_scenario_happens_the_same_way_twice() -> None:
    async def test(world: SimWorld) -> list:
        await world.initialise()
        await world.serve(0)
        await world.serve(1)
        tasks = [world.start(i, rank=i % 2) for i in range(20)]
        await pass_time(7)
        await world.sleep(0)
        await asyncio.wait(tasks)
        await world.memory((0,), gib(130))
        return world.seen

    scenario = make_scenario(make_job(trajectory=Durations(parts=((1.0, "lognormal", 10 * SECOND, 600_000),))), seed=5)
    assert in_sim(scenario, test) == in_sim(scenario, test)
