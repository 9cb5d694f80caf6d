"""What counts as rollout demand, under each of the three policies, and who waits since when.

Demand is state, not a signal: under `batch` it is read off the open rollout batches whenever it is needed. The
other two policies are the incident's, kept so that they can be compared: under `signal` a wish is an event that a
grant consumes, and between that grant and the first progress report nothing remembers that the pipeline wants
anything; `floor` remembers the grant itself and counts it as one trajectory.
"""

from core.bounds import AGEING_NS
from core.ledger import Phase, PipelineBook
from core.model import DemandPolicy, Priority


def demand(book: PipelineBook, policy: DemandPolicy) -> int:
    """Trajectories `book` still wants, as the policy sees it (0 while it is not initialised, or over)."""
    if book.releasing:
        return 0  # it has asked for its engines to be put to sleep, whatever is still open
    if policy is DemandPolicy.BATCH:
        return book.open_demand
    # A signal without an estimate is still a wish.
    wanted = max(1, book.open_demand) if book.signal else book.reported or 0
    return max(1, wanted) if policy is DemandPolicy.FLOOR and book.allocation else wanted


def wants_more(book: PipelineBook, policy: DemandPolicy) -> bool:
    """Whether one more engine than it has, or is promised, would have something to do."""
    return book.phase is Phase.READY and len(book.up) < min(demand(book, policy), book.usable)


def due(filed_at: int, priority: Priority) -> int:
    """Order of service of whoever waits (ns): lower is earlier.

    A step down in priority costs AGEING_NS of seniority, once and for all. So a request can be overtaken only by
    requests filed less than `priority * AGEING_NS` after it: ageing without ever re-sorting.
    """
    return filed_at + priority * AGEING_NS


def signal_arrived(book: PipelineBook, now: int) -> None:
    book.signal = True
    book.signals += 1
    book.signalled_at = now


def granted(book: PipelineBook, now: int) -> bool:
    """A rollout grant was decided. Returns whether it is the first of this wait (a signal is consumed)."""
    first = book.signal or not book.allocation
    if book.signal:
        book.signal = False
        book.consumed_at = now
    book.allocation = True
    return first


def progressed(book: PipelineBook) -> None:
    """A completed trajectory: the one thing that is a progress report."""
    book.reported = book.open_demand


def released(book: PipelineBook) -> None:
    """The pipeline itself gave its rollout allocation up (or is over)."""
    book.allocation = False
    book.signal = False
    book.reported = None


def feed(book: PipelineBook, policy: DemandPolicy, now: int, *, progress: bool = False) -> None:
    """Keep `demand_since` and `hungry_since` true after anything that changes demand or completes a trajectory."""
    if not book.open_demand:
        book.demand_since = -1
    elif book.demand_since < 0:
        book.demand_since = now
    wanted = demand(book, policy) if book.phase is Phase.READY else 0
    if not wanted:
        book.hungry_since = -1
    elif progress or book.hungry_since < 0:
        book.hungry_since = now
