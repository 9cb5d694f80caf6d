"""A recorded run beside the simulation of it: makespan, busy share of the GPUs, and each phase's mean.

Both are measured by the same code from their entries. One simulated run is one draw; the figures are means over some.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import msgspec

from core.accounting import Accounting
from core.config import Scenario
from core.run import execute
from core.trace import Entry, Header, Log, header_of
from core.units import seconds
from scenarios.calibration.measure import TRAJECTORY, measure
from scenarios.calibration.world import LATENCIES, PHASES, SOMETIMES

MAKESPAN_WITHIN = 0.02
PHASE_WITHIN = 0.05
BUSY_WITHIN = 0.03
"""Of the GPUs' time: points, not parts of the figure."""
RUNS = 5
SHARES = ("busy", "switching", "idle")
JUDGED = (*PHASES, *SOMETIMES, TRAJECTORY)


class Figures(NamedTuple):
    outcome: str
    makespan: float
    """s."""
    shares: dict[str, float]
    """Of all GPUs' time, by what `SHARES` says."""
    steps: dict[str, int]
    means: dict[tuple[str, str], float]
    """s, by pipeline and cost."""


class Line(NamedTuple):
    """One figure of both."""

    name: str
    recorded: float
    simulated: float
    spread: float
    """Standard deviation over the simulated runs."""
    off: float
    """Of a share: the difference; of anything else: its part of the recorded one."""
    within: float | None
    """How far off it may be; None: not judged."""

    @property
    def ok(self) -> bool:
        return self.within is None or abs(self.off) <= self.within


def figures(header: Header, entries: Iterable[Entry]) -> Figures:
    """Of one log. Raises ConfigError if it is damaged."""
    kept = list(entries)
    accounting = Accounting(header.config)
    for entry in kept:
        accounting(entry.i, entry.t, entry.cause, entry.item)
    summed = accounting.figures()
    makespan = summed["makespan_s"]
    all_ns = makespan * len(summed["gpus"]) or 1.0
    measured = measure([(header, kept)])
    own = {job.spec.id: None for job in header.config.jobs}
    return Figures(
        outcome=accounting.verdict.outcome if accounting.verdict else "cut off",
        makespan=makespan,
        shares={name: sum(gpu[f"{name}_s"] for gpu in summed["gpus"]) / all_ns for name in SHARES},
        steps={one["id"]: one["steps_done"] for one in summed["pipelines"] if one["id"] in own},
        means={
            (pipeline, cost): seconds(round(fmean(one.took for one in seen)))
            for pipeline, of in measured.items()
            for cost, seen in of.costs.items()
        },
    )


def simulated(scenario: Scenario, runs: int = RUNS) -> list[Figures]:
    """So many runs of it on the simulator, each with its own seed."""
    found = []
    for seed in range(scenario.seed, scenario.seed + runs):
        world = msgspec.structs.replace(scenario, seed=seed)
        log = Log()
        execute(world, "sim", [log])
        found.append(figures(header_of(world, "sim"), log.entries))
    return found


def compare(recorded: Figures, runs: Sequence[Figures]) -> Iterator[Line]:
    """Every figure that both have."""
    yield _line("makespan, s", recorded.makespan, [run.makespan for run in runs], MAKESPAN_WITHIN)
    for name in SHARES:
        there, here = recorded.shares[name], [run.shares[name] for run in runs]
        within = BUSY_WITHIN if name == "busy" else None
        yield Line(f"GPUs {name}", there, fmean(here), pstdev(here), fmean(here) - there, within)
    for pipeline, cost in recorded.means:
        here = [run.means[pipeline, cost] for run in runs if (pipeline, cost) in run.means]
        if here and cost in (*JUDGED, *LATENCIES):
            within = PHASE_WITHIN if cost in JUDGED else None
            yield _line(f"{pipeline} {cost}, s", recorded.means[pipeline, cost], here, within)


def _line(name: str, there: float, here: Sequence[float], within: float | None) -> Line:
    middle = fmean(here)
    off = middle / there - 1 if there else float(middle > 0)
    return Line(name, there, middle, pstdev(here), off, within)
