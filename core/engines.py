"""An engine's way through its states, and a GPU's way back to free: steps started, outcomes taken in.

    ASLEEP --wake--> AWAKE --sync--> AWAKE --open gate--> routable --sleep--> ASLEEP, GPUs clearing --memory--> free

Whatever fails, or gives no answer in its time, ends in `kill`: the engine is DEAD, its GPUs are quarantined until
their memory is seen free, and the next wake is a cold one. Handlers ask `State` for actions; they never plan.
"""

from core import actions, events
from core.actions import Action, Emptying
from core.errors import ProtocolError
from core.ledger import Engine, EngineState, Gpu, Hold, Lease, Phase, PipelineBook, Request
from core.model import OnPreempt, Priority
from core.needs import expected_residue, tenant_need
from core.reconciler import Kind, Step
from core.state import Clearing, State
from core.units import NS_PER_S, show_gib

STRIKES = 3
"""Failed syncs in a row before an engine is killed, and deaths in a row (with nothing completed between) before it
is not started again."""

PATIENCE = 2 * NS_PER_S
"""How long a GPU that could already be used is watched for memory that should still come back. It is paid once for each
growth of the residue, not at every hand-over: what stayed behind before is not expected again."""


# --- steps ----------------------------------------------------------------------------------------------


def start(state: State, step: Step) -> None:
    """Begin a step of the reconciler."""
    match step.kind:
        case Kind.SLEEP:
            _sleep(state, step.subject)
        case Kind.WATCH:
            _watch_again(state, step.subject)
        case Kind.WAKE:
            _wake(state, step.subject)
        case Kind.GRANT:
            _grant(state, step.subject)
        case Kind.SYNC:
            _sync(state, step.subject)
        case Kind.OPEN:
            _open(state, step.subject)


def _ask_engine(state: State, kind: type[Action], engine: Engine, limit: int, **fields: object) -> None:
    engine.operation = state.ask(
        kind, engine, limit, pipeline=engine.book.id, dp_rank=engine.dp_rank, epoch=engine.epoch, **fields
    )


def _emptying(engine: Engine) -> tuple[Emptying, int]:
    if engine.book.spec.on_preempt is OnPreempt.DRAIN:
        return Emptying.DRAIN, engine.book.spec.limits.drain
    return Emptying.ABORT, 0


def _sleep(state: State, engine: Engine) -> None:
    state.ledger.doomed.pop(engine, None)
    state.ledger.unserving.pop(engine, None)
    engine.doomed = False
    state.set_engine(engine, EngineState.DRAINING)
    emptying, drain = _emptying(engine)
    limits = engine.book.spec.limits
    _ask_engine(state, actions.SleepEngine, engine, drain + limits.sleep, emptying=emptying, drain=drain)


def _wake(state: State, engine: Engine) -> None:
    cold = engine.state is EngineState.DEAD
    state.ledger.hold_by_engine(engine)
    engine.epoch = state.epoch()
    engine.version = -1
    engine.begin_tenancy()  # again: it may have completed something while it drained, promised already
    state.set_engine(engine, EngineState.WAKING)
    _ask_engine(state, actions.WakeEngine, engine, engine.book.spec.limits.wake, gpus=engine.gpus, cold=cold)


def _sync(state: State, engine: Engine) -> None:
    state.set_engine(engine, EngineState.SYNCING)
    emptying, drain = _emptying(engine)
    if engine.book.spec.in_flight_updates:
        emptying, drain = Emptying.KEEP, 0
    limit = drain + engine.book.spec.limits.sync
    version = engine.book.published
    _ask_engine(state, actions.SyncEngine, engine, limit, version=version, emptying=emptying, drain=drain)


def _open(state: State, engine: Engine) -> None:
    limit = engine.book.spec.limits.command
    _ask_engine(state, actions.OpenGate, engine, limit, version=engine.version)


def _grant(state: State, request: Request) -> None:
    book = request.book
    lease = Lease(state.epoch(), request, state.ledger.now)
    state.ledger.hold_by_lease(lease, request)
    del book.requests[request.number]
    if lease.priority is Priority.INITIALIZATION:
        state.ledger.init = lease
    limits = book.spec.limits
    hold = limits.init if lease.priority is Priority.INITIALIZATION else limits.hold
    deliver_grant(state, lease)
    state.start_timer(f"hold/{lease.epoch}", state.ledger.now + hold)


