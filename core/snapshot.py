"""One planning decision on a state written down by hand: what `scenarios.plan` answers.

The snapshot says who holds what, who wants what and who waits; the answer is the planner's, on the same ledger and by
the same code as in a run. Residence counts as elapsed, requests are oldest first, ties go to the lowest pipeline id.
"""

from typing import Any

import msgspec

from core.demand import due
from core.draft import Plan
from core.errors import ConfigError
from core.ledger import EngineState, Hold, Lease, Ledger, Phase, PipelineBook, Request
from core.model import (
    PRIORITIES_OF,
    BatchState,
    Cluster,
    DemandPolicy,
    Limits,
    PipelineSpec,
    Priority,
    Role,
    WorkerGroup,
)
from core.planner import plan
from core.regions import Regions
from core.topology import MOST_GPUS, check_group

NOW = 10**18
"""ns since everyone's last change: every residence and turn has elapsed."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Group(_Strict, frozen=True, kw_only=True):
    gpus: tuple[int, ...]
    tp: int = 1


class Batch(_Strict, frozen=True, kw_only=True):
    target: int
    done: int = 0


class Pipeline(_Strict, frozen=True, kw_only=True):
    id: str
    infer: Group
    awake: tuple[int, ...] = ()
    batch: Batch | None = None


class Claim(_Strict, frozen=True, kw_only=True):
    pipeline: str
    role: str
    priority: str
    gpus: tuple[int, ...]


class Snapshot(_Strict, frozen=True, kw_only=True):
    gpus: int
    gpus_per_node: int | None = None
    pipelines: tuple[Pipeline, ...] = ()
    held: tuple[Claim, ...] = ()
    requests: tuple[Claim, ...] = ()


def plan_snapshot(data: Any, explain: bool = False) -> dict[str, Any]:
    """The decision on a snapshot (docs/scenarios.md has the format), as plain data.

    Raises ConfigError for a snapshot that is malformed, names what it does not declare, or breaks S1.
    """
    ledger = read_ledger(data)
    return _answer(plan(ledger, Regions(ledger)), explain)


def read_ledger(data: Any) -> Ledger:
    """The books that a snapshot describes. Raises ConfigError."""
    try:
        snapshot = msgspec.convert(data, Snapshot)
    except msgspec.ValidationError as error:
        raise ConfigError("snapshot", str(error).replace("`$", "`snapshot"), "see docs/scenarios.md") from None
    return _ledger(snapshot)


def _ledger(snapshot: Snapshot) -> Ledger:
    if snapshot.gpus < 1:
        raise ConfigError("gpus", f"{snapshot.gpus} GPUs", "there must be at least one")
    per_node = snapshot.gpus if snapshot.gpus_per_node is None else snapshot.gpus_per_node
    if per_node < 1 or snapshot.gpus % per_node:
        raise ConfigError("gpus_per_node", f"{per_node} does not divide {snapshot.gpus} GPUs")
    if snapshot.gpus > MOST_GPUS:
        raise ConfigError("gpus", f"{snapshot.gpus} GPUs are too many", f"at most {MOST_GPUS}")
    cluster = Cluster(nodes=snapshot.gpus // per_node, gpus_per_node=per_node, gpu_memory=1, host_memory=1)
    ledger = Ledger(cluster, DemandPolicy.BATCH)
    ledger.now = NOW
    for number, pipeline in enumerate(sorted(snapshot.pipelines, key=lambda p: p.id)):
        _add_pipeline(ledger, pipeline, number)
    for i, claim in enumerate(snapshot.held):
        _add_held(ledger, claim, f"held[{i}]")
    for i, claim in enumerate(snapshot.requests):
        _add_request(ledger, claim, f"requests[{i}]", i)
    return ledger


def _add_pipeline(ledger: Ledger, pipeline: Pipeline, number: int) -> None:
    where = f"pipelines[{pipeline.id}]"
    if not pipeline.id or pipeline.id in ledger.books:
        raise ConfigError(where, "a pipeline id must be there once, and not be empty")
    group = WorkerGroup(role=Role.ACTOR_INFER, gpus=pipeline.infer.gpus, tp=pipeline.infer.tp)
    check_group(ledger.cluster, group, f"{where}.infer")
    book = PipelineBook(PipelineSpec(id=pipeline.id, groups=(group,), limits=_NO_LIMITS), number)
    book.phase = Phase.READY
    ledger.books[book.id] = book
    for gpu in group.gpus:
        ledger.mapped[gpu][book] = None
    if pipeline.batch is not None:
        _open_batch(book, pipeline.batch, where)
    for rank in pipeline.awake:
        _wake(ledger, book, rank, where)


def _open_batch(book: PipelineBook, batch: Batch, where: str) -> None:
    if batch.target < 1 or not 0 <= batch.done <= batch.target:
        raise ConfigError(f"{where}.batch", f"{batch.done} of {batch.target} done", "0 <= done <= target, target >= 1")
    book.batches[0] = BatchState(batch=0, target=batch.target, delivered=batch.done)
    book.recount()
    book.hungry_since = 0 if book.open_demand else -1


def _wake(ledger: Ledger, book: PipelineBook, rank: int, where: str) -> None:
    if not 0 <= rank < len(book.engines):
        raise ConfigError(f"{where}.awake", f"there is no dp_rank {rank}", f"it has 0 to {len(book.engines) - 1}")
    engine = book.engines[rank]
    for gpu in engine.gpus:
        _free(ledger, gpu, f"{where}.awake")
    engine.state = EngineState.AWAKE
    engine.routable = True
    engine.routable_since = 0
    engine.completed = 1
    book.up[rank] = engine
    for gpu in engine.gpus:
        ledger.gpus[gpu].hold = Hold.HELD
        ledger.gpus[gpu].engine = engine


def _free(ledger: Ledger, gpu: int, where: str) -> None:
    device = ledger.gpus[gpu]
    if device.hold is not Hold.FREE:
        raise ConfigError(
            where, f"GPU {gpu} belongs to {device.engine or device.lease}", "one tenant a GPU (S1)"
        )


def _add_held(ledger: Ledger, claim: Claim, where: str) -> None:
    request = _request(ledger, claim, where, 0)
    for gpu in request.gpus:
        _free(ledger, gpu, f"{where}.gpus")
    lease = Lease(len(ledger.leases) + 1, request, 0)
    ledger.leases[lease.epoch] = lease
    if lease.priority is Priority.INITIALIZATION:
        ledger.init = lease
        lease.book.phase = Phase.ADMITTED
    for gpu in lease.gpus:
        ledger.gpus[gpu].hold = Hold.HELD
        ledger.gpus[gpu].lease = lease


def _add_request(ledger: Ledger, claim: Claim, where: str, age_rank: int) -> None:
    request = _request(ledger, claim, where, age_rank)
    if request.priority is Priority.INITIALIZATION:
        request.book.phase = Phase.ADMITTED
    request.book.requests[request.number] = request
    ledger.waiting[request] = None


def _request(ledger: Ledger, claim: Claim, where: str, age_rank: int) -> Request:
    book = ledger.books.get(claim.pipeline)
    if book is None:
        raise ConfigError(f"{where}.pipeline", f"no pipeline {claim.pipeline!r} is declared")
    if claim.role not in set(Role):
        raise ConfigError(f"{where}.role", f"unknown role {claim.role!r}", f"known: {', '.join(Role)}")
    role = Role(claim.role)
    if claim.priority not in Priority.__members__:
        raise ConfigError(
            f"{where}.priority", f"unknown {claim.priority!r}", f"known: {', '.join(Priority.__members__)}"
        )
    priority = Priority[claim.priority]
    if priority not in PRIORITIES_OF[role] or priority is Priority.GENERATION:
        raise ConfigError(f"{where}.priority", f"worker group {role} does not ask for {priority.name}")
    check_group(ledger.cluster, WorkerGroup(role=role, gpus=claim.gpus), f"{where}.gpus")
    return Request(book, age_rank, role, priority, claim.gpus, age_rank, due(age_rank, priority))


def _answer(made: Plan, explain: bool) -> dict[str, Any]:
    shrink: dict[str, list[int]] = {}
    for engine, _ in made.shrinks:
        shrink.setdefault(engine.book.id, []).append(engine.dp_rank)
    expand: dict[str, dict[str, list[int]]] = {}
    for engine, _ in sorted(made.expands, key=lambda pair: pair[0].id):
        expand.setdefault(engine.book.id, {})[str(engine.dp_rank)] = list(engine.gpus)
    answer: dict[str, Any] = {
        "shrink": {pipeline: sorted(ranks) for pipeline, ranks in sorted(shrink.items())},
        "expand": expand,
        "grant": [{"pipeline": r.book.id, "role": str(r.role), "gpus": list(r.gpus)} for r, _ in made.grants],
        "wait": [
            {"pipeline": r.book.id, "role": str(r.role), "gpus": list(r.gpus), "reason": why} for r, why in made.waits
        ],
    }
    if explain:
        answer["explain"] = _explain(made)
    return answer


def _explain(made: Plan) -> list[str]:
    """A sentence for each decision."""
    return [
        *(f"{request} is granted GPUs {list(request.gpus)}: {why}." for request, why in made.grants),
        *(f"Engine {engine.id} (GPUs {list(engine.gpus)}) is shrunk {why}." for engine, why in made.shrinks),
        *(f"Engine {engine.id} is expanded onto GPUs {list(engine.gpus)}: {why}." for engine, why in made.expands),
        *(f"{request} waits: {why}." for request, why in made.waits),
    ] or ["Nothing changes: everyone has its share, and no GPU is idle that somebody could use."]


_NO_LIMITS = Limits(
    hold=0, init=0, wake=0, sync=0, sleep=0, drain=0, release=0, quarantine=0, turn=0, command=0
)  # fmt: skip
