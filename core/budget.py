"""Does it fit? The memory of a GPU and of a node, summed for the worst moment.

On a GPU that is: one tenant active or initialising, every other process that is mapped there asleep with its declared
residue, and the margin. On a node: every pipeline that uses it keeps `cached_versions` of its weights.
Pure, and cheap enough to run at every admission; messages are only built for what does not fit.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core.errors import TopologyError
from core.model import ROLE_KEYS, Cluster, MemoryNeeds, PipelineSpec, Role
from core.units import in_gib, show_gib


class _Tenant(NamedTuple):
    """Who may be active on a GPU: what it needs then, and how much of it is counted as residue already."""

    spec: PipelineSpec
    doing: str
    need: int
    asleep: int


def check_fit(cluster: Cluster, admitted: Sequence[PipelineSpec], spec: PipelineSpec) -> None:
    """Raises TopologyError with the sum if `spec` does not fit beside everyone admitted, on any GPU or node."""
    check_memory(cluster, (*admitted, spec), spec.union)


def check_memory(cluster: Cluster, specs: Sequence[PipelineSpec], gpus: Sequence[int]) -> None:
    """The same for many at once, on these GPUs and on every node."""
    if not _surely_fits(cluster, specs):
        _check_gpus(cluster, specs, gpus)
    _check_hosts(cluster, specs)


def _surely_fits(cluster: Cluster, specs: Sequence[PipelineSpec]) -> bool:
    """Whether it would fit even with every process on one GPU: most worlds do, and need no look at each GPU."""
    asleep = sum(len(spec.groups) * spec.memory.residue for spec in specs)
    needs = [max(s.memory.train, s.memory.engine, s.memory.init_peak) - s.memory.residue for s in specs]
    return asleep + max([0, *needs]) + cluster.memory_margin <= cluster.gpu_memory


def _check_gpus(cluster: Cluster, specs: Sequence[PipelineSpec], gpus: Sequence[int]) -> None:
    asleep = dict.fromkeys(gpus, 0)
    most = dict.fromkeys(gpus, 0)
    for spec in specs:
        for gpu, count in _processes(spec).items():
            if gpu in asleep:
                asleep[gpu] += count * spec.memory.residue
                most[gpu] = max(most[gpu], spec.memory.init_peak - count * spec.memory.residue)
        for group in spec.groups:
            extra = _need(spec.memory, group.role) - spec.memory.residue
            for gpu in group.gpus:
                if gpu in most:
                    most[gpu] = max(most[gpu], extra)
    for gpu in gpus:
        if asleep[gpu] + most[gpu] + cluster.memory_margin > cluster.gpu_memory:
            raise TopologyError(f"GPU {gpu}", _gpu_sum(cluster, specs, gpu))


def _processes(spec: PipelineSpec) -> dict[int, int]:
    """How many worker processes of the pipeline share each of its GPUs."""
    count: dict[int, int] = {}
    for group in spec.groups:
        for gpu in group.gpus:
            count[gpu] = count.get(gpu, 0) + 1
    return count


def _need(memory: MemoryNeeds, role: Role) -> int:
    """Bytes of an active worker group on each GPU. Critic and reference are budgeted like the trainer."""
    return memory.engine if role is Role.ACTOR_INFER else memory.train


def _tenants(specs: Sequence[PipelineSpec], gpu: int) -> Iterator[_Tenant]:
    for spec in specs:
        here = [group.role for group in spec.groups if gpu in group.gpus]
        residue = spec.memory.residue
        for role in here:
            yield _Tenant(spec, ROLE_KEYS[role], max(_need(spec.memory, role), residue), residue)
        if here:
            asleep = len(here) * residue
            yield _Tenant(spec, "init", max(spec.memory.init_peak, asleep), asleep)


def _gpu_sum(cluster: Cluster, specs: Sequence[PipelineSpec], gpu: int) -> str:
    """The sum that does not fit, as a person would check it: who sleeps there, and the largest one awake."""
    largest = max(_tenants(specs, gpu), key=lambda tenant: tenant.need - tenant.asleep)
    residues = {spec.id: _processes(spec).get(gpu, 0) * spec.memory.residue for spec in specs}
    residues[largest.spec.id] -= largest.asleep
    asleep = " + ".join(f"{name} {_number(size)}" for name, size in residues.items() if size)
    total = sum(residues.values()) + largest.need + cluster.memory_margin
    head = f"sleeping residues {asleep} + " if asleep else ""
    return (
        f"{head}largest tenant {largest.spec.id} {largest.doing} {_number(largest.need)}"
        f" + margin {_number(cluster.memory_margin)} = {show_gib(total)}, but it has {show_gib(cluster.gpu_memory)}"
    )


def _number(n_bytes: int) -> str:
    return f"{in_gib(n_bytes):.2f}".rstrip("0").rstrip(".")


def cached_versions(spec: PipelineSpec) -> int:
    """Weight versions the host cache is budgeted for: the one being published, the latest, and while engines
    still read older ones, as many as the trainer may be ahead of them."""
    return spec.staleness + 2


def _check_hosts(cluster: Cluster, specs: Sequence[PipelineSpec]) -> None:
    if sum(cached_versions(spec) * spec.memory.host_cache for spec in specs) <= cluster.host_memory:
        return  # even if all of them used the same node
    caches: dict[int, list[PipelineSpec]] = {}
    for spec in specs:
        for node in sorted({cluster.node_of(gpu) for gpu in spec.union}):
            caches.setdefault(node, []).append(spec)
    for node, users in sorted(caches.items()):
        total = sum(cached_versions(spec) * spec.memory.host_cache for spec in users)
        if total > cluster.host_memory:
            parts = " + ".join(f"{s.id} {cached_versions(s)} x {_number(s.memory.host_cache)}" for s in users)
            problem = f"cached weight versions {parts} = {show_gib(total)}, but it has {show_gib(cluster.host_memory)}"
            raise TopologyError(f"host memory of node {node}", problem)
