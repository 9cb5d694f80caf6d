"""What a transition of the prover costs: one `decide`, packed and checked, per second of one core.

    python -m benchmarks.verify [--quick]        exit 1 if a bound is missed

The bound is for a core that adds a million numbers in `YARDSTICK` seconds; on a slower or busier one it is lowered in
proportion, by the same sum timed between the rounds.
"""

import time

from benchmarks.table import Row, at_least, fact
from core.verify.search import Graph, explore
from core.verify.world import World
from scenarios.parsing import Parser

ROUNDS = 3
BOUND = 10_000
"""Transitions a second and core, checks of every state included."""
YARDSTICK = 0.012
"""s for the sum of a million numbers in plain Python, on an idle core of a server of 2023 or so."""


def _sum() -> float:
    began = time.process_time()
    sum(range(1_000_000))
    return time.process_time() - began


def _transitions(states: int) -> tuple[int, float]:
    graph = Graph(World())
    explore(graph, states // 4)  # the initialisations are cheaper than what follows
    before = len(graph.targets)
    began = time.process_time()
    explore(graph, states)
    return len(graph.targets) - before, time.process_time() - began


def run(quick: bool = False) -> list[Row]:
    """Measure; ``quick`` takes a fifth of the states."""
    states = 4_000 if quick else 20_000
    best, yard = 0.0, float("inf")
    for _ in range(ROUNDS):
        yard = min(yard, *(_sum() for _ in range(5)))
        number, wall = _transitions(states)
        best = max(best, number / wall)
    scaled = best * max(1.0, yard / YARDSTICK)
    return [
        fact("transitions, as measured", best / 1e3, "k/s"),
        at_least("transitions, idle core", scaled / 1e3, "k/s", BOUND / 1e3),
    ]


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the states")
    rows = run(parser.parse_args().quick)
    for row in rows:
        bound = "" if row.bound is None else f"at least {row.bound:g}  {'ok' if row.ok else 'MISSED'}"
        print(f"{row.name:28} {row.value:9.2f} {row.unit:6} {bound}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
