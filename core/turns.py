"""How long an engine may keep its GPUs against other rollouts, and against requests: residence and turns.

Residence protects an engine from other pipelines' rollouts, once it is routable, for the time its pipeline declared.
A *turn* is the residence of a pipeline's only engine. A turn that completed nothing was for nothing where a trajectory
that is cut off starts again from its prompt, and may have been elsewhere: with a short residence the engine is taken
the moment it is routable, before it resumed anything. So a turn lasts until one trajectory is completed (or
`limits.turn` is over). Nearly finished pipelines are spared for one more residence.

Who gave its engine up for somebody else's turn waits for one residence before it takes a turn itself. Otherwise one
newcomer where many turns are over would turn them all out at once: the first one's loser takes the next one's engine,
and so on.

A turn that completed nothing was a turn all the same: whoever had it stands last in line again. Otherwise two pipelines
that never complete anything (one whose trajectories are longer than a turn, one whose driver may not start them yet)
would be the hungriest for ever, and take turns with each other alone.

Nothing here protects against non-rollout requests, but hunger does: see `outranks`.
"""

from core.demand import due
from core.ledger import UP, Engine, PipelineBook
from core.model import Priority

NEARLY_FINISHED = 0.1
"""Share of the open batches still to come below which a donor is spared."""


def stay(book: PipelineBook) -> int:
    """How long (ns) its engines keep their GPUs against other rollouts, apart from a turn."""
    residence = book.spec.min_residence
    return 2 * residence if book.left_fraction < NEARLY_FINISHED else residence


def turn_end(engine: Engine, only: bool, stays: int | None = None) -> int | None:
    """The instant (ns) from which the engine may be given to another rollout; None: not before it was routable.

    `only`: the pipeline has no other engine to rely on, so this is its turn. `stays`: what `stay` says, where known.
    """
    if engine.routable_since < 0 or engine.state not in UP:
        return None
    book = engine.book
    if only and not engine.completed:
        return engine.routable_since + max(book.spec.min_residence, book.spec.limits.turn)
    return engine.routable_since + (stay(book) if stays is None else stays)


def rests_until(book: PipelineBook, gave_way_at: int) -> int:
    """The instant (ns) before which a pipeline may not take a turn that gave way to one at `gave_way_at` (-1: did not);
    later than that in any case."""
    return -1 if gave_way_at < 0 else gave_way_at + max(1, book.spec.min_residence)


def outranks(book: PipelineBook, request_due: int) -> bool:
    """Whether a pipeline has been hungry (demand, nothing completed) for so long that it comes before a request."""
    return book.hungry_since >= 0 and due(book.hungry_since, Priority.GENERATION) < request_due


def shielded_until(engine: Engine) -> int | None:
    """Until when the hunger of its pipeline may protect this engine from a request; None: no end known yet."""
    if engine.routable_since < 0 or engine.state not in UP:
        return None
    return engine.routable_since + engine.book.spec.limits.turn
