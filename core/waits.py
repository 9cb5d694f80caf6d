"""Why is it waiting? Who waits, for what, held by whom, since when: from the state alone.

Everything here reads; the answers are the same in a test, in a stopped simulation and in a running cluster.
"""

from typing import NamedTuple

from core.demand import demand
from core.ledger import Engine, EngineState, Gpu, Hold, Ledger, Phase, PipelineBook
from core.model import DemandPolicy
from core.planner import plan
from core.regions import Regions
from core.state import State
from core.units import show_s


class Wait(NamedTuple):
    """One wait."""

    pipeline: str
    what: str
    since: int
    """ns"""
    reasons: tuple[str, ...]
    """One clause each; the first is the nearest cause."""
    behind: tuple[str, ...]
    """Pipelines that hold what is waited for."""


def waits(state: State) -> list[Wait]:
    """Everything anybody waits for now, longest first."""
    found = [*_requests(state.ledger), *_promises(state.ledger)]
    found += [_rollout(state.ledger, book) for book in state.ledger.books.values() if _wants_engine(book)]
    return sorted(found, key=lambda wait: (wait.since, wait.pipeline))


def explain(state: State) -> str:
    """The waits as text, one block each, and the cycle among them if there is one."""
    now = state.ledger.now
    blocks = []
    for wait in waits(state):
        head = f"{wait.pipeline} waits for {wait.what}, since {show_s(wait.since)} (for {show_s(now - wait.since)})"
        blocks.append("\n".join([head, *(f"    {reason}" for reason in wait.reasons)]))
    cycle = _cycle(waits(state))
    if cycle:
        blocks.append("cycle: " + " -> ".join(cycle))
    return "\n".join(blocks) or "nobody waits for the scheduler"


def _wants_engine(book: PipelineBook) -> bool:
    return book.phase is Phase.READY and book.open_demand > 0 and not any(e.routable for e in book.up.values())


# --- requests -------------------------------------------------------------------------------------------------


def _requests(ledger: Ledger) -> list[Wait]:
    if not ledger.waiting:
        return []
    found = []
    for request, why in plan(ledger, Regions(ledger)).waits:
        behind = [_holder(ledger.gpus[gpu]) for gpu in request.gpus]
        what = f"GPUs {list(request.gpus)} for {request.role} ({request.priority.name})"
        reasons = (*why.split("; "), *(f"GPU {gpu}: {_condition(ledger, gpu)}" for gpu in request.gpus))
        found.append(Wait(request.book.id, what, request.filed_at, reasons, _others(request.book, behind)))
    return found


def _promises(ledger: Ledger) -> list[Wait]:
    """Requests whose turn has come and whose GPUs are still being freed."""
    found = []
    for tenant in ledger.promised:
        if isinstance(tenant, Engine):
            continue
        late = [gpu for gpu in tenant.gpus if ledger.gpus[gpu].hold is not Hold.FREE]
        reasons = tuple(f"GPU {gpu}: {_condition(ledger, gpu)}" for gpu in late)
        behind = [_holder(ledger.gpus[gpu]) for gpu in late]
        what = f"GPUs {late} to be freed for its {tenant.role} ({tenant.priority.name})"
        found.append(Wait(tenant.book.id, what, tenant.filed_at, reasons, _others(tenant.book, behind)))
    return found


# --- rollout --------------------------------------------------------------------------------------------------


def _rollout(ledger: Ledger, book: PipelineBook) -> Wait:
    """A pipeline with open batches and no routable engine."""
    batches = ", ".join(f"batch {b.batch} has {b.delivered} of {b.target}" for b in book.batches.values() if b.demand)
    reasons = [f"its open batches want {book.open_demand} more trajectories ({batches})"]
    if not demand(book, ledger.policy):
        reasons += _vanished(ledger.policy, book)
    reasons += [_engine(ledger, engine) for engine in book.engines[:8]]
    if len(book.engines) > 8:
        reasons.append(f"and {len(book.engines) - 8} more engines")
    behind = [_holder(ledger.gpus[gpu]) for engine in book.engines for gpu in engine.gpus]
    since = max(book.demand_since, max((e.since for e in book.engines if e.routable_since >= 0), default=-1))
    return Wait(book.id, "a rollout engine", since, tuple(reasons), _others(book, behind))


def _vanished(policy: DemandPolicy, book: PipelineBook) -> list[str]:
    """Why the policy sees no demand although batches are open: the incident, in words."""
    lines = [f"but under the policy `{policy}` the scheduler sees no demand of it, so no plan includes it:"]
    if book.consumed_at >= 0:
        lines.append(
            f"its rollout signal of {show_s(book.signalled_at)} was consumed when a grant was decided at "
            f"{show_s(book.consumed_at)}, and those engines were taken away again"
        )
    else:
        lines.append("it has sent no rollout signal")
    if book.reported is None:
        lines.append("it has never completed a trajectory, so there is no progress report either")
    else:
        lines.append(f"its last progress report said {book.reported} left, and it can make none without an engine")
    lines.append(f"it is served only if it has demand, shows demand only by progress, makes progress only if served: "
                 f"{book.id} -> demand -> progress -> engine -> {book.id}")  # fmt: skip
    return lines


def _engine(ledger: Ledger, engine: Engine) -> str:
    if engine.disabled:
        return f"engine {engine.id}: not used any more, {engine.disabled}"
    if engine.holds:
        verb = "is to sleep" if engine.doomed else str(engine.state)
        return f"engine {engine.id} on GPUs {list(engine.gpus)}: {verb}, since {show_s(engine.since)}"
    state = "no process" if engine.state is EngineState.DEAD else "asleep"
    gpus = "; ".join(f"GPU {gpu} {_condition(ledger, gpu)}" for gpu in engine.gpus)
    return f"engine {engine.id}: {state}; {gpus}"


# --- GPUs -----------------------------------------------------------------------------------------------------


def _condition(ledger: Ledger, id: int) -> str:
    gpu = ledger.gpus[id]
    promised = f", promised to {gpu.promised}" if gpu.promised is not None else ""
    since = f"since {show_s(gpu.since)}"
    if gpu.engine is not None:
        return f"held by engine {gpu.engine.id} ({gpu.engine.state}) {since}{promised}"
    if gpu.lease is not None:
        return f"held by {gpu.lease} {since}{promised}"
    why = f" ({gpu.why})" if gpu.why else ""
    return f"{gpu.hold.value} {since}{why}{promised}"


def _holder(gpu: Gpu) -> str:
    tenant = gpu.engine or gpu.lease
    return tenant.book.id if tenant is not None else ""


def _others(book: PipelineBook, holders: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(holder for holder in holders if holder and holder != book.id))


def _cycle(found: list[Wait]) -> list[str]:
    """The first cycle among waiting pipelines, as a path that ends where it began; empty: none."""
    edges: dict[str, list[str]] = {}
    for wait in found:
        edges.setdefault(wait.pipeline, []).extend(wait.behind)
    for start in edges:
        path, seen = [start], {start: 0}
        while True:
            onward = next((to for to in edges.get(path[-1], ()) if to in edges), None)
            if onward is None:
                break
            if onward in seen:
                return [*path[seen[onward] :], onward]
            seen[onward] = len(path)
            path.append(onward)
    return []
