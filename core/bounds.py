"""How long anyone can have to wait: formulas of the declared limits and of who shares GPUs with whom.

All bounds are worst cases in ns, in which everything takes its whole limit and every holder has to be killed at the
end. They are finite, and linear in the number of pipelines that share GPUs. What they assume, and what breaks without:

* the order of service is `filed_at + priority * AGEING_NS`, fixed when the request is filed, and the first in that
  order has its GPUs reserved;
* nobody exceeds a limit without being stopped (past a limit: cancel, kill, quarantine, fail);
* one trajectory fits into `limits.turn`. A trajectory longer than every turn cannot be completed by taking turns.

Failures of the waiting pipeline's own engines are not in its bound: its clock starts again there. The time until it
suspects an engine that hangs while it decodes (`PipelineSpec.suspicion`) is.
"""

from collections.abc import Iterable, Sequence

from core.model import PipelineSpec, Priority, Role
from core.units import NS_PER_S

AGEING_NS = 60 * NS_PER_S
"""What one step of priority is worth: a request overtakes those of the next lower priority that were filed at most
this long before it. Long beside a switch (seconds), short beside a training phase (minutes)."""


def worth_waking(demand: int, engines_up: int, engines: int) -> bool:
    """Whether one more engine has something to do: rule (c) of L4. Trajectories are the unit, so an engine beyond
    one for each trajectory still wanted would only be woken to be put to sleep again."""
    return engines_up < min(demand, engines)


def _back_to_free(spec: PipelineSpec) -> int:
    """From a claim of release until the GPUs are free. The memory may not show in time, and again not after a kill
    (which takes as long as a sleep, at most); then the GPU is in quarantine until those who need it are failed."""
    limits = spec.limits
    return limits.sleep + 2 * limits.release + limits.quarantine


def eviction(spec: PipelineSpec) -> int:
    """From the order to put an engine of `spec` to sleep until its GPUs are free: it empties, sleeps, lets go."""
    return spec.limits.drain + spec.limits.sleep + _back_to_free(spec)


def start(spec: PipelineSpec) -> int:
    """From free GPUs until an engine of `spec` is routable: wake, sync, gate. Twice: one cold start after a failure."""
    return 2 * (spec.limits.wake + spec.limits.sync + spec.limits.command)


def turn(spec: PipelineSpec) -> int:
    """Longest an engine of `spec` keeps its GPUs against rollouts that wait, once routable: its turn, and one more
    residence because nearly finished donors are spared."""
    return max(spec.min_residence, spec.limits.turn) + spec.min_residence


def holding(spec: PipelineSpec) -> int:
    """From the grant of a lease until its GPUs are free again; past the hold limit the pipeline is killed."""
    return spec.limits.command + spec.limits.hold + _back_to_free(spec)


def initialisation(spec: PipelineSpec) -> int:
    """As `holding`, for an INITIALIZATION lease."""
    return spec.limits.command + spec.limits.init + _back_to_free(spec)


def lease_groups(spec: PipelineSpec) -> int:
    """Worker groups that ask for leases of their own: as many requests as can wait at once, at most."""
    return sum(1 for group in spec.groups if group.role is not Role.ACTOR_INFER and group.gpus)


def service(spec: PipelineSpec) -> int:
    """All that `spec` can have before somebody else in the order at one time: a lease for each worker group, and a
    rollout turn with the eviction that ends it."""
    return lease_groups(spec) * holding(spec) + start(spec) + turn(spec) + eviction(spec)


def grant(
    spec: PipelineSpec, priority: Priority, sharers: Sequence[PipelineSpec], everyone: Sequence[PipelineSpec]
) -> int:
    """Longest from a non-rollout request of `spec` to its grant (L3).

    Its key is fixed, so only what is filed during the next `priority` steps of ageing can still get before it; after
    that time the queue before it only shrinks. At most, everything each sharer (itself included) can have waiting
    at once stands in that queue, and each of those first evicts whatever rollout filled its GPUs meanwhile; so does
    the request itself. Initialisations run one at a time in the whole cluster, so each pipeline, sharing or not, may
    be initialised once before it.
    """
    worst = max(map(eviction, sharers), default=0)
    queue = sum(service(other) + (lease_groups(other) + 1) * worst for other in sharers)
    return priority * AGEING_NS + queue + sum(map(initialisation, everyone)) + worst + spec.limits.command


def rollout(spec: PipelineSpec, sharers: Sequence[PipelineSpec], everyone: Sequence[PipelineSpec]) -> int:
    """Longest that `spec` has demand without completing a trajectory (L1).

    A pipeline that completes nothing stands in the same order as a request of the lowest priority, so within `grant`
    nobody is before it any more. Then it starts an engine and keeps it for a turn, against rollouts by residence and
    against requests by its place in the order. What was running is cut off when its own trainer publishes, which can
    happen as often as full batches wait to be trained: `staleness` times. All that once, since an engine that stops
    decoding, and is suspected in the end, is a failure.
    """
    attempt = start(spec) + turn(spec) + spec.limits.drain
    own = spec.staleness * (holding(spec) + attempt)
    return grant(spec, Priority.GENERATION, sharers, everyone) + attempt + own + spec.suspicion


def sharers_of(spec: PipelineSpec, everyone: Iterable[PipelineSpec]) -> list[PipelineSpec]:
    """`spec` and all that share GPUs with it, directly or through others: whoever is before it in the order may itself
    wait for somebody who shares nothing with it."""
    found: list[PipelineSpec] = []
    reached = dict.fromkeys(spec.union)
    rest = [(other, other.union) for other in everyone]
    while True:
        apart, near = [], []
        for other in rest:
            (apart if reached.keys().isdisjoint(other[1]) else near).append(other)
        if not near:
            return found
        for other, gpus in near:
            found.append(other)
            reached.update(dict.fromkeys(gpus))
        rest = apart
