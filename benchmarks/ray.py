"""What the control plane adds where it is a Ray actor, in units of the bare call of an actor that does nothing,
measured by turns with it in the same cluster.

    python -m benchmarks ray [--quick]

* A grant with free GPUs: from `port.request` to the lease in a driver's hands. Nothing has to be shrunk for it.
* A hand-over on CPU workers (the tiny model): an engine sleeps, its memory is seen free, a trainer is granted the GPU;
  and back, until an engine takes requests. Its parts are followed through the log as `benchmarks.record` does.
* Decisions a second, and memory: `benchmarks.control`, without Ray calls.

Needs Ray, torch and Megatron-Core (`pip install turnstile[ray_gpu]`), so it is not one of the default benchmarks. Times
are wall time, medians: what is measured is waiting.
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any, TypeVar

import anyio
import msgspec

from benchmarks.record import TO_ENGINE, TO_TRAINER, Parts, Recording, switches
from benchmarks.runs import incident
from benchmarks.table import Row, at_most, fact
from core import events
from core.config import Scenario
from core.model import Priority, Role
from core.run import execute, prepare
from core.trace import Log

T = TypeVar("T")

CALLS_MOST = 3.0
"""Calls' worth that a grant with free GPUs may take."""
GRANTS = 200
STEPS = 12
TARGET = 16
PAUSE_S = 0.05
"""Between two bare calls beside a run."""
OWN_PARTS = ("shrink decided, sleep begun", "granted, pipeline told", "gate open")
"""Of a hand-over: those in which no worker has anything to do."""


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` repeats less."""
    bare, granted = _apart(_grants, GRANTS // 5 if quick else GRANTS)
    rows = [
        fact("bare call of a Ray actor", bare * 1e3, "ms"),
        fact("request to grant, free GPUs", granted * 1e3, "ms"),
        at_most("request to grant, in bare calls", granted / bare, "calls", CALLS_MOST),
        *_apart(_handovers, STEPS // 3 if quick else STEPS),
    ]
    return rows + _apart(_by_itself, quick)


def _apart(part: Callable[[Any], T], argument: Any) -> T:
    """In a process of its own: Ray takes its token from the environment once, and every cluster has another."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(part, argument).result()


def _by_itself(quick: bool) -> list[Row]:
    from benchmarks import control  # imports Ray, which the backend does only after its environment is set

    return control.run(quick)


# --- grants -------------------------------------------------------------------------------------------------


class Bare:
    """An actor that only answers."""

    async def ping(self) -> None: ...


def bare_actor() -> Any:
    """Asynchronous and without a CPU of its own, as the control plane."""
    import ray

    return ray.remote(Bare).options(num_cpus=0, max_concurrency=100).remote()


async def call(actor: Any) -> float:
    """Seconds of one bare call."""
    began = time.perf_counter()
    await actor.ping.remote()
    return time.perf_counter() - began


def _grants(count: int) -> tuple[float, float]:
    """Medians (s) of a bare call and of a grant, by turns."""
    backend = prepare(_scenario(1), "ray_gpu", device="cpu")
    found: list[tuple[float, float]] = []

    async def main() -> None:
        session = backend.session([], lambda now: None)  # type: ignore[attr-defined]
        await backend.open(session.tell)
        try:
            async with session:
                found.extend(await _by_turns(session, backend.scenario, count))  # type: ignore[attr-defined]
        finally:
            await backend.close()

    backend.run(main)
    calls, grants = zip(*found[count // 10 :], strict=True)  # the first ones find nothing in any cache
    return median(calls), median(grants)


async def _by_turns(session: Any, scenario: Scenario, count: int) -> list[tuple[float, float]]:
    spec = scenario.jobs[0].spec
    port = session.connect(spec.id)
    await port.register(spec)
    await port.admit()
    actor = bare_actor()
    await call(actor)
    found, asked = [], Priority.INITIALIZATION
    for _ in range(count):
        bare = await call(actor)
        began = time.perf_counter()
        lease = await port.request(Role.ACTOR_TRAIN, asked)
        found.append((bare, time.perf_counter() - began))
        port.release(lease)
        asked = Priority.ACTOR_TRAINING  # initialised once and for all
        while session.state.operations or any(gpu.tenant for gpu in session.state.ledger.gpus):
            await anyio.sleep(0.002)  # until the release is confirmed, so that the GPUs are free again
    await port.leave(None)
    return found


# --- hand-overs -----------------------------------------------------------------------------------------------


def _handovers(steps: int) -> list[Row]:
    """Rows for both directions, from one run of the incident's two pipelines."""
    scenario, log, calls = _scenario(steps), Log(), []

    async def beside(service: Any) -> None:
        actor = bare_actor()
        while len(log.items(events.PipelineEnded)) < len(scenario.jobs):
            calls.append(await call(actor))
            await anyio.sleep(PAUSE_S)

    result = execute(scenario, "ray_gpu", [log], beside=beside, device="cpu")
    assert result.outcome == "completed", result.diagnosis or result.errors
    bare = median(calls)
    found = switches(Recording(log.entries))
    rows = [fact("bare call beside the run", bare * 1e3, "ms")]
    for way in (TO_TRAINER, TO_ENGINE):
        assert found[way], f"no hand-over {way}"
        rows += _rows(way, found[way], bare)
    return rows


def _rows(way: str, found: list[Parts], bare: float) -> list[Row]:
    whole = median(sum(parts.values()) for parts in found) / 1e9
    own = median(sum(parts.get(name, 0) for name in OWN_PARTS) for parts in found) / 1e9
    return [
        fact(f"hand-over {way}, with its workers", whole * 1e3, "ms"),
        fact("of it, the control plane's", own * 1e3, "ms"),
        fact("the same in bare calls", own / bare, "calls"),
    ]


def _scenario(steps: int) -> Scenario:
    """The incident with the tiny model."""
    return msgspec.structs.replace(incident(steps=steps, target=TARGET), faults=(), expect=None)
