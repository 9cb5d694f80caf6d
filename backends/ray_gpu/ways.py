"""From where a pipeline's workers are to how weights can reach each of its engines. Plain data, known to all: driver,
control plane and workers come to the same result."""

from collections.abc import Sequence

from backends.ray_gpu.places import engine_name, trainer_name
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.weights.choice import AGREE, UNSET, Choice, Side, choose
from backends.ray_gpu.workers.environment import environment
from core.model import Cluster, OnPreempt, Record, Role


class Way(Record, frozen=True, kw_only=True):
    """How one engine gets its weights."""

    device: str
    asked: str
    trainer: Side
    engine: Side

    @property
    def meant(self) -> Choice:
        """While trainer and engine both have their weights on the device."""
        return choose(self.device, self.trainer, self.engine, self.asked)


def ways_of(plan: CrewPlan, cluster: Cluster, devices: Sequence[int]) -> tuple[Way, ...]:
    """The way to each engine. `devices`: the card of each logical GPU on its node; empty: each its own.

    Raises ConfigError if the plan asks for a transport that there is not.
    """
    trainer = _side(plan, cluster, devices, trainer_name(Role.ACTOR_TRAIN, 0), plan.train_gpus[:1])
    infer = plan.job.spec.infer
    engines = (_side(plan, cluster, devices, engine_name(rank), infer.bundle(rank)) for rank in range(infer.size))
    ways = tuple(Way(device=plan.device, asked=plan.transport, trainer=trainer, engine=engine) for engine in engines)
    for way in ways:
        choose(way.device, way.trainer, way.engine, way.asked)
    return ways


def direct_ranks(ways: Sequence[Way]) -> tuple[int, ...]:
    """Engines that are meant to get weights from the trainer's memory."""
    return tuple(rank for rank, way in enumerate(ways) if way.meant.transport != "cache")


def _side(plan: CrewPlan, cluster: Cluster, devices: Sequence[int], name: str, gpus: Sequence[int]) -> Side:
    own = tuple(range(cluster.gpus_per_node)) * cluster.nodes
    variables = environment(plan, (), name, one_node=True)
    return Side(
        node=cluster.node_of(gpus[0]),
        cards=tuple((devices or own)[gpu] for gpu in gpus),
        nccl=tuple(variables.get(key, UNSET) for key in AGREE),
        drains=name.startswith("engine-") and plan.job.spec.on_preempt is OnPreempt.DRAIN,
    )
