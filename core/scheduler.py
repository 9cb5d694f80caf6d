"""`decide(state, now, event)`: the one function that changes the state, and the heart of Turnstile.

    event -> take it into the books -> plan, if the assignment may change -> promise -> start what can start -> actions

Synchronous, total, without I/O: called from a test with plain data, replayed from a log, walked exhaustively. The same
events at the same times give the same actions. Planning and promising are one step, on the present state, with
everything in flight as part of it; there is no gap in which another event could slip in.
"""

from collections.abc import Callable

from core import events
from core.actions import Action
from core.demand import feed, granted
from core.engines import (
    cut_off,
    engine_died,
    engine_outcome,
    memory_missing,
    memory_seen,
    node_left,
    start,
)
from core.leases import grant_delivered, lease_overdue
from core.ledger import Engine, Hold, Lease, PipelineBook
from core.model import Cluster, DemandPolicy
from core.pipelines import client_lost, receive, stopped, teardown
from core.planner import Plan, plan
from core.reconciler import reconcile
from core.regions import Regions
from core.state import Clearing, Decision, State

__all__ = ["Decision", "State", "decide", "new_state"]


def new_state(cluster: Cluster, policy: DemandPolicy = DemandPolicy.BATCH) -> State:
    """The state before the first event."""
    return State(cluster, policy)


def decide(state: State, now: int, event: events.Event) -> Decision:
    """Take in one event that happened at `now` (ns, never decreasing); say what to do.

    Raises InvariantBroken if the books stop adding up (a bug in Turnstile). A client's mistake is a `Reply` with
    an error, an outcome nobody waits for a note; neither changes anything.
    """
    state.out = Decision()
    state.ledger.now = now
    handle = _HANDLERS.get(type(event))
    if handle is not None:
        handle(state, event)
    else:
        receive(state, event)
    while state.failing:
        book, tell = state.failing.pop(0)
        teardown(state, book, tell)
    stirred = type(event) is not events.TrajectoryCompleted
    while state.replan or state.ledger.unpromised:
        _replan(state)
        stirred = True
    if stirred and state.ledger.work:  # progress alone frees nothing and finishes nothing
        for step in reconcile(state.ledger):
            start(state, step)
    return state.out


# --- planning -------------------------------------------------------------------------------------------------


def _replan(state: State) -> None:
    if state.regions.generation != state.ledger.mapping_generation:
        state.regions = Regions(state.ledger)
    unpromised = state.ledger.unpromised
    dirty = state.dirty | dict.fromkeys(unpromised.values())
    made = plan(state.ledger, state.regions, dirty, state.dirty_gpus | dict.fromkeys(unpromised))
    state.dirty, state.dirty_gpus, state.replan = {}, {}, False
    _promise(state, made)
    unpromised.clear()
    if made.unmet:
        state.unmet.update(made.unmet)
    if made.review_at is not None and not 0 <= state.review_at <= made.review_at:
        state.review_at = made.review_at
        state.start_timer("review", made.review_at)


def _promise(state: State, made: Plan) -> None:
    """Take a plan into the books. Revocations and shrinks first: what they leave is what the rest is promised."""
    ledger = state.ledger
    for engine, why in made.revoked:
        ledger.break_promise(engine)
        state.note("shrink", f"{engine.id} is not woken: {why}", engine.book.id, engine.dp_rank, engine.gpus)
    for engine, why in made.shrinks:
        ledger.doom(engine)
        if engine.book in made.gave_way and not engine.completed:
            engine.book.hungry_since = ledger.now  # it had its turn; the next one is for whoever waited meanwhile
        state.note("shrink", why, engine.book.id, engine.dp_rank, engine.gpus)
    for request, why in made.grants:
        ledger.promise(request)
        state.note("grant", f"{request}: {why}", request.book.id, gpus=request.gpus)
    for engine, why in made.expands:
        if engine.doomed:
            _reprieve(state, engine)
        else:
            ledger.promise(engine)
        state.note("expand", why, engine.book.id, engine.dp_rank, engine.gpus)
        engine.book.gave_way_at = -1
        _granted(state, engine.book)
    for book in made.gave_way:
        book.gave_way_at = ledger.now


def _granted(state: State, book: PipelineBook) -> None:
    if granted(book, state.ledger.now):
        state.note("rollout_granted", f"{book.id} is granted rollout; its signal is consumed", book.id)
    feed(book, state.ledger.policy, state.ledger.now)


def _reprieve(state: State, engine: Engine) -> None:
    """It was to sleep, had not begun to, and is wanted again: a tenancy of its own, like that of one which is woken, or
    the turn that was over would be taken from it at once."""
    engine.doomed = False
    engine.begin_tenancy()
    if engine.routable:
        engine.routable_since = state.ledger.now
    state.ledger.doomed.pop(engine, None)
    engine.book.up[engine.dp_rank] = engine


# --- outcomes and the world -----------------------------------------------------------------------------------


def _done(state: State, event: events.ActionDone) -> None:
    _outcome(state, event.action, None, event.free)


def _failed(state: State, event: events.ActionFailed) -> None:
    _outcome(state, event.action, f"failed: {event.reason}", event.free)


def _unknown(state: State, event: events.ActionUnknown) -> None:
    _outcome(state, event.action, f"got no answer: {event.reason}", {})


def _outcome(state: State, number: int, failure: str | None, free: dict[int, int]) -> None:
    action, subject = state.operations.pop(number, (None, None))
    if action is None:
        state.note("ignored", f"outcome of action {number}, which is over")
        return
    match subject:
        case Engine():
            engine_outcome(state, action, subject, failure)
        case Clearing():
            _memory(state, action, subject, failure, free)
        case Lease():
            grant_delivered(state, subject, failure)
        case PipelineBook():
            stopped(state, subject, failure)


def _memory(state: State, action: Action, clearing: Clearing, failure: str | None, free: dict[int, int]) -> None:
    gpu = state.ledger.gpus[clearing.gpu]
    if gpu.watch != action.action or gpu.hold not in (Hold.CLEARING, Hold.QUARANTINED):
        return
    if failure is None:
        memory_seen(state, clearing, action, free)  # type: ignore[arg-type]
    else:
        memory_missing(state, clearing, failure, free)


def _timer(state: State, event: events.TimerFired) -> None:
    if state.timers.get(event.timer) != event.generation:
        state.note("ignored", f"timer {event.timer} of an older generation")
        return
    del state.timers[event.timer]
    name, _, rest = event.timer.partition("/")
    match name:
        case "review":
            state.review_at = -1
            for book in state.unmet:
                state.touch(book)
            state.unmet = {}
            state.replan = True
        case "hold":
            lease_overdue(state, int(rest))
        case "quarantine":
            _give_up(state, int(rest))


def _give_up(state: State, gpu: int) -> None:
    device = state.ledger.gpus[gpu]
    if device.hold is Hold.QUARANTINED:
        device.given_up = True
        for book in list(state.ledger.mapped[gpu]):
            if book.alive:
                cut_off(state, book, f"GPU {gpu} stayed in quarantine ({device.why})")


def _trainer_failed(state: State, event: events.TrainerFailed) -> None:
    book = state.ledger.books.get(event.pipeline)
    if book is not None:
        state.fail(book, event.reason)


_HANDLERS: dict[type[events.Event], Callable[..., None]] = {
    events.ActionDone: _done,
    events.ActionFailed: _failed,
    events.ActionUnknown: _unknown,
    events.TimerFired: _timer,
    events.EngineDied: engine_died,
    events.TrainerFailed: _trainer_failed,
    events.ClientLost: client_lost,
    events.NodeLeft: node_left,
}
