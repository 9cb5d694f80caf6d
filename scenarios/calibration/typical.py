"""One short set of costs from recorded runs: what is usual, for all pipelines together.

A fit (`fit`) is to imitate the run it comes from, with hundreds of samples; this is to be read, compared with other
hardware, and kept in `core.defaults` under a name. For each cost the median, to a tenth of a millisecond; `first` where
the first of each process is another matter; a lognormal for trajectories.
"""

import math
from collections.abc import Mapping
from statistics import median, stdev
from typing import Any

from core.units import NS_PER_S
from scenarios.calibration.fit import first_apart
from scenarios.calibration.measure import TRAJECTORY, Measured, Observation
from scenarios.calibration.world import LATENCIES, PHASES, SOMETIMES

DIGITS = 4
SIGMA_DIGITS = 3


def typical(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """By key, as a scenario file has them under `costs` (seconds); what was never seen is left out."""
    found: dict[str, Any] = {}
    for name in (*PHASES, *SOMETIMES, *LATENCIES):
        if seen := _together(measured, name):
            first, usual = first_apart(seen)
            middle = _seconds(one.took for one in usual)
            found[name] = {"first": _seconds(first), "constant": middle} if first else middle
    if trajectories := _together(measured, TRAJECTORY):
        sigma = stdev(math.log(max(1, one.took)) for one in trajectories)
        middle = _seconds(one.took for one in trajectories)
        found[TRAJECTORY] = {"lognormal": {"median": middle, "sigma": round(sigma, SIGMA_DIGITS)}}
    return found


def _together(measured: Mapping[str, Measured], name: str) -> list[Observation]:
    return [seen for one in measured.values() for seen in one.costs.get(name, ())]


def _seconds(nanos: Any) -> float:
    return round(median(nanos) / NS_PER_S, DIGITS)
