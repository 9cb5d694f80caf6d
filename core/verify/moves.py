"""Everything that may happen next, and what it does. Each move is one event for `decide`, or a tick of time.

A move that stays possible happens at last (weak fairness, `Move.fair`): clients go on, trajectories are completed,
operations end, due timers ring, time passes. Faults need not happen. Each costs one of the world's faults:

* an operation fails, or gives no answer though it was done; a pipeline's stop does;
* memory that is free is not seen free in time; an engine dies;
* a trainer fails, a client is lost, or holds its lease too long, or cancels a request (granted meanwhile or not) and
  asks again, or leaves.

What follows from a fault is free: memory under a process that lives on is not seen free, and a quarantine may
last longer than its limit.

That a grant, a confirmation or the news of a failure was delivered changes nothing in the books, so they are delivered
at once, as the service does.
"""

from collections.abc import Iterator
from typing import NamedTuple

from core import actions, events
from core.errors import InvariantBroken
from core.ledger import Engine, EngineState, Hold
from core.model import Priority
from core.scheduler import Decision, decide
from core.state import Clearing
from core.verify import client
from core.verify.node import ALL, INITIALISER, TRAINER, Node
from core.verify.world import RESIDENCE, TICK, TURN, Start, World

UNFAIR = 255
"""`Move.fair` of what need not happen, however long it is possible."""
CLIENT, STOPS, COMPLETES, OPERATES = 0, 1, 2, 10
CLASSES = 18
"""Fairness classes of one pipeline: what its client says, its stop, and for each of at most 8 engines what it completes
and how its operations end."""
DELIVERED = (actions.ConfirmRelease, actions.FailPipeline, actions.GrantLease)


class Move(NamedTuple):
    """What may happen. Numbers of actions do not occur in it, so that it means the same in any naming."""

    kind: str
    who: int = -1
    """Number of the pipeline, or of the GPU."""
    rank: int = -1
    fair: int = UNFAIR
    """Class of moves of which one must happen at last if they stay possible."""
    number: int = 0
    """The action it ends."""
    cost: int = 0


def memory_class(world: World, gpu: int) -> int:
    return world.pipelines * CLASSES + gpu


def review_class(world: World) -> int:
    return world.pipelines * CLASSES + world.gpus


def time_class(world: World) -> int:
    return review_class(world) + 1


# --- what may happen ------------------------------------------------------------------------------------


def enabled(world: World, node: Node) -> list[Move]:
    """Every move from this state. Time first, which leaves the books alone; faults last."""
    found = []
    due = 0 <= node.state.review_at <= node.now
    if not due and _time_may_pass(node):
        found.append(Move("tick", fair=time_class(world)))
    for number in range(world.pipelines):
        if client.next_word(world, node, number) is not None:
            found.append(Move("say", number, fair=number * CLASSES + CLIENT))
        found += _completions(world, node, number)
    for number, (action, _) in node.state.operations.items():
        found.append(_ending(world, node, number, action))
    if due:
        found.append(Move("review", fair=review_class(world)))
    found += _overdue_quarantines(world, node)
    if node.faults:
        found += _faults(world, node)
    return found


def _completions(world: World, node: Node, number: int) -> Iterator[Move]:
    book = node.books[number]
    if not client.waits_for_rollout(node, number):
        return
    if world.start is Start.INCIDENT and number + 1 < world.pipelines and node.at[number + 1] == client.ASK_INIT:
        return
    for engine in book.engines:
        if engine.routable_since >= 0 and book.published - engine.version <= world.staleness:
            if engine.routable:
                yield Move("complete", number, engine.dp_rank, number * CLASSES + COMPLETES + engine.dp_rank)
            elif engine.state is EngineState.DRAINING:
                yield Move("complete_late", number, engine.dp_rank)


def _ending(world: World, node: Node, number: int, action: actions.Action) -> Move:
    """How an action ends if nothing else goes wrong."""
    if isinstance(action, actions.AwaitMemory):
        gpu = action.gpus[0]
        kind = "memory_missing" if node.occupants(gpu) else "memory"
        return Move(kind, gpu, fair=memory_class(world, gpu), number=number)
    who = _number(node, action.pipeline)
    if isinstance(action, actions.StopPipeline):
        return Move("stopped", who, fair=who * CLASSES + STOPS, number=number)
    return Move("done", who, action.dp_rank, who * CLASSES + OPERATES + action.dp_rank, number)


def _number(node: Node, pipeline: str) -> int:
    return int(pipeline[1:]) - 1


def _time_may_pass(node: Node) -> bool:
    """Not past the turn of the engine that a pipeline relies on: a trajectory fits into a turn."""
    now = node.now // TICK
    for book in node.books:
        if not book.open_demand:
            continue
        served = [engine for engine in book.up.values() if engine.routable_since >= 0]
        if served and not any(engine.completed for engine in served):
            first = min(served, key=_seniority)
            if first.routable and now - first.routable_since // TICK >= _LAST:
                return False
    return True


