"""What it costs that engines stay with, or go to, pipelines that have nothing to roll out: the price of `floor`.

Two sums of GPU time (ns):

* `wasted_ns`: held by an engine of a pipeline without open-batch demand, while a pipeline that could wake an engine on
  that very GPU has demand and too few engines;
* `attracted_ns`: held by an engine that was *woken* for a pipeline without open-batch demand, until there is some.
"""

from core import bounds
from core.observed import Observed
from core.observed_nouns import Engine, Gpu, Pipeline


class GpuTime:
    """GPU time during which something is so."""

    __slots__ = ("_since", "_total")

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._total = 0

    def set(self, gpu: int, so: bool, now_ns: int) -> None:
        if so:
            self._since.setdefault(gpu, now_ns)
        elif gpu in self._since:
            self._total += now_ns - self._since.pop(gpu)

    def total_ns(self, now_ns: int) -> int:
        return self._total + sum(now_ns - since for since in self._since.values())


class IdleHolders:
    """Told of changes by the accounting, which owns the picture."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._wasted = GpuTime()
        self._attracted_time = GpuTime()
        self._attracted: dict[Engine, None] = {}
        self._mood: dict[str, tuple[bool, bool]] = {}
        """Per pipeline: without demand; with demand and too few engines."""

    @property
    def wasted_ns(self) -> int:
        return self._wasted.total_ns(self._observed.now)

    @property
    def attracted_ns(self) -> int:
        return self._attracted_time.total_ns(self._observed.now)

    def woken_without_demand(self, engine: Engine) -> None:
        """The engine is about to be woken though its pipeline wants nothing."""
        self._attracted[engine] = None

    def pipeline_changed(self, pipeline: Pipeline) -> None:
        """Its demand, its engines or its life may have changed."""
        mood = (pipeline.demand == 0, _hungry(pipeline))
        if self._mood.get(pipeline.id) == mood:
            return
        self._mood[pipeline.id] = mood
        for engine in pipeline.engines:
            if pipeline.demand:
                self._attracted.pop(engine, None)
            for gpu in engine.gpus:
                self.gpu_changed(self._observed.gpus[gpu])

    def gpu_changed(self, gpu: Gpu) -> None:
        now, tenant = self._observed.now, gpu.tenant
        idle = isinstance(tenant, Engine) and not gpu.claimed and tenant.pipeline.demand == 0
        self._attracted_time.set(gpu.id, idle and tenant in self._attracted, now)
        self._wasted.set(gpu.id, idle and any(_hungry(engine.pipeline) for engine in gpu.engines), now)


def _hungry(pipeline: Pipeline) -> bool:
    return bounds.worth_waking(pipeline.demand, pipeline.up, len(pipeline.engines)) and pipeline.wants_rollout
