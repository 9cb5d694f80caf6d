"""The nouns of what a log shows: GPUs, engines, leases, requests, pipelines as the entries so far left them.

Changed by `core.observed` alone. They are not the ledger's: they exist so that the ledger can be checked.
"""

from enum import StrEnum

from core import actions
from core.model import EngineId, PipelineSpec, Priority, Role


class Doing(StrEnum):
    """What an engine was last told to do, and whether it is done."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    SYNCING = "syncing"
    SERVING = "serving"
    """Told to open its gate."""
    FALLING_ASLEEP = "falling asleep"
    BEING_KILLED = "being killed"
    DEAD = "dead"


UP = (Doing.WAKING, Doing.AWAKE, Doing.SYNCING, Doing.SERVING)


class Gpu:
    __slots__ = (
        "claimed", "engines", "free_bytes", "free_seen_at", "id", "last", "lost", "quarantined", "serial", "tenant",
        "waiting", "watches",
    )  # fmt: skip

    def __init__(self, id: int) -> None:
        self.id = id
        self.tenant: Engine | Lease | None = None
        self.claimed = False
        """The tenant let go, or was killed; its memory was not yet seen free."""
        self.quarantined = False
        """Its memory did not come back when it was watched."""
        self.lost = False
        self.serial = 0
        """Number of the tenancy: an `AwaitMemory` of an earlier one frees nothing."""
        self.watches = 0
        """`AwaitMemory` actions in flight."""
        self.last: Engine | Lease | None = None
        """The tenant before."""
        self.free_bytes: int | None = None
        """Free memory when last confirmed or reported; None: never."""
        self.free_seen_at = 0
        self.waiting: dict[tuple[str, int], Request] = {}
        self.engines: list[Engine] = []

    @property
    def free(self) -> bool:
        return self.tenant is None and not self.lost and not self.quarantined

    @property
    def being_freed(self) -> bool:
        """Free, or on its way: its tenant was told to go or has said that it went."""
        if self.lost or self.quarantined:
            return False
        if self.tenant is None or self.claimed:
            return True
        if not isinstance(self.tenant, Engine):
            return False
        return self.tenant.doomed or self.tenant.doing in (Doing.FALLING_ASLEEP, Doing.BEING_KILLED)


class Engine:
    __slots__ = (
        "busy", "closed_at", "doing", "doomed", "failing", "gpus", "id", "last_sync", "operation", "permitted",
        "pipeline", "routable", "routable_since", "synced",
    )  # fmt: skip

    def __init__(self, pipeline: "Pipeline", dp_rank: int, gpus: tuple[int, ...]) -> None:
        self.id = EngineId(pipeline.id, dp_rank)
        self.pipeline = pipeline
        self.gpus = gpus
        self.doing = Doing.ASLEEP
        self.doomed = False
        """It is to sleep as soon as what it is doing allows (a note said so)."""
        self.operation = -1
        """Number of the last action it was given."""
        self.permitted = False
        """Told to open its gate, and not to close it since."""
        self.routable = False
        """It confirmed that."""
        self.routable_since: int | None = None
        """When its gate first opened since it was woken."""
        self.closed_at = -1
        self.busy = False
        self.synced = -1
        """Version it confirmed; -1: none since it was woken."""
        self.last_sync = -1
        """Highest version it was ever told to load."""
        self.failing = False
        """Something went wrong with it, and it has not served since."""

    @property
    def up(self) -> bool:
        return self.doing in UP


class Lease:
    __slots__ = ("claimed", "epoch", "gpus", "granted_at", "pipeline", "priority", "request", "role")

    def __init__(self, grant: actions.GrantLease, request: "Request | None", pipeline: "Pipeline", now: int) -> None:
        self.pipeline = pipeline
        self.epoch = grant.epoch
        self.request = grant.request
        self.role = grant.role
        self.priority = request.priority if request else Priority.ACTOR_TRAINING
        self.gpus = grant.gpus
        self.granted_at = now
        self.claimed = False


class Request:
    __slots__ = ("filed_at", "gpus", "granted", "number", "pipeline", "priority", "role")

    def __init__(self, pipeline: "Pipeline", number: int, role: Role, priority: Priority, now: int) -> None:
        self.pipeline = pipeline
        self.number = number
        self.role = role
        self.priority = priority
        group = pipeline.spec.group(role)
        whole = priority is Priority.INITIALIZATION
        self.gpus = pipeline.spec.union if whole else group.gpus if group else ()
        self.filed_at = now
        self.granted = False


class Batch:
    __slots__ = ("delivered", "target")

    def __init__(self, target: int, delivered: int = 0) -> None:
        self.target = target
        self.delivered = delivered

    @property
    def demand(self) -> int:
        return max(0, self.target - self.delivered)


class Pipeline:
    __slots__ = (
        "applied", "batches", "demand", "engines", "id", "initialised", "leases", "life", "over", "promised",
        "published", "releasing", "requests", "routable", "spec", "up",
    )  # fmt: skip

    def __init__(self, spec: PipelineSpec, life: int, seq: int) -> None:
        self.id = spec.id
        self.spec = spec
        self.life = life
        self.applied = seq
        infer = spec.infer
        self.engines = [Engine(self, rank, infer.bundle(rank)) for rank in range(infer.size)]
        self.batches: dict[int, Batch] = {}
        self.demand = 0
        """Trajectories its open batches still want, whatever the demand policy."""
        self.requests: dict[int, Request] = {}
        self.leases: dict[int, Lease] = {}
        self.published = -1
        self.initialised = False
        self.releasing = False
        """A planned release is under way."""
        self.over = False
        """It left, failed or was stopped."""
        self.up = 0
        """Engines waking, awake, syncing or serving."""
        self.promised: dict[Engine, int] = {}
        """Engines that are to be woken once their GPUs are free (a note said so), each with the cause of that note."""
        self.routable = 0

    @property
    def wants_rollout(self) -> bool:
        return self.demand > 0 and self.initialised and not self.over


class Watcher:
    """Told after something changed. Methods do nothing unless overridden; that an engine began or ceased to decode is a
    change of the engine to whoever makes no difference."""

    def gpu_changed(self, gpu: Gpu) -> None: ...
    def engine_changed(self, engine: Engine) -> None: ...
    def decoding_changed(self, engine: Engine) -> None:
        self.engine_changed(engine)

    def demand_changed(self, pipeline: Pipeline, before: int) -> None: ...
    def request_filed(self, request: Request) -> None: ...
    def request_ended(self, request: Request) -> None: ...
    def lifecycle_changed(self, pipeline: Pipeline) -> None: ...


class Watchers(Watcher):
    """Two that are told the same, the first one first."""

    def __init__(self, first: Watcher, second: Watcher) -> None:
        self._first = first
        self._second = second

    def gpu_changed(self, gpu: Gpu) -> None:
        self._first.gpu_changed(gpu)
        self._second.gpu_changed(gpu)

    def engine_changed(self, engine: Engine) -> None:
        self._first.engine_changed(engine)
        self._second.engine_changed(engine)

    def decoding_changed(self, engine: Engine) -> None:
        self._first.decoding_changed(engine)
        self._second.decoding_changed(engine)

    def demand_changed(self, pipeline: Pipeline, before: int) -> None:
        self._first.demand_changed(pipeline, before)
        self._second.demand_changed(pipeline, before)

    def request_filed(self, request: Request) -> None:
        self._first.request_filed(request)
        self._second.request_filed(request)

    def request_ended(self, request: Request) -> None:
        self._first.request_ended(request)
        self._second.request_ended(request)

    def lifecycle_changed(self, pipeline: Pipeline) -> None:
        self._first.lifecycle_changed(pipeline)
        self._second.lifecycle_changed(pipeline)
