"""Who holds each GPU now, and each engine's state. Conservation is enforced here and nowhere else.

A GPU is always in exactly one of five conditions (`Hold`), and changes only along

    FREE -> HELD -> CLEARING -> FREE        a tenancy: granted, released (a claim), memory seen free (a fact)
    HELD | CLEARING -> QUARANTINED -> FREE  the tenant was killed, or its memory did not come back in time
    any -> LOST                             the node left

Independently of that a GPU may be *promised* to one engine or one request: the planner's decision, kept until it is
fulfilled or taken back, so that what one shrink frees cannot be given away twice. `Gpu.tenant` is the answer the
planner works with: whose it will be once everything in flight has happened.

The books are changed in place, by `core.scheduler` alone; everyone else reads. (Replacing frozen books instead was
measured at 1,024 GPUs x 128 pipelines: one copy costs more than a plan.)
"""

from enum import Enum, StrEnum

from core.errors import InvariantBroken
from core.model import (
    BatchKind,
    BatchState,
    Cluster,
    DemandPolicy,
    EngineId,
    PipelineSpec,
    Priority,
    Role,
)


class Hold(Enum):
    FREE = "free"
    HELD = "held"
    CLEARING = "clearing"
    QUARANTINED = "quarantined"
    LOST = "lost"


class EngineState(StrEnum):
    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    SYNCING = "syncing"
    DRAINING = "draining"
    """Told to sleep: gate closed, requests being aborted or drained, memory being released."""
    DEAD = "dead"
    """No process. It can be started again (a cold wake), unless `Engine.disabled` says why not."""


UP = frozenset((EngineState.WAKING, EngineState.AWAKE, EngineState.SYNCING))


class Phase(StrEnum):
    """Where a pipeline is in its life, as the scheduler sees it."""

    REGISTERED = "registered"
    ADMITTED = "admitted"
    READY = "ready"
    """Initialised: its engines exist, asleep."""
    FAILED = "failed"
    LEFT = "left"


class Gpu:
    __slots__ = (
        "id",
        "hold",
        "engine",
        "lease",
        "promised",
        "free",
        "since",
        "cleared_by",
        "why",
        "growth",
        "hoarders",
        "given_up",
        "watch",
    )

    def __init__(self, id: int, free: int) -> None:
        self.id = id
        self.hold = Hold.FREE
        self.engine: Engine | None = None
        self.lease: Lease | None = None
        """The non-rollout lease that holds it; an engine's tenancy is in `engine`."""
        self.promised: Engine | Request | None = None
        self.free = free
        """Bytes free when last observed."""
        self.since = 0
        """When `hold` last changed."""
        self.cleared_by = ""
        """Pipeline that released it last; blamed for residue growth."""
        self.why = ""
        self.growth = 0
        """Bytes kept beyond the declared residues when last seen free."""
        self.hoarders: list[tuple[PipelineBook, Engine | Lease | None]] = []
        """Who kept them, as far as was seen at their release; the last one is the first to be asked for them."""
        self.watch = 0
        """Number of the `AwaitMemory` whose word counts; an older one speaks of an older tenancy."""
        self.given_up = False
        """In quarantine for longer than its pipeline's limit."""

    @property
    def gone(self) -> bool:
        """Lost, or as good as lost."""
        return self.hold is Hold.LOST or self.given_up

    @property
    def usable(self) -> bool:
        return self.hold is not Hold.QUARANTINED and self.hold is not Hold.LOST

    @property
    def tenant(self) -> "Engine | Lease | Request | None":
        """Who has it, or will have it once what is in flight has happened; None: it is to be given away."""
        if self.promised is not None:
            return self.promised
        engine = self.engine
        if engine is not None:
            return None if engine.doomed or engine.state is EngineState.DRAINING else engine
        return self.lease


