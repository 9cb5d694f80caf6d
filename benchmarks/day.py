"""A day of a large cluster: 100 pipelines on 1,000 GPUs, 5-minute steps of 64 trajectories, log streamed, oracles on.

    python -m benchmarks day [--quick]

Every pipeline has a window of 8 to 32 GPUs that overlaps with its neighbours', so a GPU is wanted by about two of
them; larger windows are those of larger models, with wider engines. It runs in a process of its own, for its memory.
`--quick` runs an hour of the day and extrapolates the time: it grows with the trajectories.

It cannot be repeated for the best time, so its processor time is divided by how much slower than at its quietest moment
the machine was on average while it ran (`table.Weather`); the raw time is shown beside it.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from backends.sim.fence import unfenced
from benchmarks.table import Row, Weather, at_most, fact
from core import defaults
from core.config import Costs, Durations, Job, Scenario
from core.lengths import SIGMA_UNIT
from core.model import Cluster, MemoryNeeds, PipelineSpec, Role, WorkerGroup
from core.run import execute
from core.trace import TraceWriter, header_of
from core.units import gib, ns

PIPELINES = 100
NODES = 125
GPUS_PER_NODE = 8
STEPS_AN_HOUR = 12
HOURS = 24
TARGET = 64
WINDOWS = ((8, 1), (16, 2), (24, 4), (32, 4), (16, 1))
"""(GPUs, TP), by turns."""

SENSE_EVERY = 1_000
"""Entries of the log."""
MINUTES_MAX = 10.0
GIB_MAX = 2.0

COSTS = Costs(
    init=ns(38.8), train=ns(40), offload=ns(5.2), onload=ns(4.1), publish=ns(0.6), sync=ns(0.9), sleep=ns(0.3),
    wake=ns(0.9), restart=ns(38.8), engine_slots=16,
    trajectory=Durations(parts=((1.0, "lognormal", ns(59.9), round(0.423 * SIGMA_UNIT)),)),
)  # fmt: skip
"""The defaults' (core/defaults.py), with a training phase that makes a step take five minutes in such a crowd."""
MEMORY = MemoryNeeds(train=gib(40), engine=gib(60), residue=gib(1), init_peak=gib(100), host_cache=gib(2))


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` runs an hour."""
    hours = 1 if quick else HOURS
    command = [sys.executable, "-m", "benchmarks.day", str(hours)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    raw, slowdown, memory, step = map(float, told)
    minutes = raw / slowdown / 60
    what = "a day of 100 x 1,000" + (", from an hour" if quick else "")
    trajectories = PIPELINES * STEPS_AN_HOUR * hours * TARGET
    return [
        at_most(what, minutes * HOURS / hours, "min", MINUTES_MAX),
        at_most(f"its memory{', after an hour' if quick else ''}", memory, "GiB", GIB_MAX),
        fact("of it, a trajectory", minutes * 60 / trajectories * 1e6, "us"),
        fact("the same, as measured", raw / trajectories * 1e6, "us"),
        fact("slower than at its quietest moment", slowdown, "x"),
        fact("of it, a simulated step", step / 60, "min"),
    ]


def crowd(pipelines: int = PIPELINES, nodes: int = NODES, steps: int = HOURS * STEPS_AN_HOUR) -> Scenario:
    """So many pipelines on a ring of GPUs, each from where its node begins."""
    gpus = nodes * GPUS_PER_NODE
    starts = [i * gpus // pipelines // GPUS_PER_NODE * GPUS_PER_NODE for i in range(pipelines)]
    return Scenario(
        name="day",
        cluster=Cluster(
            nodes=nodes,
            gpus_per_node=GPUS_PER_NODE,
            gpu_memory=gib(141),
            host_memory=gib(1024),
            memory_margin=gib(1),
        ),
        jobs=tuple(_job(i, start, gpus, steps) for i, start in enumerate(starts)),
        seed=1,
    )


def _job(number: int, start: int, gpus: int, steps: int) -> Job:
    width, tp = WINDOWS[number % len(WINDOWS)]
    window = tuple((start + i) % gpus for i in range(width))
    residence = defaults.min_residence(COSTS)
    spec = PipelineSpec(
        id=f"p{number:03}",
        groups=(
            WorkerGroup(role=Role.ACTOR_TRAIN, gpus=window[: width // 4]),
            WorkerGroup(role=Role.ACTOR_INFER, gpus=window, tp=tp),
        ),
        limits=defaults.limits(COSTS, residence),
        memory=MEMORY,
        min_residence=residence,
    )
    return Job(spec=spec, steps=steps, target=TARGET, costs=COSTS, reissue_after=defaults.reissue_after(COSTS))


class _Watch:
    """A listener that looks at the weather."""

    def __init__(self) -> None:
        self.weather = Weather()

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        if i % SENSE_EVERY == 0:
            with unfenced():  # a clock, for the record
                self.weather.sense()


def main() -> None:
    """Run so many hours; print processor seconds, the slowdown, peak GiB, and simulated seconds a step."""
    steps = int(sys.argv[1]) * STEPS_AN_HOUR
    scenario = crowd(steps=steps)
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        with TraceWriter(Path(folder) / "day.jsonl", header_of(scenario, "sim")) as log:
            result = execute(scenario, "sim", [log, watch])
        spent = time.process_time() - began - watch.weather.spent_s
    assert result.outcome == "completed" and not result.violations, result.diagnosis or result.violations[:3]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(spent, watch.weather.slowdown, peak, result.summary["makespan_s"] / steps)


if __name__ == "__main__":
    main()
