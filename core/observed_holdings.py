"""Who holds which GPU and what each engine is doing, from actions and their outcomes (the half of `core.observed` that
the scheduler and the backend write).

A GPU gets a tenant by `WakeEngine` or `GrantLease`. It is *claimed* once the tenant said that it let go, or was killed,
and free again when an `AwaitMemory` asked for after that tenancy began is done.
"""

from collections.abc import Callable
from typing import Any

from core import actions, events
from core.model import Cluster, Priority
from core.observed_nouns import UP, Doing, Engine, Gpu, Lease, Pipeline, Request, Watcher, Watchers

_ENDS_A_PROMISE = (actions.WakeEngine, actions.SleepEngine, actions.KillEngine)


class Holdings:
    """GPUs, engines and leases. `core.observed.Observed` is the whole picture."""

    def __init__(self, cluster: Cluster, watcher: Watcher | None = None) -> None:
        self.cluster = cluster
        self.now = 0
        self.entry = -1
        self._cause = -1
        """Of the entry being taken in."""
        self.gpus = [Gpu(id) for id in range(cluster.gpus)]
        self.pipelines: dict[str, Pipeline] = {}
        self.pending: dict[int, actions.Action] = {}
        """Actions without an outcome yet, timers left out."""
        self.overdue: dict[int, None] = {}
        """Actions that ended unknown: an answer may still come, and changes nothing."""
        self._watcher = watcher or Watcher()
        self._watched: dict[int, tuple[tuple[Gpu, int], ...]] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.ActionDone: self._done,
            events.ActionFailed: self._failed,
            events.ActionUnknown: self._unknown,
            events.EngineDied: self._engine_died,
            events.NodeLeft: self._node_left,
            events.EngineBusy: self._engine_busy,
            events.EngineIdle: self._engine_idle,
            events.MemoryUsed: self._memory_used,
            actions.WakeEngine: self._wake,
            actions.SyncEngine: self._sync,
            actions.OpenGate: self._open_gate,
            actions.SleepEngine: self._sleep,
            actions.KillEngine: self._kill,
            actions.AwaitMemory: self._await_memory,
            actions.StopPipeline: self._stop,
            actions.GrantLease: self._grant,
            actions.ConfirmRelease: self._confirm_release,
            actions.FailPipeline: self._fail,
        }

    def watch(self, watcher: Watcher) -> None:
        """Tell this one of every change too."""
        self._watcher = watcher if type(self._watcher) is Watcher else Watchers(self._watcher, watcher)

    def engine(self, pipeline: str, dp_rank: int) -> Engine | None:
        known = self.pipelines.get(pipeline)
        return known.engines[dp_rank] if known and 0 <= dp_rank < len(known.engines) else None

    # --- leases ----------------------------------------------------------------------------------------

    def _claim_lease(self, lease: Lease | None, *, used: bool = True) -> None:
        if lease is None or lease.claimed:
            return
        lease.claimed = True
        if used and lease.priority is Priority.INITIALIZATION:
            lease.pipeline.initialised = True
            self._watcher.lifecycle_changed(lease.pipeline)
        self._claim(lease, lease.gpus)

    def _unclaim_lease(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.claimed = False
            if lease.priority is Priority.INITIALIZATION:
                lease.pipeline.initialised = False
            for gpu in lease.gpus:
                self.gpus[gpu].claimed = False
                self._watcher.gpu_changed(self.gpus[gpu])

    def _grant(self, action: actions.GrantLease) -> None:
        self.pending[action.action] = action
        pipeline = self.pipelines.get(action.pipeline)
        if pipeline is None:
            return
        if action.epoch in pipeline.leases:
            return  # told again: its client has not heard of it
        request = pipeline.requests.get(action.request)
        lease = pipeline.leases[action.epoch] = Lease(action, request, pipeline, self.now)
        self._occupy(lease, action.gpus)
        if request is not None:
            request.granted = True
            self._end_request(request)

    def _grant_failed(self, action: actions.GrantLease) -> None:
        """Not delivered: it is taken back, as if the client had let go."""
        pipeline = self.pipelines.get(action.pipeline)
        self._claim_lease(pipeline.leases.get(action.epoch) if pipeline else None, used=False)

    def _end_request(self, request: Request) -> None:
        if request.pipeline.requests.pop(request.number, None) is not None:
            for gpu in request.gpus:
                del self.gpus[gpu].waiting[(request.pipeline.id, request.number)]
            self._watcher.request_ended(request)

    # --- tenancies -------------------------------------------------------------------------------------

    def _occupy(self, tenant: Engine | Lease, gpus: tuple[int, ...]) -> None:
        for id in gpus:
            if 0 <= id < len(self.gpus):
                gpu = self.gpus[id]
                gpu.last = gpu.tenant or gpu.last
                gpu.tenant, gpu.claimed, gpu.quarantined = tenant, False, False
                gpu.serial += 1
                self._watcher.gpu_changed(gpu)

    def _claim(self, tenant: Engine | Lease, gpus: tuple[int, ...]) -> None:
        for id in gpus:
            gpu = self.gpus[id]
            if gpu.tenant is tenant and not gpu.claimed:
                gpu.claimed = True
                self._watcher.gpu_changed(gpu)

    def _vacate(self, gpu: Gpu) -> None:
        tenant = gpu.tenant
        gpu.last, gpu.tenant = tenant, None
        gpu.claimed = gpu.quarantined = False
        if isinstance(tenant, Lease) and all(self.gpus[id].tenant is not tenant for id in tenant.gpus):
            tenant.pipeline.leases.pop(tenant.epoch, None)
        self._watcher.gpu_changed(gpu)

    def _await_memory(self, action: actions.AwaitMemory) -> None:
        self.pending[action.action] = action
        watched = tuple((self.gpus[id], self.gpus[id].serial) for id in action.gpus if 0 <= id < len(self.gpus))
        self._watched[action.action] = watched
        for gpu, _ in watched:
            gpu.watches += 1

    def _memory_seen(self, action: actions.AwaitMemory, free: dict[int, int], *, enough: bool) -> None:
        for gpu, serial in self._watched.pop(action.action, ()):
            gpu.watches -= 1
            if gpu.id in free:
                gpu.free_bytes, gpu.free_seen_at = free[gpu.id], self.now
            if gpu.serial == serial and not gpu.lost and (gpu.claimed or gpu.tenant is None):
                gpu.quarantined = not enough
                if enough and gpu.claimed:
                    self._vacate(gpu)
                    continue
            self._watcher.gpu_changed(gpu)

    def _memory_used(self, event: events.MemoryUsed) -> None:
        if 0 <= event.gpu < len(self.gpus) and self.gpus[event.gpu].tenant is None:
            gpu = self.gpus[event.gpu]  # what a tenant uses says nothing about what it will leave behind
            gpu.free_bytes, gpu.free_seen_at = event.capacity - event.used, self.now

    def _node_left(self, event: events.NodeLeft) -> None:
        size = self.cluster.gpus_per_node
        for gpu in self.gpus[event.node * size : (event.node + 1) * size]:
            gpu.lost = True
            for engine in gpu.engines:
                self._die(engine)
            self._watcher.gpu_changed(gpu)

    # --- engines ---------------------------------------------------------------------------------------

    def _set(self, engine: Engine, doing: Doing) -> None:
        was_up = engine.doing in UP
        engine.doing = doing
        engine.pipeline.up += (doing in UP) - was_up
        self._watcher.engine_changed(engine)

    def _close_gate(self, engine: Engine) -> None:
        if engine.permitted:
            engine.closed_at = self.now
        engine.permitted = False
        if engine.routable:
            engine.routable = False
            engine.pipeline.routable -= 1

    def _order(self, action: actions.EngineAction) -> Engine | None:
        self.pending[action.action] = action
        engine = self.engine(action.pipeline, action.dp_rank)
        if engine is not None:
            engine.operation = action.action
            if isinstance(action, _ENDS_A_PROMISE):
                engine.doomed = False
                # A decision's notes are written before its actions: one that kills may promise it GPUs anew.
                anew = isinstance(action, actions.KillEngine) and engine.pipeline.promised.get(engine) == self._cause
                if not anew:
                    engine.pipeline.promised.pop(engine, None)
        return engine

    def _wake(self, action: actions.WakeEngine) -> None:
        if (engine := self._order(action)) is not None:
            engine.routable_since, engine.synced = None, -1
            self._set(engine, Doing.WAKING)
            self._occupy(engine, action.gpus)

    def _sync(self, action: actions.SyncEngine) -> None:
        if (engine := self._order(action)) is not None:
            if action.emptying is not actions.Emptying.KEEP:
                self._close_gate(engine)
            engine.last_sync = max(engine.last_sync, action.version)
            self._set(engine, Doing.SYNCING)

    def _open_gate(self, action: actions.OpenGate) -> None:
        if (engine := self._order(action)) is not None:
            engine.permitted = True
            self._set(engine, Doing.SERVING)

    def _sleep(self, action: actions.SleepEngine) -> None:
        if (engine := self._order(action)) is not None:
            self._close_gate(engine)
            self._set(engine, Doing.FALLING_ASLEEP)

    def _kill(self, action: actions.KillEngine) -> None:
        if (engine := self._order(action)) is not None:
            self._close_gate(engine)
            engine.failing = True
            self._set(engine, Doing.BEING_KILLED)

    def _engine_died(self, event: events.EngineDied) -> None:
        if (engine := self.engine(event.pipeline, event.dp_rank)) is not None:
            self._die(engine)

    def _die(self, engine: Engine) -> None:
        """Its process is gone: whatever it held is as good as claimed."""
        self._close_gate(engine)
        engine.failing, engine.busy = True, False
        self._set(engine, Doing.DEAD)
        self._claim(engine, engine.gpus)

    def _engine_busy(self, event: events.EngineBusy) -> None:
        if (engine := self.engine(event.pipeline, event.dp_rank)) is not None:
            engine.busy = True
            self._watcher.decoding_changed(engine)

    def _engine_idle(self, event: events.EngineIdle) -> None:
        if (engine := self.engine(event.pipeline, event.dp_rank)) is not None:
            engine.busy = False
            self._watcher.decoding_changed(engine)

    def _engine_done(self, action: actions.EngineAction, engine: Engine) -> None:
        if engine.doing is Doing.DEAD and not isinstance(action, actions.KillEngine):
            return  # it died under the operation
        match action:
            case actions.WakeEngine():
                self._set(engine, Doing.AWAKE)
            case actions.SyncEngine():
                engine.synced = action.version
                self._set(engine, Doing.SERVING if engine.permitted else Doing.AWAKE)
            case actions.OpenGate():
                engine.failing = False
                if not engine.routable:
                    engine.routable = True
                    engine.pipeline.routable += 1
                if engine.routable_since is None:
                    engine.routable_since = self.now
                self._watcher.engine_changed(engine)
            case actions.SleepEngine():
                engine.busy = False
                self._set(engine, Doing.ASLEEP)
                self._claim(engine, engine.gpus)
            case actions.KillEngine():
                self._die(engine)

    def _engine_not_done(self, action: actions.EngineAction, engine: Engine) -> None:
        engine.failing = True
        if isinstance(action, actions.KillEngine):
            self._die(engine)
        elif isinstance(action, actions.OpenGate):
            self._close_gate(engine)
            self._set(engine, Doing.AWAKE)

    # --- pipelines -------------------------------------------------------------------------------------

    def _stop(self, action: actions.StopPipeline) -> None:
        self.pending[action.action] = action
        if (pipeline := self.pipelines.get(action.pipeline)) is not None:
            self._end_pipeline(pipeline)

    def _stopped(self, action: actions.StopPipeline) -> None:
        pipeline = self.pipelines.get(action.pipeline)
        if pipeline is not None:
            for engine in pipeline.engines:
                self._die(engine)
            for lease in tuple(pipeline.leases.values()):
                lease.claimed = True
                self._claim(lease, lease.gpus)

    def _leave_quarantine(self, action: actions.StopPipeline) -> None:
        """None of its workers lives: what they held is on its way back, also out of quarantine."""
        pipeline = self.pipelines.get(action.pipeline)
        for gpu in (self.gpus[id] for id in pipeline.spec.union) if pipeline else ():
            if gpu.quarantined and gpu.tenant is not None and gpu.tenant.pipeline is pipeline:
                gpu.quarantined = False
                self._watcher.gpu_changed(gpu)

    def _fail(self, action: actions.FailPipeline) -> None:
        self.pending[action.action] = action
        if (pipeline := self.pipelines.get(action.pipeline)) is not None:
            self._end_pipeline(pipeline)

    def _end_pipeline(self, pipeline: Pipeline) -> None:
        if pipeline.over:
            return
        for request in tuple(pipeline.requests.values()):
            self._end_request(request)
        pipeline.batches.clear()
        self._recount(pipeline)
        pipeline.over = True
        self._watcher.lifecycle_changed(pipeline)

    def _recount(self, pipeline: Pipeline) -> None:
        before = pipeline.demand
        pipeline.demand = sum(batch.demand for batch in pipeline.batches.values())
        if pipeline.demand != before:
            self._watcher.demand_changed(pipeline, before)

    def _confirm_release(self, action: actions.ConfirmRelease) -> None:
        self.pending[action.action] = action
        if (pipeline := self.pipelines.get(action.pipeline)) is not None:
            pipeline.releasing = False
            self._watcher.lifecycle_changed(pipeline)

    # --- outcomes and notes ----------------------------------------------------------------------------

    def _done(self, event: events.ActionDone) -> None:
        action = self.pending.pop(event.action, None)
        match action:
            case actions.EngineAction():
                engine = self.engine(action.pipeline, action.dp_rank)
                if engine is not None and engine.operation == action.action:
                    self._engine_done(action, engine)
            case actions.AwaitMemory():
                self._memory_seen(action, event.free, enough=True)
            case actions.StopPipeline():
                self._stopped(action)
                self._leave_quarantine(action)
            case None:
                self.overdue.pop(event.action, None)

    def _failed(self, event: events.ActionFailed) -> None:
        self._not_done(event.action, event.free, answered=True)

    def _unknown(self, event: events.ActionUnknown) -> None:
        if event.action in self.pending:
            self.overdue[event.action] = None
        self._not_done(event.action, {}, answered=False)

    def _not_done(self, number: int, free: dict[int, int], *, answered: bool) -> None:
        action = self.pending.pop(number, None)
        match action:
            case actions.EngineAction():
                engine = self.engine(action.pipeline, action.dp_rank)
                if engine is not None and engine.operation == action.action:
                    self._engine_not_done(action, engine)
            case actions.AwaitMemory():
                self._memory_seen(action, free, enough=False)
            case actions.StopPipeline():
                self._stopped(action)
            case actions.GrantLease() if answered:
                self._grant_failed(action)
            case None if answered:
                self.overdue.pop(number, None)
