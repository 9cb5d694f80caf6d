"""What a step costs on the simulator's loop, as ratios to bare SimPy measured in the same run.

    python -m benchmarks.loop [--quick]        exit 1 if a bound is missed

Ratios and not rates: machines differ and share their cores, bare SimPy next to it feels the same weather. The rounds
of all engines are interleaved, processor time is counted, and the best of each engine stands. A miss is measured again
before it is believed.
"""

import gc
import time
from collections.abc import Callable

import anyio
import simpy

from backends.sim.calendar import SimEnv
from backends.sim.loop import SimLoop, run_sim
from backends.sim.policies import Walk
from benchmarks.table import Row, at_most, fact, show
from scenarios.parsing import Parser

ROUNDS = 3
# On a busy machine one engine may have no quiet round among three; a real miss stays one.
ROUNDS_BEFORE_A_MISS = 9
# How many times slower than bare SimPy a wake-up may be.
BOUNDS = {"sleep_ns": 4.0, "until(timeout)": 4.0, "anyio.sleep": 8.0}


def _delay(task: int, turn: int) -> int:
    """Between 1 us and 1 s, scattered, the same for every engine."""
    return 1_000 + (task * 7_919 + turn * 104_729) * 6_151 % 1_000_000_000


def _bare_simpy(env: simpy.Environment, tasks: int, turns: int) -> float:
    def sleeper(task: int):
        for turn in range(turns):
            yield env.timeout(_delay(task, turn))

    for task in range(tasks):
        env.process(sleeper(task))
    gc.collect()
    gc.disable()  # as run_sim does
    began = time.process_time()
    env.run()
    wall = time.process_time() - began
    gc.enable()
    return wall


def _on_loop(make_sleep: Callable[[SimLoop], Callable[[int], object]], tasks: int, turns: int, policy=None) -> float:
    """Processor seconds for ``tasks`` tasks with ``turns`` sleeps each."""
    loops: list[SimLoop] = []

    async def main() -> float:
        sleep = make_sleep(loops[0])

        async def sleeper(task: int) -> None:
            for turn in range(turns):
                await sleep(_delay(task, turn))

        began = time.process_time()
        async with anyio.create_task_group() as group:
            for task in range(tasks):
                group.start_soon(sleeper, task)
        return time.process_time() - began

    return run_sim(main, setup=loops.append, policy=policy)


def _sleep_ns(loop: SimLoop):
    return loop.sleep_ns


def _until(loop: SimLoop):
    until, timeout = loop.until, loop.env.timeout
    return lambda nanos: until(timeout(nanos))


def _anyio_sleep(loop: SimLoop):
    return lambda nanos: anyio.sleep(nanos / 1e9)


def run(quick: bool = False) -> list[Row]:
    """Measure; ``quick`` takes a fifth of the work, and wider noise."""
    tasks, turns = (500, 40) if quick else (1_000, 100)
    engines: dict[str, Callable[[], float]] = {
        "bare SimPy": lambda: _bare_simpy(simpy.Environment(), tasks, turns),
        "SimPy, cancellable calendar": lambda: _bare_simpy(SimEnv(), tasks, turns),
        "sleep_ns": lambda: _on_loop(_sleep_ns, tasks, turns),
        "until(timeout)": lambda: _on_loop(_until, tasks, turns),
        "anyio.sleep": lambda: _on_loop(_anyio_sleep, tasks, turns),
        "anyio.sleep, random walk": lambda: _on_loop(_anyio_sleep, tasks, turns, Walk(1)),
    }
    best = dict.fromkeys(engines, float("inf"))
    for turn in range(ROUNDS_BEFORE_A_MISS):
        for name, measure in engines.items():
            best[name] = min(best[name], measure())
        if turn + 1 >= ROUNDS and all(row.ok for row in _rows(best, tasks * turns)):
            break
    return _rows(best, tasks * turns)


def _rows(best: dict[str, float], events: int) -> list[Row]:
    bare = best["bare SimPy"]
    rows = [fact("bare SimPy", events / bare / 1e3, "k events/s")]
    for name, spent in best.items():
        if name in BOUNDS:
            rows.append(at_most(name, spent / bare, "x bare SimPy", BOUNDS[name]))
        elif name != "bare SimPy":
            rows.append(fact(name, spent / bare, "x bare SimPy"))
    return rows


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the work")
    rows = run(parser.parse_args().quick)
    for row in rows:
        print(show(row))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