def deliver_grant(state: State, lease: Lease) -> None:
    """Tell the client; again, if it asks again."""
    state.ask(
        actions.GrantLease, lease, lease.book.spec.limits.command,
        pipeline=lease.book.id, life=lease.book.life, request=lease.request, role=lease.role, epoch=lease.epoch,
        gpus=lease.gpus,
    )  # fmt: skip


# --- GPUs on their way to free ---------------------------------------------------------------------------


def clear(state: State, gpus: tuple[int, ...], book: PipelineBook, why: str, source: Engine | Lease) -> None:
    """The tenant has released these GPUs, by its own word; watch each until its memory shows it."""
    for gpu in state.ledger.clear(gpus, book, why):
        watch_gpu(state, gpu, book, source)


def watch_gpu(state: State, gpu: int, book: PipelineBook, source: Engine | Lease | None) -> None:
    """Ask to be told when the GPU's memory is back: as much as its next tenant declared, plus the margin."""
    ledger = state.ledger
    device = ledger.gpus[gpu]
    half = book.spec.limits.release // 2
    promised = device.promised
    need = ledger.need[gpu]
    if promised is not None:
        need = max(need, tenant_need(promised) + ledger.cluster.memory_margin)
    device.watch = state.ask(
        actions.AwaitMemory, Clearing(gpu, book, source), book.spec.limits.release,
        gpus=(gpu,), need=(need,), expect=(max(need, _expected_free(state, gpu) - device.growth),),
        patience=min(PATIENCE, half) if book.alive else half,  # whoever is over is to leave nothing behind
    )  # fmt: skip


def _watch_again(state: State, tenant: Engine | Request) -> None:
    for gpu in tenant.gpus:
        state.ledger.recheck(gpu, tenant.book)
        watch_gpu(state, gpu, tenant.book, None)


def memory_seen(state: State, clearing: Clearing, look: actions.AwaitMemory, free: dict[int, int]) -> None:
    """The device shows enough free memory: the GPU is free."""
    ledger = state.ledger
    gpu = ledger.gpus[clearing.gpu]
    if gpu.hold is Hold.LOST:
        return
    if gpu.hold is Hold.QUARANTINED or gpu.given_up:
        state.cancel_timer(f"quarantine/{gpu.id}")
        gpu.given_up = False
        state.touch(None, (gpu.id,))
    gpu.free = free.get(gpu.id, gpu.free)
    _note_growth(state, gpu, clearing, look)
    ledger.free(gpu.id)
    settle(state, clearing.book)


def _expected_free(state: State, gpu: int) -> int:
    """Free bytes if nobody is active on the GPU and everybody keeps just the declared residue."""
    return state.ledger.cluster.gpu_memory - expected_residue(state.ledger.residents(gpu), gpu)


def _note_growth(state: State, gpu: Gpu, clearing: Clearing, look: actions.AwaitMemory) -> None:
    expected = _expected_free(state, gpu.id)
    if look.expect and expected > look.expect[0] + gpu.growth:
        return  # somebody has left since the look was ordered; what it saw of theirs is no growth
    more = max(0, expected - gpu.free)
    if more > gpu.growth:
        releaser = clearing.book
        text = f"GPU {gpu.id}: {show_gib(more)} more than declared stay behind; {releaser.id} released it last"
        state.note("residue_growth", text, releaser.id, gpus=(gpu.id,))
        gpu.hoarders.append((releaser, clearing.source))
    elif not more:
        gpu.hoarders.clear()
    gpu.growth = more


def memory_missing(state: State, clearing: Clearing, reason: str, free: dict[int, int]) -> None:
    """The memory is not back within the limit: quarantine, end whatever may hold it, and go on watching."""
    gpu = state.ledger.gpus[clearing.gpu]
    if gpu.hold is Hold.LOST:
        return
    book, source = clearing.book, clearing.source
    if gpu.hold is not Hold.QUARANTINED:
        quarantine(state, (gpu.id,), book, f"memory of GPU {gpu.id} not back after {gpu.why}: {reason}")
    if _missing_before(state, gpu, free.get(gpu.id, 0)):
        _end_hoarder(state, gpu)
        watch_gpu(state, gpu.id, book, source)
    elif isinstance(source, Lease) and book.alive:
        state.fail(book, f"its {source.role} released GPU {gpu.id} but the memory did not come back: {reason}")
    elif isinstance(source, Engine) and book.alive and not source.holds and not source.operation:
        _reap(state, source, f"GPU {gpu.id} does not get its memory back")
    elif book.stop <= 0:
        if source is None:
            _end_hoarder(state, gpu)
        watch_gpu(state, gpu.id, book, source)
    settle(state, book)  # what is left in quarantine does not hold up a leave