class Engine:
    __slots__ = (
        "id", "dp_rank", "book", "gpus", "state", "epoch", "version", "routable", "routable_since", "completed",
        "doomed", "operation", "strikes", "deaths", "disabled", "since",
    )  # fmt: skip

    def __init__(self, book: "PipelineBook", dp_rank: int, gpus: tuple[int, ...]) -> None:
        self.id = EngineId(book.id, dp_rank)
        self.dp_rank = dp_rank
        self.book = book
        self.gpus = gpus
        self.state = EngineState.ASLEEP
        self.epoch = 0
        self.version = -1
        self.routable = False
        """Its gate was opened and not closed since."""
        self.routable_since = -1
        """When its gate first opened in this tenancy; -1: not yet."""
        self.completed = 0
        """Trajectories completed in this tenancy."""
        self.doomed = False
        """To be put to sleep as soon as what it is doing allows."""
        self.operation = 0
        """Number of the action in flight on it; 0: none."""
        self.strikes = 0
        self.deaths = 0
        self.disabled = ""
        """Why it is not used any more; empty: it is."""
        self.since = 0

    @property
    def holds(self) -> bool:
        """Whether its GPUs are in its name."""
        return self.state in UP or self.state is EngineState.DRAINING

    def begin_tenancy(self) -> None:
        """What counts within a tenancy starts from nothing, and does so with the promise: an engine that waits for its
        GPUs must not look as if it had had its turn because it had one long ago."""
        self.completed = 0
        self.routable_since = -1

    def __repr__(self) -> str:
        return f"engine {self.id}"


class Lease:
    """GPUs held by a worker group other than rollout engines."""

    __slots__ = ("epoch", "book", "request", "role", "priority", "gpus", "granted_at")

    def __init__(self, epoch: int, request: "Request", now: int) -> None:
        self.epoch = epoch
        self.book = request.book
        self.request = request.number
        self.role = request.role
        self.priority = request.priority
        self.gpus = request.gpus
        self.granted_at = now

    def __str__(self) -> str:
        return f"{self.book.id}'s {self.role} ({self.priority.name})"


class Request:
    """A non-rollout request that waits for its whole mapping."""

    __slots__ = ("book", "number", "role", "priority", "gpus", "filed_at", "due", "promised")

    def __init__(
        self,
        book: "PipelineBook",
        number: int,
        role: Role,
        priority: Priority,
        gpus: tuple[int, ...],
        now: int,
        due: int,
    ) -> None:
        self.book = book
        self.number = number
        self.role = role
        self.priority = priority
        self.gpus = gpus
        self.filed_at = now
        self.due = due
        """Order of service: filed_at plus ageing by priority, never changed (`core.demand.due`)."""
        self.promised = False

    def __str__(self) -> str:
        return f"{self.book.id}'s request for {self.role} ({self.priority.name})"


