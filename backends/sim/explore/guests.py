"""Clients with strange habits: pipelines whose loop is a list of moves, most of them sensible, some of them not.

1. A guest harms nobody but itself, whatever it does: that is what it is there to show. So nothing is expected of how it
   ends, only that everybody else finishes and nothing of it stays behind.
2. It talks through a port like everybody else, so that messages of its are lost and repeated like theirs. Only nonsense
   goes to the service directly, under the name of somebody who was never there.
3. Whatever its moves are, it ends: it leaves, or its silence is noticed.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from backends.sim.explore.case import Case, Guest, Move
from backends.sim.explore.chance import Chance
from backends.sim.explore.worlds import Pace, draw_job
from core import events
from core.errors import ConfigError, TurnstileError
from core.model import BatchKind, BatchState, PipelineState, Priority, RequestState, Role
from core.pipeline import wait_until
from core.port import Lease, Port
from core.service import Service
from core.topology import check_world
from core.units import NS_PER_S

if TYPE_CHECKING:
    from backends.sim.explore.judge import World

PATIENCE = 60 * NS_PER_S
"""How long a guest waits for any one answer."""
STRANGER = "nobody"
GOODBYE_NS = 600 * NS_PER_S

SENSIBLE = (
    "register", "admit", "ask_init", "await", "init", "publish", "offload", "release", "open", "idle", "complete",
    "close", "ask_train", "await", "release", "release_rollout",
)  # fmt: skip
ODD = ("again", "other", "ask_init", "ask_train", "ask_bad", "cancel", "release", "release_bad", "open", "open_bad",
       "complete", "lie", "close", "signal", "repeat", "nonsense", "nonsense", "idle", "swap")  # fmt: skip


def draw(case: Case, seed: int) -> Case:
    """The case with one or two guests, if their memory fits beside everybody else's."""
    chance = Chance(seed, "guests")
    pace = Pace(chance)
    guests: list[Guest] = []
    for i in range(chance.between(1, 2)):
        job = draw_job(chance, case.scenario.cluster, f"g{i + 1}", pace, small=True, lean=True)
        guests.append(Guest(job=job, moves=tuple(_moves(chance, pace))))
        try:
            check_world(everybody(msgspec.structs.replace(case, guests=tuple(guests))))
        except ConfigError:
            guests.pop()
    return msgspec.structs.replace(case, guests=tuple(guests))


def everybody(case: Case) -> Any:
    """The scenario with the guests as pipelines: the workers that the simulator must have."""
    jobs = (*case.scenario.jobs, *(guest.job for guest in case.guests))
    return msgspec.structs.replace(case.scenario, jobs=jobs)


def _moves(chance: Chance, pace: Pace) -> list[Move]:
    """The sensible way, up to somewhere, with odd moves in between and a drawn end."""
    kinds = list(SENSIBLE[: chance.between(1, len(SENSIBLE))])
    for _ in range(chance.below(6)):
        kinds.insert(chance.below(len(kinds) + 1), chance.pick(ODD))
    if chance.often(0.3):
        kinds.pop(chance.below(len(kinds)))
    kinds.append(chance.pick(("leave", "leave", "vanish", "fail")))
    return [Move(kind=kind, wait=_pause(chance, pace), number=chance.below(12)) for kind in kinds]


def _pause(chance: Chance, pace: Pace) -> int:
    return 0 if chance.often(0.5) else pace.span(chance) * chance.between(0, 3)


# --- at work ----------------------------------------------------------------------------------------------


