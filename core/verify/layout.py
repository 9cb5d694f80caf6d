"""What the bytes of a packed state stand for: codes, lengths, and the canonical numbers a state is written in.

A state is: three bytes of its own (faults left, review, dregs); of each pipeline `HEAD` bytes, a byte a batch and
`ENGINE` bytes an engine; a byte a GPU, two if its memory is `WATCHED`; a byte for each instant, in the order in which
they come due.
"""

from core import actions
from core.demand import due
from core.ledger import UP, EngineState, Hold, Phase
from core.model import Priority

PHASES = tuple(Phase)
STATES = tuple(EngineState)
PRIORITIES = tuple(Priority)
HOLDS = tuple(Hold)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}
STATE_CODE = {state: code for code, state in enumerate(STATES)}
OPERATIONS = (
    None, actions.WakeEngine, actions.SyncEngine, actions.OpenGate, actions.SleepEngine, actions.KillEngine
)  # fmt: skip
OPERATION_CODE = {kind: code for code, kind in enumerate(OPERATIONS) if kind is not None}

# Canonical numbers. Any would do; these leave room for what comes before.
NOW_TICK = 20
COUNT = 50
"""Latest batch opened and request filed, by each pipeline."""
VERSION = 9
NO_AGE = 3
NO_LAG = 7

START = 3
"""Where the first pipeline begins."""
HEAD = 8
"""Bytes of a pipeline before its batches."""
ENGINE = 4

# The first two bytes of an engine that is asleep.
ASLEEP = STATE_CODE[EngineState.ASLEEP]
NOTHING = NO_AGE | NO_LAG << 2
AGEING = frozenset(STATE_CODE[state] for state in UP)
WATCHED = frozenset((HOLDS.index(Hold.CLEARING), HOLDS.index(Hold.QUARANTINED)))
UNUSED = (ASLEEP, NOTHING, 0, 0)
HUNGER = due(0, Priority.GENERATION)

# Numbers of actions in flight: one at a time for each engine, GPU, and pipeline.
STOP, MEMORY, FIRST_ENGINE, NEXT = 1, 20, 30, 200


def batches(key: bytes, place: int) -> int:
    """How many open batches the pipeline has whose bytes begin there."""
    return key[place + 3] >> 5
