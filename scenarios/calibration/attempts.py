"""When each attempt at a trajectory began. No log says so; it follows from what the gateway does (`core.gateway`).

1. An engine's slots fill when its gate opens and whenever an attempt ends there; trajectories start in order, those
   cut off before fresh ones, on the engine with the least in flight. So an attempt's time is free of queueing.
2. What is in flight when an engine has been emptied, or died, was cut off, and waits again.
3. What contradicts this is believed: a trajectory that comes from elsewhere is taken from where it was, and not
   measured.
4. The first requests of a pipeline wait for kernels to be compiled, on every engine that begins before they are there.
   That is a cost of its own, if the first answer took more than `COMPILING` times as long as it ever did later.
"""

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from core import actions, events
from core.config import Job
from core.model import BatchKind, Partial

COMPILING = 2.0
OPENINGS_LEAST = 3
"""So many later openings make a comparison."""


class _Flight(NamedTuple):
    batch: int
    trajectory: int
    started: int


class _Engine:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.open = False
        self.version = -1
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.life = 0
        self.opened = -1
        """When it was opened, until its first answer."""


class _Batch:
    def __init__(self, event: events.BatchOpened) -> None:
        self.number = event.batch
        self.kind = event.kind
        self.target = event.target
        self.delivered = 0
        self.size = event.target
        """Trajectories numbered so far; those dropped are replaced under new numbers."""
        self.fresh = deque(range(event.target))
        self.again: deque[int] = deque()

    @property
    def waits(self) -> bool:
        return bool(self.again or self.fresh)


class _Ended(NamedTuple):
    batch: int
    engine: tuple[int, int]
    """Rank, and which process of it."""
    started: int
    took: int


class _Opening(NamedTuple):
    engine: tuple[int, int]
    at: int
    answered_after: int


