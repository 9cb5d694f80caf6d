"""What must hold in every state, besides what `decide` and `moves` refuse on the spot."""

from core.errors import InvariantBroken
from core.ledger import Engine, EngineState, Hold, Phase
from core.model import DemandPolicy
from core.planner import plan
from core.verify.node import Node

BUSY = frozenset((EngineState.WAKING, EngineState.SYNCING, EngineState.DRAINING))


def check(node: Node) -> None:
    """Raises InvariantBroken for the first rule that does not hold."""
    node.state.ledger.check()
    _nothing_promised_in_quarantine(node)
    _nothing_left_to_plan(node)
    _everything_is_under_way(node)
    _no_gpu_idles(node)


def _nothing_promised_in_quarantine(node: Node) -> None:
    """Whoever counts on such a GPU may wait for ever, and gives up what it could have had instead. Not asked of the
    planner's own idea of what is usable."""
    for gpu in node.state.ledger.gpus:
        if gpu.promised is not None and (gpu.hold is Hold.QUARANTINED or gpu.hold is Hold.LOST):
            raise InvariantBroken(f"GPU {gpu.id} is {gpu.hold.value} ({gpu.why}) and promised to {gpu.promised}")


def _nothing_left_to_plan(node: Node) -> None:
    """Time alone may make another plan possible, but then a review rings that instant."""
    state = node.state
    if state.ledger.policy is not DemandPolicy.BATCH or 0 <= state.review_at <= node.now:
        return
    again = plan(state.ledger, state.regions)
    if not again.empty:
        changes = [*again.grants, *again.expands, *again.shrinks, *again.revoked]
        text = "; ".join(f"{what}: {why}" for what, why in changes)
        raise InvariantBroken(f"planning again changes the plan: {text}")


def _everything_is_under_way(node: Node) -> None:
    """Whatever is between two conditions has an action that will end it."""
    state = node.state
    for book in node.books:
        for engine in book.engines:
            if engine.state in BUSY and engine.operation not in state.operations:
                raise InvariantBroken(f"{engine} is {engine.state} and nothing will ever end that")
    for gpu in state.ledger.gpus:
        if gpu.hold is Hold.CLEARING and gpu.watch not in state.operations:
            owner = state.ledger.books[gpu.cleared_by]
            if owner.stop <= 0:
                raise InvariantBroken(f"GPU {gpu.id} is clearing and nobody watches its memory")


def _no_gpu_idles(node: Node) -> None:
    """L4: nobody with demand has an engine whose GPUs are all free and promised to nobody."""
    ledger = node.state.ledger
    if ledger.policy is not DemandPolicy.BATCH or all(gpu.hold is not Hold.FREE for gpu in ledger.gpus):
        return
    for book in node.books:
        if book.phase is Phase.READY and book.open_demand > len(book.up):
            for engine in book.engines:
                if _could_wake(node, engine):
                    raise InvariantBroken(f"L4: GPUs {list(engine.gpus)} idle though {engine} could be woken there")


def _could_wake(node: Node, engine: Engine) -> bool:
    gpus = node.state.ledger.gpus
    return (
        not (engine.operation or engine.disabled)
        and engine.dp_rank not in engine.book.up
        and all(gpus[gpu].hold is Hold.FREE and gpus[gpu].promised is None for gpu in engine.gpus)
    )
