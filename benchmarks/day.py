"""A day of a large cluster: 100 pipelines on 1,000 GPUs, 5-minute steps of 64 trajectories, log streamed, oracles on.

    python -m benchmarks.day [--quick]

Pipelines have windows of 8 to 32 GPUs that overlap with their neighbours', so every GPU is wanted by about two of them.
`--quick` runs one hour of the day and extrapolates: what a run costs grows with its trajectories.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

from core import defaults
from core.config import Costs, Durations, Job, Scenario
from core.lengths import SIGMA_UNIT
from core.model import Cluster, MemoryNeeds, PipelineSpec, Role, WorkerGroup
from core.run import Result, execute
from core.trace import TraceWriter, header_of
from core.units import NS_PER_S, gib, ns

from benchmarks.table import Row

PIPELINES = 100
GPUS_PER_NODE = 8
NODES = 125
STEPS_AN_HOUR = 12
TARGET = 64
WIDTHS = (8, 16, 24, 32, 20)

MINUTES_MAX = 10.0
GIB_MAX = 2.0

COSTS = Costs(
    init=ns(38.8), train=ns(100), offload=ns(5), onload=ns(4), publish=ns(0.6), sync=ns(0.9), sleep=ns(0.3),
    wake=ns(0.9), restart=ns(38.8), engine_slots=4,
    trajectory=Durations(parts=((1.0, "lognormal", ns(60), round(0.423 * SIGMA_UNIT)),)),
)  # fmt: skip
MEMORY = MemoryNeeds(train=gib(40), engine=gib(60), residue=gib(1), init_peak=gib(100), host_cache=gib(2))
CLUSTER = Cluster(
    nodes=NODES, gpus_per_node=GPUS_PER_NODE, gpu_memory=gib(141), host_memory=gib(1024), memory_margin=gib(1)
)  # fmt: skip


def scenario(pipelines: int = PIPELINES, nodes: int = NODES, steps: int = 24 * STEPS_AN_HOUR) -> Scenario:
    gpus = nodes * GPUS_PER_NODE
    apart = gpus // pipelines
    cluster = Cluster(
        nodes=nodes, gpus_per_node=GPUS_PER_NODE, gpu_memory=gib(141), host_memory=gib(1024), memory_margin=gib(1)
    )  # fmt: skip
    return Scenario(
        name="day",
        cluster=cluster,
        jobs=tuple(_job(i, tuple((i * apart + g) % gpus for g in range(WIDTHS[i % len(WIDTHS)])), steps) for i in range(pipelines)),
        seed=1,
    )


def _job(number: int, window: tuple[int, ...], steps: int) -> Job:
    residence = defaults.min_residence(COSTS)
    spec = PipelineSpec(
        id=f"p{number:03}",
        groups=(
            WorkerGroup(role=Role.ACTOR_TRAIN, gpus=window[: len(window) // 4]),
            WorkerGroup(role=Role.ACTOR_INFER, gpus=window),
        ),
        limits=defaults.limits(COSTS, residence),
        memory=MEMORY,
        min_residence=residence,
    )
    return Job(spec=spec, steps=steps, target=TARGET, costs=COSTS, reissue_after=defaults.reissue_after(COSTS))
