"""What a pipeline says next: the loop of `core.pipeline`, message by message, as a small machine that never ends.

    ask for initialisation - publish - open the first batches - release
    then for ever: close the full batch - ask for training - publish - open the next batch - release
"""

from core import events
from core.ledger import Phase, PipelineBook
from core.model import DemandPolicy, Priority, Role
from core.verify.node import INITIALISER, TRAINER, Node
from core.verify.world import Start, World

(ASK_INIT, INIT, FIRST_OPEN, FIRST_SIGNAL, INIT_RELEASE, ROLLOUT, ASK, TRAIN, OPEN, SIGNAL, RELEASE, GONE) = range(12)

SAYS = {
    ASK_INIT: "asks to be initialised", INIT: "is initialised and publishes its first weights",
    FIRST_OPEN: "opens a rollout batch", FIRST_SIGNAL: "signals that it wants to roll out",
    INIT_RELEASE: "releases all its GPUs", ROLLOUT: "takes its full batch, which is closed",
    ASK: "asks for its training GPUs", TRAIN: "has trained and publishes its weights",
    OPEN: "opens its next rollout batch", SIGNAL: "signals that it wants to roll out",
    RELEASE: "releases its training GPUs", GONE: "has heard that it failed, and leaves",
}  # fmt: skip
"""What a pipeline at each place says, in words."""


def next_word(world: World, node: Node, number: int) -> int | None:
    """The place whose message comes next; None: the client waits."""
    at, book = node.at[number], node.books[number]
    if at == GONE:
        return None
    if not book.alive:
        return GONE
    if at == ROLLOUT:
        return at if _full(book) else None
    if at in (INIT, TRAIN):
        return at if book.leases else None
    if at == ASK_INIT and world.start is Start.INCIDENT and number and not node.books[number - 1].allocation:
        return None
    return at


def _full(book: PipelineBook) -> bool:
    return bool(book.batches) and not book.batches[min(book.batches)].demand


def say(world: World, node: Node, number: int, word: int) -> events.Message:
    """The message, with the client moved on."""
    book = node.books[number]
    who = {"pipeline": book.id, "seq": book.seq + 1}
    node.at[number] = _after(world, book, word)
    match word:
        case 0 | 6:  # ASK_INIT, ASK
            priority = Priority.INITIALIZATION if word == ASK_INIT else Priority.ACTOR_TRAINING
            request = book.requests_through + 1
            return events.LeaseRequested(**who, request=request, role=Role.ACTOR_TRAIN, priority=priority)
        case 1 | 7:  # INIT, TRAIN
            return events.WeightsPublished(**who, version=book.published + 1)
        case 2 | 8:  # FIRST_OPEN, OPEN
            return events.BatchOpened(**who, batch=book.opened_through + 1, target=world.target)
        case 3 | 9:  # FIRST_SIGNAL, SIGNAL
            return events.RolloutSignalled(**who, batch=book.opened_through)
        case 4 | 10:  # INIT_RELEASE, RELEASE
            node.leave(number, TRAINER | INITIALISER)
            return events.LeaseReleased(**who, epoch=min(book.leases))
        case 5:  # ROLLOUT
            return events.BatchClosed(**who, batch=min(book.batches), reason="taken")
    return events.PipelineLeft(**who, error=book.reason)


def _after(world: World, book: PipelineBook, word: int) -> int:
    """Where the client is once it has said this. Nobody listens to signals under `batch`, so none are sent."""
    silent = world.demand is DemandPolicy.BATCH
    if word == FIRST_SIGNAL or (word == FIRST_OPEN and silent):
        opened = len(book.batches) + (word == FIRST_OPEN)
        return FIRST_OPEN if opened <= world.staleness else INIT_RELEASE
    if word == OPEN and silent:
        return RELEASE
    return ROLLOUT if word == RELEASE else min(word + 1, GONE)


def completes(book: PipelineBook, dp_rank: int) -> events.TrajectoryCompleted:
    """A trajectory of the oldest batch that wants one."""
    batch = book.batches[min(n for n, batch in book.batches.items() if batch.demand)]
    return events.TrajectoryCompleted(
        pipeline=book.id, seq=book.seq + 1, batch=batch.batch, delivered=batch.delivered + 1,
        trajectory=batch.delivered, attempt=0, dp_rank=dp_rank,
    )  # fmt: skip


def waits_for_rollout(node: Node, number: int) -> bool:
    """It has been initialised and wants trajectories: the oracles' measure, whatever the policy."""
    book = node.books[number]
    return book.phase is Phase.READY and book.open_demand > 0


def waits_for_lease(node: Node, number: int) -> bool:
    """It has asked and was not answered, whether the scheduler remembers that or not."""
    book = node.books[number]
    return node.at[number] in (INIT, TRAIN) and book.alive and not book.leases