def _seniority(engine: Engine) -> tuple[int, int]:
    return engine.routable_since, engine.dp_rank


_LAST = (TURN - RESIDENCE) // TICK


def _overdue_quarantines(world: World, node: Node) -> Iterator[Move]:
    for gpu in node.state.ledger.gpus:
        if gpu.hold is Hold.QUARANTINED and not gpu.given_up:
            yield Move("given_up", gpu.id)


def _faults(world: World, node: Node) -> Iterator[Move]:
    for number, (action, _) in node.state.operations.items():
        if isinstance(action, actions.AwaitMemory):
            if not node.occupants(action.gpus[0]):
                yield Move("memory_missing", action.gpus[0], number=number, cost=1)
            continue
        rank = getattr(action, "dp_rank", -1)
        who = _number(node, action.pipeline)
        yield Move("fails", who, rank, number=number, cost=1)
        yield Move("unanswered", who, rank, number=number, cost=1)
    for number, book in enumerate(node.books):
        if not book.alive:
            continue
        for engine in book.engines:
            if engine.state is not EngineState.DEAD and book.published >= 0:
                yield Move("dies", number, engine.dp_rank, cost=1)
        if book.leases:
            yield Move("trainer_fails", number, cost=1)
            yield Move("overdue", number, cost=1)
        if book.requests or (book.leases and node.at[number] in (client.INIT, client.TRAIN)):
            yield Move("cancels", number, cost=1)
        yield Move("lost", number, cost=1)
        yield Move("leaves", number, cost=1)


# --- what it does -----------------------------------------------------------------------------------------


def apply(world: World, node: Node, move: Move) -> Decision | None:
    """Let it happen. Raises InvariantBroken if the scheduler, or what it asks for, breaks a rule."""
    node.now += 1
    node.faults -= move.cost
    if move.kind == "tick":
        node.now += TICK
        return None
    decision = decide(node.state, node.now, _event(world, node, move))
    if node.faults == world.faults:
        _must_please(node, decision)
    for action in decision.actions:
        match action:
            case actions.WakeEngine():
                _wake(node, action)
            case actions.GrantLease():
                _grant(node, action)
            case actions.OpenGate():
                _open(world, node, action)
        if isinstance(action, DELIVERED):
            del node.state.operations[action.action]
    if world.faults:
        _forget(node)
    if world.coarse:
        _at_once(world, node)
    return decision


def _forget(node: Node) -> None:
    """Drop what nobody waits for any more, once it was seen that it makes no difference how it ends."""
    operations = node.state.operations
    for number, (_, subject) in list(operations.items()):
        match subject:
            case Engine():
                wanted = subject.operation == number
            case Clearing():
                gpu = node.state.ledger.gpus[subject.gpu]
                wanted = gpu.watch == number and gpu.hold in (Hold.CLEARING, Hold.QUARANTINED)
            case _:
                wanted = True
        if not wanted:
            _must_be_ignored(node, number)


def _must_be_ignored(node: Node, number: int) -> None:
    """S2: only the watch of this tenancy speaks for a GPU, and only its last operation for an engine."""
    state = node.state
    action, subject = state.operations[number]
    before = _conditions(node)
    for outcome in (
        events.ActionDone(action=number, free=dict.fromkeys(getattr(action, "gpus", ()), 1)),
        events.ActionFailed(action=number, reason="it failed"),
        events.ActionUnknown(action=number, reason="silence"),
    ):
        state.operations[number] = action, subject
        led_to = decide(state, node.now, outcome)
        if led_to.actions or _conditions(node) != before:
            raise InvariantBroken(f"S2: nobody waits for {_named(action)} any more, and yet its outcome is heeded")


def _named(action: actions.Action) -> str:
    where = getattr(action, "gpus", ())
    return type(action).__name__ + (f" of GPU {where[0]}" if where else "")


def _conditions(node: Node) -> list[object]:
    """What every GPU and engine is doing, and under which action."""
    gpus: list[object] = [(gpu.hold, gpu.watch) for gpu in node.state.ledger.gpus]
    return gpus + [(engine.state, engine.operation) for book in node.books for engine in book.engines]


def _must_please(node: Node, decision: Decision) -> None:
    """As long as nothing has gone wrong, no client is refused anything, and none fails."""
    for reply in decision.replies:
        if reply.error is not None:
            raise InvariantBroken(f"{reply.pipeline} did nothing wrong and is refused: {reply.error}")
    for book in node.books:
        if not book.alive:
            raise InvariantBroken(f"nothing went wrong and {book.id} has failed: {book.reason}")


