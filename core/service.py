"""The shell: takes events in, lets `decide` decide, has the actions carried out, and feeds their outcomes back.

1. One event at a time, to the end: log it, decide, log and start what was decided. Decisions are synchronous; nothing
   can slip in between.
2. Each operation of the backend ends in exactly one outcome; a task waits for it, unless the backend needs none. Past
   its limit an operation is given up and its outcome is *unknown*; a later answer is ignored by its number.
3. The service holds no policy and no scheduler state but the object it hands to `decide`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, get_args

import anyio
from anyio.abc import TaskGroup

from core import actions, events
from core.backend import Backend, Outcome, Timer
from core.config import Trigger
from core.errors import RequestError, TurnstileError
from core.model import Cluster, DemandPolicy
from core.port import Gates, Port
from core.scheduler import Decision, State, decide, new_state
from core.trace import Entry

Listener = Callable[[int, int, int, Any], None]
"""Called for every entry: (number, ns, number of the entry that led to it or -1, event | action | note | verdict)."""

Command = actions.GrantLease | actions.ConfirmRelease | actions.FailPipeline


class Client(Protocol):
    """A pipeline's end of the line when it is in another process: told, and answering in its own time. What it never
    answers ends as *unknown* at the command's limit, like any operation."""

    gates: Gates
    life: int
    """Which client of that name."""

    def replied(self, seq: int, error: RequestError | None) -> None:
        """Everything up to `seq` has arrived; `error` is about the message `seq`."""
        ...

    def command(self, action: Command) -> None:
        """Carry it to the pipeline; its answer comes back by `Service.answered`."""
        ...


class Snapshot(NamedTuple):
    """All that a service knows between two events; what it was rebuilt from before can be forgotten."""

    entries: int
    """Of the log, up to here."""
    state: State
    begun: tuple[tuple[actions.AnyAction, int], ...]
    """Operations and timers under way, each with the number of its entry."""
    noted: tuple[Trigger, ...]


AWAIT_MEMORY_SLACK = 2
"""The backend itself gives up `AwaitMemory` at its limit, to say what it saw; only past this many times the limit is
it taken for hung."""


