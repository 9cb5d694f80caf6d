"""The world to be proved: pipelines that go through the same step again and again, on a few GPUs.

How an infinite world becomes a finite one, and what that leaves out:

* **Counters** (actions, epochs, generations, batches, requests, versions) only ever meet their equals; they are
  renumbered after every event (`packing`). Exact.
* **Steps**: a pipeline opens a batch, fills it, closes it, trains, publishes, releases, and starts over. A batch wants
  one or two trajectories, so "a tenth still to come" (a spared donor) and the bands of progress never show.
* **Durations**: anything in flight may end before or after anything else; nothing has a speed. More orders than any
  real world has, never fewer.
* **Time** is counted in *ticks*, each longer than all the seniority that priority can buy (six steps of ageing). The
  scheduler compares instants only for their order, or with a residence, a turn, or ageing. So an instant is known
  by its tick and its place in the order of events; `RESIDENCE` is one tick, `TURN` two, and an instant older than
  everything it can be compared with only keeps its place. Left out: hunger between five and six steps of ageing (it
  comes before a training request and not before an initialisation), and limits that stand in other proportions.
* A tick passes whenever it likes, but not while a timer is due, and not past the turn of a pipeline's only engine
  that has completed nothing: `core.bounds` assumes that one trajectory fits into a turn, and so does the proof.
* **Memory** is seen free or not; there are no bytes (S3 is the simulator's business).
* **Messages** arrive in order; a late one may be overtaken by what the scheduler does meanwhile: a trajectory that was
  completed before its engine was told to sleep may be heard of while it goes to sleep, not later.
* **Faults** cost one each, out of `World.faults`; see `moves`.
"""

from enum import StrEnum
from typing import NamedTuple

from core import events
from core.bounds import AGEING_NS
from core.errors import ConfigError
from core.model import Cluster, DemandPolicy, Limits, MemoryNeeds, PipelineSpec, Role, WorkerGroup
from core.scheduler import decide, new_state
from core.state import State

TICK = 7 * AGEING_NS
"""ns; more than ageing over all priorities."""
RESIDENCE = TICK
TURN = 2 * TICK
OLDEST = 2
"""Ticks after which an engine's age makes no difference any more: its turn is over."""

_NEVER = 10**9 * TICK
_LIMITS = Limits(
    hold=_NEVER, init=_NEVER, wake=_NEVER, sync=_NEVER, sleep=_NEVER, drain=_NEVER, release=_NEVER, quarantine=_NEVER,
    turn=TURN, command=_NEVER,
)  # fmt: skip


class Mapping(StrEnum):
    """Who may use which GPUs. All roll out on all GPUs, unless it says otherwise."""

    INCIDENT = "incident"
    """Pipeline number i trains on GPU i (modulo the GPUs)."""
    FULL = "full"
    """Everyone trains on all GPUs."""
    PARTIAL = "partial"
    """Pipeline number i trains on GPU i and rolls out on all GPUs but the one before it."""


class Start(StrEnum):
    """How pipelines come in."""

    FREE = "free"
    INCIDENT = "incident"
    """Each asks to be initialised only when rollout was granted to the one before it, which completes nothing until
    then."""


class World(NamedTuple):
    """What is to be proved. Immutable; together with the code it determines the graph."""

    gpus: int = 2
    pipelines: int = 2
    tp: tuple[int, ...] = (1,)
    """Of each pipeline in turn; the last for all that follow."""
    mapping: Mapping = Mapping.INCIDENT
    demand: DemandPolicy = DemandPolicy.BATCH
    start: Start = Start.FREE
    faults: int = 0
    target: int = 1
    """Trajectories a batch."""
    staleness: int = 0
    coarse: bool = False
    """A sync with the opening of the gate, and a sleep with the look at memory, are one step each."""
    symmetry: bool = True
    """States that differ only in which of several like pipelines is which are walked once (`core.verify.symmetry`)."""


def specs(world: World) -> tuple[PipelineSpec, ...]:
    """Raises ConfigError for a world that cannot be."""
    if not (1 <= world.pipelines <= 8 and 1 <= world.gpus <= 8):
        raise ConfigError("", f"{world.pipelines} pipelines on {world.gpus} GPUs: a world proved whole has 1 to 8 each")
    return tuple(_spec(world, number) for number in range(world.pipelines))


def _spec(world: World, number: int) -> PipelineSpec:
    everything = tuple(range(world.gpus))
    own = number % world.gpus
    infer = everything
    if world.mapping is Mapping.PARTIAL and world.gpus > 1:
        infer = tuple(gpu for gpu in everything if gpu != (own - 1) % world.gpus)
    tp = world.tp[min(number, len(world.tp) - 1)]
    if tp < 1 or len(infer) % tp:
        raise ConfigError("--tp", f"{len(infer)} GPUs of p{number + 1} cannot be divided into engines of {tp}")
    return PipelineSpec(
        id=f"p{number + 1}",
        groups=(
            WorkerGroup(role=Role.ACTOR_TRAIN, gpus=everything if world.mapping is Mapping.FULL else (own,)),
            WorkerGroup(role=Role.ACTOR_INFER, gpus=infer, tp=tp),
        ),
        limits=_LIMITS,
        memory=MemoryNeeds(),
        staleness=world.staleness,
        min_residence=RESIDENCE,
    )


def admitted(world: World) -> State:
    """The state in which every pipeline is registered and admitted, and nothing else has happened."""
    cluster = Cluster(nodes=1, gpus_per_node=world.gpus, gpu_memory=1, host_memory=1)
    state = new_state(cluster, world.demand)
    for spec in specs(world):
        for event in (
            events.PipelineRegistered(pipeline=spec.id, seq=0, spec=spec),
            events.PipelineAdmitted(pipeline=spec.id, seq=1),
        ):
            for reply in decide(state, 0, event).replies:
                if reply.error is not None:
                    raise reply.error
    return state
