"""Every kind of fault does what it says, at its time, to its target, and to nobody else."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from backends.sim.backend import SimBackend
from backends.sim.faults import STRIKES
from core import events
from core.actions import Emptying
from core.config import Durations, Fault
from core.errors import ConfigError, OperationFailed
from core.units import gib
from tests.worlds import NO_LAG, SECOND, SimWorld, in_sim, make_job, make_scenario, pass_time

# The worlds of this file are initialised at 44 s; what a fault is to hit is set up until then.
READY = 44
STRUCK = 100


def fault(kind: str, at: float = STRUCK, **fields: Any) -> Fault:
    duration = int(fields.pop("duration", 0) * SECOND)
    return Fault(at=int(at * SECOND), kind=kind, duration=duration, **({"pipeline": "p1"} | fields))


def in_fault(test: Any, *faults: Fault, jobs: tuple[Any, ...] = (), **options: Any) -> Any:
    async def initialised(world: SimWorld) -> Any:
        await world.initialise()
        assert world.now == READY
        return await test(world)

    return in_sim(make_scenario(*jobs, faults=faults), initialised, **options)


async def until(world: SimWorld, second: float) -> None:
    await pass_time(second - world.now)


def task(coroutine: Any) -> Any:
    return asyncio.get_running_loop().create_task(coroutine)


def stuck(work: "asyncio.Task[Any]") -> bool:
    return not work.done()


# --- engines -----------------------------------------------------------------------------------------------


def test_kill_engine_ends_the_process_its_requests_and_its_operation_now() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve(0)
        await world.serve(1)
        await until(world, 95)
        mine, other = world.start(rank=0), world.start(rank=1)
        await until(world, 98)
        sync = task(world.sleep(0, Emptying.DRAIN, 100))
        assert (await mine).status == "failed"
        assert world.now == STRUCK
        assert "injected fault" in (await sync or "")
        assert (await other).status == "completed"
        assert [(event.pipeline, event.dp_rank) for event in world.events(events.EngineDied)] == [("p1", 0)]
        assert world.events(events.FaultInjected) == [events.FaultInjected(kind="kill_engine", target="p1/0")]
        await pass_time(1)
        assert world.held(0, "p1/0") == {}
        assert await world.wake(cold=True) is None

    in_fault(test, fault("kill_engine", dp_rank=0))


def test_kill_engine_during_a_wake_takes_its_memory_back() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, STRUCK - 0.5)
        assert "died" in (await world.wake() or "")
        await pass_time(1)
        assert world.free(0) == gib(140)

    in_fault(test, fault("kill_engine", dp_rank=0))


def test_hang_engine_answers_nothing_until_it_is_killed() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await until(world, 95)
        running = world.start()
        await until(world, 101)
        late, sleep = world.start(1), task(world.sleep(how=Emptying.DRAIN, drain=5))
        await pass_time(10_000)
        assert stuck(running)
        assert stuck(late)
        assert stuck(sleep)
        assert await world.kill() is None
        assert {(await running).status, (await late).status} == {"failed"}
        assert await sleep is not None
        assert await world.wake(cold=True) is None

    in_fault(test, fault("hang_engine", dp_rank=0))


def test_hang_engine_stops_an_operation_half_way() -> None:
    async def test(world: SimWorld) -> None:
        await world.wake()
        await until(world, STRUCK - 1)
        sync = task(world.sync())
        await pass_time(1_000)
        assert stuck(sync)
        await world.kill()
        assert "killed" in (await sync or "")
        assert world.backend.world.links[0]._free.level == world.backend.world.links[0].bytes_per_s

    in_fault(test, fault("hang_engine", dp_rank=0))


def test_a_hung_engine_is_nothing_to_wait_for() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await until(world, 95)
        running = world.start()
        await until(world, 101)
        assert world.backend.world.env.live == 0
        running.cancel()

    in_fault(test, fault("hang_engine", dp_rank=0))


def test_slow_engine_slows_what_runs_and_what_comes_for_its_duration() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await until(world, 96)
        ends = []
        for i in (0, 1):
            generation = task(world.generate(i))
            generation.add_done_callback(lambda _: ends.append(world.now))
            await until(world, STRUCK)
        await until(world, 200)
        # The first had 6 s left: 3 s of them in the slow 6 s, 3 s after. The second, begun slow: 3 s, then 7 s.
        assert ends == [109, 113]

    in_fault(test, fault("slow_engine", dp_rank=0, factor=2.0, duration=6))


def test_slow_engine_slows_operations_too() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 101)
        assert await world.wake() is None
        assert world.now == 104

    in_fault(test, fault("slow_engine", factor=3.0))


def test_false_release_acknowledges_and_keeps_the_memory_for_its_duration() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await until(world, 101)
        assert await world.sleep() is None
        assert world.now == 102
        await world.memory((0,), gib(139))
        assert world.now == 142
        await world.serve()
        await world.sleep()
        assert world.free(0) == gib(139)  # it lied once only

    in_fault(test, fault("false_release", dp_rank=0, duration=40), release_lag=NO_LAG)


def test_false_release_without_duration_holds_until_the_process_is_killed() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await until(world, 101)
        assert await world.sleep() is None
        waiting = task(world.memory((0,), gib(139)))
        await pass_time(50)
        assert stuck(waiting)
        await world.kill()
        assert isinstance(await waiting, events.ActionDone)

    in_fault(test, fault("false_release", dp_rank=0))


def test_false_release_of_a_whole_pipeline_hits_its_trainer_too() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 101)
        await world.phase("onload")
        await world.phase("offload")
        assert world.held(0, "p1/actor_train")["releasing"] == gib(39)

    in_fault(test, fault("false_release", duration=40), release_lag=NO_LAG)


def test_leak_residue_leaves_more_behind_at_each_sleep_until_a_wake_does_not_fit() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 101)
        residues = []
        for _ in range(4):
            assert await world.wake() is None
            assert await world.sleep() is None
            residues.append(world.held(0, "p1/0")["residue"])
        assert residues == [gib(22), gib(43), gib(64), gib(64)]
        assert await world.wake() is None
        assert world.free(0) == gib(141 - 1 - 64 - 59)

    in_fault(test, fault("leak_residue", dp_rank=0, bytes=gib(21), count=3), release_lag=NO_LAG)


def test_leaked_residue_ends_in_a_wake_that_does_not_fit() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 101)
        for _ in range(2):
            assert await world.wake() is None
            assert await world.sleep() is None
        assert "p1/0 asked for 59 GiB on GPU 0, which has 57 GiB" in (await world.wake() or "")
        assert len(world.events(events.EngineDied)) == 1

    in_fault(test, fault("leak_residue", dp_rank=0, bytes=gib(41), count=5), release_lag=NO_LAG)


def test_fail_sync_fails_the_next_syncs_and_the_engine_serves_nothing() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await world.train(1)
        await until(world, 101)
        assert "failed" in (await world.sync(version=1) or "")
        assert world.now == 104
        assert await world.open(version=0) is not None
        assert (await world.generate()).status == "aborted"
        assert await world.sync(version=1) is not None
        assert await world.sync(version=1) is None

    in_fault(test, fault("fail_sync", dp_rank=0, count=2))


def test_fail_sync_of_an_update_in_flight_aborts_what_ran() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await world.train(1)
        await until(world, 101)
        running = world.start()
        await pass_time(4)
        assert "failed" in (await world.sync(version=1, how=Emptying.KEEP) or "")
        assert (await running).segments == ((0, 200),)
        assert (await world.generate()).status == "aborted"
        assert await world.sync(version=1) is None

    in_fault(test, fault("fail_sync"))


# --- trainers ----------------------------------------------------------------------------------------------


def test_kill_trainer_ends_its_phase_and_frees_its_memory() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 90)
        await world.phase("onload")
        with pytest.raises(OperationFailed, match="injected fault"):
            await world.phase("train")
        assert world.now == STRUCK
        assert world.events(events.TrainerFailed) == [events.TrainerFailed(pipeline="p1", reason="injected fault")]
        await pass_time(1)
        assert world.held(0, "p1/actor_train") == {}
        with pytest.raises(OperationFailed, match="no process"):
            await world.phase("offload")

    in_fault(test, fault("kill_trainer"))


def test_kill_trainer_during_initialisation_leaves_nothing_behind() -> None:
    async def test(world: SimWorld) -> None:
        with pytest.raises(OperationFailed):
            await world.phase("init")
        await pass_time(1)
        assert world.used() == 0
        await world.initialise()  # and it can be tried again

    in_sim(make_scenario(faults=(fault("kill_trainer", at=10),)), test)


def test_kill_trainer_during_a_publish_drops_the_half_written_version() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 99)
        with pytest.raises(OperationFailed):
            await world.phase("publish", version=1)
        assert world.backend.world.memory.hosts[0].used == gib(2)
        assert world.backend.crew("p1").cache.versions == (0,)

    in_fault(test, fault("kill_trainer"))


def test_hang_trainer_never_returns_until_the_pipeline_is_stopped() -> None:
    async def test(world: SimWorld) -> None:
        await until(world, 90)
        await world.phase("onload")
        train = task(world.phase("train"))
        await pass_time(10_000)
        assert stuck(train)
        await world.stop()
        with pytest.raises(OperationFailed):
            await train

    in_fault(test, fault("hang_trainer"))


# --- messages and clients ----------------------------------------------------------------------------------


class Inbox:
    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.got: list[tuple[float, str, int]] = []

    def send(self, seq: int, pipeline: str = "p1") -> None:
        self.world.backend.carry(events.PipelineAdmitted(pipeline=pipeline, seq=seq), self._deliver)

    def _deliver(self, message: events.Message) -> None:
        self.got.append((self.world.now, message.pipeline, message.seq))


def run_messages(*faults: Fault) -> list[tuple[float, str, int]]:
    """What arrives when, of messages 1 to 4 sent by p1 and p2 at 101 s."""

    async def test(world: SimWorld) -> list[tuple[float, str, int]]:
        inbox = Inbox(world)
        await until(world, 101)
        for seq in (1, 2, 3, 4):
            inbox.send(seq)
            inbox.send(seq, "p2")
        await pass_time(100)
        theirs = [(101, "p2", seq) for seq in (1, 2, 3, 4)]
        assert [entry for entry in inbox.got if entry[1] == "p2"] == theirs
        return [(at, seq) for at, pipeline, seq in inbox.got if pipeline == "p1"]

    return in_fault(test, *faults, jobs=(make_job("p1"), make_job("p2")))


def test_messages_are_lost() -> None:
    assert run_messages(fault("lose_message", count=2)) == [(101, 3), (101, 4)]


def test_messages_are_delayed_and_so_overtaken() -> None:
    assert run_messages(fault("delay_message", duration=5)) == [(101, 2), (101, 3), (101, 4), (106, 1)]


def test_messages_are_doubled() -> None:
    assert run_messages(fault("duplicate_message", duration=5)) == [(101, 1), (101, 2), (101, 3), (101, 4), (106, 1)]


def test_kill_client_silences_it_at_once_and_is_noticed_after_the_heartbeat_limit() -> None:
    async def test(world: SimWorld) -> None:
        killed: list[float] = []
        inbox = Inbox(world)
        world.backend.on_kill_client("p1", lambda: killed.append(world.now))
        await until(world, 101)
        assert killed == [STRUCK]
        inbox.send(1)
        assert inbox.got == []
        assert world.backend.world.env.live > 0  # something will still happen
        await pass_time(100)
        lost = [(at / SECOND, event.pipeline) for at, event in world.seen if isinstance(event, events.ClientLost)]
        assert lost == [(STRUCK + 30, "p1")]

    in_fault(test, fault("kill_client"))


def test_restart_control_plane_loses_everybody_s_messages_until_it_is_back() -> None:
    async def test(world: SimWorld) -> None:
        calls: list[tuple[str, float]] = []
        world.backend.on_restart(lambda: calls.append(("down", world.now)), lambda: calls.append(("up", world.now)))
        inbox = Inbox(world)
        for second in (99, 101, 114, 116):
            await until(world, second)
            inbox.send(second)
            inbox.send(second, "p2")
        assert [seq for _, _, seq in inbox.got] == [99, 99, 116, 116]
        assert calls == [("down", STRUCK), ("up", 115)]

    outages = [fault("restart_control_plane", at=at, pipeline="", duration=10) for at in (STRUCK, 105)]
    in_fault(test, *outages)


# --- nodes -------------------------------------------------------------------------------------------------


def in_nodes(test: Any, *jobs: Any, lost: int) -> None:
    """Two nodes of two GPUs, of which one is lost."""

    async def initialised(world: SimWorld) -> None:
        await world.initialise()
        await test(world)

    in_sim(make_scenario(*jobs, nodes=2, faults=(fault("remove_node", pipeline="", node=lost),)), initialised)


def test_remove_node_takes_everything_on_it_and_nothing_else() -> None:
    async def test(world: SimWorld) -> None:
        peer = world.peer("p2")
        await peer.initialise()
        await world.serve(0)
        await peer.serve(0)
        await until(world, 98)
        mine, theirs = world.start(), task(peer.generate())
        waiting = task(world.memory((0,), gib(141)))
        assert (await mine).status == "failed"
        assert (await theirs).status == "completed"
        gone = await waiting
        assert isinstance(gone, events.ActionFailed)
        assert "GPU 0 is gone" in gone.reason
        assert isinstance(await world.memory((1,), 0), events.ActionFailed)
        assert "gone" in (await world.wake(cold=True) or "")
        left = world.events(events.NodeLeft, events.EngineDied, events.TrainerFailed)
        assert left[0] == events.NodeLeft(node=0)
        assert {event.pipeline for event in left[1:]} == {"p1"}
        assert len(left) == 4

    in_nodes(test, make_job("p1", train=(0,), infer=(0, 1)), make_job("p2", train=(2,), infer=(2, 3)), lost=0)


def test_remove_node_kills_an_engine_that_spans_it_and_frees_its_other_gpus() -> None:
    async def test(world: SimWorld) -> None:
        await world.serve()
        await until(world, 102)
        assert [event.dp_rank for event in world.events(events.EngineDied)] == [0]
        assert world.events(events.TrainerFailed) == []
        assert [world.free(gpu) for gpu in (0, 1, 2, 3)] == [gib(140), gib(141), 0, 0]

    in_nodes(test, make_job("p1", train=(0,), infer=(0, 1, 2, 3), tp=4), lost=1)


# --- rules -------------------------------------------------------------------------------------------------


def test_a_fault_to_come_is_no_reason_to_believe_in_progress() -> None:
    async def test(world: SimWorld) -> None:
        await pass_time(1)
        assert world.backend.world.env.live == 0

    in_fault(test, *[fault(kind, at=10_000, node=0) for kind in STRIKES])


def test_close_takes_the_faults_to_come_with_it() -> None:
    async def test(world: SimWorld) -> None:
        await world.backend.close()
        await pass_time(1_000)
        assert world.events(events.FaultInjected) == []

    in_fault(test, fault("kill_engine"), fault("kill_client"))


async def quietly(work: Any) -> None:
    with suppress(OperationFailed):
        await work


SPREAD = Durations(parts=((1.0, "lognormal", 10 * SECOND, 600_000),))


@pytest.mark.parametrize("kind", ["kill_engine", "slow_engine", "leak_residue", "kill_trainer", "false_release"])
def test_a_fault_of_one_pipeline_leaves_the_draws_of_the_other_alone(kind: str) -> None:
    async def test(world: SimWorld) -> list[Any]:
        await world.initialise()
        peer = world.peer("p2")
        await peer.initialise()
        await world.phase("onload")
        await world.serve(0)
        await peer.serve(1)
        assert world.now == 98
        mine = [world.start(i, rank=0) for i in range(6)]
        theirs = [peer.start(i, rank=1) for i in range(6)]
        train = task(quietly(world.phase("train")))
        await pass_time(8)
        sleep = task(world.sleep(0))
        await peer.sleep(1)
        await peer.memory((1,), gib(130))
        ended = world.now
        await asyncio.wait([*mine, sleep, train])
        return [ended, *[(await generation).segments for generation in theirs]]

    jobs = (make_job("p1", trajectory=SPREAD), make_job("p2", train=(1,), trajectory=SPREAD))
    struck = fault(kind, at=100, bytes=gib(1), factor=3.0)
    assert in_sim(make_scenario(*jobs), test) == in_sim(make_scenario(*jobs, faults=(struck,)), test)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (fault("kill_engin"), "no fault is called 'kill_engin'"),
        (fault("kill_engine", pipeline="p9"), "no pipeline 'p9'"),
        (fault("hang_engine", dp_rank=2), "p1 has no engine 2"),
        (fault("remove_node", node=1), "no node 1"),
        (fault("slow_engine", factor=0.0), "factor 0.0"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_before_time_0(bad: Fault, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SimBackend(make_scenario(faults=(bad,)))
