"""Requests and leases of worker groups other than rollout engines: filed, dropped, granted, released, overdue.

1. A worker group gets its whole mapping or nothing.
2. Nobody holds one lease and waits for another (`check_empty_handed`), so nobody who waits is waited for.
3. A lease ends once: by its holder's word, by its limit, or with its pipeline. Its epoch is never used again.
"""

from core.demand import due, feed
from core.engines import UNKNOWN, clear
from core.errors import Conflict, RequestError, StaleLease, UnknownName
from core.ledger import Lease, Phase, PipelineBook, Request
from core.model import PRIORITIES_OF, Priority, RequestState, Role
from core.needs import declare_needs
from core.state import State


def file_request(state: State, book: PipelineBook, wanted: RequestState) -> None:
    """Put a request into the queue; one that was put there before changes nothing. Raises RequestError."""
    if wanted.request <= book.requests_through:
        return  # a retry
    gpus = check_request(state, book, wanted.role, wanted.priority)
    check_empty_handed(book, wanted.role)
    now = state.ledger.now
    book.requests_through = wanted.request
    request = Request(book, wanted.request, wanted.role, wanted.priority, gpus, now, due(now, wanted.priority))
    book.requests[request.number] = request
    state.ledger.waiting[request] = None
    if request.priority is Priority.INITIALIZATION:
        state.note("init_accepted", f"{book.id} asks for GPUs {list(gpus)} to initialise", book.id, gpus=gpus)
    state.touch()


def check_request(state: State, book: PipelineBook, role: Role, priority: Priority) -> tuple[int, ...]:
    """The GPUs that such a request asks for; raises RequestError if it may not be made."""
    group = book.spec.group(role)
    if group is None:
        raise UnknownName(f"pipeline {book.id} has no worker group {role}")
    if priority not in PRIORITIES_OF[role]:
        allowed = ", ".join(p.name for p in PRIORITIES_OF[role]) or "nothing"
        raise RequestError(f"{book.id}: worker group {role} may ask for {allowed}, not for {priority.name}")
    if priority is Priority.GENERATION:
        raise RequestError(f"{book.id}: rollout engines are not requested; open a rollout batch instead")
    initial = priority is Priority.INITIALIZATION
    if initial and book.phase is not Phase.ADMITTED:
        raise Conflict(f"{book.id}: INITIALIZATION may be requested once, after admission (it is {book.phase})")
    if not initial and book.phase is not Phase.READY:
        raise Conflict(f"{book.id}: {priority.name} may be requested after initialisation (it is {book.phase})")
    gpus = book.spec.union if initial else group.gpus
    gone = [gpu for gpu in gpus if state.ledger.gpus[gpu].gone]
    if gone:
        raise RequestError(f"{book.id}: {role} needs GPU {gone[0]}, which is gone ({state.ledger.gpus[gone[0]].why})")
    return gpus


def check_empty_handed(book: PipelineBook, role: Role, but: Lease | None = None) -> None:
    """No pipeline holds one lease (`but` the one it is about to release) and waits for another, nor for two that could
    be granted one by one. So nobody who waits is waited for: two jobs that take two pools in opposite order cannot
    lock, and no request behind them can either. Raises Conflict."""
    held = next((lease for lease in book.leases.values() if lease is not but), None)
    if held is not None:
        raise Conflict(
            f"{book.id} holds GPUs {list(held.gpus)} for its {held.role} and may not wait for its {role} meanwhile; "
            "release first, or release and request in one step"
        )
    if book.requests:
        waiting = next(iter(book.requests.values()))
        raise Conflict(f"{book.id} waits for its {waiting.role} already; cancel that before asking for its {role}")


def drop_request(state: State, request: Request) -> None:
    """Nobody waits for it any more; what was promised to it is to be given away."""
    ledger = state.ledger
    request.book.requests.pop(request.number, None)
    if request.promised:
        ledger.break_promise(request)
        state.touch(None, request.gpus)
    ledger.waiting.pop(request, None)
    state.touch()


def lease_of(book: PipelineBook, epoch: int) -> Lease:
    """The pipeline's lease of that epoch; raises StaleLease."""
    lease = book.leases.get(epoch)
    if lease is None:
        held = ", ".join(str(e) for e in book.leases) or "none"
        raise StaleLease(f"pipeline {book.id} holds no lease with epoch {epoch} (its leases: {held})")
    return lease


def end_lease(state: State, lease: Lease) -> None:
    """Take a lease out of the books; its GPUs are the caller's to clear."""
    del state.ledger.leases[lease.epoch]
    del lease.book.leases[lease.epoch]
    if state.ledger.init is lease:
        state.ledger.init = None
        state.touch()
    state.cancel_timer(f"hold/{lease.epoch}")


def release(state: State, lease: Lease, *, used: bool = True) -> None:
    """The holder says that it is offloaded; or never heard that it holds anything, if it is not `used`."""
    book = lease.book
    end_lease(state, lease)
    if used and lease.priority is Priority.INITIALIZATION and book.phase is Phase.ADMITTED:
        book.phase = Phase.READY
        declare_needs(state.ledger, book)
    clear(state, lease.gpus, book, f"release by {lease}", lease)
    state.touch(book, lease.gpus)
    feed(book, state.ledger.policy, state.ledger.now)


def lease_overdue(state: State, epoch: int) -> None:
    """A maximum hold is over."""
    lease = state.ledger.leases.get(epoch)
    if lease is not None:
        held = (state.ledger.now - lease.granted_at) / 1e9
        state.fail(lease.book, f"its {lease.role} held GPUs {list(lease.gpus)} for {held:g} s, longer than its limit")


def grant_delivered(state: State, lease: Lease, failure: str | None) -> None:
    """A grant reached its client, or did not. If nobody knows, the client's next repetition tells."""
    if failure and not failure.startswith(UNKNOWN) and lease.epoch in state.ledger.leases:
        release(state, lease, used=False)
