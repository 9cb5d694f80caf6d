"""The shell and the port, on a real event loop with a clock that is turned by hand."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from core_world import LIMITS, MEMORY, S, spec

from core import actions, events
from core.backend import Timer
from core.config import Trigger
from core.errors import Conflict, OperationFailed, RequestError, StaleLease, TopologyError
from core.ledger import Hold
from core.model import Cluster, DemandPolicy, MemoryNeeds, Priority, Role
from core.port import Lease, Port
from core.service import Service

pytestmark = pytest.mark.asyncio

CLUSTER = Cluster(nodes=1, gpus_per_node=2, gpu_memory=100, host_memory=1000)


class Alarm:
    def __init__(self, at: int, callback: Callable[[], None]) -> None:
        self.at, self.callback, self.dead = at, callback, False

    def cancel(self) -> None:
        self.dead = True


class Clock:
    """Time stands still until somebody turns it."""

    def __init__(self) -> None:
        self.now = 0
        self.alarms: list[Alarm] = []

    def now_ns(self) -> int:
        return self.now

    def call_at_ns(self, when_ns: int, callback: Callable[[], None], *, daemon: bool = False) -> Timer:
        self.alarms.append(Alarm(when_ns, callback))
        return self.alarms[-1]

    async def turn(self, seconds: float) -> None:
        until = self.now + int(seconds * S)
        while True:
            await settle()
            alive = [alarm for alarm in self.alarms if not alarm.dead and alarm.at <= until]
            if not alive:
                break
            alarm = min(alive, key=lambda a: a.at)
            self.alarms.remove(alarm)
            self.now = max(self.now, alarm.at)
            alarm.callback()
        self.now = until


class World:
    """A backend that does everything at once, unless it is told to hang, fail or lose messages."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.performed: list[Any] = []
        self.hang: tuple[type, ...] = ()
        self.fail: tuple[type, ...] = ()
        self.lose = 0
        self.double = False
        self.held_back: list[Callable[[], None]] = []
        self.delay = False
        self.sent: list[events.Message] = []

    def carry(self, message: events.Message, deliver: Callable[[events.Message], None]) -> None:
        self.sent.append(message)
        if self.lose:
            self.lose -= 1
        elif self.delay:
            self.held_back.append(lambda: deliver(message))
        else:
            for _ in range(1 + self.double):
                deliver(message)

    async def perform(self, action: Any) -> events.ActionDone | events.ActionFailed:
        self.performed.append(action)
        if isinstance(action, self.hang):
            await anyio.sleep_forever()
        if isinstance(action, self.fail):
            raise OperationFailed("the device said no")
        free = dict.fromkeys(action.gpus, 96) if isinstance(action, actions.AwaitMemory) else {}
        return events.ActionDone(action=action.action, free=free)

    def names(self) -> list[str]:
        return [type(action).__name__ for action in self.performed]


async def settle() -> None:
    for _ in range(12):
        await anyio.sleep(0)


