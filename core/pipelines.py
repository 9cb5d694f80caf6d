"""What clients say: each message checked, then taken into the books. A mistake is answered to whoever made it.

A message is applied if it is the pipeline's next one, or if it carries the whole state and is newer than all before.
Everything else is late or doubled (acknowledged again, no effect) or early (not acknowledged: the port will repeat
with its whole state). So a lost, late, doubled or reordered message can delay, but never wedge.
"""

from collections.abc import Callable

from core import actions, events
from core.budget import check_fit
from core.demand import demand, feed, progressed, released, signal_arrived
from core.engines import deliver_grant, kill, quarantine, settle, watch_gpu
from core.errors import Conflict, Displaced, RequestError, UnknownName
from core.leases import check_empty_handed, check_request, drop_request, end_lease, file_request, lease_of, release
from core.ledger import EngineState, Phase, PipelineBook
from core.model import BatchState, DemandPolicy, PipelineState, RequestState
from core.needs import declare_needs
from core.state import Reply, State
from core.topology import check_spec

BANDS = 8
"""How often, within one set of open batches, progress alone makes the shares be computed again."""


def receive(state: State, message: events.Message) -> None:
    """Apply one client message, or say why not."""
    book = state.ledger.books.get(message.pipeline)
    if book is None or message.life != book.life:
        _of_another_life(state, message, book)
    elif message.seq <= book.seq:
        state.out.replies.append(Reply(book.id, book.life, book.seq))
    elif isinstance(message, events.StateResent) or message.seq == book.seq + 1:
        book.seq = message.seq
        _answer(state, message, _HANDLERS[type(message)])
    # else: something before it is missing; unacknowledged, it will come again with the whole state


def _of_another_life(state: State, message: events.Message, book: PipelineBook | None) -> None:
    """From a client that is not the one listened to (`book`: whose; None: nobody's). It may begin a life of its own,
    unless it comes too late for that: nobody would speak for what it registers."""
    ended = state.ledger.ended.get(message.pipeline, -1)
    if message.life <= ended or (book is not None and message.life < book.life):
        error: RequestError = Displaced(f"this client of pipeline {message.pipeline} is over")
    elif isinstance(message, events.PipelineRegistered):
        _answer(state, message, _register)
        return
    else:
        if isinstance(message, events.PipelineLeft):
            state.ledger.ended[message.pipeline] = message.life
        if book is not None and book.alive:
            error = _displaced(book)
        else:
            error = UnknownName(f"no pipeline {message.pipeline!r} is registered; register it first")
    state.out.replies.append(Reply(message.pipeline, message.life, message.seq, error))


def _displaced(book: PipelineBook) -> Displaced:
    return Displaced(f"another client speaks for pipeline {book.id}; let it leave, or be missed, first")


def client_lost(state: State, event: events.ClientLost) -> None:
    """A client is gone without a word. Whatever it said and is still on its way comes too late."""
    book = state.ledger.books.get(event.pipeline)
    if book is not None and event.life == book.life:
        state.fail(book, event.reason, tell=False)
    elif book is None or event.life > book.life:
        state.ledger.ended[event.pipeline] = max(event.life, state.ledger.ended.get(event.pipeline, -1))


def _answer(state: State, message: events.Message, handle: Callable[[State, events.Message], None]) -> None:
    error = None
    try:
        handle(state, message)
    except RequestError as mistake:
        error = mistake
        state.note("rejected", str(mistake), message.pipeline)
    state.out.replies.append(Reply(message.pipeline, message.life, message.seq, error))


def _book(state: State, message: events.Message) -> PipelineBook:
    """The sender's book, if it may still ask for things."""
    book = state.ledger.books[message.pipeline]
    if not book.alive:
        raise Conflict(f"pipeline {book.id} is over ({book.reason or 'it left'}); register it again to run again")
    return book


# --- coming and going -------------------------------------------------------------------------------------