class Client:
    """Carries out a guest's moves."""

    def __init__(self, guest: Guest, service: Service, world: "World") -> None:
        self._guest = guest
        self._spec = guest.job.spec
        self._service = service
        self._world = world
        self._port: Port = service.connect(self._spec.id)
        self._leases: list[Lease] = []
        self._asking: list[anyio.CancelScope] = []
        self._batches: dict[int, int] = {}
        self._next_batch = 0
        self._tasks: anyio.abc.TaskGroup
        self._registered = self._gone = False

    async def run(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            for move in self._guest.moves:
                if self._gone:
                    break
                if move.wait:
                    await self._pause(move.wait)
                await self._within(PATIENCE, MOVES[move.kind], self, move)
            self._tasks.cancel_scope.cancel()
        if not self._gone:
            await self._within(GOODBYE_NS, Client.leave, self, Move(kind="leave"))

    async def _pause(self, nanos: int) -> None:
        clock = self._world.clock
        await wait_until(clock, clock.now_ns() + nanos)

    async def _within(self, nanos: int, do: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Do something, for at most so long. What it is told off for is its own affair."""
        with anyio.CancelScope() as scope:
            clock = self._world.clock
            timer = clock.call_at_ns(clock.now_ns() + nanos, scope.cancel)
            try:
                with suppress(TurnstileError):
                    await do(*args)
            finally:
                timer.cancel()

    # --- coming and going ---------------------------------------------------------------------------------

    async def register(self, move: Move) -> None:
        self._registered = True
        await self._port.register(self._spec)

    async def other(self, move: Move) -> None:
        """Registers once more, with other worker groups or from a new connection."""
        if move.number % 2:
            self._port.close()
            self._world.miss(self._spec.id, self._port.life)
            self._port = self._service.connect(self._spec.id)
        await self._port.register(msgspec.structs.replace(self._spec, staleness=self._spec.staleness + 1))

    async def admit(self, move: Move) -> None:
        await self._port.admit()

    async def leave(self, move: Move) -> None:
        self._gone = True
        try:
            await self._port.leave("tired of it" if move.kind == "fail" else None)
        except BaseException:  # out of patience too: then its silence will be noticed
            self._vanish()
            raise

    async def vanish(self, move: Move) -> None:
        self._vanish()

    def _vanish(self) -> None:
        self._gone = True
        self._port.close()
        self._world.vanish(self._spec.id)

    # --- leases -------------------------------------------------------------------------------------------

    async def ask_init(self, move: Move) -> None:
        self._ask(Role.ACTOR_TRAIN, Priority.INITIALIZATION)

    async def ask_train(self, move: Move) -> None:
        self._ask(Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)

    async def ask_bad(self, move: Move) -> None:
        roles, priorities = list(Role), list(Priority)
        self._ask(roles[move.number % len(roles)], priorities[move.number % len(priorities)])

    def _ask(self, role: Role, priority: Priority) -> None:
        scope = anyio.CancelScope()
        self._asking.append(scope)
        self._tasks.start_soon(self._wait_for_grant, scope, role, priority)

    async def _wait_for_grant(self, scope: anyio.CancelScope, role: Role, priority: Priority) -> None:
        with scope, suppress(TurnstileError):
            self._leases.append(await self._port.request(role, priority))

    async def wait_for_lease(self, move: Move) -> None:
        while not self._leases:
            await self._pause(NS_PER_S)

    async def cancel(self, move: Move) -> None:
        if self._asking:
            self._asking.pop(move.number % len(self._asking)).cancel()

    async def release(self, move: Move) -> None:
        if self._leases:
            self._port.release(self._leases.pop(move.number % len(self._leases)))

    async def release_bad(self, move: Move) -> None:
        self._port.release(Lease(move.number, ()))

    async def swap(self, move: Move) -> None:
        """Releases and asks in one step, then changes its mind."""
        if self._leases:
            lease = self._leases.pop()
            self._leases.append(
                await self._port.release_and_request(lease, Role.ACTOR_TRAIN, Priority.ACTOR_TRAINING)
            )

    # --- work ---------------------------------------------------------------------------------------------

    async def init(self, move: Move) -> None:
        await self._phase("init")

    async def publish(self, move: Move) -> None:
        await self._phase("publish", 0)
        self._port.weights_published(0)

    async def offload(self, move: Move) -> None:
        await self._phase("offload")

    async def _phase(self, phase: Any, version: int = -1) -> None:
        if self._leases:
            await self._world.phase(self._spec.id, Role.ACTOR_TRAIN, phase, self._leases[0].epoch, version)

    # --- rollouts -----------------------------------------------------------------------------------------

    async def open(self, move: Move) -> None:
        number, self._next_batch = self._next_batch, self._next_batch + 1
        self._port.batch_opened(number, 1 + move.number, BatchKind.EVAL if move.number % 3 == 2 else BatchKind.TRAIN)
        self._batches[number] = 0

    async def open_bad(self, move: Move) -> None:
        self._port.batch_opened(self._next_batch - move.number % 3, 1 - move.number, BatchKind.TRAIN)

    async def complete(self, move: Move) -> None:
        """Says that a trajectory of its newest batch is done; or two at once, or one too many."""
        if self._batches:
            number = max(self._batches)
            self._batches[number] += 1 + move.number % 2
            self._port.trajectory_completed(number, self._batches[number], move.number, 0, 0, ())

    async def lie(self, move: Move) -> None:
        """Counts what it never delivered as dropped."""
        if self._batches:
            self._port.demand_changed(max(self._batches), 12 - move.number, move.number, "so it says")

    async def close(self, move: Move) -> None:
        if self._batches:
            number = min(self._batches)
            del self._batches[number]
            self._port.batch_closed(number, "given up")

    async def signal(self, move: Move) -> None:
        self._port.rollout_signal(move.number)

    async def release_rollout(self, move: Move) -> None:
        await self._port.release_rollout()

    async def idle(self, move: Move) -> None:
        await self._pause(move.number * NS_PER_S)

    # --- nonsense -----------------------------------------------------------------------------------------

    async def repeat(self, move: Move) -> None:
        """Its first message again, long after it was answered."""
        if self._registered:
            first = events.PipelineRegistered(pipeline=self._spec.id, seq=0, life=self._port.life, spec=self._spec)
            self._world.say(first)

    async def nonsense(self, move: Move) -> None:
        said = NONSENSE[move.number % len(NONSENSE)]
        self._service.deliver(said)


def _strange_state() -> PipelineState:
    return PipelineState(
        batches=(BatchState(batch=7, target=3, delivered=9),), opened_through=2, requests_through=-5, leases=(1, 2, 3),
        waiting=(RequestState(request=4, role=Role.CRITIC, priority=Priority.GENERATION),), published=99,
        admission=True, releasing=True, signals=-1,
    )  # fmt: skip


NONSENSE: tuple[events.Message, ...] = (
    events.LeaseReleased(pipeline=STRANGER, seq=0, epoch=1),
    events.LeaseReleased(pipeline=STRANGER, seq=-3, epoch=-1),
    events.PipelineAdmitted(pipeline=STRANGER, seq=0),
    events.LeaseRequested(pipeline=STRANGER, seq=5, request=0, role=Role.REWARD, priority=Priority.GENERATION),
    events.RequestCancelled(pipeline=STRANGER, seq=1, request=-1),
    events.BatchOpened(pipeline=STRANGER, seq=1, batch=-1, target=-1),
    events.TrajectoryCompleted(pipeline=STRANGER, seq=1, batch=0, delivered=1, trajectory=0, attempt=0, dp_rank=99),
    events.StateResent(pipeline=STRANGER, seq=9, state=_strange_state()),
    events.PipelineLeft(pipeline=STRANGER, seq=1, error="who am I?"),
    events.EngineSuspected(pipeline=STRANGER, seq=1, dp_rank=-7, reason=""),
)  # fmt: skip

MOVES: dict[str, Callable[..., Awaitable[None]]] = {
    "register": Client.register, "again": Client.register, "other": Client.other, "admit": Client.admit,
    "leave": Client.leave, "fail": Client.leave, "vanish": Client.vanish, "ask_init": Client.ask_init,
    "ask_train": Client.ask_train, "ask_bad": Client.ask_bad, "await": Client.wait_for_lease, "cancel": Client.cancel,
    "release": Client.release, "release_bad": Client.release_bad, "swap": Client.swap, "init": Client.init,
    "publish": Client.publish, "offload": Client.offload, "open": Client.open, "open_bad": Client.open_bad,
    "complete": Client.complete, "lie": Client.lie, "close": Client.close, "signal": Client.signal,
    "release_rollout": Client.release_rollout, "idle": Client.idle, "repeat": Client.repeat,
    "nonsense": Client.nonsense,
}  # fmt: skip