class PipelineBook:
    """Everything the scheduler knows about one pipeline."""

    __slots__ = (
        "id", "spec", "number", "life", "phase", "reason", "seq", "batches", "opened_through", "requests", "leases",
        "requests_through", "published", "signal", "signals", "signalled_at", "consumed_at", "reported", "allocation",
        "hungry_since", "demand_since", "engines", "rank_at", "up", "open_demand", "open_target", "releasing", "stop",
        "planned_at", "leave_asked", "clearing", "degraded", "tp", "kept", "gave_way_at",
    )  # fmt: skip

    def __init__(self, spec: PipelineSpec, number: int, life: int = 0) -> None:
        self.id = spec.id
        self.spec = spec
        self.number = number
        """Order of registration."""
        self.life = life
        """Which client of that name it listens to."""
        self.phase = Phase.REGISTERED
        self.reason = ""
        """Why it failed."""
        self.seq = 0
        """Last client message applied."""
        self.batches: dict[int, BatchState] = {}
        self.opened_through = -1
        """Highest batch number seen; numbers ascend, so a lower one that is not open is closed."""
        self.requests: dict[int, Request] = {}
        self.leases: dict[int, Lease] = {}
        self.requests_through = -1
        self.published = -1
        self.signal = False
        """A rollout signal arrived and no grant has consumed it."""
        self.signals = 0
        self.signalled_at = -1
        self.consumed_at = -1
        self.reported: int | None = None
        """Demand according to the last progress report; None before the first."""
        self.allocation = False
        """Was granted rollout and has not itself released it."""
        self.hungry_since = -1
        """Since when it has had demand (as the policy sees it) without completing a trajectory; -1: no demand."""
        self.demand_since = -1
        """Since when its open batches want trajectories, whatever the policy sees; -1: they do not."""
        self.gave_way_at = -1
        """When it lost its last engine to another pipeline's rollout, with demand of its own; -1: it did not, or was
        promised one since."""
        infer = spec.infer
        self.tp = infer.tp
        self.engines = [Engine(self, rank, infer.bundle(rank)) for rank in range(infer.size)]
        self.rank_at = {gpu: engine.dp_rank for engine in self.engines for gpu in engine.gpus}
        self.kept: dict[int, int] = {}
        """Bytes it keeps on each of its GPUs, once initialised, when all of it sleeps: every process its residue."""
        for group in spec.groups:
            for gpu in group.gpus:
                self.kept[gpu] = self.kept.get(gpu, 0) + spec.memory.residue
        self.up: dict[int, Engine] = {}
        """Engines by rank that are up or promised, and not doomed: what the planner counts."""
        self.open_demand = 0
        """Sum of the open batches' demand, whatever the policy."""
        self.open_target = 0
        self.releasing = False
        """A planned release waits for its engines to be clear."""
        self.stop = 0
        """Number of the StopPipeline action in flight; 0: none; -1: done."""
        self.planned_at = 0
        """`open_demand` when shares were last computed."""
        self.leave_asked = False
        self.degraded = False
        """Some engine of it is disabled."""
        self.clearing: dict[int, None] = {}
        """GPUs it released or lost that are not confirmed free yet."""

    def engine_on(self, gpu: int) -> Engine | None:
        rank = self.rank_at.get(gpu)
        return None if rank is None else self.engines[rank]

    @property
    def alive(self) -> bool:
        return self.phase is not Phase.FAILED and self.phase is not Phase.LEFT

    @property
    def left_fraction(self) -> float:
        """Share of its open batches still to be delivered; 0 without any."""
        return self.open_demand / self.open_target if self.open_target else 0.0

    @property
    def usable(self) -> int:
        """Engines that may be used."""
        return sum(not engine.disabled for engine in self.engines) if self.degraded else len(self.engines)

    def recount(self) -> None:
        """After any change of `batches`."""
        self.open_demand = sum(batch.demand for batch in self.batches.values())
        self.open_target = sum(batch.target for batch in self.batches.values())

    def open_batches(self, kind: BatchKind) -> int:
        return sum(batch.kind is kind for batch in self.batches.values())

    def __repr__(self) -> str:
        return f"pipeline {self.id}"