def _register(state: State, message: events.PipelineRegistered) -> None:
    spec, ledger = message.spec, state.ledger
    known = ledger.books.get(message.pipeline)
    if message.pipeline != spec.id:
        raise Conflict(f"message from {message.pipeline!r} registers {spec.id!r}")
    if known is not None and known.alive and message.life > known.life:
        raise _displaced(known)
    if known is not None and known.alive and known.spec == spec:
        return
    check_spec(ledger.cluster, spec)
    if known is not None:
        if known.alive and (known.phase is not Phase.REGISTERED or known.requests):
            raise Conflict(f"pipeline {spec.id} is in use with other worker groups; let it leave first")
        if known.stop > 0 or known.clearing:
            raise Conflict(f"the workers of an earlier pipeline {spec.id} are still being stopped; register it then")
        _forget(state, known)
    book = PipelineBook(spec, ledger.registrations, message.life)
    ledger.registrations += 1
    ledger.books[spec.id] = book
    book.seq = message.seq
    for gpu in spec.union:
        ledger.mapped[gpu][book] = None
    state.remap()


def _forget(state: State, book: PipelineBook) -> None:
    for gpu in book.spec.union:
        state.ledger.mapped[gpu].pop(book, None)
    del state.ledger.books[book.id]
    state.remap()


def _admit(state: State, message: events.PipelineAdmitted) -> None:
    book = _book(state, message)
    if book.phase is not Phase.REGISTERED:
        return
    others = [o.spec for o in state.ledger.books.values() if o.phase in (Phase.ADMITTED, Phase.READY)]
    check_fit(state.ledger.cluster, others, book.spec)
    book.phase = Phase.ADMITTED


def _leave(state: State, message: events.PipelineLeft) -> None:
    book = state.ledger.books[message.pipeline]
    book.leave_asked = True
    if book.alive:
        book.phase = Phase.LEFT
        book.reason = message.error or ""
        teardown(state, book, tell=False)
    else:
        settle(state, book)


def teardown(state: State, book: PipelineBook, tell: bool) -> None:
    """The pipeline is over: drop what it wanted, take back what it had, stop its workers."""
    ledger = state.ledger
    if tell:
        limit = book.spec.limits.command
        state.ask(actions.FailPipeline, None, limit, pipeline=book.id, life=book.life, reason=book.reason)
    for request in list(book.requests.values()):
        drop_request(state, request)
    book.batches.clear()
    book.recount()
    released(book)
    book.releasing = False
    book.hungry_since = -1
    for engine in book.engines:
        if engine in ledger.promised:
            ledger.break_promise(engine)
        if engine.holds:
            ledger.clear(engine.gpus, book, f"{book.id} is over")
        ledger.doomed.pop(engine, None)
        ledger.unserving.pop(engine, None)
        engine.doomed = False
        engine.operation = 0
        state.set_engine(engine, EngineState.DEAD)
    book.up.clear()
    for lease in list(book.leases.values()):
        end_lease(state, lease)
        ledger.clear(lease.gpus, book, f"{book.id} is over")
    for gpu in book.spec.union:
        ledger.mapped[gpu].pop(book, None)
    declare_needs(state.ledger, book)
    limit = book.spec.limits.sleep
    book.stop = state.ask(actions.StopPipeline, book, limit, pipeline=book.id, reason=book.reason or "it left")
    state.touch(book, book.spec.union)
    state.remap()


def stopped(state: State, book: PipelineBook, failure: str | None) -> None:
    """The workers are stopped, or nobody knows: watch what they held. What one of them had kept for too long has a new
    chance to come back, now that none of them lives."""
    book.stop = -1
    gpus = tuple(book.clearing)
    if failure:
        quarantine(state, gpus, book, f"workers of {book.id} could not be stopped: {failure}")
    else:
        state.ledger.clear(gpus, book, f"the end of {book.id}")
        state.touch(book, gpus)  # from quarantine back to clearing: whoever waits may be promised them now
    for gpu in gpus:
        if not failure:
            state.cancel_timer(f"quarantine/{gpu}")
        watch_gpu(state, gpu, book, None)
    settle(state, book)


# --- leases -------------------------------------------------------------------------------------------------


def _request(state: State, message: events.LeaseRequested | events.ReleasedAndRequested) -> None:
    book = _book(state, message)
    file_request(state, book, RequestState(request=message.request, role=message.role, priority=message.priority))


