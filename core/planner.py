"""The assignment wanted, and why. Pure: reads the ledger, changes nothing, returns a `Plan`.

A plan is the difference between what is and what should be: requests to grant, engines to expand or shrink, promises
to take back. It is made on the present state with everything in flight as part of it (`Gpu.tenant`), so that
planning the same again at once gives an empty plan. Two passes:

1. `core.queueing`: non-rollout requests, in order of `demand.due`, their whole mapping or nothing.
2. `core.rollouts`: engines for everyone with rollout demand, on what the first pass left.

A plan looks at the region around what changed (`core.regions`), and at the regions of whoever got or lost an engine
there; `dirty=None` looks at everything. It shares out again as long as that may change anything.
"""

from collections.abc import Collection, Iterable
from operator import attrgetter

from core.demand import demand, due
from core.draft import Draft, Plan
from core.ledger import Ledger, Phase, PipelineBook
from core.model import Priority
from core.queueing import place_requests
from core.regions import GpuClass, Regions
from core.rollouts import share_rollouts
from core.turns import outranks

__all__ = ["Plan", "plan"]

_HUNGER = attrgetter("hungry_since", "number")


def plan(
    ledger: Ledger, regions: Regions, dirty: Iterable[PipelineBook] | None = None, gpus: Collection[int] = ()
) -> Plan:
    """One planning decision. `dirty`, `gpus`: whose wishes and which GPUs changed since the last one."""
    draft = Draft(ledger)
    if ledger.waiting:
        place_requests(draft, _long_hungry(ledger, regions))
    classes = regions.everywhere if dirty is None else regions.around([*dirty, *draft.touched], gpus)
    settled = share_rollouts(draft, _demanders(ledger, classes), classes, regions.layout_of)
    while not settled or (dirty is not None and draft.touched):
        # A donor may find something instead, or others a new donor, where this plan has not looked yet.
        wider = classes if dirty is None else regions.around([*draft.touched], [cls.gpus[0] for cls in classes])
        if settled and len(wider) == len(classes):
            break
        classes = wider
        settled = share_rollouts(draft, _demanders(ledger, classes), classes, regions.layout_of)
    return draft.plan


def _long_hungry(ledger: Ledger, regions: Regions) -> list[PipelineBook]:
    """Of the pipelines with demand near whatever waits, those that come before some of it: hardly ever anyone."""
    last = max([request.due for request in ledger.waiting])
    since = last - due(0, Priority.GENERATION)  # `outranks`, for all of them at once
    if not any([0 <= book.hungry_since < since for book in ledger.books.values()]):
        return []
    near = regions.around((), set().union(*[request.gpus for request in ledger.waiting]))
    return [book for book in _demanders(ledger, near) if outranks(book, last)]


def _demanders(ledger: Ledger, classes: list[GpuClass]) -> list[PipelineBook]:
    """Initialised pipelines with demand that can use some GPU of these classes, longest hungry first: ties go to them,
    and not to whoever registered first."""
    policy = ledger.policy
    found = {book.number: book for cls in classes for book in cls.books}
    wanting = [book for book in found.values() if book.phase is Phase.READY and demand(book, policy) > 0]
    wanting.sort(key=_HUNGER)
    return wanting
