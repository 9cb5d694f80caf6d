"""Which processes belong to which worker, on one node: written down when they start, so that whoever has to end a
worker ends all of it, also when the worker itself can no longer be asked.

A record is a file named after the worker. It lists processes by pid and start time; a pid that was used again is
another process and is left alone. Children that a worker started without saying so are found through /proc.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from backends.ray_gpu.devices.process import Process, started_at
from core.model import Record


class _Page(Record, frozen=True, kw_only=True):
    processes: list[tuple[int, int]] = []  # noqa: RUF012  msgspec gives each its own
    gpus: tuple[int, ...] = ()


class Processes:
    """The records in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def record(self, owner: str, pids: tuple[int, ...], gpus: tuple[int, ...] = ()) -> None:
        """These are all the processes of `owner` from now on, and its logical GPUs."""
        self._directory.mkdir(parents=True, exist_ok=True)
        found = [(pid, started) for pid in dict.fromkeys(pids) if (started := started_at(pid)) is not None]
        file = self._file(owner)
        half = file.with_suffix(".half")
        half.write_bytes(msgspec.json.encode(_Page(processes=found, gpus=gpus)))
        half.rename(file)

    def by_owner(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of every worker: pids of its recorded processes that live, and its logical GPUs."""
        found = {}
        for owner in self.owners():
            page = self._page(owner)
            pids = tuple(pid for pid, started in page.processes if Process(pid, started).alive)
            found[owner] = (pids, page.gpus)
        return found

    def owners(self, pipeline: str | None = None) -> list[str]:
        """Recorded workers, of one pipeline or of all."""
        names = sorted(unquote(file.stem) for file in self._directory.glob("*.json"))
        return [name for name in names if pipeline is None or name.startswith(f"{pipeline}/")]

    def of(self, owner: str) -> list[Process]:
        """Its living processes: those recorded, and their descendants."""
        processes = [Process(pid, started) for pid, started in self._page(owner).processes]
        return _with_descendants([process for process in processes if process.alive])

    def signal(self, owner: str, number: int) -> int:
        """Send a signal to all of its processes; how many there were."""
        processes = self.of(owner)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        return len(processes)

    def kill(self, owner: str) -> int:
        """End all of it at once, and forget it; how many processes there were."""
        number = self.signal(owner, signal.SIGKILL)
        self._file(owner).unlink(missing_ok=True)
        return number

    def _page(self, owner: str) -> _Page:
        try:
            return msgspec.json.decode(self._file(owner).read_bytes(), type=_Page)
        except FileNotFoundError:
            return _Page()

    def _file(self, owner: str) -> Path:
        return self._directory / f"{quote(owner, safe='')}.json"


def _with_descendants(roots: list[Process]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                started = started_at(int(entry.name))
                if started is not None:
                    children.setdefault(parent, []).append(Process(int(entry.name), started))
    found = dict.fromkeys(roots)
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop().pid, ()):
            if child not in found:
                found[child] = None
                todo.append(child)
    return list(found)