def _at_once(world: World, node: Node) -> None:
    """The steps that `World.coarse` does not show."""
    for number, (action, _) in list(node.state.operations.items()):
        quick = isinstance(action, actions.OpenGate) or (
            isinstance(action, actions.AwaitMemory) and not node.occupants(action.gpus[0])
        )
        if quick and number in node.state.operations:
            apply(world, node, _ending(world, node, number, action))


def _event(world: World, node: Node, move: Move) -> events.Event:
    book = node.books[move.who] if move.kind not in ("memory", "memory_missing", "given_up", "review") else None
    match move.kind:
        case "say":
            word = client.next_word(world, node, move.who)
            assert word is not None, f"{move} though the client waits"
            return client.say(world, node, move.who, word)
        case "complete" | "complete_late":
            return client.completes(book, move.rank)
        case "done" | "stopped":
            _ended(node, move)
            return events.ActionDone(action=move.number)
        case "memory":
            node.dregs &= ~(1 << move.who)
            return events.ActionDone(action=move.number, free={move.who: 1})
        case "memory_missing" | "fails":
            return events.ActionFailed(action=move.number, reason="it failed")
        case "unanswered":
            _ended(node, move)
            return events.ActionUnknown(action=move.number, reason="silence")
        case "review":
            return events.TimerFired(timer="review", generation=node.state.timers["review"])
        case "given_up":
            timer = f"quarantine/{move.who}"
            return events.TimerFired(timer=timer, generation=node.state.timers[timer])
    return _mishap(node, move)


def _mishap(node: Node, move: Move) -> events.Event:
    book = node.books[move.who]
    match move.kind:
        case "dies":
            node.leave(move.who, 1 << move.rank)
            return events.EngineDied(pipeline=book.id, dp_rank=move.rank, reason="it died")
        case "trainer_fails":
            return events.TrainerFailed(pipeline=book.id, reason="it broke")
        case "overdue":
            timer = f"hold/{min(book.leases)}"
            return events.TimerFired(timer=timer, generation=node.state.timers[timer])
        case "lost":
            node.at[move.who] = client.GONE
            return events.ClientLost(pipeline=book.id, reason="it is silent")
        case "cancels":
            node.at[move.who] = client.ASK_INIT if node.at[move.who] == client.INIT else client.ASK
            node.active[move.who] &= ~(TRAINER | INITIALISER)  # granted or not, it has loaded nothing yet
            return events.RequestCancelled(pipeline=book.id, seq=book.seq + 1, request=book.requests_through)
        case "leaves":
            node.at[move.who] = client.GONE
            return events.PipelineLeft(pipeline=book.id, seq=book.seq + 1)
    raise AssertionError(f"no move is called {move.kind}")


def _ended(node: Node, move: Move) -> None:
    """What is true of the processes once an action was carried out."""
    action, subject = node.state.operations[move.number]
    match action:
        case actions.SleepEngine() | actions.KillEngine():
            assert isinstance(subject, Engine)
            node.leave(move.who, 1 << subject.dp_rank)
        case actions.StopPipeline():
            node.leave(move.who, ALL)


# --- what the scheduler may ask for, and when -----------------------------------------------------------------


def _wake(node: Node, action: actions.WakeEngine) -> None:
    number = _number(node, action.pipeline)
    _must_be_empty(node, action.gpus, f"engine {action.pipeline}/{action.dp_rank} is woken")
    node.active[number] |= 1 << action.dp_rank


def _grant(node: Node, action: actions.GrantLease) -> None:
    number = _number(node, action.pipeline)
    lease = node.state.ledger.leases[action.epoch]
    bit = INITIALISER if lease.priority is Priority.INITIALIZATION else TRAINER
    _must_be_empty(node, action.gpus, f"{action.pipeline} is granted GPUs {list(action.gpus)}")
    node.active[number] |= bit


def _must_be_empty(node: Node, gpus: tuple[int, ...], what: str) -> None:
    for gpu in gpus:
        if node.dregs >> gpu & 1:
            raise InvariantBroken(f"S2: {what} before the memory of GPU {gpu} was seen free")
        for number, bit in node.occupants(gpu):
            whose = {TRAINER: "its trainer", INITIALISER: "its initialisation"}.get(bit, f"engine {bit.bit_length()-1}")
            raise InvariantBroken(f"S2: {what} while GPU {gpu} is still used by {node.books[number].id} ({whose})")


def _open(world: World, node: Node, action: actions.OpenGate) -> None:
    book = node.books[_number(node, action.pipeline)]
    engine = book.engines[action.dp_rank]
    if engine.state is not EngineState.AWAKE or engine.version != action.version or action.version < 0:
        has = f"it is {engine.state} with version {engine.version}"
        raise InvariantBroken(f"S4: the gate of {engine.id} opens for version {action.version}; {has}")
