"""One planning decision: how long it takes on a large cluster, and how that grows.

    python -m benchmarks planning [--quick]

All pipelines are mapped to all GPUs, the hardest case: one region, everybody meets everybody. The books are written
down through `core.snapshot`, the decision is the planner's, as in a run.

* rebalance: a few pipelines have every engine, now all want their share, so that nearly every GPU changes hands;
* no change: everybody has its share already;
* all idle: nobody has an engine yet;
* requests: everybody's trainer waits for GPUs too, and half of the pipelines are so hungry that they go before it.

Growth is the exponent of a straight line through log time over log(n log n), with n = GPUs + pipelines + awake engines
+ candidates: 1 is as n log n.
"""

import math
from collections.abc import Callable
from typing import Any

from benchmarks.table import Row, at_most, best_of
from core.bounds import AGEING_NS
from core.draft import Plan
from core.ledger import Ledger
from core.planner import plan
from core.regions import Regions
from core.snapshot import read_ledger

DONORS = 8
"""In `rebalance` this many pipelines have all the engines."""
PER_NODE = 8
GROWTH = (128, 256, 512, 1024, 2048)
GROWTH_MAX = 1.05
"""As n log n, but for what timing on a shared machine leaves uncertain."""


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` repeats less."""
    repetitions = 3 if quick else 9
    rows = []
    for gpus, pipelines, bound in ((128, 16, 2.0), (1024, 128, 20.0)):
        for name, make in CASES.items():
            took = _time(make(gpus, pipelines), repetitions, bound / 1e3)
            rows.append(at_most(f"plan, {gpus} x {pipelines}, {name}", took * 1e3, "ms", bound))
    rows.append(_growth(repetitions))
    return rows


def _time(ledger: Ledger, repetitions: int, enough: float = float("inf")) -> float:
    """Seconds for one decision; what does not change between registrations is prepared, as in a run."""
    regions = Regions(ledger)
    return best_of(repetitions, lambda: plan(ledger, regions), enough)


def _growth(repetitions: int) -> Row:
    points = []
    for gpus in GROWTH:
        ledger = rebalance(gpus, gpus // 8)
        n = _size(ledger, plan(ledger, Regions(ledger)))
        points.append((math.log(n * math.log(n)), math.log(_time(ledger, repetitions))))
    return at_most("plan, exponent of growth over n log n", _slope(points), "", GROWTH_MAX)


def _size(ledger: Ledger, made: Plan) -> int:
    awake = sum(len(book.up) for book in ledger.books.values())
    return len(ledger.gpus) + len(ledger.books) + awake + len(made.expands) + len(made.grants)


def _slope(points: list[tuple[float, float]]) -> float:
    middle_x, middle_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    run = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / run


# --- the cases ------------------------------------------------------------------------------------------


def rebalance(gpus: int, pipelines: int) -> Ledger:
    return _ledger(gpus, pipelines, holders=DONORS)


def no_change(gpus: int, pipelines: int) -> Ledger:
    return _ledger(gpus, pipelines, holders=pipelines, alike=True)


def all_idle(gpus: int, pipelines: int) -> Ledger:
    return _ledger(gpus, pipelines, holders=0)


def mixed_tp(gpus: int, pipelines: int) -> Ledger:
    """`rebalance` with engines of 1, 2, 4 and 8 GPUs in turn; the donors' have one."""
    return _ledger(gpus, pipelines, holders=DONORS, tps=(1, 2, 4, 8))


def requests(gpus: int, pipelines: int) -> Ledger:
    ledger = _ledger(gpus, pipelines, holders=DONORS, trainers=max(1, gpus // pipelines))
    for book in list(ledger.books.values())[::2]:
        book.hungry_since = -10 * AGEING_NS
    return ledger


CASES: dict[str, Callable[[int, int], Ledger]] = {
    "rebalance": rebalance,
    "no change": no_change,
    "all idle": all_idle,
    "mixed TP": mixed_tp,
    "requests": requests,
}


def _ledger(
    gpus: int,
    pipelines: int,
    *,
    holders: int,
    alike: bool = False,
    tps: tuple[int, ...] = (1,),
    trainers: int = 0,
) -> Ledger:
    """Books in which the first `holders` pipelines have all engines, in equal parts. `trainers`: GPUs that each
    pipeline's trainer waits for."""
    everything = list(range(gpus))
    share = gpus // holders if holders else 0
    declared: list[dict[str, Any]] = []
    for i in range(pipelines):
        tp = 1 if i < holders else tps[i % len(tps)]
        target = 100 if alike else 50 + 37 * i % 101
        declared.append(
            {
                "id": f"p{i:04}",
                "infer": {"gpus": everything, "tp": tp},
                "awake": everything[i * share : (i + 1) * share] if i < holders else [],
                "batch": {"target": target * tp * gpus, "done": 0},
            }
        )
    waiting = [
        {"pipeline": f"p{i:04}", "role": "actor_train", "priority": "ACTOR_TRAINING", "gpus": mine}
        for i in range(pipelines)
        if (mine := everything[i * trainers : (i + 1) * trainers])
    ]
    return read_ledger({"gpus": gpus, "gpus_per_node": PER_NODE, "pipelines": declared, "requests": waiting})
