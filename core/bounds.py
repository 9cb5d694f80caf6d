"""How long anyone can have to wait: formulas of the declared limits and of who shares GPUs with whom.

All bounds are worst cases in ns. They are generous by a constant factor on purpose and by nothing else: finite, and
linear in the number of pipelines that share GPUs. docs/guarantees.md gives the arguments in prose.

What they assume, and what breaks if it does not hold:
* the order of service is `filed_at + priority * AGEING_NS`, fixed when the request is filed, and the first in that
  order has its GPUs reserved;
* nobody exceeds a limit without being stopped (past a limit: cancel, kill, quarantine, fail);
* one trajectory fits into `limits.turn`. A trajectory longer than every turn cannot be completed by taking turns.
Failures of the waiting pipeline's own engines are not in the bounds: its clock starts again there.
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


def eviction(spec: PipelineSpec) -> int:
    """From the decision to shrink an engine of `spec` until its GPUs are free.

    It may have a turn to finish (`turn`), then empties (`drain`), sleeps (`sleep`) and its memory comes back
    (`release`). Each step may fail at its limit: then it is killed (as long as a sleep, at most) and its memory is
    waited for, after which the GPU is in quarantine and those who cannot do without it are failed.
    """
    limits = spec.limits
    return limits.turn + limits.drain + 2 * limits.sleep + 2 * limits.release + limits.quarantine


def start(spec: PipelineSpec) -> int:
    """From free GPUs until an engine of `spec` is routable: wake, sync, gate. Twice: one cold start after a failure."""
    return 2 * (spec.limits.wake + spec.limits.sync + spec.limits.command)


def residence(spec: PipelineSpec) -> int:
    """Longest an engine of `spec` keeps its GPUs against a rollout that waits for its turn: its turn, and one more
    residence because nearly finished donors are spared."""
    return max(spec.min_residence, spec.limits.turn) + spec.min_residence


def holding(spec: PipelineSpec) -> int:
    """From the grant of a lease until its GPUs are free again: the hold limit, then at worst the pipeline is killed
    and its memory waited for."""
    limits = spec.limits
    return limits.command + limits.hold + limits.sleep + 2 * limits.release + limits.quarantine


def initialisation(spec: PipelineSpec) -> int:
    """As `holding`, for an INITIALIZATION lease."""
    limits = spec.limits
    return limits.command + limits.init + limits.sleep + 2 * limits.release + limits.quarantine


def non_rollout_groups(spec: PipelineSpec) -> int:
    """Worker groups that ask for leases of their own: as many requests as can wait at once, at most."""
    return sum(1 for group in spec.groups if group.role is not Role.ACTOR_INFER and group.gpus)


def service(spec: PipelineSpec) -> int:
    """Everything that `spec` can put before somebody else who waits: one initialisation, one lease for each worker
    group, one turn of rollout, and the eviction that ends the turn."""
    leases = non_rollout_groups(spec) * holding(spec)
    return initialisation(spec) + leases + start(spec) + residence(spec) + eviction(spec)


def grant(
    spec: PipelineSpec, priority: Priority, sharers: Sequence[PipelineSpec], everyone: Sequence[PipelineSpec]
) -> int:
    """Longest from a non-rollout request of `spec` to its grant (L3).

    The key of the request is fixed, so only what is filed in the next `priority` steps of ageing can still get
    before it: after that time the queue before it can only shrink. In it stands, at most, everything each sharer can
    have waiting at once (`service`; its own other groups included). A reserved GPU becomes free after the worst
    eviction among the sharers, and each of those before it pays that once. Initialisations run one at a time in the
    whole cluster, so each pipeline, sharing or not, may be initialised once before.
    """
    worst = max(map(eviction, sharers), default=0)
    queue = sum(service(other) + (non_rollout_groups(other) + 2) * worst for other in sharers)
    return priority * AGEING_NS + queue + sum(map(initialisation, everyone)) + worst + spec.limits.command


def rollout(spec: PipelineSpec, sharers: Sequence[PipelineSpec], everyone: Sequence[PipelineSpec]) -> int:
    """Longest that `spec` has demand without completing a trajectory (L1).

    A pipeline without an engine stands in the same order as a request of the lowest priority would, so it gets its
    engine within `grant`. Once routable it keeps it for a turn: against rollouts by residence, and against requests
    because an engine that completed nothing is emptied only after its first trajectory. What is cut off at the end of
    that turn (its own trainer publishing, say) can begin again once, so everything is counted twice.
    """
    engine = start(spec) + max(spec.limits.turn, spec.min_residence) + spec.limits.drain
    return 2 * (grant(spec, Priority.GENERATION, sharers, everyone) + engine)


def cut_off(spec: PipelineSpec) -> int:
    """Longest until a pipeline whose every engine needs a lost or quarantined GPU has ended as failed (L2)."""
    limits = spec.limits
    return limits.quarantine + limits.command + limits.sleep + limits.release


def sharers_of(spec: PipelineSpec, everyone: Iterable[PipelineSpec]) -> list[PipelineSpec]:
    """`spec` and all that share GPUs with it, directly or through others: whoever is before it in the order may itself
    wait for somebody who shares nothing with it."""
    found: list[PipelineSpec] = []
    reached: dict[int, None] = dict.fromkeys(spec.union)
    rest = list(everyone)
    while True:
        near = [other for other in rest if any(gpu in reached for gpu in other.union)]
        if not near:
            return found
        rest = [other for other in rest if other not in near]
        for other in near:
            found.append(other)
            reached.update(dict.fromkeys(other.union))
