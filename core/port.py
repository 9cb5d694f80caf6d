"""A pipeline's side of the wire to the scheduler.

Every message is acknowledged. Until then it is repeated, with growing pauses, and a repetition carries the pipeline's
whole state, so that it makes up for everything lost before it. The port is the only place that repeats anything; the
core never does. Calls that need no answer return at once; a mistake in one of them is raised by the next call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio

from core import actions, events
from core.backend import Clock, Timer
from core.errors import Conflict, Displaced, RequestError, UnknownName
from core.model import (
    BatchKind,
    BatchState,
    PipelineSpec,
    PipelineState,
    Priority,
    RequestState,
    Role,
)
from core.units import NS_PER_S

M = TypeVar("M", bound=events.Message)

RESEND_FIRST = 1 * NS_PER_S
RESEND_MOST = 10 * NS_PER_S
"""Pause before a message is repeated: doubled each time, up to the most, so that a goodbye is said again several times
within the minute that a pipeline has for it."""


class Lease(NamedTuple):
    """GPUs held by a worker group, as its pipeline sees them."""

    epoch: int
    gpus: tuple[int, ...]


class Gates(Protocol):
    """What the scheduler tells a pipeline without being asked."""

    def open_gate(self, dp_rank: int, version: int, epoch: int) -> None:
        """The engine serves this version from now on."""
        ...

    def close_gate(self, dp_rank: int) -> None:
        """The engine takes no more requests; those in flight will be aborted or drained."""
        ...

    def failed(self, reason: str) -> None:
        """The scheduler has failed the pipeline; its workers are being stopped."""
        ...


class NoGates:
    """Stands in until the pipeline has set its own."""

    def open_gate(self, dp_rank: int, version: int, epoch: int) -> None: ...

    def close_gate(self, dp_rank: int) -> None: ...

    def failed(self, reason: str) -> None: ...


class _Waiter:
    """Somebody waits for the answer to one message, or for a grant."""

    __slots__ = ("event", "for_grant", "lease", "error")

    def __init__(self, for_grant: bool = False) -> None:
        self.event = anyio.Event()
        self.for_grant = for_grant
        """An acknowledgement alone does not settle it."""
        self.lease: Lease | None = None
        self.error: Exception | None = None

    def settle(self, lease: Lease | None = None, error: Exception | None = None) -> None:
        self.lease, self.error = lease, error
        self.event.set()


class Port:
    """One pipeline's connection. `send(message)` carries a message; answers come by `replied` and `granted`."""

    def __init__(
        self,
        pipeline: str,
        clock: Clock,
        send: Callable[[events.Message], None],
        tell: Callable[[events.Event], None],
        life: int = 0,
    ) -> None:
        self.pipeline = pipeline
        self.life = life
        """Which client of that name this is: later ones have higher numbers."""
        self.gates: Gates = NoGates()
        self.tell = tell
        self._clock = clock
        self._carry = send
        self._seq = -1
        self._acked = -1
        self._spec: PipelineSpec | None = None
        self._batches: dict[int, BatchState] = {}
        self._opened_through = -1
        self._waiting: dict[int, tuple[RequestState, _Waiter]] = {}
        self._leases: dict[int, Lease] = {}
        self._returned: dict[int, int] = {}
        """Epochs of leases given back, each with the `seq` that says so, until that has arrived."""
        self._requests = -1
        self._published = -1
        self._signals = 0
        self._admission = self._releasing = self._left = False
        self._left_error: str | None = None
        self._answers: dict[int, list[_Waiter]] = {}
        self._confirmed: _Waiter | None = None
        self._error: Exception | None = None
        self._resend: Timer | None = None
        self._pause = RESEND_FIRST
        self._closed = False

    # --- life ------------------------------------------------------------------------------------------

    async def register(self, spec: PipelineSpec) -> None:
        """Declare the worker groups. Raises RequestError if the scheduler refuses them."""
        self._spec = spec
        await self._ask(self._message(events.PipelineRegistered, spec=spec))

    async def admit(self) -> None:
        """Ask to be admitted. Raises TopologyError, with the sum, if the memory does not fit."""
        self._admission = True
        await self._ask(self._message(events.PipelineAdmitted))

    async def leave(self, error: str | None) -> None:
        """The pipeline is over. Returns once its workers are stopped and its GPUs given back."""
        if self._spec is None:
            return
        self._left, self._left_error = True, error
        self._confirmed = _Waiter()
        self._send(self._message(events.PipelineLeft, error=error))
        try:
            await self._confirmed.event.wait()
        finally:
            self.close()
        if self._confirmed.error is not None and not isinstance(self._confirmed.error, UnknownName):
            raise self._confirmed.error

    def close(self) -> None:
        """Say nothing more; what is unanswered stays so."""
        self._closed = True
        if self._resend is not None:
            self._resend.cancel()
            self._resend = None

    # --- leases ----------------------------------------------------------------------------------------

    async def request(self, role: Role, priority: Priority) -> Lease:
        """Ask for a worker group's GPUs and wait until they are granted. Cancelling the wait takes the request back."""
        self._check()
        wanted = self._want(role, priority)
        message = self._message(events.LeaseRequested, request=wanted.request, role=role, priority=priority)
        return await self._await_grant(wanted, message)

    async def release_and_request(self, lease: Lease, role: Role, priority: Priority) -> Lease:
        """Release one lease and ask for another in one step. If the request is refused, nothing is released."""
        self._check()
        wanted = self._want(role, priority)
        message = self._message(
            events.ReleasedAndRequested, epoch=lease.epoch, request=wanted.request, role=role, priority=priority
        )
        self._give_back(lease, message)
        try:
            return await self._await_grant(wanted, message)
        except RequestError:
            self._returned.pop(lease.epoch, None)
            self._leases[lease.epoch] = lease
            raise

    def release(self, lease: Lease) -> None:
        """Say that the worker group is offloaded. A claim: the scheduler looks at the memory itself."""
        message = self._message(events.LeaseReleased, epoch=lease.epoch)
        self._give_back(lease, message)
        self._send(message)

    def _give_back(self, lease: Lease, message: events.Message) -> None:
        if self._leases.pop(lease.epoch, None) is not None:
            self._returned[lease.epoch] = message.seq

    def _want(self, role: Role, priority: Priority) -> RequestState:
        self._requests += 1
        return RequestState(request=self._requests, role=role, priority=priority)

    async def _await_grant(self, wanted: RequestState, message: events.Message) -> Lease:
        waiter = _Waiter(for_grant=True)
        self._waiting[wanted.request] = (wanted, waiter)
        self._answers[message.seq] = [waiter]
        self._send(message)
        try:
            await waiter.event.wait()
        except BaseException:
            self._cancel(wanted.request, waiter)
            raise
        self._waiting.pop(wanted.request, None)
        if waiter.error is not None:
            raise waiter.error
        assert waiter.lease is not None
        return waiter.lease

    def _cancel(self, request: int, waiter: _Waiter) -> None:
        self._waiting.pop(request, None)
        if waiter.lease is not None:
            self._leases.pop(waiter.lease.epoch, None)
        self._send(self._message(events.RequestCancelled, request=request))

    # --- rollout ---------------------------------------------------------------------------------------

    def batch_opened(self, batch: int, target: int, kind: BatchKind = BatchKind.TRAIN) -> None:
        """A rollout batch is wanted. Called before anything is waited for."""
        self._check()
        self._batches[batch] = BatchState(batch=batch, target=target, kind=kind)
        self._opened_through = max(self._opened_through, batch)
        self._send(self._message(events.BatchOpened, batch=batch, target=target, kind=kind))

    def rollout_signal(self, batch: int) -> None:
        """The one-shot rollout request that the policies `signal` and `floor` listen to."""
        self._signals += 1
        self._send(self._message(events.RolloutSignalled, batch=batch))

    def trajectory_completed(
        self,
        batch: int,
        delivered: int,
        trajectory: int,
        attempt: int,
        dp_rank: int,
        segments: tuple[tuple[int, int], ...],
    ) -> None:
        """A finished trajectory was accepted; `delivered` counts it."""
        self._check()
        state = self._open(batch)
        self._batches[batch] = BatchState(batch=batch, target=state.target, delivered=delivered, kind=state.kind)
        self._send(
            self._message(
                events.TrajectoryCompleted, batch=batch, delivered=delivered, trajectory=trajectory, attempt=attempt,
                dp_rank=dp_rank, segments=segments,
            )
        )  # fmt: skip

    def demand_changed(self, batch: int, target: int, delivered: int, reason: str) -> None:
        """Accepted trajectories were dropped again, or some are given up."""
        kind = self._open(batch).kind
        self._batches[batch] = BatchState(batch=batch, target=target, delivered=delivered, kind=kind)
        self._send(
            self._message(events.DemandChanged, batch=batch, target=target, delivered=delivered, reason=reason)
        )

    def _open(self, batch: int) -> BatchState:
        state = self._batches.get(batch)
        if state is None:
            raise Conflict(f"{self.pipeline}: batch {batch} is not open")
        return state

    def batch_closed(self, batch: int, reason: str) -> None:
        """The batch is taken, released, cancelled or failed."""
        self._batches.pop(batch, None)
        self._send(self._message(events.BatchClosed, batch=batch, reason=reason))

    def weights_published(self, version: int) -> None:
        """This version is complete in the weight cache."""
        self._check()
        self._published = version
        self._send(self._message(events.WeightsPublished, version=version))

    def engine_suspected(self, dp_rank: int, reason: str) -> None:
        """The engine does not answer within the pipeline's limit."""
        self._send(self._message(events.EngineSuspected, dp_rank=dp_rank, reason=reason))

    async def release_rollout(self) -> None:
        """Give up all rollout engines. Returns once they slept and their memory was seen free."""
        self._releasing = True
        self._confirmed = _Waiter()
        self._send(self._message(events.RolloutReleased))
        await self._confirmed.event.wait()
        self._releasing = False
        if self._confirmed.error is not None:
            raise self._confirmed.error

    # --- the scheduler's answers (called by the service) -------------------------------------------------

    def replied(self, seq: int, error: RequestError | None) -> None:
        """Everything up to `seq` has arrived; `error` is about the message `seq`."""
        if isinstance(error, Displaced):
            self._displaced(error)
            return
        error_told = False
        self._acked = max(self._acked, seq)
        self._pause = RESEND_FIRST
        if self._returned:
            self._returned = {epoch: said for epoch, said in self._returned.items() if said > self._acked}
        if self._acked >= self._seq and self._resend is not None:
            self._resend.cancel()
            self._resend = None
        for waiter in self._answers.pop(seq, ()):
            if error is not None:
                waiter.settle(error=error)
                error_told = True
            elif not waiter.for_grant:
                waiter.settle()
        if error is not None and not error_told:
            self._refused(error)

    def _displaced(self, error: Displaced) -> None:
        """Nothing that is said here counts, so there is no use in waiting, or in repeating it."""
        if self._resend is not None:
            self._resend.cancel()
            self._resend = None
        self._acked = self._seq
        waiters = [waiter for answered in self._answers.values() for waiter in answered]
        waiters += [waiter for _, waiter in self._waiting.values()]
        for waiter in dict.fromkeys([*waiters, *([self._confirmed] if self._confirmed else [])]):
            if not waiter.event.is_set():
                waiter.settle(error=error)
        self._answers.clear()
        self._error = self._error or error

    def _refused(self, error: RequestError) -> None:
        """A message that nobody waits on was refused: tell whoever waits for a confirmation, or the next caller."""
        if self._confirmed is not None and not self._confirmed.event.is_set():
            self._confirmed.settle(error=error)
        else:
            self._error = self._error or error

    def granted(self, request: int, epoch: int, gpus: tuple[int, ...]) -> bool:
        """A grant arrived. Returns whether it was taken, now or before: a late message may have asked for it again."""
        if epoch in self._leases or epoch in self._returned:
            return True
        _, waiter = self._waiting.get(request, (None, None))
        if waiter is None or self._closed:
            return False
        lease = Lease(epoch, gpus)
        self._leases[epoch] = lease
        waiter.settle(lease)
        return True

    def command(self, action: actions.GrantLease | actions.ConfirmRelease | actions.FailPipeline) -> str | None:
        """Take a command of the scheduler: None, or why it was not taken."""
        if action.life != self.life:
            return "its client is gone"
        match action:
            case actions.GrantLease():
                if not self.granted(action.request, action.epoch, action.gpus):
                    return "its client does not wait for it any more"
            case actions.ConfirmRelease():
                self.confirmed()
            case actions.FailPipeline():
                self.gates.failed(action.reason)
        return None

    def confirmed(self) -> None:
        """A planned release, or the leave, is complete."""
        if self._confirmed is not None:
            self._confirmed.settle()

    # --- sending ---------------------------------------------------------------------------------------

    def _message(self, of: type[M], /, **said: Any) -> M:
        """The next message."""
        self._seq += 1
        return of(pipeline=self.pipeline, seq=self._seq, life=self.life, **said)

    def _check(self) -> None:
        """Raise what an earlier call did wrong and did not wait to hear."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    async def _ask(self, message: events.Message) -> None:
        waiter = _Waiter()
        self._answers[message.seq] = [waiter]
        self._send(message)
        await waiter.event.wait()
        if waiter.error is not None:
            raise waiter.error

    def _send(self, message: events.Message) -> None:
        if self._closed:
            return
        self._carry(message)
        if self._acked < self._seq and self._resend is None and not self._closed:
            self._arm()

    def _arm(self) -> None:
        # Not a daemon timer: while something is unanswered, a repetition is what will happen next.
        self._resend = self._clock.call_at_ns(self._clock.now_ns() + self._pause, self._repeat)
        self._pause = min(2 * self._pause, RESEND_MOST)

    def _repeat(self) -> None:
        self._resend = None
        if self._closed or self._acked >= self._seq:
            return
        if self._acked < 0 and self._spec is not None:  # nobody knows us yet: a state would mean nothing
            self._carry(events.PipelineRegistered(pipeline=self.pipeline, seq=0, life=self.life, spec=self._spec))
        else:
            self._repeat_state()
        if self._acked < self._seq and self._resend is None:
            self._arm()

    def _repeat_state(self) -> None:
        message = self._message(events.StateResent, state=self.state())
        # Whoever waits for the answer to a lost message waits for the answer to this one from now on.
        waiting = [waiter for seq in list(self._answers) if seq > self._acked for waiter in self._answers.pop(seq)]
        if waiting:
            self._answers[self._seq] = waiting
        self._carry(message)

    def state(self) -> PipelineState:
        """The whole state, as a repetition carries it."""
        return PipelineState(
            batches=tuple(self._batches[number] for number in sorted(self._batches)),
            opened_through=self._opened_through,
            waiting=tuple(wanted for wanted, waiter in self._waiting.values() if waiter.lease is None),
            leases=tuple(self._leases),
            requests_through=self._requests,
            published=self._published,
            signals=self._signals,
            admission=self._admission,
            releasing=self._releasing,
            left=self._left,
            error=self._left_error,
        )