class Service:
    """The scheduler at work on a backend. An async context manager: leaving it cancels what still runs."""

    def __init__(
        self,
        backend: Backend,
        cluster: Cluster,
        policy: DemandPolicy,
        listeners: Iterable[Listener] = (),
        *,
        journal: bool = False,
        check: bool = False,
    ) -> None:
        self.backend = backend
        self.state: State = new_state(cluster, policy)
        self._cluster = cluster
        self._policy = policy
        self._listeners = list(listeners)
        self._entries = 0
        self._inbox: deque[tuple[events.Event, int]] = deque()
        self._busy = False
        self._frozen = False
        self._ports: dict[str, Port | Client] = {}
        self._lives: dict[str, int] = {}
        """Number of the last connection of that name."""
        self._heard: dict[str, int] = {}
        self._entry_of: dict[int, int] = {}
        self._limits: dict[int, Timer] = {}
        self._give_up: dict[int, Callable[[], None]] = {}
        self._begin_without_task = getattr(backend, "begin", None)
        self._command_delay: Callable[[str], int] = getattr(backend, "command_delay", _none)
        self._timers: dict[str, tuple[Timer, actions.StartTimer, int]] = {}
        """With the action that started it, and the number of its entry."""
        self._seen: dict[Trigger, anyio.Event] = {}
        self._tasks: TaskGroup | None = None
        self._journal: list[tuple[int, events.Event]] | None = [] if journal else None
        self._down: deque[events.Event] | None = None
        self._check = check

    async def __aenter__(self) -> "Service":
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        for timer in [*self._limits.values(), *(timer for timer, _, _ in self._timers.values())]:
            timer.cancel()
        for give_up in list(self._give_up.values()):
            give_up()
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    # --- for clients -----------------------------------------------------------------------------------

    def connect(self, pipeline: str) -> Port:
        """A new connection for a pipeline; it replaces an older one of the same name."""
        carry = partial(self.backend.carry, deliver=self.deliver)
        self._lives[pipeline] = life = self._lives.get(pipeline, -1) + 1
        port = self._ports[pipeline] = Port(pipeline, self.backend.clock, carry, self.tell, life)
        return port

    def attach(self, pipeline: str, client: Client) -> None:
        """The pipeline speaks from another process from now on; its messages come by `deliver`."""
        self._ports[pipeline] = client

    def detach(self, pipeline: str) -> None:
        """Nobody speaks for it any more."""
        self._ports.pop(pipeline, None)

    def answered(self, number: int, failure: str | None) -> None:
        """A client in another process has taken a command, or refused it (`failure`)."""
        if self._limits.get(number) is not None:
            action, _ = self.state.operations[number]
            self._ended(action, _outcome_of(number, failure))

    def deliver(self, message: events.Message) -> None:
        """A client message has arrived."""
        if self._down is None:
            self.post(message, self._heard.get(message.pipeline, -1))

    def tell(self, event: events.Event) -> None:
        """Telemetry, or something the backend saw happen."""
        if type(event) in _DECIDED:
            self.post(event, -1)
        else:
            self._log(self.backend.clock.now_ns(), event, -1)

    async def happened(self, trigger: Trigger) -> None:
        """Wait until a decision was noted (`rollout_granted`, `init_accepted`) for a pipeline; at once, if it was."""
        await self._trigger(trigger).wait()

    def freeze(self) -> None:
        """The verdict is in: nothing more is logged. Decisions go on, so that everyone can clean up."""
        self._frozen = True

    # --- events in -------------------------------------------------------------------------------------

    def post(self, event: events.Event, cause: int) -> None:
        """Take an event in; decide at once unless a decision is being taken."""
        if self._down is not None:
            if not isinstance(event, events.TimerFired):
                self._down.append(event)
            return
        self._inbox.append((event, cause))
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._decide(*self._inbox.popleft())
        finally:
            self._busy = False

    def _decide(self, event: events.Event, cause: int) -> None:
        now = self.backend.clock.now_ns()
        if type(event) in _OUTCOMES:
            cause = self._entry_of.pop(event.action, cause)  # type: ignore[attr-defined]
        entry = self._log(now, event, cause)
        if self._journal is not None:
            self._journal.append((now, event))
        decision = decide(self.state, now, event)
        if self._check:
            self.state.ledger.check()
        self._carry_out(now, decision, entry)

    def _carry_out(self, now: int, decision: Decision, cause: int) -> None:
        for note in decision.notes:
            self._log(now, note, cause)
            self._noted(note)
        for action in decision.actions:
            self._start(action, self._log(now, action, cause))
        for reply in decision.replies:
            port = self._ports.get(reply.pipeline)
            if port is not None and port.life == reply.life:
                port.replied(reply.seq, reply.error)

    def _noted(self, note: actions.Note) -> None:
        if note.kind == "rollout_granted" or note.kind == "init_accepted":
            self._trigger(Trigger(pipeline=note.pipeline, event=note.kind)).set()

    def _trigger(self, trigger: Trigger) -> anyio.Event:
        found = self._seen.get(trigger)
        if found is None:
            found = self._seen[trigger] = anyio.Event()
        return found

    def conclude(self, verdict: Any) -> None:
        """Write the verdict as the last entry of the log."""
        self._log(self.backend.clock.now_ns(), verdict, self._entries - 1)
        self.freeze()

    def _log(self, now: int, item: Any, cause: int) -> int:
        entry = self._entries
        if not self._frozen:
            self._entries = entry + 1
            for listener in self._listeners:
                listener(entry, now, cause, item)
        return entry

    # --- actions out -----------------------------------------------------------------------------------

    def _start(self, action: actions.Action, entry: int) -> None:
        match action:
            case actions.StartTimer():
                ring = partial(self._ring, action, entry)
                self._timers[action.timer] = (self.backend.clock.call_at_ns(action.at, ring), action, entry)
            case actions.CancelTimer():
                running = self._timers.pop(action.timer, None)
                if running is not None:
                    running[0].cancel()
            case actions.GrantLease() | actions.ConfirmRelease() | actions.FailPipeline():
                self._entry_of[action.action] = entry
                self._heard[action.pipeline] = entry
                self._tell_client(action, entry)
            case _:
                self._entry_of[action.action] = entry
                self._begin(action)

    def _ring(self, timer: actions.StartTimer, entry: int) -> None:
        self._timers.pop(timer.timer, None)
        self.post(events.TimerFired(timer=timer.timer, generation=timer.generation), entry)

    def _tell_client(self, action: Command, entry: int) -> None:
        port = self._ports.get(action.pipeline)
        if port is None:
            self.post(events.ActionFailed(action=action.action, reason="its client is gone"), entry)
        elif isinstance(port, Port):
            delay = self._command_delay(action.pipeline)
            if delay:
                self._watch(action, action.limit)
                clock = self.backend.clock
                clock.call_at_ns(clock.now_ns() + delay, partial(self._hand_over, action))
            else:
                self.post(_outcome_of(action.action, port.command(action)), entry)
        else:
            self._watch(action, action.limit)
            port.command(action)

    def _hand_over(self, action: Command) -> None:
        """A command that took its time has arrived."""
        port = self._ports.get(action.pipeline)
        refusal = port.command(action) if isinstance(port, Port) else "its client is gone"
        self.answered(action.action, refusal)

    def _begin(self, action: actions.Action) -> None:
        """Start an operation of the backend, and the watch over its limit."""
        assert self._tasks is not None, "the service is not open"
        self._watch(action, action.limit * (AWAIT_MEMORY_SLACK if isinstance(action, actions.AwaitMemory) else 1))
        if self._begin_without_task is not None:
            self._give_up[action.action] = self._begin_without_task(action, self._may_begin, self._ended)
        else:
            self._tasks.start_soon(self._perform, action)

    def _watch(self, action: actions.Action, limit: int) -> None:
        clock = self.backend.clock
        self._limits[action.action] = clock.call_at_ns(clock.now_ns() + limit, partial(self._overdue, action, limit))

    def _overdue(self, action: actions.Action, limit: int) -> None:
        self._limits.pop(action.action, None)
        give_up = self._give_up.pop(action.action, None)
        if give_up is not None:
            give_up()
        self.post(events.ActionUnknown(action=action.action, reason=f"after {limit / 1e9:g} s"), -1)

    def _may_begin(self, action: Any) -> bool:
        """The operation is about to begin, if it is not overdue already."""
        if action.action not in self._limits:
            return False
        if _closes_gate(action):
            port = self._ports.get(action.pipeline)
            if port is not None:
                port.gates.close_gate(action.dp_rank)
        return True

    async def _perform(self, action: Any) -> None:
        """One operation, in a task of its own."""
        if not self._may_begin(action):
            return
        with anyio.CancelScope() as scope:
            self._give_up[action.action] = scope.cancel
            outcome = await self._outcome(action)
        if not scope.cancelled_caught:
            self._ended(action, outcome)

    async def _outcome(self, action: Any) -> Outcome:
        try:
            return await self.backend.perform(action)
        except TurnstileError as error:
            return events.ActionFailed(action=action.action, reason=str(error))

    def _ended(self, action: Any, outcome: Outcome) -> None:
        """The backend has answered."""
        self._give_up.pop(action.action, None)
        limit = self._limits.pop(action.action, None)
        if limit is None:
            return  # too late
        limit.cancel()
        if type(action) is actions.OpenGate and type(outcome) is events.ActionDone:
            self._gate_opened(action, outcome)
        else:
            self.post(outcome, -1)

    def _gate_opened(self, action: actions.OpenGate, outcome: events.ActionDone) -> None:
        port = self._ports.get(action.pipeline)
        if port is not None:
            self._heard[action.pipeline] = self._entry_of.get(action.action, -1)
        self.post(outcome, -1)
        if port is not None and self.state.serves(action.pipeline, action.dp_rank, action.epoch):
            port.gates.open_gate(action.dp_rank, action.version, action.epoch)

    # --- death and resurrection --------------------------------------------------------------------------

    def go_down(self) -> None:
        """The control plane dies: messages are lost from now on, outcomes wait at the workers."""
        self._down = deque()

    def come_back(self) -> None:
        """The restarted control plane: the state is rebuilt from the journal, then hears what happened meanwhile."""
        assert self._journal is not None, "no journal was kept"
        assert self._down is not None, "the control plane is up"
        self.state = new_state(self._cluster, self._policy)
        for at, event in self._journal:
            decide(self.state, at, event)
        missed, self._down = self._down, None
        for timer, generation in list(self.state.timers.items()):
            if timer not in self._timers:  # it rang while nobody was there
                self.post(events.TimerFired(timer=timer, generation=generation), -1)
        for event in missed:
            self.post(event, -1)

    def snapshot(self) -> Snapshot:
        """What `restore` can begin with instead of the log so far. Not while an event is being handled."""
        assert not self._busy, "in the middle of an event"
        begun = ((action, self._entry_of[number]) for number, (action, _) in self.state.operations.items())
        noted = (trigger for trigger, seen in self._seen.items() if seen.is_set())
        timers = ((action, entry) for _, action, entry in self._timers.values())
        return Snapshot(self._entries, self.state, (*begun, *timers), tuple(noted))

    def restore(self, journal: Iterable[Entry], known: Snapshot | None = None) -> None:
        """A new process takes over from one that died: rebuild the state from its log, go on counting entries where it
        stopped, and begin again whatever has no outcome in it. Workers take a doubled order as done and clients a
        doubled command as taken, so nothing has to be guessed; timers that should have rung meanwhile ring at once.

        With a snapshot that is `known`, `journal` is what came after it. Call it after `__aenter__`, with every client
        attached, before anything else is posted. What was decided last may be missing at the end of the log; it is
        logged now, so that the log stays one whole run.
        """
        issued: dict[int, tuple[actions.AnyAction, int]] = {}
        left: deque[actions.AnyAction | actions.Note] = deque()
        decided_at, cause = 0, -1
        if known is not None:
            self.state, self._entries = known.state, known.entries
            issued |= {action.action: (action, entry) for action, entry in known.begun}
            for trigger in known.noted:
                self._trigger(trigger).set()
        for entry in journal:
            self._entries = entry.i + 1
            item = entry.item
            if type(item) in _DECIDED:
                decision = decide(self.state, entry.t, item)
                decided_at, cause = entry.t, entry.i
                left = deque([*decision.notes, *decision.actions])
            elif left and item == left[0]:
                self._relearn(left.popleft(), entry.i, issued)
        for item in left:
            self._relearn(item, self._log(decided_at, item, cause), issued)
        timers = {
            action.timer: (action, at) for action, at in issued.values() if isinstance(action, actions.StartTimer)
        }
        begun = [*(issued[number] for number in self.state.operations), *(timers[name] for name in self.state.timers)]
        for action, at in begun:
            self._start(action, at)

    def _relearn(
        self, item: actions.AnyAction | actions.Note, entry: int, issued: dict[int, tuple[actions.AnyAction, int]]
    ) -> None:
        if isinstance(item, actions.Note):
            self._noted(item)
        else:
            issued[item.action] = (item, entry)


def _outcome_of(number: int, failure: str | None) -> Outcome:
    if failure is None:
        return events.ActionDone(action=number)
    return events.ActionFailed(action=number, reason=failure)


def _none(pipeline: str) -> int:
    """The delay of commands where nothing delays them."""
    return 0


def _closes_gate(action: actions.Action) -> bool:
    if type(action) is actions.SyncEngine:
        return action.emptying is not actions.Emptying.KEEP
    return type(action) is actions.SleepEngine or type(action) is actions.KillEngine


# Looked up by type: asking each event whether it is one of a long union takes longer than logging it.
_DECIDED = dict.fromkeys(get_args(events.SCHEDULED))
_OUTCOMES = dict.fromkeys((*get_args(Outcome), events.ActionUnknown))
