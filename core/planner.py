"""The assignment wanted, and why. Pure: reads the ledger, changes nothing, returns a `Plan`.

A plan is the difference between what is and what should be: requests to grant, engines to expand or shrink, promises
to take back. It is made on the present state with everything in flight as part of it (`Gpu.tenant`), so that
planning again at once gives an empty plan. Two passes:

1. `core.queueing`: non-rollout requests, in order of `demand.due`, their whole mapping or nothing.
2. `core.rollouts`: engines for everyone with rollout demand, on what the first pass left.

A plan looks at the region around what changed (`core.regions`), and at the regions of whoever lost an engine there;
`dirty=None` looks at everything.
"""

from collections.abc import Collection, Iterable

from core.demand import demand
from core.draft import Draft, Plan
from core.ledger import Ledger, Phase, PipelineBook
from core.queueing import place_requests
from core.regions import GpuClass, Regions
from core.rollouts import share_rollouts

__all__ = ["Plan", "plan"]


def plan(
    ledger: Ledger, regions: Regions, dirty: Iterable[PipelineBook] | None = None, gpus: Collection[int] = ()
) -> Plan:
    """One planning decision. `dirty`, `gpus`: whose wishes and which GPUs changed since the last one."""
    draft = Draft(ledger)
    if ledger.waiting:
        near = regions.around((), [gpu for request in ledger.waiting for gpu in request.gpus])
        place_requests(draft, _demanders(ledger, near))
    classes = regions.everywhere if dirty is None else regions.around([*dirty, *draft.touched], gpus)
    share_rollouts(draft, _demanders(ledger, classes), classes, regions.layout_of)
    while dirty is not None and draft.touched:  # a donor may find something instead where this plan has not looked yet
        wider = regions.around([*draft.touched], [cls.gpus[0] for cls in classes])
        if len(wider) == len(classes):
            break
        classes = wider
        share_rollouts(draft, _demanders(ledger, classes), classes, regions.layout_of)
    return draft.plan


def _demanders(ledger: Ledger, classes: list[GpuClass]) -> list[PipelineBook]:
    """Initialised pipelines with demand that can use some GPU of these classes, by order of registration."""
    policy = ledger.policy
    found = {book.number: book for cls in classes for book in cls.books}
    return [
        book
        for _, book in sorted(found.items())
        if book.phase is Phase.READY and demand(book, policy) > 0
    ]
