"""S1 to S4 and S7: who holds what, memory, versions, and whose fault it was. One check an entry, before it is taken in.

S1  A GPU that is given away (`WakeEngine`, `GrantLease`) has no tenant; a grant answers a request that still waits,
    with exactly its mapping; a trainer phase runs only on GPUs its pipeline holds.
S2  ... and its last tenant's memory was *seen* free, as much as the next tenant declared plus the margin.
S3  Observed memory never exceeds a GPU or a host. Initialisations, whose peak is highest, run one after another.
S4  A gate opens only on an engine that is synced to that very version, not older than the staleness bound allows. An
    engine begins to decode only behind an open gate. Segments carry published versions, in ascending order.
S7  No pipeline fails without a cause of its own: a fault, a failed operation, an exceeded limit, or being cut off.

Rule `outcome`: every action ends in exactly one event, and only actions that were issued do.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from core import actions, events
from core.config import DriverPolicy
from core.model import Priority
from core.observed_nouns import Doing, Engine, Gpu, Lease, Pipeline
from core.units import show_gib, show_s

if TYPE_CHECKING:
    from core.monitor import Monitor


class SafetyOracles:
    def __init__(self, monitor: "Monitor", driver: DriverPolicy, skew_ns: int) -> None:
        self._observed = monitor.observed
        self._breach = monitor.breach
        self._concerns = monitor.concerns
        self._isolated = driver is DriverPolicy.ISOLATE
        self._skew_ns = skew_ns
        self._own_faults: dict[str, str] = {}
        self._said_goodbye: dict[str, None] = {}
        self._ended_for_its_client: dict[str, None] = {}
        """A client that vanished ends here before the scheduler has noticed its silence."""
        self.checks: dict[type, Callable[[Any], None]] = {
            actions.WakeEngine: self._wake,
            actions.GrantLease: self._grant,
            actions.SyncEngine: self._sync,
            actions.OpenGate: self._open_gate,
            actions.SleepEngine: self._issued,
            actions.KillEngine: self._issued,
            actions.AwaitMemory: self._issued,
            actions.StopPipeline: self._stop,
            actions.ConfirmRelease: self._confirm_release,
            actions.FailPipeline: self._fail,
            actions.Note: self._note,
            events.ActionDone: self._done,
            events.ActionFailed: self._failed,
            events.ActionUnknown: self._unknown,
            events.MemoryUsed: self._memory_used,
            events.PhaseStarted: self._phase_started,
            events.PhaseEnded: self._phase_ended,
            events.EngineBusy: self._engine_busy,
            events.WeightsPublished: self._weights_published,
            events.TrajectoryCompleted: self._trajectory_completed,
            events.EngineDied: self._blame,
            events.TrainerFailed: self._blame,
            events.ClientLost: self._blame,
            events.EngineSuspected: self._blame,
            events.NodeLeft: self._node_left,
            events.FaultInjected: self._fault_injected,
            events.PipelineLeft: self._left,
            events.PipelineEnded: self._ended,
        }

    def finish(self) -> None:
        """The run ended by itself: nothing may be left in flight."""
        for number, action in self._observed.pending.items():
            if self._is_own(action) and not self._hopeless(action):
                self._breach("outcome", f"{_name(action)} (action {number}) never ended")

    def _is_own(self, action: actions.Action) -> bool:
        """Memory is awaited for nobody in particular: where strangers are about, it may be for one of them."""
        if isinstance(action, actions.AwaitMemory):
            return all(self._concerns(pipeline) for pipeline in self._observed.pipelines)
        return self._concerns(getattr(action, "pipeline", ""))

    def _hopeless(self, action: actions.Action) -> bool:
        """Nobody waits for it any more: memory that does not come back, an engine of a pipeline that is over."""
        match action:
            case actions.AwaitMemory():
                return any(self._observed.gpus[gpu].quarantined or self._observed.gpus[gpu].lost for gpu in action.gpus)
            case actions.EngineAction():
                pipeline = self._observed.pipelines.get(action.pipeline)
                return pipeline is None or pipeline.over or action.pipeline in self._ended_for_its_client
        return False

    # --- S1, S2: tenancies -----------------------------------------------------------------------------

    def _wake(self, action: actions.WakeEngine) -> None:
        self._issued(action)
        engine = self._observed.engine(action.pipeline, action.dp_rank)
        who = f"engine {action.pipeline}/{action.dp_rank}"
        if engine is None or action.gpus != engine.gpus:
            self._breach("S1", f"{who} is woken on GPUs {_ids(action.gpus)}, which are not its own")
            return
        memory = engine.pipeline.spec.memory
        self._give_away(action.gpus, who, memory.engine - memory.residue)

    def _grant(self, action: actions.GrantLease) -> None:
        self._issued(action)
        pipeline = self._observed.pipelines.get(action.pipeline)
        request = pipeline.requests.get(action.request) if pipeline else None
        who = f"{action.role} of {action.pipeline}"
        if pipeline is not None and action.epoch in pipeline.leases:
            return  # told again
        if pipeline is None or request is None:
            self._breach("S1", f"GPUs {_ids(action.gpus)} are granted to {who}, which does not wait for them")
            return
        if action.gpus != request.gpus:
            self._breach("S1", f"{who} asked for GPUs {_ids(request.gpus)} and is granted {_ids(action.gpus)}")
        memory = pipeline.spec.memory
        if request.priority is Priority.INITIALIZATION:
            self._one_initialisation(pipeline)
            self._give_away(action.gpus, who, memory.init_peak)
        else:
            self._give_away(action.gpus, who, memory.train - memory.residue)

    def _give_away(self, gpus: tuple[int, ...], who: str, need: int) -> None:
        need = max(0, need) + self._observed.cluster.memory_margin
        for id in gpus:
            if not 0 <= id < len(self._observed.gpus):
                self._breach("S1", f"{who} is given GPU {id}, which does not exist")
                continue
            gpu = self._observed.gpus[id]
            if gpu.lost:
                self._breach("S1", f"{who} is given GPU {id}, whose node left")
            elif gpu.quarantined:
                self._breach("S2", f"{who} is given GPU {id} out of quarantine")
            elif gpu.claimed:
                self._breach("S2", f"{who} is given GPU {id} before the memory of {_who(gpu)} was seen free")
            elif gpu.tenant is not None:
                self._breach("S1", f"{who} is given GPU {id}, which {_who(gpu)} holds")
            elif gpu.free_bytes is not None and gpu.free_bytes < need:
                seen = f"{show_gib(gpu.free_bytes)} free at {show_s(gpu.free_seen_at)}"
                self._breach("S2", f"{who} needs {show_gib(need)} on GPU {id}, which showed {seen}")

    def _one_initialisation(self, pipeline: Pipeline) -> None:
        for other in self._observed.pipelines.values():
            for lease in other.leases.values():
                if lease.priority is Priority.INITIALIZATION and not lease.claimed and not other.over:
                    self._breach("S3", f"{pipeline.id} and {other.id} initialise at the same time")

    def _phase_started(self, event: events.PhaseStarted) -> None:
        pipeline = self._observed.pipelines.get(event.pipeline)
        if pipeline is not None and pipeline.over:
            return  # cleaning up; its workers are being stopped, and refuse
        for id in event.gpus:
            tenant = self._observed.gpus[id].tenant if 0 <= id < len(self._observed.gpus) else None
            if not isinstance(tenant, Lease) or tenant.pipeline.id != event.pipeline:
                self._breach("S1", f"{event.role} of {event.pipeline} runs {event.phase} on GPU {id}, not holding it")

    # --- S3: memory ------------------------------------------------------------------------------------

    def _memory_used(self, event: events.MemoryUsed) -> None:
        if event.used > event.capacity:
            where = f"GPU {event.gpu}" if event.gpu >= 0 else f"the host of node {-1 - event.gpu}"
            self._breach("S3", f"{show_gib(event.used)} are used on {where}, which has {show_gib(event.capacity)}")

    # --- S4: versions ----------------------------------------------------------------------------------

    def _sync(self, action: actions.SyncEngine) -> None:
        self._issued(action)
        engine = self._observed.engine(action.pipeline, action.dp_rank)
        if engine is None or engine.doing not in (Doing.AWAKE, Doing.SYNCING, Doing.SERVING):
            self._breach("S4", f"{action.pipeline}/{action.dp_rank} is synced while {_doing(engine)}")
        elif action.version != engine.pipeline.published:
            latest = engine.pipeline.published
            self._breach("S4", f"{engine.id} is synced to version {action.version}; the latest published is {latest}")

    def _open_gate(self, action: actions.OpenGate) -> None:
        self._issued(action)
        engine = self._observed.engine(action.pipeline, action.dp_rank)
        if engine is None or engine.doing not in (Doing.AWAKE, Doing.SERVING):
            self._breach("S4", f"the gate of {action.pipeline}/{action.dp_rank} opens while it is {_doing(engine)}")
            return
        latest, bound = engine.pipeline.published, engine.pipeline.spec.staleness
        if action.version != engine.synced:
            self._breach("S4", f"the gate of {engine.id} opens at {action.version}; it is synced to {engine.synced}")
        elif not 0 <= latest - action.version <= bound:
            self._breach("S4", f"the gate of {engine.id} opens at {action.version}; latest {latest}, bound {bound}")

    def _engine_busy(self, event: events.EngineBusy) -> None:
        engine = self._observed.engine(event.pipeline, event.dp_rank)
        if engine is None:
            self._breach("S4", f"{event.pipeline}/{event.dp_rank} decodes and was never declared")
        elif not engine.permitted and self._observed.now > engine.closed_at + self._skew_ns:
            # A request sent in the instant in which the gate closed may still arrive; none later.
            self._breach("S4", f"{engine.id} begins to decode while {_doing(engine)}, its gate closed")

    def _weights_published(self, event: events.WeightsPublished) -> None:
        if self._observed.applies(event) and event.version <= self._observed.pipelines[event.pipeline].published:
            latest = self._observed.pipelines[event.pipeline].published
            self._breach("S4", f"{event.pipeline} publishes version {event.version} after version {latest}")

    def _trajectory_completed(self, event: events.TrajectoryCompleted) -> None:
        engine = self._observed.engine(event.pipeline, event.dp_rank)
        if engine is None or not event.segments:
            return
        previous = 0
        for version, _ in event.segments:
            if version < previous:
                self._breach("S4", f"{_sample(event)} goes from version {previous} to {version}")
            previous = version
        if previous > engine.pipeline.published and self._observed.applies(event):
            self._breach("S4", f"{_sample(event)} has version {previous}, which was never published")
        elif previous > engine.last_sync:
            self._breach("S4", f"{_sample(event)} has version {previous}, newer than {engine.id} ever loaded")

    # --- S7: whose fault -------------------------------------------------------------------------------

    def _blame(self, event: Any) -> None:
        self._own_faults.setdefault(event.pipeline, type(event).__name__)

    def _blame_action(self, action: actions.Action | None) -> None:
        match action:
            case actions.AwaitMemory():
                for id in action.gpus:
                    self._blame_tenant(self._observed.gpus[id])
            case actions.EngineAction() | actions.GrantLease() | actions.StopPipeline() | actions.ConfirmRelease():
                self._own_faults.setdefault(action.pipeline, f"{_name(action)} failed")

    def _blame_tenant(self, gpu: Gpu) -> None:
        if gpu.tenant is not None:
            self._own_faults.setdefault(gpu.tenant.pipeline.id, f"GPU {gpu.id} did not come back")

    def _node_left(self, event: events.NodeLeft) -> None:
        for pipeline in self._observed.pipelines.values():
            if any(self._observed.cluster.node_of(gpu) == event.node for gpu in pipeline.spec.union):
                self._own_faults.setdefault(pipeline.id, f"node {event.node} left")

    def _fault_injected(self, event: events.FaultInjected) -> None:
        """Also one that strikes before its pipeline was heard of. Targets are `pipeline` or `pipeline/dp_rank`."""
        everybody = self._observed.pipelines if event.kind == "restart_control_plane" else ()
        for id in (*everybody, event.target, event.target.rpartition("/")[0]):
            self._own_faults.setdefault(id, event.kind)

    def _phase_ended(self, event: events.PhaseEnded) -> None:
        if event.error:
            self._blame(event)

    def _note(self, note: actions.Note) -> None:
        if note.kind == "rejected" and note.pipeline:
            self._own_faults.setdefault(note.pipeline, "rejected")

    def _left(self, event: events.PipelineLeft) -> None:
        if event.error:
            self._said_goodbye[event.pipeline] = None

    def _fail(self, action: actions.FailPipeline) -> None:
        self._issued(action)
        if self._isolated and action.pipeline not in self._said_goodbye and not self._cause(action.pipeline):
            self._breach("S7", f"{action.pipeline} is failed without a fault of its own: {action.reason}")
        self._said_goodbye[action.pipeline] = None

    def _ended(self, event: events.PipelineEnded) -> None:
        self._ended_for_its_client[event.pipeline] = None
        if not event.error or not self._isolated or event.pipeline in self._said_goodbye:
            return
        if not self._cause(event.pipeline):
            self._breach("S7", f"{event.pipeline} ended without a fault of its own: {event.error}")

    def _cause(self, id: str) -> str:
        """Why this pipeline may fail; empty if there is no reason in it."""
        if id in self._own_faults:
            return self._own_faults[id]
        pipeline = self._observed.pipelines.get(id)
        if pipeline is None:
            return "was never admitted"
        limits, now = pipeline.spec.limits, self._observed.now
        for lease in pipeline.leases.values():
            limit = limits.init if lease.priority is Priority.INITIALIZATION else limits.hold
            if now - lease.granted_at >= limit:
                return f"held {lease.role} for longer than its limit"
        for gpu in pipeline.spec.union:
            if self._observed.gpus[gpu].lost or self._observed.gpus[gpu].quarantined:
                return f"cut off from GPU {gpu}"
        return ""

    # --- every action, exactly one outcome --------------------------------------------------------------

    def _issued(self, action: actions.Action) -> None:
        if action.action in self._observed.pending:
            self._breach("outcome", f"{_name(action)} has the number of another action in flight, {action.action}")

    def _stop(self, action: actions.StopPipeline) -> None:
        self._issued(action)

    def _confirm_release(self, action: actions.ConfirmRelease) -> None:
        self._issued(action)
        pipeline = self._observed.pipelines.get(action.pipeline)
        if pipeline is None or pipeline.over:
            return  # the answer to its leaving
        for engine in pipeline.engines:
            held = [gpu for gpu in engine.gpus if self._observed.gpus[gpu].tenant is engine]
            if held and not self._observed.gpus[held[0]].lost:
                self._breach("S2", f"a release is confirmed to {action.pipeline} while {engine.id} has GPU {held[0]}")

    def _done(self, event: events.ActionDone) -> None:
        self._ended_once(event.action)
        action = self._observed.pending.get(event.action)
        if isinstance(action, actions.AwaitMemory):
            for gpu, need in zip(action.gpus, action.need, strict=True):
                if event.free.get(gpu, 0) < need:
                    seen = show_gib(event.free.get(gpu, 0))
                    self._breach("S2", f"GPU {gpu} counts as free with {seen}; {show_gib(need)} were asked for")

    def _failed(self, event: events.ActionFailed) -> None:
        self._ended_once(event.action)
        self._blame_action(self._observed.pending.get(event.action))

    def _unknown(self, event: events.ActionUnknown) -> None:
        self._ended_once(event.action)
        self._blame_action(self._observed.pending.get(event.action))

    def _ended_once(self, number: int) -> None:
        if number not in self._observed.pending and number not in self._observed.overdue:
            self._breach("outcome", f"action {number} ends and is not in flight")


def _name(action: actions.Action) -> str:
    return type(action).__name__


def _ids(gpus: tuple[int, ...]) -> str:
    return ", ".join(map(str, gpus)) or "none"


def _doing(engine: Engine | None) -> str:
    return engine.doing.value if engine else "unknown"


def _who(gpu: Gpu) -> str:
    tenant = gpu.tenant
    if isinstance(tenant, Lease):
        return f"{tenant.role} of {tenant.pipeline.id}"
    return f"engine {tenant.id}" if tenant else "nobody"


def _sample(event: events.TrajectoryCompleted) -> str:
    return f"trajectory {event.trajectory} of batch {event.batch} of {event.pipeline}"