def _missing_before(state: State, gpu: Gpu, free: int) -> bool:
    """Whether all is back but what others were seen to keep before: then it is not the releaser that has to go."""
    all_but_growth = _expected_free(state, gpu.id) - gpu.growth
    return bool(gpu.hoarders) and free + state.ledger.cluster.memory_margin >= all_but_growth


def _end_hoarder(state: State, gpu: Gpu) -> None:
    """More memory is needed than whoever comes next to this GPU usually needs, and it is not there: whoever was seen
    to keep more than declared has to go, or the one who needs it would wait for ever."""
    while gpu.hoarders:
        book, source = gpu.hoarders.pop()
        if not book.alive:
            continue
        if isinstance(source, Engine) and (source.holds or source.operation or source.state is EngineState.DEAD):
            continue
        why = f"kept more than declared on GPU {gpu.id}, and now somebody needs it"
        if isinstance(source, Engine):
            _reap(state, source, f"{source.id} {why}")
        else:
            state.fail(book, f"its {source.role if source else 'workers'} {why}")
        return


def quarantine(state: State, gpus: tuple[int, ...], book: PipelineBook, why: str) -> tuple[int, ...]:
    """Nobody gets these GPUs until their memory is seen free. Returns those that still exist."""
    affected = state.ledger.clear(gpus, book, why, quarantine=True)
    for gpu in affected:
        if f"quarantine/{gpu}" not in state.timers:
            state.start_timer(f"quarantine/{gpu}", state.ledger.now + book.spec.limits.quarantine)
    state.note("quarantine", why, book.id, gpus=affected)
    state.touch(book, affected)
    return affected


# --- death ------------------------------------------------------------------------------------------------


def kill(state: State, engine: Engine, reason: str) -> None:
    """End the engine's process, whatever it was doing; quarantine what it held."""
    ledger = state.ledger
    held = engine.holds
    if engine in ledger.promised:
        ledger.break_promise(engine)
    ledger.doomed.pop(engine, None)
    ledger.unserving.pop(engine, None)
    engine.book.up.pop(engine.dp_rank, None)
    engine.doomed = False
    state.set_engine(engine, EngineState.DEAD)
    _count_death(state, engine, reason)
    if held:
        quarantine(state, engine.gpus, engine.book, f"{engine.id} was killed: {reason}")
    if engine.book.alive:
        _reap(state, engine, reason)
        state.touch(engine.book)


def _reap(state: State, engine: Engine, reason: str) -> None:
    """Kill the process tree behind an engine that holds nothing (any more) in the books."""
    if engine.state is not EngineState.DEAD:
        if engine in state.ledger.promised:
            state.ledger.break_promise(engine)
        state.set_engine(engine, EngineState.DEAD)
        state.touch(engine.book)
    engine.strikes = 0
    _ask_engine(state, actions.KillEngine, engine, engine.book.spec.limits.sleep, reason=reason)


def _count_death(state: State, engine: Engine, reason: str) -> None:
    engine.deaths += 1
    engine.completed = 0
    if engine.deaths >= STRIKES:
        disable(state, engine, f"died {STRIKES} times in a row, last: {reason}")


def disable(state: State, engine: Engine, why: str) -> None:
    """The engine is not used any more; without any engine left the pipeline has failed."""
    if engine.disabled:
        return
    engine.disabled = why
    book = engine.book
    book.degraded = True
    state.note("degraded", f"{engine.id} is not used any more: {why}", book.id, engine.dp_rank)
    if all(other.disabled for other in book.engines):
        state.fail(book, f"none of its engines can be used any more; {engine.id} {why}")


def engine_died(state: State, event: events.EngineDied) -> None:
    book = state.ledger.books.get(event.pipeline)
    if book is None or not book.alive:
        return
    engine = book.engines[event.dp_rank]
    if engine.state is not EngineState.DEAD:
        kill(state, engine, event.reason)