class Gates:
    """What a pipeline hears, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def open_gate(self, dp_rank: int, version: int, epoch: int) -> None:
        self.heard.append(("open", dp_rank, version))

    def close_gate(self, dp_rank: int) -> None:
        self.heard.append(("close", dp_rank))

    def failed(self, reason: str) -> None:
        self.heard.append(("failed", reason))


class Bench:
    """A service on such a world, and what it logged."""

    def __init__(self, journal: bool = False) -> None:
        self.world = World()
        self.log: list[Any] = []
        self.service = Service(
            self.world,  # type: ignore[arg-type]
            CLUSTER,
            DemandPolicy.BATCH,
            [lambda i, t, cause, item: self.log.append((i, t, cause, item))],
            journal=journal,
            check=True,
        )

    async def ready(self, name: str = "a", train: tuple[int, ...] = (0,), **fields: Any) -> tuple[Port, Gates]:
        port = self.service.connect(name)
        port.gates = gates = Gates()
        await port.register(spec(name, train, (0, 1), **fields))
        await port.admit()
        lease = await port.request(Role.ACTOR_TRAIN, Priority.INITIALIZATION)
        port.weights_published(0)
        port.release(lease)
        await settle()
        return port, gates

    def items(self, kind: type) -> list[Any]:
        return [item for _, _, _, item in self.log if isinstance(item, kind)]

    def hold(self, gpu: int) -> Hold:
        return self.service.state.ledger.gpus[gpu].hold


async def test_a_batch_opens_the_gates_and_a_request_closes_one_first() -> None:
    bench = Bench()
    async with bench.service:
        port, gates = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        assert gates.heard[-2:] == [("open", 0, 0), ("open", 1, 0)]
        before = len(gates.heard)
        lease = await port.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        assert lease.gpus == (0,)
        assert gates.heard[before:] == [("close", 0)]


async def test_every_entry_names_the_entry_that_led_to_it() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
    numbers = {i: item for i, _, _, item in bench.log}
    assert list(numbers) == list(range(len(bench.log)))
    for i, _, cause, item in bench.log:
        assert cause < i
        if isinstance(item, events.ActionDone):
            assert numbers[cause].action == item.action
        if isinstance(item, actions.Action | actions.Note):
            assert isinstance(numbers[cause], events.Event)


async def test_an_operation_without_an_answer_is_unknown_at_its_limit_and_its_late_answer_is_nothing() -> None:
    bench = Bench()
    bench.world.hang = (actions.SleepEngine,)
    async with bench.service:
        port, _ = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        port.batch_closed(0, "taken")
        waiting = anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def train() -> None:
                await port.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
                waiting.set()

            tasks.start_soon(train)
            await bench.world.clock.turn(LIMITS.sleep / S - 1)
            assert not bench.items(events.ActionUnknown)
            await bench.world.clock.turn(2)
            assert bench.items(events.ActionUnknown)
            await settle()
            assert "KillEngine" in bench.world.names()
            assert waiting.is_set()  # quarantined, killed, seen free, granted


async def test_a_failed_operation_is_an_outcome_and_not_an_exception() -> None:
    bench = Bench()
    bench.world.fail = (actions.WakeEngine,)
    async with bench.service:
        port, gates = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        reasons = [event.reason for event in bench.items(events.ActionFailed)]
        assert "the device said no" in reasons
        assert [word for word, *_ in gates.heard].count("failed") == 1  # after its strikes on every engine


async def test_a_cancelled_wait_takes_the_request_back_and_a_retry_is_accepted() -> None:
    bench = Bench()
    async with bench.service:
        a, _ = await bench.ready("a", (0,))
        b, _ = await bench.ready("b", (0,))
        lease = await a.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        with anyio.move_on_after(0.01) as scope:
            await b.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        assert scope.cancelled_caught
        assert not bench.service.state.ledger.waiting
        a.release(lease)
        await settle()
        assert bench.hold(0) is Hold.FREE  # granted to nobody
        assert (await b.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)).gpus == (0,)


async def test_a_grant_nobody_waits_for_any_more_is_taken_back() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        bench.world.delay = True  # the cancellation is still under way when the grant is decided
        with anyio.move_on_after(0.01):
            await port.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        request, cancel = bench.world.held_back
        request()
        await settle()
        assert bench.hold(0) is Hold.FREE
        cancel()
        await settle()
        assert not bench.service.state.ledger.leases


async def test_mistakes_go_to_who_made_them() -> None:
    bench = Bench()
    async with bench.service:
        a, _ = await bench.ready("a", (0,))
        b, _ = await bench.ready("b", (1,))
        with pytest.raises(RequestError, match="actor_infer may ask for GENERATION"):
            await a.request(Role.ACTOR_INFER, Priority.ACTOR_TRAINING)
        with pytest.raises(RequestError, match="no worker group critic"):
            await a.request(Role.CRITIC, Priority.CRITIC_TRAINING)
        with pytest.raises(Conflict):
            await a.request(Role.ACTOR_TRAIN, Priority.INITIALIZATION)
        lease = await a.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        with pytest.raises(RequestError):
            await a.release_and_request(lease, Role.REWARD, Priority.ACTOR_TRAINING)
        assert bench.hold(0) is Hold.HELD  # nothing was released
        with pytest.raises(StaleLease):
            await a.release_and_request(Lease(999, (0,)), Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        assert (await b.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)).gpus == (1,)


async def test_what_cannot_fit_is_refused_at_admission_with_the_sum() -> None:
    bench = Bench()
    async with bench.service:
        await bench.ready("a", (0,))
        port = bench.service.connect("b")
        big = MemoryNeeds(train=99, engine=50, residue=2, init_peak=99, host_cache=1)
        await port.register(spec("b", (0,), (0, 1), memory=big))
        with pytest.raises(TopologyError, match="GPU 0"):
            await port.admit()
        assert MEMORY.train < big.train


async def test_registering_again_is_nothing_and_otherwise_is_refused() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready("a", (0,))
        before = bench.service.state.ledger.books["a"]
        await port.register(spec("a", (0,), (0, 1)))
        assert bench.service.state.ledger.books["a"] is before
        with pytest.raises(Conflict, match="other worker groups"):
            await port.register(spec("a", (1,), (0, 1)))


async def test_a_grant_that_a_late_message_asked_for_again_counts_as_taken_until_the_release_has_arrived() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        lease = await port.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        again = actions.GrantLease(
            action=999, pipeline="a", request=1, role=Role.ACTOR_TRAIN, epoch=lease.epoch, gpus=lease.gpus
        )
        bench.world.lose = 1
        port.release(lease)
        assert port.command(again) is None
        await bench.world.clock.turn(5)
        assert bench.hold(0) is Hold.FREE
        assert port.command(again) == "its client does not wait for it any more"


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_lost_messages_only_delay(lost: int) -> None:
    bench = Bench()
    async with bench.service:
        port, gates = await bench.ready()
        bench.world.lose = lost
        port.batch_opened(0, 8)
        port.rollout_signal(0)
        await bench.world.clock.turn(10)
        assert ("open", 0, 0) in gates.heard
        assert bench.service.state.ledger.books["a"].open_demand == 8
        repeats = [m for m in bench.world.sent if isinstance(m, events.StateResent)]
        assert len(repeats) <= 3


async def test_a_lost_request_is_repeated_and_granted_once() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        bench.world.lose = 1
        leases: list[Lease] = []
        async with anyio.create_task_group() as tasks:

            async def train() -> None:
                leases.append(await port.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING))

            tasks.start_soon(train)
            await bench.world.clock.turn(5)
        assert len(leases) == 1
        assert len(bench.service.state.ledger.leases) == 1


async def test_doubled_messages_are_taken_once() -> None:
    bench = Bench()
    bench.world.double = True
    async with bench.service:
        port, _ = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        port.trajectory_completed(0, 1, 0, 0, 0, ())
        await settle()
        assert bench.service.state.ledger.books["a"].open_demand == 7
        assert not [note for note in bench.items(actions.Note) if note.kind == "rejected"]


async def test_reordered_messages_end_in_the_right_state() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        bench.world.delay = True
        port.batch_opened(0, 8)
        port.batch_closed(0, "released")
        port.batch_opened(1, 4)
        bench.world.delay = False
        for late in reversed(bench.world.held_back):
            late()
        await bench.world.clock.turn(5)
        assert list(bench.service.state.ledger.books["a"].batches) == [1]


async def test_a_planned_release_returns_only_when_the_engines_sleep_and_the_memory_is_back() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        port.batch_closed(0, "released")
        await port.release_rollout()
        assert bench.hold(0) is bench.hold(1) is Hold.FREE
        assert bench.world.names().count("SleepEngine") == 2


async def test_leaving_stops_the_workers_and_returns_everything() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        await port.leave("it broke")
        assert "StopPipeline" in bench.world.names()
        assert bench.hold(0) is bench.hold(1) is Hold.FREE
        port.batch_opened(1, 8)  # says nothing more
        assert not isinstance(bench.world.sent[-1], events.BatchOpened)


async def test_a_decision_noted_before_anybody_waited_for_it_is_still_heard() -> None:
    bench = Bench()
    async with bench.service:
        port, _ = await bench.ready()
        port.batch_opened(0, 8)
        with anyio.fail_after(1):
            await bench.service.happened(Trigger(pipeline="a", event="rollout_granted"))
            await bench.service.happened(Trigger(pipeline="a", event="init_accepted"))


async def test_a_restarted_control_plane_knows_everything_again() -> None:
    bench = Bench(journal=True)
    async with bench.service:
        port, gates = await bench.ready()
        port.batch_opened(0, 8)
        await settle()
        held = [bench.hold(gpu) for gpu in (0, 1)]
        bench.service.go_down()
        port.trajectory_completed(0, 1, 0, 0, 0, ())  # nobody listens
        bench.service.come_back()
        assert [bench.hold(gpu) for gpu in (0, 1)] == held
        assert bench.service.state.ledger.books["a"].open_demand == 8
        await bench.world.clock.turn(5)
        assert bench.service.state.ledger.books["a"].open_demand == 7
        lease = await port.request(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
        assert lease.gpus == (0,)
        assert ("close", 0) in gates.heard
