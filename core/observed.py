"""What a log shows: who holds which GPU, what each engine is doing, who wants what. Rebuilt from entries alone.

1. It reads entries and nothing else: never the ledger, the planner or the scheduler. So it can be used to judge them.
2. It judges nothing itself. An entry that makes no sense is taken at its word; the oracles say that it was wrong.
3. A client message counts only if the rule of `core.events` lets it (the next `seq`, or a newer whole state), and is
   undone if the note that follows says it was rejected.
4. An entry costs what it names: nothing is ever scanned.

Here is what the clients say; `observed_holdings` has what is done, `observed_nouns` the nouns of both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from core import actions, events
from core.model import Cluster, PipelineSpec, Priority, Role
from core.observed_holdings import Holdings
from core.observed_nouns import Batch, Engine, Lease, Pipeline, Request, Watcher


class Observed(Holdings):
    """Everything the entries so far say. Changed by `apply` alone."""

    def __init__(self, cluster: Cluster, watcher: Watcher | None = None) -> None:
        super().__init__(cluster, watcher)
        self._undo: tuple[int, Callable[[], object]] | None = None
        """The last message that can be rejected: its entry, and how to take it back."""
        self.registrations = 0
        """How often somebody was registered, or that was taken back."""
        self._ended: dict[str, int] = {}
        """By name, the last client that was over before it was registered."""
        self._handlers |= {
            events.PipelineRegistered: self._registered,
            events.PipelineAdmitted: self._plain_message,
            events.LeaseRequested: self._lease_requested,
            events.RequestCancelled: self._request_cancelled,
            events.LeaseReleased: self._lease_released,
            events.ReleasedAndRequested: self._released_and_requested,
            events.BatchOpened: self._batch_opened,
            events.RolloutSignalled: self._plain_message,
            events.TrajectoryCompleted: self._trajectory_completed,
            events.DemandChanged: self._demand_changed,
            events.BatchClosed: self._batch_closed,
            events.WeightsPublished: self._weights_published,
            events.RolloutReleased: self._rollout_released,
            events.EngineSuspected: self._plain_message,
            events.PipelineLeft: self._left,
            events.StateResent: self._state_resent,
            events.ClientLost: self._end_life,
            actions.Note: self._note,
        }

    def apply(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        """Take one entry in, in order."""
        self.now = t_ns
        self.entry = i
        self._cause = cause
        handler = self._handlers.get(type(item))
        if handler is not None:
            handler(item)

    def applies(self, message: events.Message) -> bool:
        """Whether this message, not yet taken in, will count."""
        pipeline = self.speaker(message)
        return pipeline is not None and not pipeline.over and message.seq == pipeline.applied + 1

    # --- client messages -------------------------------------------------------------------------------

    def speaker(self, message: events.Message) -> Pipeline | None:
        """The pipeline, if it is this client of it that counts."""
        pipeline = self.pipelines.get(message.pipeline)
        return pipeline if pipeline is not None and pipeline.life == message.life else None

    def _accept(self, message: events.Message) -> Pipeline | None:
        pipeline = self.speaker(message)
        if pipeline is None or pipeline.over or message.seq != pipeline.applied + 1:
            return None
        pipeline.applied = message.seq
        return pipeline

    def _plain_message(self, message: events.Message) -> None:
        self._accept(message)

    def _registered(self, message: events.PipelineRegistered) -> None:
        known = self.pipelines.get(message.pipeline)
        if known is not None and known.life == message.life:
            if message.seq != known.applied + 1:
                return
            known.applied = message.seq
            if not known.over and known.spec == message.spec:
                return  # a retry
        elif message.life <= self._ended.get(message.pipeline, -1) or (
            known is not None and (message.life < known.life or not known.over)
        ):
            return  # too late, or too early
        if not self._possible(message.spec):
            return  # it will be rejected
        new = Pipeline(message.spec, message.life, message.seq)
        self._replace(known, new)
        self._undo = (self.entry, lambda: self._replace(new, known))

    def _possible(self, spec: PipelineSpec) -> bool:
        infer = spec.group(Role.ACTOR_INFER)
        known = all(0 <= gpu < len(self.gpus) for gpu in spec.union)
        return infer is not None and infer.tp > 0 and known

    def _replace(self, old: Pipeline | None, new: Pipeline | None) -> None:
        for engine in old.engines if old else ():
            for gpu in engine.gpus:
                self.gpus[gpu].engines.remove(engine)
        for engine in new.engines if new else ():
            for gpu in engine.gpus:
                self.gpus[gpu].engines.append(engine)
        if old is not None:
            del self.pipelines[old.id]
        if new is not None:
            self.pipelines[new.id] = new
        self.registrations += 1

    def _lease_requested(self, message: events.LeaseRequested) -> None:
        if (pipeline := self._accept(message)) is not None:
            request = self._file(pipeline, message.request, message.role, message.priority)
            self._undo = (self.entry, lambda: self._end_request(request))

    def _released_and_requested(self, message: events.ReleasedAndRequested) -> None:
        if (pipeline := self._accept(message)) is not None:
            lease = pipeline.leases.get(message.epoch)
            self._claim_lease(lease)
            request = self._file(pipeline, message.request, message.role, message.priority)
            self._undo = (self.entry, lambda: self._take_back(request, lease))

    def _take_back(self, request: Request, released: Lease | None) -> None:
        self._end_request(request)
        self._unclaim_lease(released)

    def _request_cancelled(self, message: events.RequestCancelled) -> None:
        if (pipeline := self._accept(message)) is not None:
            request = pipeline.requests.get(message.request)
            if request is not None:
                self._end_request(request)
            for lease in pipeline.leases.values():
                if lease.request == message.request:
                    self._claim_lease(lease, used=False)

    def _lease_released(self, message: events.LeaseReleased) -> None:
        if (pipeline := self._accept(message)) is not None:
            self._claim_lease(pipeline.leases.get(message.epoch))

    def _batch_opened(self, message: events.BatchOpened) -> None:
        if (pipeline := self._accept(message)) is not None:
            known = message.batch in pipeline.batches
            pipeline.batches.setdefault(message.batch, Batch(message.target))
            self._recount(pipeline)
            if not known:
                self._undo = (self.entry, lambda: self._close_batch(pipeline, message.batch))

    def _trajectory_completed(self, message: events.TrajectoryCompleted) -> None:
        if (pipeline := self._accept(message)) is not None:
            batch = pipeline.batches.get(message.batch)
            if batch is not None:
                self._undo = (self.entry, partial(self._set_batch, pipeline, batch, batch.target, batch.delivered))
                before = pipeline.demand
                pipeline.demand -= batch.demand
                batch.delivered = message.delivered
                pipeline.demand += batch.demand
                self._watcher.demand_changed(pipeline, before)

    def _demand_changed(self, message: events.DemandChanged) -> None:
        if (pipeline := self._accept(message)) is not None:
            batch = pipeline.batches.get(message.batch)
            if batch is not None:
                self._undo = (self.entry, partial(self._set_batch, pipeline, batch, batch.target, batch.delivered))
                self._set_batch(pipeline, batch, message.target, message.delivered)

    def _set_batch(self, pipeline: Pipeline, batch: Batch, target: int, delivered: int) -> None:
        batch.target, batch.delivered = target, delivered
        self._recount(pipeline)

    def _batch_closed(self, message: events.BatchClosed) -> None:
        if (pipeline := self._accept(message)) is not None:
            self._close_batch(pipeline, message.batch)

    def _close_batch(self, pipeline: Pipeline, batch: int) -> None:
        pipeline.batches.pop(batch, None)
        self._recount(pipeline)

    def _weights_published(self, message: events.WeightsPublished) -> None:
        if (pipeline := self._accept(message)) is not None:
            pipeline.published = max(pipeline.published, message.version)

    def _rollout_released(self, message: events.RolloutReleased) -> None:
        if (pipeline := self._accept(message)) is not None:
            pipeline.releasing = True
            self._watcher.lifecycle_changed(pipeline)

    def _left(self, message: events.PipelineLeft) -> None:
        if (pipeline := self._accept(message)) is not None:
            self._end_pipeline(pipeline)
        else:
            self._end_life(message)

    def _end_life(self, event: events.PipelineLeft | events.ClientLost) -> None:
        """If it has not begun, it never will."""
        known = self.pipelines.get(event.pipeline)
        if known is None or event.life > known.life:
            self._ended[event.pipeline] = max(event.life, self._ended.get(event.pipeline, -1))

    def _state_resent(self, message: events.StateResent) -> None:
        pipeline = self.speaker(message)
        if pipeline is None or pipeline.over or message.seq <= pipeline.applied:
            return
        pipeline.applied = message.seq
        state = message.state
        if state.left:
            self._end_pipeline(pipeline)
            return
        pipeline.published = max(pipeline.published, state.published)
        pipeline.releasing = pipeline.releasing or state.releasing
        pipeline.batches = {batch.batch: Batch(batch.target, batch.delivered) for batch in state.batches}
        self._recount(pipeline)
        waiting = {asked.request: asked for asked in state.waiting}
        for lease in tuple(pipeline.leases.values()):
            known = lease.request <= state.requests_through and lease.request not in waiting
            if known and lease.epoch not in state.leases:
                self._claim_lease(lease)
        for request in tuple(pipeline.requests.values()):
            if request.number <= state.requests_through and request.number not in waiting:
                self._end_request(request)
        held = [lease.request for lease in pipeline.leases.values()]
        for asked in waiting.values():
            if asked.request not in pipeline.requests and asked.request not in held:
                self._file(pipeline, asked.request, asked.role, asked.priority)

    # --- requests --------------------------------------------------------------------------------------

    def _file(self, pipeline: Pipeline, number: int, role: Role, priority: Priority) -> Request:
        request = pipeline.requests[number] = Request(pipeline, number, role, priority, self.now)
        for gpu in request.gpus:
            self.gpus[gpu].waiting[(pipeline.id, number)] = request
        self._watcher.request_filed(request)
        return request

    def _note(self, note: actions.Note) -> None:
        if note.kind == "quarantine":
            for id in note.gpus:
                self.gpus[id].quarantined = True
                self._watcher.gpu_changed(self.gpus[id])
        elif note.kind == "shrink" or note.kind == "expand":
            engine = self.engine(note.pipeline, note.dp_rank)
            if engine is not None:
                self._intend(engine, wanted=note.kind == "expand")
        elif note.kind == "rejected" and self._undo is not None and self._undo[0] == self._cause:
            self._undo[1]()
            self._undo = None

    def _intend(self, engine: Engine, *, wanted: bool) -> None:
        engine.doomed = engine.up and not wanted
        if wanted and not engine.up:
            engine.pipeline.promised[engine] = self._cause
        else:
            engine.pipeline.promised.pop(engine, None)
        self._watcher.engine_changed(engine)
