"""What a trainer lends its engines: the version it has just published, on its device, until it offloads.

1. A lender offers one version or none. An engine borrows it, takes it (through handles, or as a broadcast), and gives
   it back; if it dies first, the control plane gives it back in its name.
2. `withdraw` waits until nobody borrows any more: memory that an engine still reads is not given away. An engine that
   hangs is killed when its sync is overdue, so that wait has the scheduler's limit for a sync.
3. Methods are called from several threads of one actor.
"""

import os
import threading
from typing import Any

from backends.ray_gpu.weights.choice import AGREE, UNSET, disagreement
from backends.ray_gpu.weights.manifest import Manifest
from core.errors import OperationFailed, WorldError
from core.model import Record


class Loan(Record, frozen=True, kw_only=True):
    """What an engine gets when it asks."""

    refusal: str = ""
    """Why nothing is lent; empty if it is."""
    payload: bytes = b""
    """Handles, for `ipc`."""
    digest: int = 0


def nccl_settings() -> tuple[str, ...]:
    """What this process really has for `AGREE`."""
    return tuple(os.environ.get(name, UNSET) for name in AGREE)


class Lender:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = -1
        self._buckets: tuple[Any, ...] = ()
        self._digest = 0
        self._why_not = "the trainer's weights are off the device"
        self._borrowers: dict[str, threading.Event] = {}
        """By name; set when it is dead."""
        self._sending: dict[str, None] = {}
        self._groups: dict[str, Any] = {}

    # --- for the trainer ---------------------------------------------------------------------------------

    def offer(self, manifest: Manifest, buckets: tuple[Any, ...]) -> None:
        """From now on `manifest`'s version can be borrowed."""
        from backends.ray_gpu.weights.staged import digest

        self.withdraw()
        found = digest(buckets)
        with self._changed:
            self._version, self._buckets, self._digest = manifest.version, buckets, found

    def cannot(self, why: str) -> None:
        """There is no offer of the version just published, though the trainer is loaded."""
        self.withdraw()
        with self._changed:
            self._why_not = why

    def withdraw(self) -> bool:
        """Wait for all borrowers, then offer nothing. Whether there was an offer."""
        with self._changed:
            offered = self._version >= 0
            self._version = -1
            self._why_not = "the trainer's weights are off the device"
            self._changed.wait_for(lambda: not self._borrowers and not self._sending)
            self._buckets = ()
        if offered:
            _collect()
        return offered

    # --- for engines --------------------------------------------------------------------------------------

    def lend(self, borrower: str, version: int, label: str | None, nccl: tuple[str, ...]) -> Loan:
        """`label`: for handles (`transports.export_handles`); None: it will be sent. `nccl`: the engine's settings."""
        from backends.ray_gpu.weights.transports import export_handles

        against = disagreement(nccl_settings(), nccl) if label is None else ""
        with self._changed:
            if self._version != version or against:
                held = f"the trainer offers version {self._version}" if self._version >= 0 else self._why_not
                return Loan(refusal=against or held)
            self._borrowers[borrower] = threading.Event()
            buckets, digest = self._buckets, self._digest
        try:
            return Loan(payload=b"" if label is None else export_handles(buckets, label), digest=digest)
        except BaseException:
            self.give_back(borrower)
            raise

    def meet(self, borrower: str, meeting: Any) -> None:
        """Form a process group with an engine, in place of an earlier one. Blocks until it comes."""
        from backends.ray_gpu.weights.transports import open_group

        self._part(borrower)
        self._groups[borrower] = open_group(meeting)

    def send(self, borrower: str) -> None:
        """Broadcast what it borrowed to the engine, which is receiving. Raises OperationFailed."""
        from backends.ray_gpu.weights.transports import send

        with self._changed:
            group, dead, buckets = self._groups.get(borrower), self._borrowers.get(borrower), self._buckets
            if group is None or dead is None:
                raise OperationFailed(f"{borrower} has borrowed nothing, or is in no group with the trainer")
            self._sending[borrower] = None
        try:
            send(buckets, group, dead)
        except WorldError:
            self._part(borrower)
            raise
        finally:
            with self._changed:
                del self._sending[borrower]
                self._changed.notify_all()

    def give_back(self, borrower: str, *, dead: bool = False) -> None:
        """Whatever the engine borrowed it does not need any more. `dead`: nor the group."""
        with self._changed:
            loan = self._borrowers.pop(borrower, None)
            if loan is not None and dead:
                loan.set()  # whoever is sending to it stops, and closes the group
            self._changed.notify_all()
            sending = borrower in self._sending
        if dead and not sending:
            self._part(borrower)

    def _part(self, borrower: str) -> None:
        from backends.ray_gpu.weights.transports import close_group

        group = self._groups.pop(borrower, None)
        if group is not None:
            close_group(group, broken=True)


def _collect() -> None:
    """On CUDA, memory that was shared goes back only when torch is told to look whether others are done with it."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
