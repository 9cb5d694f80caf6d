"""A driver's line to the control plane: what `core.service.Service` is for a driver in the same process.

Rules of this room:

1. What a pipeline says goes out in the order in which it was said. What came of it comes back in the order of the log.
2. The log is fed through `decide` here too, so a driver has the scheduler's whole state at hand to explain a wait, and
   every run checks that the log replays to the actions it records.
3. If the control plane dies, the ports go on repeating themselves, and telemetry that has not come back in the log is
   said again: nothing is lost, nothing is doubled.
4. Nobody polls for a verdict: time is told to the oracles once a second, and a world in which nothing can happen any
   more (no operation, timer, request or phase anywhere, nothing unsaid) is found out by looking at exactly that.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, get_args

import anyio
import msgspec
import ray
from anyio.abc import TaskGroup

from backends.ray_gpu import wire
from backends.ray_gpu.clock import RealClock
from core import actions, events
from core.config import Trigger
from core.errors import InvariantBroken, OperationFailed
from core.ledger import EngineState
from core.model import Cluster, DemandPolicy
from core.port import Port
from core.scheduler import Decision, decide, new_state
from core.service import Command, Listener
from core.trace import Entry, Verdict

TICK_S = 1.0
QUIET_LOOKS = 3
"""So many looks in a row, a tick apart, must find that nothing can happen."""
RETRY_S = 0.2
"""Pause before a control plane that is being started again is asked again."""
GIVE_UP_S = 60.0
"""How long a control plane may be away."""

_DECIDED = dict.fromkeys(get_args(events.SCHEDULED))
_TELEMETRY = dict.fromkeys(get_args(events.TELEMETRY))


class Session:
    """Async context manager: leaving it stops listening. `control` is the handle of the control plane's actor."""

    def __init__(
        self,
        control: Any,
        run: str,
        clock: RealClock,
        cluster: Cluster,
        demand: DemandPolicy,
        listeners: Iterable[Listener],
        tick: Callable[[int], None],
    ) -> None:
        self.state = new_state(cluster, demand)
        """The scheduler's state as of the last entry that came."""
        self.on_tell: Callable[[events.AnyEvent], None] = lambda event: None
        self.on_quiescent: Callable[[], None] = lambda: None
        self.busy: Callable[[], bool] = lambda: False
        """Whether a call to a worker is under way."""
        self._control = control
        self._run = run
        self._clock = clock
        self._listeners = list(listeners)
        self._tick = tick
        self._tasks: TaskGroup | None = None
        self._ports: dict[str, Port] = {}
        self._seen_triggers: dict[Trigger, anyio.Event] = {}
        self._incarnation = ""
        self._after = 0
        self._entries = 0
        """Of the log, taken in so far."""
        self._decided: deque[actions.AnyAction] = deque()
        self._out: deque[wire.Up] = deque()
        self._unheard: deque[events.AnyEvent] = deque()
        """Telemetry that has not come back in the log yet."""
        self._answered: dict[int, None] = {}
        """Commands answered whose outcome has not come back in the log yet."""
        self._to_say = asyncio.Event()
        self._came = asyncio.Event()
        """An entry came."""
        self._synced = asyncio.Event()
        self._number = 0
        """Of the first frame in `_out`, counted since this incarnation listens."""
        self._frozen = False
        self._entry = msgspec.json.Decoder(Entry)

    async def __aenter__(self) -> "Session":
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._listen)
        self._tasks.start_soon(self._say)
        self._tasks.start_soon(self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    # --- as a service ----------------------------------------------------------------------------------

    def connect(self, pipeline: str) -> Port:
        """A new connection for a pipeline; it replaces an older one of the same name."""
        port = self._ports[pipeline] = Port(pipeline, self._clock, self._send, self.tell)
        return port

    def _send(self, message: events.Message) -> None:
        self.on_tell(message)  # type: ignore[arg-type]
        self._put(wire.Said(event=message))  # type: ignore[arg-type]

    def tell(self, event: events.AnyEvent) -> None:
        """Telemetry, or something the backend saw happen."""
        self.on_tell(event)
        if type(event) in _TELEMETRY:
            self._unheard.append(event)
        self._put(wire.Said(event=event))

    def _put(self, frame: wire.Up) -> None:
        self._out.append(frame)
        self._to_say.set()

    async def happened(self, trigger: Trigger) -> None:
        """Wait until a decision was noted (`rollout_granted`, `init_accepted`) for a pipeline; at once, if it was."""
        await self._trigger(trigger).wait()

    def _trigger(self, trigger: Trigger) -> anyio.Event:
        found = self._seen_triggers.get(trigger)
        if found is None:
            found = self._seen_triggers[trigger] = anyio.Event()
        return found

    def freeze(self) -> None:
        """The verdict is in: listeners hear nothing more."""
        self._frozen = True

    def conclude(self, verdict: Verdict) -> None:
        """The verdict, as the last entry that listeners hear. It is about this run, and not in the shared log."""
        self._hear(Entry(self._entries, self._clock.now_ns(), self._entries - 1, verdict))
        self.freeze()

    def go_down(self) -> None: ...

    def come_back(self) -> None: ...

    # --- out -------------------------------------------------------------------------------------------

    async def _say(self) -> None:
        while True:
            await self._to_say.wait()
            await self._synced.wait()
            self._to_say.clear()
            while self._out:
                await self._say_now(self._incarnation, list(self._out))

    async def _say_now(self, incarnation: str, frames: list[wire.Up]) -> None:
        """Say it once; what was not taken in stays to be said. Numbers tell the other side what it knows already."""
        try:
            taken = await self._control.say.remote(self._run, incarnation, self._number, wire.pack(frames))
        except ray.exceptions.RayActorError:
            taken = False
        if incarnation != self._incarnation:
            return  # somebody else listens now, and what is to be said was made up anew
        if not taken:
            await asyncio.sleep(RETRY_S)
            return
        self._number += len(frames)
        for _ in frames:
            self._out.popleft()
        self._came.set()

    async def said(self) -> None:
        """Wait until everything said so far is in the log."""
        while self._out or self._unheard or self._answered:
            self._came.clear()
            await self._came.wait()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the control plane that may be called twice; again, if it died before it answered."""
        while True:
            try:
                return await getattr(self._control, method).remote(*arguments)
            except ray.exceptions.RayActorError:
                await asyncio.sleep(RETRY_S)  # whether it comes back at all is `_listen`'s to say
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from error

    async def synced(self, pipeline: str, version: int, ranks: Iterable[int]) -> None:
        """Wait until the scheduler knows of a published version, and none of these engines is being synced. An engine
        that does something else when it hears of the version is not waited for, and a pipeline that ended has none."""
        while (book := self.state.ledger.books.get(pipeline)) is not None and book.alive:
            engines = [book.engines[rank] for rank in ranks]
            if book.published >= version and all(engine.state is not EngineState.SYNCING for engine in engines):
                return
            self._came.clear()
            await self._came.wait()

    # --- in --------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        away = 0.0
        while True:
            try:
                incarnation, upto, frames = await self._control.listen.remote(
                    self._run, self._incarnation, self._after, self._entries
                )
            except ray.exceptions.RayActorError as error:
                away += RETRY_S
                if away > GIVE_UP_S:
                    raise OperationFailed(f"the control plane has been gone for {away:.0f} s") from error
                await asyncio.sleep(RETRY_S)
                continue
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from error
            away = 0.0
            self._take_all(frames)
            self._after = upto
            if incarnation != self._incarnation:
                self._incarnation = incarnation
                self._resynchronise()

    def _take_all(self, frames: list[bytes]) -> None:
        for packed in frames:
            frame = wire.unpack_down(packed)
            match frame:
                case wire.Entries():
                    for line in frame.lines.splitlines():
                        self._take(self._entry.decode(line))
                case wire.Replied():
                    self._port(frame.pipeline, lambda port, f=frame: port.replied(f.seq, wire.unpack_error(f.error)))
                case wire.Commanded():
                    self._answered[frame.action.action] = None
                    self._put(wire.Answered(action=frame.action.action, failure=self._obey(frame.action)))
                case wire.GateOpened():
                    self._port(
                        frame.pipeline, lambda port, f=frame: port.gates.open_gate(f.dp_rank, f.version, f.epoch)
                    )
                case wire.GateClosed():
                    self._port(frame.pipeline, lambda port, f=frame: port.gates.close_gate(f.dp_rank))

    def _port(self, pipeline: str, call: Callable[[Port], None]) -> None:
        port = self._ports.get(pipeline)
        if port is not None:
            call(port)

    def _obey(self, action: Command) -> str | None:
        """Tell the pipeline; None, or why it did not take it."""
        port = self._ports.get(action.pipeline)
        if port is None:
            return "its client is gone"
        return port.command(action)

    def _resynchronise(self) -> None:
        """Another incarnation listens now: say again the telemetry that is not in its log. Ports repeat themselves."""
        self._out = deque(wire.Said(event=event) for event in self._unheard)
        self._number = 0
        self._answered.clear()  # whatever was not taken will be commanded again
        self._to_say.set()
        self._synced.set()

    def _take(self, entry: Entry) -> None:
        self._entries = entry.i + 1
        item = entry.item
        self._came.set()
        if type(item) in _DECIDED:
            self._answered.pop(getattr(item, "action", -1), None)
            self._check_decided(entry.i)
            decision: Decision = decide(self.state, entry.t, item)  # type: ignore[arg-type]
            self._decided = deque(decision.actions)
        elif isinstance(item, actions.Action):
            self._compare(entry.i, item)
        elif isinstance(item, actions.Note):
            if item.kind in ("rollout_granted", "init_accepted"):
                self._trigger(Trigger(pipeline=item.pipeline, event=item.kind)).set()
        elif self._unheard and self._unheard[0] == item:
            self._unheard.popleft()
        self._hear(entry)

    def _check_decided(self, entry: int) -> None:
        if self._decided:
            raise InvariantBroken(f"entry {entry}: the log lacks {self._decided[0]}, which `decide` gives here")

    def _compare(self, entry: int, action: actions.Action) -> None:
        expected = self._decided.popleft() if self._decided else None
        if expected != action:
            raise InvariantBroken(f"entry {entry}: the log has {action}, `decide` gives {expected} here")

    def _hear(self, entry: Entry) -> None:
        if not self._frozen:
            for listener in self._listeners:
                listener(entry.i, entry.t, entry.cause, entry.item)

    # --- looking ---------------------------------------------------------------------------------------

    async def _look(self) -> None:
        quiet, before = 0, -1
        while True:
            await asyncio.sleep(TICK_S)
            if self._frozen:
                continue
            self._tick(self._clock.now_ns())
            still = self._entries == before and not self._can_happen()
            quiet, before = quiet + 1 if still else 0, self._entries
            if quiet >= QUIET_LOOKS:
                quiet = 0
                self.on_quiescent()

    def _can_happen(self) -> bool:
        """Whether anything is under way. Other drivers are not asked: where there are any, the bounds judge."""
        return bool(
            not self._synced.is_set()
            or self.state.operations
            or self.state.timers
            or self._out
            or self._clock.pending
            or self.busy()
            or any(name not in self._ports for name in self.state.ledger.books)
        )


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    """What went wrong in the control plane, as it was raised there."""
    cause = error.cause or error
    if isinstance(cause, KeyError):
        return OperationFailed("the control plane gave this run up: it heard nothing from it for too long")
    return cause if isinstance(cause, Exception) else error
