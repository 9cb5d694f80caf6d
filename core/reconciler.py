"""What can start now. Pure: (ledger, promises) -> steps whose preconditions hold; it decides nothing.

There is no barrier: an engine wakes as soon as *its* GPUs are free, whatever else is under way, and a hung operation
delays nobody who does not need its GPUs. Called after every event; it looks only at the ledger's work lists, so
a step that cannot start yet costs one look.

An engine that is to sleep while an operation runs on it waits for that operation: there is no interrupting a wake.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from core.ledger import Engine, EngineState, Hold, Ledger, Request
from core.needs import tenant_need


class Kind(Enum):
    SLEEP = "sleep"
    WATCH = "watch"
    """Look at a free GPU's memory again: its next tenant declared more than was last seen free."""
    WAKE = "wake"
    GRANT = "grant"
    SYNC = "sync"
    OPEN = "open"


class Step(NamedTuple):
    kind: Kind
    subject: Engine | Request


def reconcile(ledger: Ledger) -> Iterator[Step]:
    """Steps that may start now, in the order of the decisions that wanted them. The caller takes each before asking
    for the next."""
    for engine in list(ledger.doomed):
        if engine.state is EngineState.AWAKE and not engine.operation:
            yield Step(Kind.SLEEP, engine)
    for tenant in list(ledger.promised):
        if not _free(ledger, tenant.gpus):
            continue
        if isinstance(tenant, Engine) and (
            tenant.operation or tenant.state not in (EngineState.ASLEEP, EngineState.DEAD)
        ):
            continue
        need = tenant_need(tenant) + ledger.cluster.memory_margin
        if any(ledger.gpus[gpu].free < need for gpu in tenant.gpus):
            yield Step(Kind.WATCH, tenant)
        else:
            yield Step(Kind.WAKE if isinstance(tenant, Engine) else Kind.GRANT, tenant)
    for engine in list(ledger.unserving):
        if engine.operation or engine.doomed or engine.state is not EngineState.AWAKE:
            continue
        if engine.version < engine.book.published:
            yield Step(Kind.SYNC, engine)
        elif engine.version >= 0:
            yield Step(Kind.OPEN, engine)


def _free(ledger: Ledger, gpus: tuple[int, ...]) -> bool:
    return all([ledger.gpus[gpu].hold is Hold.FREE for gpu in gpus])
