"""The nouns of Turnstile, frozen. One word an idea; every other room uses these words and no synonyms.

cluster         nodes with GPUs; a GPU has a global integer id, node = id // gpus_per_node
pipeline        one RL job; its worker groups are declared once, before it may ask for anything
role            what a worker group does (`Role`); `reward` runs on CPU and has no GPUs
worker group    one role of one pipeline: its `device_mapping` (GPU ids, in rank order) and `tp_size`
engine          one data-parallel rank of `actor_infer`: the bundle of `tp_size` GPUs it runs on
lease           GPUs held by a worker group, with a priority and an epoch; stale epochs are refused
rollout batch   a pipeline's intent to collect `target` trajectories; demand = max(0, target - delivered)

Units: times are integer nanoseconds, memory integer bytes (`core.units` converts).
"""

from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec


class Priority(IntEnum):
    """Who goes first, high to low. Only GENERATION is elastic and preemptible, engine by engine."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REF_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    GENERATION = 6


class Role(StrEnum):
    ACTOR_TRAIN = "actor_train"
    ACTOR_INFER = "actor_infer"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"


# What a worker group is called in scenario files, options and messages.
ROLE_KEYS: dict[Role, str] = {
    Role.ACTOR_TRAIN: "train",
    Role.ACTOR_INFER: "infer",
    Role.CRITIC: "critic",
    Role.REFERENCE: "reference",
    Role.REWARD: "reward",
}

# What a worker group may ask for. INITIALIZATION is asked for the whole pipeline, under its train role.
PRIORITIES_OF: dict[Role, tuple[Priority, ...]] = {
    Role.ACTOR_TRAIN: (Priority.INITIALIZATION, Priority.ACTOR_TRAINING, Priority.OLD_LOG_PROBS),
    Role.CRITIC: (Priority.CRITIC_TRAINING, Priority.VALUE_COMPUTE),
    Role.REFERENCE: (Priority.REF_LOG_PROBS,),
    Role.ACTOR_INFER: (Priority.GENERATION,),
    Role.REWARD: (),
}


class EngineId(NamedTuple):
    """An engine by name: its pipeline and data-parallel rank."""

    pipeline: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.dp_rank}"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the frozen nouns: compared by value, typed JSON for free."""


