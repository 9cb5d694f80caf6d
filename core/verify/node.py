"""A state of the world: the scheduler's, and what is true outside of it."""

from core.ledger import PipelineBook
from core.model import Role
from core.state import State

TRAINER = 1 << 14
INITIALISER = 1 << 15
"""Bits of `Node.active`: a trainer on its GPUs, a pipeline being initialised on all of its own. Bit r is engine r."""
ALL = (1 << 16) - 1


class Node:
    """The scheduler's state and the world around it. Changed in place by `moves.apply`."""

    __slots__ = ("state", "books", "at", "active", "dregs", "faults", "now")

    def __init__(self, state: State) -> None:
        self.state = state
        self.books: list[PipelineBook] = list(state.ledger.books.values())
        self.at: list[int] = [0] * len(self.books)
        """Where each pipeline's client is in its loop (`client`)."""
        self.active: list[int] = [0] * len(self.books)
        """Processes of each pipeline that may have memory on their GPUs, whatever the books say (bits)."""
        self.dregs = 0
        """GPUs that somebody has left, by its own word, and whose memory was not seen free since (bits)."""
        self.faults = 0
        """Faults that may still happen."""
        self.now = 0

    def leave(self, number: int, bits: int) -> None:
        """These processes of a pipeline have ended or let go; what they leave behind is another matter."""
        left = self.active[number] & bits
        self.active[number] &= ~bits
        if not left:
            return
        spec = self.books[number].spec
        train = spec.group(Role.ACTOR_TRAIN)
        gpus = [gpu for engine in self.books[number].engines if left >> engine.dp_rank & 1 for gpu in engine.gpus]
        if left & INITIALISER:
            gpus += spec.union
        elif left & TRAINER and train is not None:
            gpus += train.gpus
        for gpu in gpus:
            self.dregs |= 1 << gpu

    def occupants(self, gpu: int) -> list[tuple[int, int]]:
        """Who may have memory on this GPU in fact: (number of the pipeline, bit)."""
        found = []
        for number, active in enumerate(self.active):
            if not active:
                continue
            spec = self.books[number].spec
            rank = self.books[number].rank_at.get(gpu)
            if rank is not None and active >> rank & 1:
                found.append((number, 1 << rank))
            if active & INITIALISER and gpu in spec.union:
                found.append((number, INITIALISER))
            train = spec.group(Role.ACTOR_TRAIN)
            if active & TRAINER and train is not None and gpu in train.gpus:
                found.append((number, TRAINER))
        return found