def node_left(state: State, event: events.NodeLeft) -> None:
    ledger = state.ledger
    lost = [gpu for gpu in ledger.gpus if ledger.cluster.node_of(gpu.id) == event.node and gpu.hold is not Hold.LOST]
    for gpu in lost:
        engine = gpu.engine
        if engine is not None and engine.state is not EngineState.DEAD:
            kill(state, engine, f"node {event.node} left")
    for gpu in lost:
        state.cancel_timer(f"quarantine/{gpu.id}")
        ledger.lose(gpu.id)
    for book in list(ledger.books.values()):
        if book.alive:
            cut_off(state, book, f"node {event.node} left")
        settle(state, book)
    state.touch(None, tuple(gpu.id for gpu in lost))


def cut_off(state: State, book: PipelineBook, why: str) -> None:
    """Fail a pipeline that cannot do without a GPU that is gone; degrade one that can."""
    gone = {gpu: None for gpu in book.spec.union if state.ledger.gpus[gpu].gone}
    if not gone:
        return
    if book.phase is not Phase.READY:
        state.fail(book, f"{why}: it cannot initialise without GPU {next(iter(gone))}")
        return
    for group in book.spec.groups:
        needed = [gpu for gpu in group.gpus if gpu in gone]
        if needed and group is not book.spec.infer:
            state.fail(book, f"{why}: its {group.role} cannot run without GPU {needed[0]}")
            return
    for engine in book.engines:
        if any(gpu in gone for gpu in engine.gpus):
            if engine in state.ledger.promised:
                state.ledger.break_promise(engine)
            disable(state, engine, why)


# --- outcomes ---------------------------------------------------------------------------------------------


def engine_outcome(state: State, action: Action, engine: Engine, failure: str | None) -> None:
    """Take in how an engine's operation ended. `failure`: None if it is done."""
    if engine.operation != action.action:
        state.note("ignored", f"late outcome of action {action.action} on {engine.id}", engine.book.id, engine.dp_rank)
        return
    engine.operation = 0
    match action:
        case actions.KillEngine():
            for gpu in engine.gpus:
                owner = state.ledger.gpus[gpu]
                if owner.hold is Hold.QUARANTINED and owner.cleared_by == engine.book.id:
                    watch_gpu(state, gpu, engine.book, engine)
        case actions.SyncEngine() if failure and not failure.startswith(UNKNOWN) and engine.strikes + 1 < STRIKES:
            engine.strikes += 1
            _awake(state, engine)
        case _ if failure:
            kill(state, engine, f"{type(action).__name__} {failure}")
        case actions.WakeEngine():
            _awake(state, engine)
        case actions.SyncEngine():
            engine.version = action.version
            engine.strikes = 0
            _awake(state, engine)
        case actions.OpenGate():
            _opened(state, engine)
        case actions.SleepEngine():
            state.set_engine(engine, EngineState.ASLEEP)
            clear(state, engine.gpus, engine.book, f"{engine.id} went to sleep", engine)
        case _:
            raise ProtocolError(f"{action} has an outcome nobody waits for")


UNKNOWN = "got no answer"
"""How the reason of an unknown outcome begins."""


def _awake(state: State, engine: Engine) -> None:
    state.set_engine(engine, EngineState.AWAKE)
    state.ledger.unserving[engine] = None


def _opened(state: State, engine: Engine) -> None:
    if engine.doomed:
        return
    engine.routable = True
    if engine.version == engine.book.published:
        state.ledger.unserving.pop(engine, None)
    if engine.routable_since < 0:
        engine.routable_since = state.ledger.now
        if state.awaited(engine.book):
            state.touch(engine.book)  # now it is known when its turn ends


# --- a whole pipeline -------------------------------------------------------------------------------------


def settle(state: State, book: PipelineBook) -> None:
    """Confirm a planned release, or a leave, once everything it covers is clear."""
    gpus = state.ledger.gpus
    if any(gpus[gpu].hold is Hold.CLEARING for gpu in book.clearing):
        return
    if book.releasing and not book.clearing and not any(engine.holds for engine in book.engines):
        book.releasing = False
        state.ask(actions.ConfirmRelease, None, book.spec.limits.command, pipeline=book.id, life=book.life)
        state.touch(book)
    elif book.leave_asked and book.stop < 0:
        book.leave_asked = False
        state.ask(actions.ConfirmRelease, None, book.spec.limits.command, pipeline=book.id, life=book.life)
