"""How much memory the workers of one pipeline were seen to hold, active and asleep.

1. A look counts as active or asleep only when it is certain which: between a finished onload or sync and the order to
   let go, or after that was done. Everything in between says nothing.
2. Active: the most that was seen. Asleep: the median of each worker, the largest of these; a look may come before what
   was released is really free.
"""

import re
from collections.abc import Iterable
from statistics import median

from core import actions
from core.model import Role

_ENGINE = re.compile(r"(?:engine-)?(\d+)")

ACTIVE, ASLEEP = "active", "asleep"
TRAINER_ROLES = (Role.ACTOR_TRAIN, Role.CRITIC, Role.REFERENCE)


class MemorySeen:
    def __init__(self) -> None:
        self._state: dict[str, str] = {}
        """Of a worker: a role, or an engine's rank; absent while it is unclear."""
        self._active: dict[bool, int] = {}
        """Most bytes on one GPU; True: of an engine."""
        self._asleep: dict[tuple[str, int], list[int]] = {}

    @property
    def train(self) -> int | None:
        """Bytes of an onloaded trainer on one GPU; None: never seen."""
        return self._active.get(False)

    @property
    def engine(self) -> int | None:
        """Bytes of an awake engine on one GPU."""
        return self._active.get(True)

    @property
    def residue(self) -> int | None:
        """Bytes that a sleeping worker keeps on one GPU."""
        return max((round(median(looks)) for looks in self._asleep.values()), default=None)

    # --- what the workers do -----------------------------------------------------------------------------

    def phase(self, role: Role, phase: str, begins: bool) -> None:
        """A phase of a worker group begins, or has ended."""
        if phase in ("onload", "offload") and begins:
            self._state.pop(role.value, None)
        elif phase == "onload":
            self._state[role.value] = ACTIVE
        elif phase == "offload":
            self._state[role.value] = ASLEEP

    def engine_ordered(self, action: actions.EngineAction) -> None:
        if isinstance(action, actions.WakeEngine | actions.SleepEngine | actions.KillEngine):
            self._state.pop(str(action.dp_rank), None)

    def engine_done(self, action: actions.EngineAction) -> None:
        if isinstance(action, actions.SyncEngine):
            self._state[str(action.dp_rank)] = ACTIVE
        elif isinstance(action, actions.SleepEngine):
            self._state[str(action.dp_rank)] = ASLEEP

    # --- looks -------------------------------------------------------------------------------------------

    def seen(self, gpu: int, worker: str, held: int) -> None:
        """`worker` as backends name it behind the pipeline: `actor_train`, `actor_train-0`, `1`, `engine-1`."""
        name, is_engine = _worker(worker)
        state = self._state.get(name)
        if gpu < 0 or state is None:
            return
        if state == ACTIVE:
            self._active[is_engine] = max(held, self._active.get(is_engine, 0))
        else:
            self._asleep.setdefault((worker, gpu), []).append(held)


def _worker(owner: str) -> tuple[str, bool]:
    """A role or a rank, and whether it is an engine's."""
    rank = _ENGINE.fullmatch(owner)
    if rank is not None:
        return rank.group(1), True
    return next((role.value for role in _roles(owner)), owner), False


def _roles(owner: str) -> Iterable[Role]:
    return (role for role in TRAINER_ROLES if owner == role.value or owner.startswith(f"{role.value}-"))