class Cluster(Record, frozen=True, kw_only=True):
    nodes: int
    gpus_per_node: int
    gpu_memory: int
    """Bytes of one GPU."""
    host_memory: int
    """Bytes of one node's host memory."""
    memory_margin: int = 0
    """Bytes that must stay free on a GPU beyond what the next tenant declared (S2)."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        return gpu // self.gpus_per_node


class WorkerGroup(Record, frozen=True, kw_only=True):
    role: Role
    gpus: tuple[int, ...]
    """The device mapping, in rank order."""
    tp: int = 1
    """Tensor-parallel size: consecutive `tp` entries of the mapping form one bundle."""

    @property
    def size(self) -> int:
        """How many data-parallel ranks (engines, for `actor_infer`)."""
        return len(self.gpus) // self.tp

    def bundle(self, dp_rank: int) -> tuple[int, ...]:
        return self.gpus[dp_rank * self.tp : (dp_rank + 1) * self.tp]


class MemoryNeeds(Record, frozen=True, kw_only=True):
    """Bytes a pipeline declares for each GPU (or node, for the host) that it uses."""

    train: int = 0
    """Active trainer: weights, gradients, optimizer, activations."""
    engine: int = 0
    """Awake engine: weights, KV cache, graphs."""
    residue: int = 0
    """What one sleeping process (trainer or engine) keeps on each of its GPUs."""
    init_peak: int = 0
    """Most that initialisation holds on one GPU at once."""
    host_cache: int = 0
    """One published version in the CPU weight cache, on each node the pipeline uses."""


class Limits(Record, frozen=True, kw_only=True):
    """Declared limits (ns). Past one: cancel, kill, quarantine, fail the pipeline that exceeded it."""

    hold: int
    """Longest a non-rollout lease may be held."""
    init: int
    """Longest an INITIALIZATION lease may be held."""
    wake: int
    """Longest a wake may take; also a cold start after a kill."""
    sync: int
    sleep: int
    """Longest a sleep may take once its requests are gone."""
    drain: int
    """Longest a closing engine may wait for the requests in flight."""
    release: int
    """Longest between a claimed release and memory observed free; then quarantine."""
    quarantine: int
    """Longest a quarantined GPU is waited for before those who cannot do without it are failed."""
    turn: int
    """Longest an engine keeps its turn for the sake of a first completed trajectory."""
    command: int
    """Longest a command to a client (grant, gate) may stay unanswered."""


class OnPreempt(StrEnum):
    """What happens to the requests in flight when an engine must go to sleep or sync."""

    ABORT = "abort"
    DRAIN = "drain"


class Partial(StrEnum):
    """What the pipeline does with a trajectory that was cut off."""

    RESTART = "restart"
    RESUME = "resume"


class Overlap(StrEnum):
    """What a pipeline promises about its own train and infer mappings; `topology.check_spec` holds it to that."""

    ANY = "any"
    PARTIAL = "partial"
    """Every train GPU is also an inference GPU."""
    NONE = "none"
    """No GPU is in both."""


class PipelineSpec(Record, frozen=True, kw_only=True):
    """Everything the core knows about a pipeline; declared at registration, never changed."""

    id: str
    groups: tuple[WorkerGroup, ...]
    limits: Limits
    memory: MemoryNeeds = MemoryNeeds()
    staleness: int = 0
    """Bound k: a sample may be at most k versions older than the trainer that takes it. 0: on-policy."""
    min_residence: int = 0
    """ns an engine keeps its GPUs against other rollouts once it is routable."""
    suspicion: int = 0
    """Longest an engine that stopped decoding may go unsuspected by its pipeline, ns (`core.defaults.suspicion`); the
    scheduler waits for the suspicion, and only the bounds know how long."""
    on_preempt: OnPreempt = OnPreempt.ABORT
    partial: Partial = Partial.RESTART
    in_flight_updates: bool = False
    """Sync without emptying the engine: running trajectories change version between two tokens."""
    overlap: Overlap = Overlap.ANY

    def group(self, role: Role) -> WorkerGroup | None:
        for group in self.groups:
            if group.role is role:
                return group
        return None

    @property
    def infer(self) -> WorkerGroup:
        group = self.group(Role.ACTOR_INFER)
        assert group is not None, f"{self.id} has no actor_infer group; topology.validate lets none pass"
        return group

    @property
    def union(self) -> tuple[int, ...]:
        """Every GPU of the pipeline, ascending: what INITIALIZATION asks for."""
        return tuple(sorted({gpu for group in self.groups for gpu in group.gpus}))


class BatchKind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class BatchState(Record, frozen=True, kw_only=True):
    """An open rollout batch as the pipeline reports it. The unit is trajectories."""

    batch: int
    """Number of the batch, ascending within a pipeline, over both kinds."""
    target: int
    delivered: int = 0
    """Distinct trajectories the pipeline accepted."""
    kind: BatchKind = BatchKind.TRAIN

    @property
    def demand(self) -> int:
        return max(0, self.target - self.delivered)


class RequestState(Record, frozen=True, kw_only=True):
    """A lease request as the pipeline repeats it."""

    request: int
    """Number of the request, ascending within a pipeline, never used twice."""
    role: Role
    priority: Priority


class PipelineState(Record, frozen=True, kw_only=True):
    """A pipeline's whole state, sent with every repeated message; repeating it is idempotent."""

    batches: tuple[BatchState, ...] = ()
    """Open batches, ascending."""
    opened_through: int = -1
    """Highest batch number used so far; those up to it that are not listed are closed."""
    waiting: tuple[RequestState, ...] = ()
    """Requests not yet granted, as far as the pipeline knows."""
    leases: tuple[int, ...] = ()
    """Epochs of the non-rollout leases the pipeline believes it holds."""
    requests_through: int = -1
    """Highest request number used so far; those neither waiting nor held are over."""
    published: int = -1
    """Latest weight version in the cache; -1 before the first."""
    signals: int = 0
    """How many rollout signals were sent so far."""
    admission: bool = False
    """It has asked to be admitted."""
    releasing: bool = False
    """It waits for a planned release of its rollout engines to be confirmed."""
    left: bool = False
    error: str | None = None
    """It is over, and why if it failed."""


class DemandPolicy(StrEnum):
    """What counts as rollout demand (docs/guarantees.md compares the three)."""

    BATCH = "batch"
    FLOOR = "floor"
    SIGNAL = "signal"