def _cancel(state: State, message: events.RequestCancelled) -> None:
    book = state.ledger.books[message.pipeline]
    request = book.requests.get(message.request)
    if request is not None:
        drop_request(state, request)
        return
    for lease in list(book.leases.values()):
        if lease.request == message.request:
            release(state, lease, used=False)


def _release(state: State, message: events.LeaseReleased) -> None:
    release(state, lease_of(state.ledger.books[message.pipeline], message.epoch))


def _release_and_request(state: State, message: events.ReleasedAndRequested) -> None:
    book = _book(state, message)
    lease = lease_of(book, message.epoch)
    if message.request > book.requests_through:
        check_request(state, book, message.role, message.priority)
        check_empty_handed(book, message.role, lease)
    release(state, lease)
    _request(state, message)


# --- rollout ------------------------------------------------------------------------------------------------


def _wish_changed(state: State, book: PipelineBook) -> None:
    before = book.open_demand, book.left_fraction
    book.recount()
    feed(book, state.ledger.policy, state.ledger.now)
    if (book.open_demand, book.left_fraction) != before:  # a full batch that is closed was no wish any more
        book.planned_at = book.open_demand
        state.touch(book)


def _open_batch(state: State, message: events.BatchOpened) -> None:
    book = _book(state, message)
    if message.target < 1:
        raise RequestError(f"{book.id}: batch {message.batch} has target {message.target}; it must be at least 1")
    if message.batch <= book.opened_through:
        return
    book.opened_through = message.batch
    book.batches[message.batch] = BatchState(batch=message.batch, target=message.target, kind=message.kind)
    _wish_changed(state, book)


def _signal(state: State, message: events.RolloutSignalled) -> None:
    book = _book(state, message)
    signal_arrived(book, state.ledger.now)
    if state.ledger.policy is not DemandPolicy.BATCH:  # there an open batch has said it already
        feed(book, state.ledger.policy, state.ledger.now)
        state.touch(book)


def _complete(state: State, message: events.TrajectoryCompleted) -> None:
    """The hot path: one completed trajectory. It costs a plan only if it can change the assignment."""
    book = _book(state, message)
    batch = _batch(book, message.batch)
    if not batch.delivered < message.delivered <= batch.target:
        raise Conflict(
            f"{book.id}: batch {batch.batch} has {batch.delivered} of {batch.target} delivered, not {message.delivered}"
        )
    book.batches[batch.batch] = BatchState(
        batch=batch.batch, target=batch.target, delivered=message.delivered, kind=batch.kind
    )
    policy = state.ledger.policy
    before = demand(book, policy)
    book.open_demand -= message.delivered - batch.delivered
    progressed(book)
    more = demand(book, policy) > before  # a report tells the policies `signal` and `floor` what they had forgotten
    shielded = state.shields(book)
    feed(book, policy, state.ledger.now, progress=True)
    first = False
    if 0 <= message.dp_rank < len(book.engines):
        engine = book.engines[message.dp_rank]
        engine.completed += 1
        engine.deaths = 0
        first = engine.completed == 1
    done = not book.open_demand
    drifted = done or book.planned_at - book.open_demand > book.open_target // BANDS
    if drifted:
        book.planned_at = book.open_demand
    if done or more or shielded or (drifted and state.coveted(book)) or (first and state.awaited(book)):
        state.touch(book)


def _batch(book: PipelineBook, number: int) -> BatchState:
    batch = book.batches.get(number)
    if batch is None:
        raise Conflict(f"{book.id}: batch {number} is not open")
    return batch


def _demand_changed(state: State, message: events.DemandChanged) -> None:
    book = _book(state, message)
    batch = _batch(book, message.batch)
    if not 0 <= message.delivered <= message.target:
        raise RequestError(f"{book.id}: batch {message.batch}: {message.delivered} delivered of {message.target}")
    if message.delivered > batch.delivered or message.target > batch.target:
        what = f"{batch.delivered} of {batch.target} cannot become {message.delivered} of {message.target}"
        raise Conflict(f"{book.id}: batch {batch.batch}: {what} by dropping trajectories or giving them up")
    book.batches[batch.batch] = BatchState(
        batch=batch.batch, target=message.target, delivered=message.delivered, kind=batch.kind
    )
    _wish_changed(state, book)