class Attempts:
    """Follows one pipeline's gateway through a log. `durations` and `warmups` are what came of it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._slots = job.costs.engine_slots
        self._engines: dict[int, _Engine] = {}
        self._batches: list[_Batch] = []
        self._latest = -1
        self._being_trained = 0
        self._held_back = job.dispatch_after is not None
        self._gates: dict[int, actions.EngineAction] = {}
        self._so_far: dict[tuple[int, int], int] = {}
        """ns that earlier attempts at a trajectory took, if those are resumed."""
        self._ended: list[_Ended] = []
        self._openings: list[_Opening] = []
        self.unexplained = 0

    # --- what came of it -----------------------------------------------------------------------------------

    def warmups(self) -> list[tuple[str, int]]:
        """What each process that found no kernels took to compile them (ns), by its name."""
        return [(f"{rank}/{life}", took) for (rank, life), (_, took) in self._compiled().items()]

    def durations(self) -> Iterator[tuple[int, int]]:
        """(batch, ns) of every trajectory that was followed through, without the compiling it waited for; those of a
        batch in the order in which they began."""
        compiled = self._compiled()
        for ended in sorted(self._ended, key=lambda ended: (ended.batch, ended.started)):
            began, took = compiled.get(ended.engine, (0, 0))
            waited = max(0, began + took - max(began, ended.started)) if took else 0
            yield ended.batch, max(1, ended.took - waited)

    def _compiled(self) -> dict[tuple[int, int], tuple[int, int]]:
        """When each process that found no kernels was first opened, and what it took to compile them (ns)."""
        first: dict[tuple[int, int], _Opening] = {}
        later: list[int] = []
        for opening in sorted(self._openings, key=lambda opening: opening.at):
            if opening.engine in first:
                later.append(opening.answered_after)
            else:
                first[opening.engine] = opening
        if len(later) < OPENINGS_LEAST:
            return {}
        usual, most = round(median(later)), max(later)
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for engine, at, after in first.values():
            if all(at < began + took for began, took in found.values()) and after > COMPILING * most:
                found[engine] = at, after - usual
        return found

    # --- the log ---------------------------------------------------------------------------------------------

    def hear(self, now: int, item: Any) -> None:
        if isinstance(item, actions.Note):
            self._noted(now, item)
        elif isinstance(item, events.ActionDone | events.ActionFailed | events.ActionUnknown):
            self._outcome(now, item)
        elif getattr(item, "pipeline", "") == self._job.spec.id:
            self._own(now, item)

    def _own(self, now: int, item: Any) -> None:
        match item:
            case events.TrajectoryCompleted():
                self._completed(now, item)
                return
            case actions.EngineAction():
                self._ordered(item)
                return
            case events.EngineDied():
                self._emptied(now, self._engine(item.dp_rank), died=True)
            case events.BatchOpened():
                self._batches.append(_Batch(item))
            case events.DemandChanged():
                self._changed(item)
            case events.BatchClosed():
                self._closed(item)
            case events.BatchTaken():
                self._being_trained = 1
            case events.WeightsPublished():
                self._latest, self._being_trained = item.version, 0
            case _:
                return
        self._dispatch(now)

    def _noted(self, now: int, note: actions.Note) -> None:
        waited = self._job.dispatch_after
        if waited is not None and (note.kind, note.pipeline) == (waited.event, waited.pipeline):
            self._held_back = False
            self._dispatch(now)

    def _ordered(self, action: actions.EngineAction) -> None:
        """The gate closes before the engine is emptied; what drains may still come."""
        self._gates[action.action] = action
        keeps = isinstance(action, actions.SyncEngine) and action.emptying is actions.Emptying.KEEP
        if not keeps and not isinstance(action, actions.WakeEngine | actions.OpenGate):
            self._engine(action.dp_rank).open = False

    def _outcome(self, now: int, outcome: events.ActionDone | events.ActionFailed | events.ActionUnknown) -> None:
        action = self._gates.pop(outcome.action, None)
        if action is None:
            return
        engine = self._engine(action.dp_rank)
        if isinstance(action, actions.OpenGate):
            if isinstance(outcome, events.ActionDone):
                engine.open, engine.version, engine.opened = True, action.version, now
        elif not engine.open:
            self._emptied(now, engine, died=isinstance(action, actions.KillEngine))
        self._dispatch(now)

    def _emptied(self, now: int, engine: _Engine, *, died: bool) -> None:
        engine.open = False
        resumed = self._job.spec.partial is Partial.RESUME and not died
        for key, flight in engine.flights.items():
            batch = self._batch(flight.batch)
            if batch is not None:
                batch.again.append(flight.trajectory)
            if resumed:
                self._so_far[key] = self._so_far.get(key, 0) + now - flight.started
        engine.flights.clear()
        if died:
            engine.life += 1

    def _completed(self, now: int, item: events.TrajectoryCompleted) -> None:
        now -= self._job.reward_s
        engine = self._engine(item.dp_rank)
        key = item.batch, item.trajectory
        batch = self._batch(item.batch)
        if batch is not None:
            batch.delivered = item.delivered
        flight = engine.flights.pop(key, None)
        if flight is None:
            self.unexplained += 1
            self._forget(key, batch)
        else:
            process = engine.rank, engine.life
            took = now - flight.started + self._so_far.pop(key, 0)
            self._ended.append(_Ended(item.batch, process, flight.started, took))
            if engine.opened >= 0:
                self._openings.append(_Opening(process, engine.opened, now - flight.started))
                engine.opened = -1
        self._dispatch(now)

    def _forget(self, key: tuple[int, int], batch: _Batch | None) -> None:
        """It was over elsewhere than was thought."""
        for engine in self._engines.values():
            engine.flights.pop(key, None)
        for waiting in (batch.fresh, batch.again) if batch is not None else ():
            if key[1] in waiting:
                waiting.remove(key[1])

    def _changed(self, item: events.DemandChanged) -> None:
        batch = self._batch(item.batch)
        if batch is None:
            return
        dropped = max(0, batch.delivered - item.delivered)
        batch.fresh.extend(range(batch.size, batch.size + dropped))
        batch.size += dropped
        batch.target, batch.delivered = item.target, item.delivered

    def _closed(self, item: events.BatchClosed) -> None:
        self._batches = [batch for batch in self._batches if batch.number != item.batch]
        for engine in self._engines.values():
            engine.flights = {key: flight for key, flight in engine.flights.items() if key[0] != item.batch}

    # --- the gateway -------------------------------------------------------------------------------------------

    def _dispatch(self, now: int) -> None:
        while not self._held_back and (found := self._next()) is not None:
            batch, engine = found
            trajectory = (batch.again or batch.fresh).popleft()
            engine.flights[batch.number, trajectory] = _Flight(batch.number, trajectory, now)

    def _next(self) -> tuple[_Batch, _Engine] | None:
        oldest = self._latest + self._being_trained - self._job.spec.staleness
        for batch in (batch for batch in self._batches if batch.kind is BatchKind.TRAIN):
            engine = self._least_loaded(oldest) if batch.waits else None
            if engine is not None:
                return batch, engine
            oldest += 1
        for batch in (batch for batch in self._batches if batch.kind is BatchKind.EVAL):
            engine = self._least_loaded(self._latest - self._job.spec.staleness) if batch.waits else None
            if engine is not None:
                return batch, engine
        return None

    def _least_loaded(self, oldest: int) -> _Engine | None:
        fit = [e for e in self._engines.values() if e.open and e.version >= oldest and len(e.flights) < self._slots]
        return min(fit, key=lambda engine: (len(engine.flights), engine.rank), default=None)

    def _engine(self, rank: int) -> _Engine:
        return self._engines.setdefault(rank, _Engine(rank))

    def _batch(self, number: int) -> _Batch | None:
        return next((batch for batch in self._batches if batch.number == number), None)
