"""One progress report that cannot change the assignment: what the scheduler pays for every trajectory.

    python -m benchmarks reports [--quick]

Everybody has its share, and a pipeline completes one trajectory after another of a batch so large that the demand
hardly falls. `decide` alone on a large cluster; and the whole service with its oracles, accounting and log around it,
on a backend that does everything at once.
"""

import io
from collections.abc import Callable
from typing import Any

import anyio

from benchmarks.day import COSTS, MEMORY
from benchmarks.planning import no_change
from benchmarks.table import Row, at_most, best_of, fact
from core import actions, defaults, events
from core.accounting import Accounting
from core.backend import Answer, MayBegin
from core.config import Job, Scenario
from core.model import Cluster, PipelineSpec, Priority, Role, WorkerGroup
from core.monitor import Monitor
from core.port import Port
from core.scheduler import decide, new_state
from core.service import Service
from core.state import State
from core.trace import TraceWriter, header_of
from core.units import gib

DECIDE_US_MAX = 50.0
"""Tens of microseconds."""
ENDLESS = 10**9
REPORTS = 2_000


def run(quick: bool = False) -> list[Row]:
    """Measure; `quick` repeats less."""
    repetitions = 2 if quick else 7
    decided = best_of(repetitions, _deciding(1024, 128)) / REPORTS
    served = anyio.run(_served, repetitions) / REPORTS
    return [
        at_most("report, decide, 1024 x 128", decided * 1e6, "us", DECIDE_US_MAX),
        fact("report, whole service, oracles and log", served * 1e6, "us"),
    ]


# --- decide alone ---------------------------------------------------------------------------------------


def _deciding(gpus: int, pipelines: int) -> Callable[[], None]:
    """`REPORTS` reports, each a fact that a state was never told before."""
    state = _settled(gpus, pipelines)
    book = next(iter(state.ledger.books.values()))
    batch = book.batches[0]
    book.batches[0] = type(batch)(batch=0, target=ENDLESS)
    book.recount()
    book.planned_at = book.open_demand
    told = [0]

    def report() -> None:
        first = told[0]
        for i in range(first, first + REPORTS):
            made = decide(state, state.ledger.now + 1, _report(book.id, book.seq + 1, i))
            assert not made.actions and not made.notes, "this report has changed something"
        told[0] += REPORTS

    return report


def _settled(gpus: int, pipelines: int) -> State:
    ledger = no_change(gpus, pipelines)
    state = new_state(ledger.cluster)
    state.ledger = ledger
    return state


def _report(pipeline: str, seq: int, i: int) -> events.TrajectoryCompleted:
    return events.TrajectoryCompleted(
        pipeline=pipeline, seq=seq, batch=0, delivered=i + 1, trajectory=i, attempt=0, dp_rank=0, segments=((0, 100),)
    )


# --- the whole service ------------------------------------------------------------------------------------


class _Timer:
    def cancel(self) -> None: ...


class _Clock:
    """Time stands still but for what the reports add; nothing ever rings."""

    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now

    def call_at_ns(self, when_ns: int, callback: Callable[[], None], *, daemon: bool = False) -> _Timer:
        return _Timer()


def _nothing() -> None: ...


class _Obliging:
    """A backend on which everything is done as soon as it is asked."""

    def __init__(self) -> None:
        self.clock = _Clock()

    def carry(self, message: events.Message, deliver: Callable[[events.Message], None]) -> None:
        deliver(message)

    def begin(self, action: Any, may_begin: MayBegin, answer: Answer) -> Callable[[], None]:
        may_begin(action)
        free = dict.fromkeys(action.gpus, gib(140)) if isinstance(action, actions.AwaitMemory) else {}
        answer(action, events.ActionDone(action=action.action, free=free))
        return _nothing  # there is nothing to give up


async def _served(repetitions: int) -> float:
    """Seconds for `REPORTS` reports of one of 16 pipelines on 128 GPUs."""
    scenario = _scenario(128, 16)
    backend = _Obliging()
    accounting = Accounting(scenario)
    monitor = Monitor(scenario.cluster, scenario.demand, observed=accounting.observed)
    log = TraceWriter(io.BytesIO(), header_of(scenario, "none"))
    async with Service(backend, scenario.cluster, scenario.demand, [monitor, accounting, log]) as service:  # type: ignore[arg-type]
        ports = [await _ready(service, job) for job in scenario.jobs]
        for port in ports:
            port.batch_opened(0, ENDLESS)
        told = [0]

        def report() -> None:
            for i in range(told[0], told[0] + REPORTS):
                backend.clock.now += 1_000
                ports[0].trajectory_completed(0, i + 1, i, 0, 0, ((0, 100),))
            told[0] += REPORTS

        took = best_of(repetitions, report)
    assert not monitor.violations, monitor.violations[0]
    return took


async def _ready(service: Service, job: Job) -> Port:
    port = service.connect(job.spec.id)
    await port.register(job.spec)
    await port.admit()
    lease = await port.request(Role.ACTOR_TRAIN, Priority.INITIALIZATION)
    port.weights_published(0)
    port.release(lease)
    return port


def _scenario(gpus: int, pipelines: int) -> Scenario:
    everything = tuple(range(gpus))
    groups = (
        WorkerGroup(role=Role.ACTOR_TRAIN, gpus=everything),
        WorkerGroup(role=Role.ACTOR_INFER, gpus=everything),
    )
    specs = [
        PipelineSpec(id=f"p{i}", groups=groups, limits=defaults.limits(COSTS, 0), memory=MEMORY)
        for i in range(pipelines)
    ]
    return Scenario(
        name="reports",
        cluster=Cluster(nodes=gpus // 8, gpus_per_node=8, gpu_memory=gib(1024), host_memory=gib(1024)),
        jobs=tuple(Job(spec=spec, steps=1, target=1, costs=COSTS) for spec in specs),
    )
