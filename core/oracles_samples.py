"""S5 and S6: every trajectory ends exactly once, and none that is trained is too stale.

S5  A trajectory is accepted at most once, and then either trained or dropped; `delivered` counts what was accepted: up
    by one with each, never beyond the target, down only by `DemandChanged`. A batch is trained at most once.
S6  The staleness of a trained trajectory is the trainer's version minus its oldest segment's, and at most the bound.

Completions travel as client messages and may be doubled, late, or lost for good (the state resent after a loss covers
them); `BatchTaken` and `TrajectoryDropped` do not travel. So a completion may show up after the end of its trajectory,
and once a pipeline had to resend its state, or was lost before it could, the batches open then are checked only as far
as they were seen.

A batch's book is kept until it was taken and closed, and a few more batches came after it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core import actions, events

if TYPE_CHECKING:
    from core.monitor import Monitor

BOOKS_KEPT = 8
"""Closed batches of a pipeline that late messages may still speak of, beyond its staleness bound."""


class Book:
    """One batch: what was accepted, what came of it."""

    __slots__ = ("accepted", "closed", "dropped", "gaps", "taken", "taken_early")

    def __init__(self) -> None:
        self.accepted: dict[int, tuple[int, int]] = {}
        """Trajectory -> (attempt, oldest version), until it ends."""
        self.dropped: dict[int, int | None] = {}
        """Trajectory -> the attempt that was accepted before; None: none was seen."""
        self.taken: events.BatchTaken | None = None
        self.taken_early: dict[int, int] = {}
        """Trained, but not yet seen accepted: trajectory -> its staleness as told."""
        self.closed = False
        self.gaps = False
        """Completions may have been lost: what was not seen proves nothing."""


class SampleOracles:
    def __init__(self, monitor: "Monitor") -> None:
        self._observed = monitor.observed
        self._breach = monitor.breach
        self._concerns = monitor.concerns
        self._books: dict[str, dict[int, Book]] = {}
        self._trained: dict[str, dict[int, None]] = {}
        self._failed: dict[str, None] = {}
        self.checks: dict[type, Callable[[Any], None]] = {
            events.TrajectoryCompleted: self._completed,
            events.TrajectoryDropped: self._dropped,
            events.BatchTaken: self._batch_taken,
            events.BatchOpened: self._opened,
            events.BatchClosed: self._closed,
            events.StateResent: self._resent,
            events.DemandChanged: self._demand_changed,
            events.ClientLost: self._lost,
            actions.Note: self._noted,
        }

    def finish(self) -> None:
        """The run ended by itself: what was taken must add up."""
        for pipeline, books in self._books.items():
            for number, book in books.items() if self._concerns(pipeline) else ():
                self._settle(pipeline, number, book)

    # --- accepted --------------------------------------------------------------------------------------

    def _completed(self, event: events.TrajectoryCompleted) -> None:
        if self._observed.applies(event):
            self._count(event)
        book = self._books.get(event.pipeline, {}).get(event.batch) or self._new_book(event.pipeline, event.batch)
        if book is None:
            return
        trajectory, attempt = event.trajectory, event.attempt
        accepted = book.accepted.get(trajectory)
        if accepted is not None:
            if accepted[0] != attempt:  # the same attempt is the same message, delivered twice
                self._breach("S5", f"{_sample(event)} is accepted twice, as attempts {accepted[0]} and {attempt}")
            return
        if trajectory in book.dropped:
            if book.dropped[trajectory] not in (None, attempt):
                self._breach("S5", f"{_sample(event)} is accepted again after it was dropped")
            book.dropped[trajectory] = attempt
            return
        oldest = event.segments[0][0] if event.segments else 0
        if book.taken is not None:
            self._late(event, book, oldest)
            return
        book.accepted[trajectory] = (attempt, oldest)

    def _late(self, event: events.TrajectoryCompleted, book: Book, oldest: int) -> None:
        """The message was under way when its batch was taken."""
        assert book.taken is not None
        staleness = book.taken_early.pop(event.trajectory, None)
        if staleness is not None:
            self._stale(book.taken, event.trajectory, staleness, oldest)
        elif event.trajectory not in book.taken.trajectories:
            book.accepted[event.trajectory] = (event.attempt, oldest)

    def _count(self, event: events.TrajectoryCompleted) -> None:
        batch = self._observed.pipelines[event.pipeline].batches.get(event.batch)
        if batch is None:
            self._breach("S5", f"{_sample(event)} is accepted, but the batch is not open")
        elif event.delivered != batch.delivered + 1 or event.delivered > batch.target:
            was = f"{batch.delivered} of {batch.target} were before"
            self._breach("S5", f"{_sample(event)} makes {event.delivered} delivered; {was}")

    def _demand_changed(self, event: events.DemandChanged) -> None:
        if not self._observed.applies(event):
            return
        batch = self._observed.pipelines[event.pipeline].batches.get(event.batch)
        if batch is not None and (event.delivered > batch.delivered or event.target > batch.target):
            change = f"{batch.delivered} of {batch.target} become {event.delivered} of {event.target}"
            self._breach("S5", f"batch {event.batch} of {event.pipeline}: {change} by dropping")

    # --- ended -----------------------------------------------------------------------------------------

    def _dropped(self, event: events.TrajectoryDropped) -> None:
        book = self._book(event.pipeline, event.batch)
        if book is None:
            return
        if event.trajectory in book.dropped:
            self._breach("S5", f"{_sample(event)} is dropped twice")
        elif book.taken is not None and event.trajectory in book.taken.trajectories:
            self._breach("S5", f"{_sample(event)} is dropped and was trained")
        accepted = book.accepted.pop(event.trajectory, None)
        book.dropped[event.trajectory] = accepted[0] if accepted else None

    def _batch_taken(self, event: events.BatchTaken) -> None:
        if event.batch in self._trained.setdefault(event.pipeline, {}):
            self._breach("S5", f"batch {event.batch} of {event.pipeline} is trained twice")
            return
        self._trained[event.pipeline][event.batch] = None
        book = self._book(event.pipeline, event.batch)
        if book is None:
            return
        book.taken = event
        if len(dict.fromkeys(event.trajectories)) != len(event.trajectories):
            self._breach("S5", f"batch {event.batch} of {event.pipeline} contains a trajectory twice")
        for trajectory, staleness in zip(event.trajectories, event.staleness, strict=True):
            self._train(event, book, trajectory, staleness)

    def _train(self, event: events.BatchTaken, book: Book, trajectory: int, staleness: int) -> None:
        if trajectory in book.dropped:
            what = f"trajectory {trajectory} of batch {event.batch} of {event.pipeline}"
            self._breach("S5", f"{what} is trained and was dropped")
        accepted = book.accepted.pop(trajectory, None)
        if accepted is None:
            book.taken_early[trajectory] = staleness
        self._stale(event, trajectory, staleness, accepted[1] if accepted else event.version - staleness)

    def _stale(self, event: events.BatchTaken, trajectory: int, told: int, oldest: int) -> None:
        bound = self._bound(event.pipeline)
        what = f"trajectory {trajectory} of batch {event.batch} of {event.pipeline}"
        if told != event.version - oldest:
            right = f"version {event.version} - {oldest}"
            self._breach("S6", f"{what} is trained as {told} versions behind; it is {right}")
        if max(told, event.version - oldest) > bound:
            self._breach("S6", f"{what} is trained {max(told, event.version - oldest)} versions behind; bound {bound}")

    # --- books -----------------------------------------------------------------------------------------

    def _opened(self, event: events.BatchOpened) -> None:
        self._book(event.pipeline, event.batch)

    def _closed(self, event: events.BatchClosed) -> None:
        if (book := self._books.get(event.pipeline, {}).get(event.batch)) is not None:
            book.closed = True
            self._retire(event.pipeline)

    def _lost(self, event: events.ClientLost) -> None:
        """What it had not said again by then is lost for good."""
        for book in self._books.get(event.pipeline, {}).values():
            book.gaps = True

    def _noted(self, note: actions.Note) -> None:
        if note.kind == "failed":
            self._failed[note.pipeline] = None

    def _resent(self, event: events.StateResent) -> None:
        for number, book in self._books.setdefault(event.pipeline, {}).items():
            book.gaps = True
            book.closed = book.closed or number <= event.state.opened_through
        for batch in event.state.batches:
            if (open_book := self._book(event.pipeline, batch.batch)) is not None:
                open_book.gaps, open_book.closed = True, False
        self._retire(event.pipeline)

    def _book(self, pipeline: str, batch: int) -> Book | None:
        return self._books.get(pipeline, {}).get(batch) or self._new_book(pipeline, batch)

    def _new_book(self, pipeline: str, batch: int) -> Book | None:
        """A book for a batch not heard of before; None for one whose book was put away."""
        books = self._books.setdefault(pipeline, {})
        if batch in self._trained.get(pipeline, {}) and books and batch < next(iter(books)):
            return None
        books[batch] = Book()
        return books[batch]

    def _retire(self, pipeline: str) -> None:
        books = self._books[pipeline]
        closed = [number for number, book in books.items() if book.closed]
        for number in closed[: max(0, len(closed) - BOOKS_KEPT - self._bound(pipeline))]:
            self._settle(pipeline, number, books.pop(number))

    def _settle(self, pipeline: str, number: int, book: Book) -> None:
        """Nothing more will be heard of this batch: all that was accepted must have ended, and the other way round."""
        if book.taken is None or book.gaps:
            return
        if book.taken_early and pipeline not in self._failed:
            which = f"trajectories {_some(book.taken_early)} of batch {number} of {pipeline}"
            self._breach("S5", f"{which} were trained and never accepted")
        if book.accepted:
            which = f"trajectories {_some(book.accepted)} of batch {number} of {pipeline}"
            self._breach("S5", f"{which} were accepted and neither trained nor dropped")

    def _bound(self, pipeline: str) -> int:
        known = self._observed.pipelines.get(pipeline)
        return known.spec.staleness if known else 0


def _sample(event: events.TrajectoryCompleted | events.TrajectoryDropped) -> str:
    return f"trajectory {event.trajectory} of batch {event.batch} of {event.pipeline}"


def _some(trajectories: dict[int, Any]) -> str:
    shown = ", ".join(map(str, list(trajectories)[:5]))
    return shown if len(trajectories) <= 5 else f"{shown} and {len(trajectories) - 5} more"
