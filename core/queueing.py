"""First pass of planning: who of those that wait gets a whole mapping.

Order is `demand.due`: seniority, with AGEING_NS for each step of priority. A request takes any GPU that is free, being
freed, or used by rollouts. If it cannot have all of them now, nothing is preempted for it, and its mapping is closed
to everyone later in the order: small requests cannot overtake a large one for ever. Until its other GPUs are being
freed too, rollouts may go on using what it waits for.

A pipeline that has had rollout demand for very long without completing anything stands in the same queue, with one
engine: while it comes before a request, the request may not take that engine away.
"""

from operator import attrgetter

from core.demand import demand
from core.draft import Draft
from core.ledger import Engine, Lease, PipelineBook, Request
from core.model import Priority
from core.turns import outranks, shielded_until, turn_end

_ORDER = attrgetter("due", "book.number", "number")
_HUNGER = attrgetter("hungry_since", "number")


def place_requests(draft: Draft, hungry: list[PipelineBook]) -> None:
    """Decide for every waiting request; the answers are in `draft.plan.grants` and `.waits`. `hungry`: the pipelines
    with demand that come before some of them."""
    queue = sorted(draft.ledger.waiting, key=_ORDER)
    closed: dict[int, Request | PipelineBook] = {}
    hungry = sorted(hungry, key=_HUNGER, reverse=True)
    for request in queue:
        while hungry and outranks(hungry[-1], request.due):
            _place_hungry(draft, hungry.pop(), closed)
        _place(draft, request, closed)


def _place(draft: Draft, request: Request, closed: dict[int, Request | PipelineBook]) -> None:
    ledger = draft.ledger
    if request.priority is Priority.INITIALIZATION and (other := _initialising(draft)) is not None:
        draft.plan.waits.append((request, f"{other.book.id} is initialising; one pipeline at a time"))
        return
    blockers = [(gpu, why) for gpu in request.gpus if (why := _blocker(draft, request, gpu, closed))]
    if not blockers:
        draft.grant(request, "its GPUs are free or being freed")
        return
    draft.plan.waits.append((request, "; ".join(f"GPU {gpu} {why}" for gpu, why in blockers)))
    # A GPU in quarantine may stay there: closing the others meanwhile would stop their pipelines for nothing.
    if all(ledger.gpus[gpu].usable for gpu, _ in blockers):
        for gpu in request.gpus:
            closed.setdefault(gpu, request)


def _initialising(draft: Draft) -> Request | Lease | None:
    if draft.ledger.init is not None:
        return draft.ledger.init
    return next((r for r, _ in draft.plan.grants if r.priority is Priority.INITIALIZATION), None)


def _blocker(draft: Draft, request: Request, gpu: int, closed: dict[int, Request | PipelineBook]) -> str:
    """Why the request cannot have this GPU now, as a clause that follows its number; empty: it can."""
    device = draft.ledger.gpus[gpu]
    if not device.usable:
        return f"is {device.hold.value}: {device.why}"
    if gpu in closed:
        earlier = closed[gpu]
        return f"is reserved for {earlier if isinstance(earlier, Request) else earlier.id + ' (long hungry)'}"
    tenant = draft.tenant(gpu)
    if isinstance(tenant, Lease):
        return f"is held by {tenant}"
    if isinstance(tenant, Request):
        return f"is promised to {tenant}"
    if gpu in draft.given:
        return f"goes to {tenant.id}, whose pipeline has completed nothing for too long"
    if isinstance(tenant, Engine) and _shielded(draft, tenant, request):
        return f"is used by {tenant.id}, whose pipeline has completed nothing for too long"
    return ""


def _shielded(draft: Draft, engine: Engine, request: Request) -> bool:
    book = engine.book
    if book is request.book or not outranks(book, request.due) or not draft.bears_turn(engine):
        return False
    end = shielded_until(engine)
    draft.review(end)
    return end is None or draft.ledger.now < end


def _place_hungry(draft: Draft, book: PipelineBook, closed: dict[int, Request | PipelineBook]) -> None:
    """One engine for a pipeline that comes before the requests that follow; else its place in the queue. Not on GPUs
    that it waits for itself: its own request may take those back at once."""
    if draft.up(book):
        return
    own = {gpu for request in book.requests.values() for gpu in request.gpus}
    rests = draft.rests(book)
    best: tuple[int, int] | None = None
    nearest: tuple[int, int] | None = None
    for engine in book.engines:
        if engine.disabled or not all(draft.ledger.gpus[gpu].usable and gpu not in own for gpu in engine.gpus):
            continue
        obstacles = sum(_obstacle(draft, gpu, closed, rests) for gpu in engine.gpus)
        if obstacles:
            nearest = min(nearest or (obstacles, engine.dp_rank), (obstacles, engine.dp_rank))
            continue
        shrinks = len({id(tenant) for gpu in engine.gpus if (tenant := draft.tenant(gpu)) is not None})
        best = min(best or (shrinks, engine.dp_rank), (shrinks, engine.dp_rank))
    if best is not None:
        draft.expand(book.engines[best[1]], "it has completed nothing for longer than a request may overtake it")
    elif nearest is not None:
        for gpu in book.engines[nearest[1]].gpus:
            closed.setdefault(gpu, book)


def _obstacle(draft: Draft, gpu: int, closed: dict[int, Request | PipelineBook], rests: bool) -> int:
    """0: the GPU can be had now. 1: somebody's time on it must end first, or ours to give way (`rests`). 2: somebody
    else is before us there."""
    if gpu in closed:
        return 2
    tenant = draft.tenant(gpu)
    if tenant is None:
        return 0
    if isinstance(tenant, Engine):
        if gpu in draft.given:
            return 1
        if not demand(tenant.book, draft.ledger.policy):
            return 0
        end = turn_end(tenant, draft.up(tenant.book) == 1 or draft.bears_turn(tenant))
        draft.review(end)
        return int(rests or end is None or end > draft.ledger.now)
    return 1 if isinstance(tenant, Lease) else 2
