"""What engines cost that are awake for a pipeline with nothing to roll out while a peer had demand.

This is what the `floor` policy pays with: whoever keeps a rollout allocation counts as one trajectory, so an idle
holder attracts GPUs and takes them from a busy peer. Demand is measured by open batches under every policy.

A *rival* shares at least one inference GPU. Time counts per GPU, as long as any rival has demand.
"""

from collections.abc import Sequence

from core.model import PipelineSpec


class IdleHolders:
    def __init__(self, specs: Sequence[PipelineSpec]) -> None:
        self.gpu_ns = 0
        """GPU-nanoseconds held without demand, while a rival had some, up to the last change."""
        self.wakes = 0
        """Engines woken for a pipeline without demand, while a rival had some."""
        self._rivals = _rivals(specs)
        self._wants = {spec.id: False for spec in specs}
        self._rivals_wanting = {spec.id: 0 for spec in specs}
        self._awake = {spec.id: 0 for spec in specs}
        self._counted = 0
        """GPUs held so at this moment."""
        self._since = 0

    def wants(self, pipeline: str, has_demand: bool, t_ns: int) -> None:
        """The pipeline has demand from now on, or has none."""
        if self._wants[pipeline] == has_demand:
            return
        self._advance(t_ns)
        for each in (pipeline, *self._rivals[pipeline]):
            self._counted -= self._held_idly(each)
        self._wants[pipeline] = has_demand
        for rival in self._rivals[pipeline]:
            self._rivals_wanting[rival] += 1 if has_demand else -1
        for each in (pipeline, *self._rivals[pipeline]):
            self._counted += self._held_idly(each)

    def woken(self, pipeline: str, gpus: int, t_ns: int) -> None:
        if self._is_idle(pipeline):
            self.wakes += 1
        self._change(pipeline, gpus, t_ns)

    def put_to_sleep(self, pipeline: str, gpus: int, t_ns: int) -> None:
        self._change(pipeline, -gpus, t_ns)

    def _change(self, pipeline: str, gpus: int, t_ns: int) -> None:
        self._advance(t_ns)
        self._awake[pipeline] += gpus
        if self._is_idle(pipeline):
            self._counted += gpus

    def _advance(self, t_ns: int) -> None:
        self.gpu_ns += self._counted * (t_ns - self._since)
        self._since = t_ns

    def _is_idle(self, pipeline: str) -> bool:
        return not self._wants[pipeline] and self._rivals_wanting[pipeline] > 0

    def _held_idly(self, pipeline: str) -> int:
        return self._awake[pipeline] if self._is_idle(pipeline) else 0


def _rivals(specs: Sequence[PipelineSpec]) -> dict[str, tuple[str, ...]]:
    """Who shares an inference GPU with whom."""
    users: dict[int, list[str]] = {}
    for spec in specs:
        for gpu in spec.infer.gpus:
            users.setdefault(gpu, []).append(spec.id)
    found: dict[str, dict[str, None]] = {spec.id: {} for spec in specs}
    for sharing in dict.fromkeys(tuple(ids) for ids in users.values()):
        for one in sharing:
            found[one].update(dict.fromkeys(sharing))
    return {one: tuple(other for other in others if other != one) for one, others in found.items()}
