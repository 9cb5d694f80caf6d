"""CPU "GPUs": slots with a memory budget that is really accounted.

A slot book is a directory that the worker processes of one host share. Rules of this room:

1. A process writes only its own page, a file named by pid and start time, holding what its owners hold on each slot.
2. The pages of dead processes count for nothing and are never read: a process that dies frees what it held, however it
   died, and whatever it left in its page. Whoever writes next removes them.
3. Reading all pages, judging the budget and writing one's own page happen under one file lock, so the sum never exceeds
   the budget, and an observer sees exactly the sum. The lock is `flock`, which ends with the process that has it.
4. Holding less is never refused.

What is entered is what workers say of themselves, bytes of tensors; nothing here can see memory that nobody enters.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from backends.ray_gpu.devices.process import Process, parse, this_process
from core.errors import InvariantBroken, OperationFailed, OutOfMemory
from core.model import Record

PAGE = ".json"


class Holding(Record, frozen=True, kw_only=True):
    """What one owner of one process holds on one slot, as one kind (`weights`, say)."""

    gpu: int
    owner: str
    kind: str
    nbytes: int
    pid: int

    def __str__(self) -> str:
        return f"{_label(self.owner, self.kind)} {self.nbytes}"


Pages = dict[Process, tuple[Holding, ...]]


class Slots:
    """The slot book in `directory` (made if need be), for slots with these budgets (bytes by GPU id).

    Every process of a run opens its own with the same arguments; one may be used from several threads.
    """

    def __init__(self, directory: str | Path, budgets: Mapping[int, int]) -> None:
        self.directory = Path(directory)
        self.budgets = dict(budgets)
        self.directory.mkdir(parents=True, exist_ok=True)

    def hold(self, gpu: int, owner: str, nbytes: int, kind: str = "") -> None:
        """From now on `owner` of this process holds `nbytes` as `kind` on `gpu`, in place of what it held as that kind.

        Raises OutOfMemory, with the sums, if the budget would be exceeded; nothing was changed then.
        """
        self.hold_bundle({gpu: nbytes}, owner, kind)

    def hold_bundle(self, wanted: Mapping[int, int], owner: str, kind: str = "") -> None:
        """As `hold`, on several slots at once (bytes by GPU id): all or nothing."""
        if any(nbytes < 0 for nbytes in wanted.values()):
            raise InvariantBroken(f"{owner} would hold a negative number of bytes: {dict(wanted)}")
        with self._locked(fcntl.LOCK_EX):
            pages = self._read(tidy=True)
            mine = pages.pop(this_process(), ())
            kept = [h for h in mine if not (h.gpu in wanted and h.owner == owner and h.kind == kind)]
            now = {h.gpu: h.nbytes for h in mine if h not in kept}
            pid = os.getpid()
            others = [holding for page in pages.values() for holding in page] + kept
            for gpu, nbytes in wanted.items():
                if nbytes > now.get(gpu, 0):
                    self._judge(gpu, owner, kind, nbytes, [h for h in others if h.gpu == gpu])
            new = [Holding(gpu=gpu, owner=owner, kind=kind, nbytes=n, pid=pid) for gpu, n in wanted.items() if n]
            self._write([*kept, *new])

    def drop(self, gpu: int, owner: str) -> None:
        """`owner` of this process holds nothing on `gpu` any more, of whatever kind."""
        with self._locked(fcntl.LOCK_EX):
            mine = self._read(tidy=True).get(this_process(), ())
            self._write([h for h in mine if not (h.gpu == gpu and h.owner == owner)])

    def used(self, gpu: int) -> int:
        """Bytes that living processes hold on `gpu`."""
        return sum(holding.nbytes for holding in self.holders(gpu))

    def free(self, gpu: int) -> int:
        """Bytes of the budget of `gpu` that nobody holds."""
        return self._budget(gpu) - self.used(gpu)

    def holders(self, gpu: int) -> list[Holding]:
        """Who holds what on `gpu`: living processes only, by pid."""
        self._budget(gpu)
        with self._locked(fcntl.LOCK_SH):
            pages = self._read()
        return [holding for page in pages.values() for holding in page if holding.gpu == gpu]

    # --- within ---------------------------------------------------------------------------------------

    def _budget(self, gpu: int) -> int:
        if gpu not in self.budgets:
            raise InvariantBroken(f"there is no slot for GPU {gpu}; slots: {sorted(self.budgets)}")
        return self.budgets[gpu]

    def _judge(self, gpu: int, owner: str, kind: str, nbytes: int, others: list[Holding]) -> None:
        budget, taken = self._budget(gpu), sum(holding.nbytes for holding in others)
        if taken + nbytes > budget:
            by = ", ".join(map(str, others)) or "nobody"
            raise OutOfMemory(
                f"GPU {gpu}: {_label(owner, kind)} needs {nbytes} bytes, and {budget - taken} of {budget} are free; "
                f"{taken} are held by: {by}"
            )

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        # A file description of its own for each lock: flock then also separates the threads of one process.
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)

    def _read(self, tidy: bool = False) -> Pages:
        """The pages of the living. `tidy`: remove those of the dead, and half-written ones."""
        pages: Pages = {}
        for file in self.directory.iterdir():
            owner = parse(file.name.removesuffix(PAGE))
            if owner is not None and file.name.endswith(PAGE) and owner.alive:
                pages[owner] = self._page(file)
            elif tidy and file.name != "lock":
                file.unlink()
        return dict(sorted(pages.items()))

    @staticmethod
    def _page(file: Path) -> tuple[Holding, ...]:
        try:
            return msgspec.json.decode(file.read_bytes(), type=tuple[Holding, ...])
        except msgspec.DecodeError as error:
            raise OperationFailed(f"{file} is damaged although its process lives: {error}") from error

    def _write(self, mine: list[Holding]) -> None:
        page = self.directory / f"{this_process()}{PAGE}"
        if not mine:
            page.unlink(missing_ok=True)
            return
        # Renamed into place, so that whoever is killed while writing has its old page or its new one.
        half = page.with_suffix(".half")
        half.write_bytes(msgspec.json.encode(mine))
        half.rename(page)


def _label(owner: str, kind: str) -> str:
    return f"{owner} ({kind})" if kind else owner
