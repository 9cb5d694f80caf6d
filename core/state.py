"""The scheduler's state and the three things every handler does with it: ask, tell, and mark as changed.

`State` is everything `decide` knows: the ledger, the actions in flight, the timers, and what has changed since the last
plan. It is plain data; a state rebuilt by replaying a log is the same state.
"""

from operator import attrgetter
from typing import Any, NamedTuple

from core import actions
from core.actions import Action, Note
from core.demand import due, wants_more
from core.errors import RequestError
from core.ledger import Engine, EngineState, Lease, Ledger, Phase, PipelineBook
from core.model import Cluster, DemandPolicy, Priority
from core.regions import Regions


class Clearing(NamedTuple):
    """What an `AwaitMemory` is about: a GPU, whose it was, and what released it (None: a last look before a grant,
    or the end of a whole pipeline)."""

    gpu: int
    book: PipelineBook
    source: Engine | Lease | None


_DUE = attrgetter("due")

Subject = Engine | Lease | Clearing | PipelineBook | None


class Reply:
    """The answer to a client message: acknowledged up to `seq`, with an error if that message was refused."""

    __slots__ = ("pipeline", "life", "seq", "error")

    def __init__(self, pipeline: str, life: int, seq: int, error: RequestError | None = None) -> None:
        self.pipeline = pipeline
        self.life = life
        self.seq = seq
        self.error = error


class Decision:
    """What one event led to."""

    __slots__ = ("actions", "notes", "replies")

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.notes: list[Note] = []
        self.replies: list[Reply] = []


class State:
    """Everything the scheduler knows. Changed by `core.scheduler.decide` alone."""

    def __init__(self, cluster: Cluster, policy: DemandPolicy) -> None:
        self.ledger = Ledger(cluster, policy)
        self.regions = Regions(self.ledger)
        self.operations: dict[int, tuple[Action, Subject]] = {}
        """Actions in flight by number, each with what it is about."""
        self.timers: dict[str, int] = {}
        """Running timers: name -> generation."""
        self.review_at = -1
        """When the running review timer rings; -1: none runs."""
        self.next_action = 1
        self.next_epoch = 1
        self.next_generation = 1
        self.dirty: dict[PipelineBook, None] = {}
        """Pipelines whose wish or engines changed since the last plan."""
        self.dirty_gpus: dict[int, None] = {}
        self.replan = False
        self.unmet: dict[PipelineBook, None] = {}
        """Pipelines that wait for somebody's turn or residence to end; looked at again when `review` rings."""
        self.failing: list[tuple[PipelineBook, bool]] = []
        """Pipelines that failed while the present event was handled, and whether their clients are to be told."""
        self.out = Decision()

    def serves(self, pipeline: str, dp_rank: int, epoch: int) -> bool:
        """Whether this engine's gate is open under this lease."""
        book = self.ledger.books.get(pipeline)
        if book is None or not 0 <= dp_rank < len(book.engines):
            return False
        engine = book.engines[dp_rank]
        return engine.routable and engine.epoch == epoch and not engine.doomed

    # --- ask -------------------------------------------------------------------------------------------

    def ask(self, kind: type[Action], subject: Subject, limit: int, **fields: Any) -> int:
        """Issue an action; its one outcome will come back under the number returned."""
        number = self.next_action
        self.next_action += 1
        action = kind(action=number, limit=limit, **fields)
        self.operations[number] = (action, subject)
        self.out.actions.append(action)
        return number

    def start_timer(self, name: str, at: int) -> None:
        self.cancel_timer(name)
        self.timers[name] = self.next_generation
        self.next_generation += 1
        number = self.next_action
        self.next_action += 1
        self.out.actions.append(actions.StartTimer(action=number, timer=name, generation=self.timers[name], at=at))

    def cancel_timer(self, name: str) -> None:
        generation = self.timers.pop(name, None)
        if generation is not None:
            number = self.next_action
            self.next_action += 1
            self.out.actions.append(actions.CancelTimer(action=number, timer=name, generation=generation))

    def epoch(self) -> int:
        self.next_epoch += 1
        return self.next_epoch - 1

    # --- tell ------------------------------------------------------------------------------------------

    def note(self, kind: str, text: str, pipeline: str = "", dp_rank: int = -1, gpus: tuple[int, ...] = ()) -> None:
        self.out.notes.append(Note(kind=kind, text=text, pipeline=pipeline, dp_rank=dp_rank, gpus=gpus))

    # --- mark ------------------------------------------------------------------------------------------

    def touch(self, book: PipelineBook | None = None, gpus: tuple[int, ...] = ()) -> None:
        """Something changed that may change the assignment."""
        self.replan = True
        if book is not None:
            self.dirty[book] = None
        for gpu in gpus:
            self.dirty_gpus[gpu] = None

    def awaited(self, book: PipelineBook) -> bool:
        """Whether anybody else waits where this pipeline rolls out until its turn is over: for an engine, or for a
        mapping that it may keep them from."""
        mine = book.rank_at.keys()
        return any(
            other is not book and not mine.isdisjoint(other.rank_at) for other in self.unmet
        ) or self.shields(book)

    def shields(self, book: PipelineBook) -> bool:
        """Whether the hunger of this pipeline keeps a request waiting, or may."""
        waiting = self.ledger.waiting
        if book.hungry_since < 0 or not waiting:
            return False
        rank = due(book.hungry_since, Priority.GENERATION)  # `outranks`, once for all of them: this is the hot path
        if rank >= max(map(_DUE, waiting)):
            return False
        mine = book.rank_at.keys()
        return any(rank < request.due and not mine.isdisjoint(request.gpus) for request in waiting)

    def coveted(self, book: PipelineBook) -> bool:
        """Whether anybody else could use one engine more where this pipeline rolls out. If not, it may need less and
        less, and still nothing changes hands."""
        if self.regions.generation != self.ledger.mapping_generation:
            return True
        policy = self.ledger.policy
        return any(
            other is not book and wants_more(other, policy)
            for cls in self.regions.classes_of[book]
            for other in cls.books
        )

    def remap(self) -> None:
        """A pipeline or engine came or went for good: the map of who meets whom must be drawn again."""
        self.ledger.mapping_generation += 1
        self.replan = True

    def fail(self, book: PipelineBook, reason: str, tell: bool = True) -> None:
        """The pipeline has failed. What it has is taken back before the present event is done with."""
        if book.alive:
            book.phase = Phase.FAILED
            book.reason = reason
            self.failing.append((book, tell))
            self.note("failed", reason, book.id)

    def set_engine(self, engine: Engine, to: EngineState) -> None:
        engine.state = to
        engine.since = self.ledger.now
        engine.routable = False