class Ledger:
    """All books of one cluster, and the only code that moves a GPU from one condition to another."""

    def __init__(self, cluster: Cluster, policy: DemandPolicy) -> None:
        self.cluster = cluster
        self.policy = policy
        self.now = 0
        self.gpus = [Gpu(id, cluster.gpu_memory) for id in range(cluster.gpus)]
        self.need = [cluster.memory_margin] * cluster.gpus
        """Bytes that must be seen free on a GPU before it counts as free: what any initialised pipeline may bring."""
        self.mapped: list[dict[PipelineBook, None]] = [{} for _ in range(cluster.gpus)]
        """Living pipelines with any worker group on each GPU."""
        self.books: dict[str, PipelineBook] = {}
        self.registrations = 0
        self.ended: dict[str, int] = {}
        """By name, the last client that was over before it was registered."""
        self.waiting: dict[Request, None] = {}
        """Requests not yet promised, in order of filing."""
        self.leases: dict[int, Lease] = {}
        self.init: Request | Lease | None = None
        """The one initialisation under way (promised or granted)."""
        # Work lists: what the reconciler looks at, so that it never scans the cluster.
        self.doomed: dict[Engine, None] = {}
        self.promised: dict[Engine | Request, None] = {}
        self.unserving: dict[Engine, None] = {}
        """Engines that are awake but not routable at the latest version."""
        self.unpromised: dict[int, PipelineBook] = {}
        """GPUs whose promise was taken back since the last plan, each with whose it was: somebody else may want the GPU
        now, and it another one."""
        self.mapping_generation = 0
        """Changes whenever the set of pipelines or usable engines does (`core.regions` caches by it)."""

    @property
    def work(self) -> bool:
        """Whether there may be something for the reconciler to do."""
        return bool(self.promised or self.unserving or self.doomed)

    # --- one GPU ---------------------------------------------------------------------------------------

    def _move(self, gpu: Gpu, to: Hold, allowed: tuple[Hold, ...], why: str) -> None:
        if gpu.hold not in allowed:
            raise InvariantBroken(f"GPU {gpu.id} is {gpu.hold.value} ({gpu.why}) and cannot become {to.value} ({why})")
        gpu.hold = to
        gpu.since = self.now
        gpu.why = why

    def hold_by_engine(self, engine: Engine) -> None:
        for id in engine.gpus:
            gpu = self.gpus[id]
            self._move(gpu, Hold.HELD, (Hold.FREE,), str(engine.id))
            gpu.engine = engine
            gpu.promised = None
        self.promised.pop(engine, None)

    def hold_by_lease(self, lease: Lease, request: Request) -> None:
        for id in lease.gpus:
            gpu = self.gpus[id]
            self._move(gpu, Hold.HELD, (Hold.FREE,), str(lease))
            gpu.lease = lease
            gpu.promised = None
        self.promised.pop(request, None)
        self.leases[lease.epoch] = lease
        lease.book.leases[lease.epoch] = lease

    def clear(self, ids: tuple[int, ...], book: PipelineBook, why: str, *, quarantine: bool = False) -> tuple[int, ...]:
        """The tenant is gone by its own word (or killed: `quarantine`). Returns the GPUs that were in its name."""
        to = Hold.QUARANTINED if quarantine else Hold.CLEARING
        cleared = []
        for id in ids:
            gpu = self.gpus[id]
            if gpu.hold is Hold.LOST:
                gpu.engine = gpu.lease = None
                continue
            self._move(gpu, to, (Hold.HELD, Hold.CLEARING, Hold.QUARANTINED), why)
            gpu.engine = gpu.lease = None
            gpu.cleared_by = book.id
            book.clearing[id] = None
            if quarantine and gpu.promised is not None:
                self.break_promise(gpu.promised)
            cleared.append(id)
        return tuple(cleared)

    def free(self, id: int) -> None:
        """Its memory was seen free."""
        gpu = self.gpus[id]
        if gpu.hold is Hold.LOST:
            return
        self._move(gpu, Hold.FREE, (Hold.CLEARING, Hold.QUARANTINED), "")
        owner = self.books.get(gpu.cleared_by)
        if owner is not None:
            owner.clearing.pop(id, None)

    def recheck(self, id: int, book: PipelineBook) -> None:
        """A free GPU's memory is to be looked at again, because its next tenant needs more than was seen."""
        gpu = self.gpus[id]
        self._move(gpu, Hold.CLEARING, (Hold.FREE,), "more memory is needed than was last seen free")
        gpu.cleared_by = book.id
        book.clearing[id] = None

    def residents(self, id: int) -> list[PipelineBook]:
        """Initialised pipelines with a worker on this GPU."""
        return [book for book in self.mapped[id] if book.phase is Phase.READY]

    def lose(self, id: int) -> None:
        gpu = self.gpus[id]
        if gpu.hold is Hold.LOST:
            return
        if gpu.promised is not None:
            self.break_promise(gpu.promised)
        gpu.hold = Hold.LOST
        gpu.since = self.now
        gpu.why = "its node left"
        owner = self.books.get(gpu.cleared_by)
        if owner is not None:
            owner.clearing.pop(id, None)

    # --- promises --------------------------------------------------------------------------------------

    def promise(self, to: Engine | Request) -> None:
        """From now on the GPUs are meant for `to`, and for nobody else."""
        for id in to.gpus:
            gpu = self.gpus[id]
            if gpu.promised is not None or not gpu.usable:
                raise InvariantBroken(f"GPU {id} cannot be promised to {to}: {gpu.hold.value}, promised {gpu.promised}")
            gpu.promised = to
        self.promised[to] = None
        if isinstance(to, Engine):
            to.begin_tenancy()
            to.book.up[to.dp_rank] = to
        else:
            to.promised = True
            self.waiting.pop(to, None)
            if to.priority is Priority.INITIALIZATION:
                self.init = to

    def break_promise(self, to: Engine | Request) -> None:
        """Take a promise back; a request waits again, in its old place."""
        for id in to.gpus:
            if self.gpus[id].promised is to:
                self.gpus[id].promised = None
                self.unpromised[id] = to.book
        self.promised.pop(to, None)
        if isinstance(to, Engine):
            to.book.up.pop(to.dp_rank, None)
        else:
            to.promised = False
            if self.init is to:
                self.init = None
            if to.number in to.book.requests:
                self.waiting[to] = None

    def doom(self, engine: Engine) -> None:
        """The engine is to sleep; its GPUs are to be given away."""
        engine.doomed = True
        engine.book.up.pop(engine.dp_rank, None)
        self.doomed[engine] = None

    # --- invariants ------------------------------------------------------------------------------------

    def check(self) -> None:
        """S1 and the books' own consistency, from scratch. For tests and `--check`; O(GPUs + engines)."""
        for gpu in self.gpus:
            self._check_gpu(gpu)
        for book in self.books.values():
            for engine in book.engines:
                self._check_engine(engine)
        for lease in self.leases.values():
            wrong = [g for g in lease.gpus if self.gpus[g].lease is not lease and self.gpus[g].hold is not Hold.LOST]
            if wrong:
                raise InvariantBroken(f"{lease} does not hold GPUs {wrong} that it was granted")

    def _check_gpu(self, gpu: Gpu) -> None:
        tenants = (gpu.engine is not None) + (gpu.lease is not None)
        if tenants != (1 if gpu.hold is Hold.HELD else 0) and gpu.hold is not Hold.LOST:
            raise InvariantBroken(f"GPU {gpu.id} is {gpu.hold.value} with {tenants} tenants")
        if gpu.promised is not None:
            if gpu.promised not in self.promised or gpu.id not in gpu.promised.gpus:
                raise InvariantBroken(f"GPU {gpu.id} keeps a promise to {gpu.promised} that nobody remembers")
            if not gpu.usable:
                raise InvariantBroken(f"GPU {gpu.id} is {gpu.hold.value} and promised to {gpu.promised}")

    def _check_engine(self, engine: Engine) -> None:
        for id in engine.gpus:
            gpu = self.gpus[id]
            if (gpu.engine is engine) != engine.holds and gpu.hold is not Hold.LOST:
                raise InvariantBroken(f"{engine} is {engine.state.value} but GPU {id} is {gpu.hold.value}")
        promised = engine in self.promised
        if promised and (engine.holds and not engine.doomed and engine.state is not EngineState.DRAINING):
            raise InvariantBroken(f"{engine} is promised GPUs it already has")
        counted = engine.book.up.get(engine.dp_rank) is engine
        if counted != (promised or (engine.state in UP and not engine.doomed)):
            raise InvariantBroken(
                f"{engine} ({engine.state.value}, doomed={engine.doomed}) is miscounted as up={counted}"
            )
        if engine.routable and engine.state is not EngineState.AWAKE:
            raise InvariantBroken(f"{engine} is {engine.state.value} but its gate is open")
