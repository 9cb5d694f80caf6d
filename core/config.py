"""Scenario files: schema, defaults, and errors a person can act on.

A scenario is the declared world: the cluster, the pipelines (what the core needs in `spec`, what their loop and
the simulator need beside it), faults and expectations. Durations are ns, memory bytes; the YAML has s and GiB.
"""

from enum import StrEnum

from core.model import Cluster, DemandPolicy, PipelineSpec, Record
from core.workload import Workload


class DriverPolicy(StrEnum):
    """What a failed pipeline means for the others."""

    ISOLATE = "isolate"
    FAIL_FAST = "fail_fast"


class Durations(Record, frozen=True, kw_only=True):
    """A distribution of durations (ns): a mixture of lognormals, constants and uniforms, or samples, or a drift.

    `parts` are (weight, kind, a, b): `constant` a; `lognormal` median a, sigma b (times 1e6); `uniform` a..b.
    `samples` are drawn uniformly and exclude `parts`.
    """

    parts: tuple[tuple[float, str, int, int], ...] = ()
    samples: tuple[int, ...] = ()
    drift: tuple[tuple[int, ...], ...] = ()
    """Samples that change as a run goes on: list k serves draws number k x `every` and on, the last one all after it.
    Trajectories are numbered by batch, phases by how often the worker did them. Excludes the other two."""
    every: int = 1
    in_order: bool = False
    """Trajectories only: each list is in the order in which they began, and one is drawn from about its own place in
    it. Keeps what the order tells: an engine that is full is slower than one that runs empty."""
    first: int = 0
    """What the first one of each process takes instead (0: nothing else than usual); phases only."""


Cost = int | Durations
"""What a phase takes: always the same, or drawn each time."""


class Costs(Record, frozen=True, kw_only=True):
    """Durations (ns) of everything a pipeline does, for the simulator; a real backend takes what it takes."""

    init: Cost
    train: Cost
    offload: Cost
    onload: Cost
    publish: Cost
    sync: Cost
    sleep: Cost
    wake: Cost
    restart: Cost
    """Cold start of one engine after its process died."""
    log_probs: Cost = 0
    """One pass of old or reference log-probs, or of values."""
    critic_train: Cost = 0
    engine_slots: int = 16
    trajectory: Durations
    warmup: Cost = 0
    """What the first requests of a pipeline wait beside, on each engine that begins before kernels are compiled."""
    gate: Cost = 0
    """From the order to open an engine's gate until its pipeline has heard of it."""
    command: Cost = 0
    """From a grant, or another command, until its pipeline has taken it."""
    release: Cost | None = None
    """From "released" until the memory is seen free. None: what the simulator takes for usual."""


class Evaluation(Record, frozen=True, kw_only=True):
    """Evaluation rollouts: every `every` steps, `trajectories` of them, on one known version."""

    every: int
    trajectories: int


class Trigger(Record, frozen=True, kw_only=True):
    """Waits for an event of another pipeline instead of a time: `rollout_granted` or `init_accepted`."""

    pipeline: str
    event: str


class Job(Record, frozen=True, kw_only=True):
    """A pipeline and what its loop does."""

    spec: PipelineSpec
    steps: int
    target: int
    """Trajectories of one training batch: prompts x samples_per_prompt."""
    samples_per_prompt: int = 1
    """Trajectories of one prompt, whose rewards are compared with each other."""
    costs: Costs
    workload: Workload = Workload()
    """What a real backend trains on; the simulator ignores it."""
    start_at: int = 0
    start_after: Trigger | None = None
    """File the INITIALIZATION request only after this happened (an event, not a time)."""
    dispatch_after: Trigger | None = None
    """Dispatch no trajectory before this happened."""
    reissue_after: int = 0
    """ns after which a trajectory in flight is given to another engine."""
    max_attempts: int = 4
    """Attempts that may *fail or time out* before a trajectory is given up; preemptions do not count."""
    old_log_probs: bool = False
    """Ask for OLD_LOG_PROBS before training (REF_LOG_PROBS, VALUE_COMPUTE and CRITIC_TRAINING follow from
    the reference and critic groups)."""
    evaluation: Evaluation | None = None
    reward_s: int = 0
    """Duration (ns) of the reward on CPU, after each trajectory."""


class Fault(Record, frozen=True, kw_only=True):
    """Something that goes wrong at `at` (ns)."""

    at: int
    kind: str
    pipeline: str = ""
    dp_rank: int = -1
    node: int = -1
    duration: int = 0
    factor: float = 1.0
    bytes: int = 0
    count: int = 1
    """How many messages or operations, in sequence, it hits."""


# How a run can end (`Expect.outcome`), and the rules that can be broken in it (docs/guarantees.md).
OUTCOMES = ("completed", "failed", "deadlock", "starved", "interrupted")
RULES = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "L1", "L2", "L3", "L4", "L5")


class Expect(Record, frozen=True, kw_only=True):
    """What must be true of the run. None: not asked."""

    outcome: str | None = None
    """One of `OUTCOMES`."""
    max_wait: int | None = None
    """ns; the longest `max_wait_s` of any pipeline."""
    violations: tuple[str, ...] = ()
    """Rules that may be broken; any other broken rule fails the run."""
    max_makespan: int | None = None
    """ns; the run takes no longer."""
    min_handovers: int | None = None
    """GPUs that passed from one pipeline to another, at least."""
    failed: tuple[str, ...] | None = None
    """Exactly these pipelines end with an error."""


class Scenario(Record, frozen=True, kw_only=True):
    name: str
    cluster: Cluster
    jobs: tuple[Job, ...]
    driver: DriverPolicy = DriverPolicy.ISOLATE
    demand: DemandPolicy = DemandPolicy.BATCH
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    expect: Expect | None = None
    topology_source: str = "scenario"