def _close_batch(state: State, message: events.BatchClosed) -> None:
    book = _book(state, message)
    if book.batches.pop(message.batch, None) is not None:
        _wish_changed(state, book)


def _published(state: State, message: events.WeightsPublished) -> None:
    book = _book(state, message)
    if message.version <= book.published:
        return
    book.published = message.version
    for engine in book.engines if len(book.up) == len(book.engines) else book.up.values():
        if engine.state is EngineState.AWAKE or engine.state is EngineState.SYNCING:
            state.ledger.unserving[engine] = None


def _release_rollout(state: State, message: events.RolloutReleased) -> None:
    """A planned release: confirmed only once the engines it put to sleep are clear."""
    book = _book(state, message)
    released(book)
    book.releasing = True
    for engine in list(book.up.values()):
        if engine in state.ledger.promised:
            state.ledger.break_promise(engine)
        else:
            state.ledger.doom(engine)
    feed(book, state.ledger.policy, state.ledger.now)
    state.touch(book)
    settle(state, book)


def _suspect(state: State, message: events.EngineSuspected) -> None:
    book = _book(state, message)
    if not 0 <= message.dp_rank < len(book.engines):
        raise UnknownName(f"pipeline {book.id} has no engine {message.dp_rank}")
    engine = book.engines[message.dp_rank]
    if engine.state is EngineState.AWAKE and not engine.operation:
        kill(state, engine, message.reason)


# --- the whole state again ------------------------------------------------------------------------------------


def _resent(state: State, message: events.StateResent) -> None:
    """Make the books agree with what the client says now, however much was lost between. Not a progress report."""
    told = message.state
    if told.left:
        _leave(state, events.PipelineLeft(pipeline=message.pipeline, seq=message.seq, error=told.error))
        return
    book = _book(state, message)
    if told.admission:
        _admit(state, events.PipelineAdmitted(pipeline=book.id, seq=message.seq))
    listed = {batch.batch: batch for batch in told.batches}
    delivered = sum(batch.delivered for batch in book.batches.values())
    if listed != book.batches or told.opened_through > book.opened_through:
        book.batches = listed
        book.opened_through = max(book.opened_through, told.opened_through, *listed, -1)
        _wish_changed(state, book)
        if sum(batch.delivered for batch in listed.values()) > delivered:
            feed(book, state.ledger.policy, state.ledger.now, progress=True)
    if told.signals > book.signals:
        book.signals = told.signals - 1
        signal_arrived(book, state.ledger.now)
        feed(book, state.ledger.policy, state.ledger.now)
        state.touch(book)
    if told.published > book.published:
        _published(state, events.WeightsPublished(pipeline=book.id, seq=message.seq, version=told.published))
    _resent_leases(state, book, told)
    if told.releasing and not book.releasing:
        _release_rollout(state, events.RolloutReleased(pipeline=book.id, seq=message.seq))


def _resent_leases(state: State, book: PipelineBook, told: PipelineState) -> None:
    waiting = {request.request: request for request in told.waiting}
    for lease in list(book.leases.values()):
        if lease.request in waiting:
            deliver_grant(state, lease)  # it has not heard of the grant
        elif lease.epoch not in told.leases and lease.request <= told.requests_through:
            release(state, lease)
    for request in list(book.requests.values()):
        if request.number not in waiting and request.number <= told.requests_through:
            drop_request(state, request)
    for number in sorted(waiting):
        if number > book.requests_through:
            file_request(state, book, waiting[number])


_HANDLERS: dict[type[events.Message], Callable[..., None]] = {
    events.PipelineRegistered: _register,
    events.PipelineAdmitted: _admit,
    events.LeaseRequested: _request,
    events.RequestCancelled: _cancel,
    events.LeaseReleased: _release,
    events.ReleasedAndRequested: _release_and_request,
    events.BatchOpened: _open_batch,
    events.RolloutSignalled: _signal,
    events.TrajectoryCompleted: _complete,
    events.DemandChanged: _demand_changed,
    events.BatchClosed: _close_batch,
    events.WeightsPublished: _published,
    events.RolloutReleased: _release_rollout,
    events.EngineSuspected: _suspect,
    events.PipelineLeft: _leave,
    events.StateResent: _resent,
}
