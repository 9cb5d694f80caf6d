"""The moment and the history that the live view and the reports show: the accounting, with what people need beside it.

1. It only listens, and counts nothing itself: figures are `core.accounting`'s, a GPU's states `core.timeline`'s.
2. Its memory is bounded: beyond `ROWS` GPUs no history is kept, and a long history gets coarser.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from core import events
from core.accounting import Accounting
from core.config import Scenario
from core.timeline import Segment

ROWS = 64
"""GPUs with a timeline of their own; more rows than that nobody reads."""
SEGMENTS = 4096
"""Stretches remembered for one GPU; past that, neighbours are merged in pairs."""


DELIVERIES = 32
"""Ways of weights told apart; reasons why one failed may have many wordings."""


class Delivery(NamedTuple):
    """One way that weights came."""

    transport: str
    meant: str
    """The way that was meant to be taken."""
    fallback: str
    """Why another was; empty if it was that one."""


class Board(Accounting):
    """A listener: call it with every entry of a run, in order."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.scenario = scenario
        self.phases: dict[str, str] = {}
        """The trainer phase that each pipeline is in; none: no entry."""
        self.ended: dict[str, str | None] = {}
        """The pipelines that are over, and the error of each."""
        self._notes: dict[type, Callable[[Any], None]] = {
            events.PhaseStarted: self._phase_started,
            events.PhaseEnded: self._phase_ended,
            events.PipelineEnded: self._pipeline_ended,
            events.WeightsLoaded: self._weights_loaded,
        }
        self._own = {job.spec.id: None for job in scenario.jobs}
        self.deliveries: dict[Delivery, list[int]] = {}
        """How weights came to engines: durations (ns) by way. Real workers only."""
        self.has_rows = scenario.cluster.gpus <= ROWS

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        super().__call__(i, t_ns, cause, item)
        note = self._notes.get(type(item))
        if note is not None:
            note(item)

    def _phase_started(self, event: events.PhaseStarted) -> None:
        self.phases[event.pipeline] = event.phase

    def _phase_ended(self, event: events.PhaseEnded) -> None:
        self.phases.pop(event.pipeline, None)

    def _pipeline_ended(self, event: events.PipelineEnded) -> None:
        self.ended[event.pipeline] = event.error

    def _weights_loaded(self, event: events.WeightsLoaded) -> None:
        if event.pipeline not in self._own:
            return  # of another run that shares the scheduler
        fallback = event.why if event.transport != event.meant else ""
        way = Delivery(event.transport, event.meant, fallback)
        if way not in self.deliveries and len(self.deliveries) >= DELIVERIES:
            way = Delivery(event.transport, event.meant, "other reasons" if fallback else "")
        self.deliveries.setdefault(way, []).append(event.took)

    @property
    def now(self) -> int:
        return self.observed.now

    def steps_done(self, pipeline: str) -> int:
        account = self.accounts.get(pipeline)
        return account.steps_done if account else 0

    def demand(self, pipeline: str) -> int:
        """Trajectories that the pipeline's open batches still want."""
        known = self.observed.pipelines.get(pipeline)
        return known.demand if known else 0

    def open_batch(self, pipeline: str) -> tuple[int, int]:
        """(delivered, target) of the pipeline's oldest open batch; (0, 0) if none is open."""
        known = self.observed.pipelines.get(pipeline)
        if not known or not known.batches:
            return 0, 0
        batch = known.batches[min(known.batches)]
        return batch.delivered, batch.target

    def moment(self) -> list[tuple[str, str]]:
        """(state, pipeline) of each GPU now."""
        return [state for state, _ in self._timeline._current]

    def history(self, end_ns: int | None = None) -> list[list[Segment]]:
        """Each GPU's stretches up to `end_ns` (now), oldest first, no gaps; empty if there are too many GPUs."""
        self.finish(end_ns)
        return self.segments if self.has_rows else []

    def _segment(self, segment: Segment) -> None:
        super()._segment(segment)
        if self.has_rows:
            kept = self.segments[segment.gpu]
            kept.append(segment)
            if len(kept) > SEGMENTS:
                self.segments[segment.gpu] = coarser(kept)


def coarser(segments: list[Segment]) -> list[Segment]:
    """Half as many stretches: of each two neighbours, what the longer one was stands for both."""
    halved = []
    for first, second in zip(segments[::2], segments[1::2], strict=False):
        longer = max(first, second, key=lambda segment: segment.end - segment.start)
        halved.append(msgspec.structs.replace(longer, start=first.start, end=second.end))
    return halved + segments[len(segments) - len(segments) % 2 :]
