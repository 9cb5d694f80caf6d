"""The control plane's event log on disk: what a restarted control plane rebuilds itself from, and what a driver that
joins late is told.

1. An entry is in the file before anything it leads to begins. It is handed to the operating system at once, so it
   survives the death of the process, though not of the machine.
2. The format is that of `core.trace` without checkpoints: a header line, then a line an entry. A line cut short by a
   death is cut off when the journal is opened again.
3. Nothing of it is kept in memory.
4. Beside it lies a *snapshot*: all that was known after so many entries, so that a restart reads only what came later
   and takes no longer on the hundredth day than on the first. The log itself stays whole: a driver that joins decides
   all of it again, and its oracles begin with the first tenant of each GPU.
"""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from core.service import Snapshot
from core.trace import Entry, Header

CHUNK_ENTRIES = 1_000
SNAPSHOT_BYTES = 2 << 20
"""Of the journal between two snapshots, at least: some 10,000 entries, decided again in a third of a second."""
SNAPSHOT_TIMES = 4
"""And so many times the size of a snapshot: 4 kB for two pipelines, 110 kB (14 ms) for a hundred that share GPUs in
pairs, 16 MB (2 s) for a hundred that all share a thousand GPUs."""
BUFFER = 1 << 20


class _Place(NamedTuple):
    """The start of a line in the file."""

    entry: int
    offset: int


class Journal:
    """An append-only log. Calling it with an entry writes the line and returns it."""

    def __init__(self, path: Path, header: Header) -> None:
        """Opens the journal, or makes it."""
        self.path = path
        self.entries = 0
        """How many are in it."""
        self.latest_ns = 0
        """Time of the last one; when the journal was opened again, of the last one before the snapshot."""
        self.known: Snapshot | None = None
        """What was known at the last snapshot, if there was one when the journal was opened. Whoever goes on from it
        changes it, so it can be used once."""
        self._snapshot = path.with_suffix(".snapshot")
        self._snapshot_bytes = 0
        self._after = _Place(0, 0)
        """Behind the last snapshot, or behind the header."""
        self._encode = msgspec.json.Encoder().encode
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._file).st_size
        if self._size == 0:
            self._write(self._encode(header) + b"\n")
            self._after = _Place(0, self._size)
        else:
            self._recover()

    def __call__(self, i: int, t_ns: int, cause: int, item: object) -> bytes:
        line = self._encode(Entry(i, t_ns, cause, item)) + b"\n"  # type: ignore[arg-type]
        self._write(line)
        self.entries += 1
        self.latest_ns = t_ns
        return line

    def _write(self, data: bytes) -> None:
        while data:
            written = os.write(self._file, data)
            data = data[written:]
            self._size += written

    def _recover(self) -> None:
        """Take in the snapshot; count what is whole after it, and cut off what is not."""
        with open(self.path, "rb", buffering=BUFFER) as file:
            self._after = _Place(0, len(file.readline()))
            if self._snapshot.exists():
                packed = self._snapshot.read_bytes()
                self._snapshot_bytes = len(packed)
                self._after, self.latest_ns, self.known = pickle.loads(packed)
            self.entries, end = self._after
            file.seek(end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.entries += 1
                end += len(line)
        os.ftruncate(self._file, end)
        self._size = end

    @property
    def due(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._size - self._after.offset >= max(SNAPSHOT_BYTES, SNAPSHOT_TIMES * self._snapshot_bytes)

    def keep(self, known: Snapshot) -> None:
        """Take a snapshot of what is known after the last entry. It takes the place of the one before as a whole."""
        place = _Place(self.entries, self._size)
        half = self._snapshot.with_suffix(".half")
        packed = pickle.dumps((place, self.latest_ns, known), pickle.HIGHEST_PROTOCOL)
        half.write_bytes(packed)
        half.rename(self._snapshot)
        self._after, self._snapshot_bytes = place, len(packed)

    def read(self) -> Iterator[Entry]:
        """All entries after the last snapshot; after the header, if there is none."""
        decoder = msgspec.json.Decoder(Entry)
        with open(self.path, "rb", buffering=BUFFER) as file:
            file.seek(self._after.offset)
            for line in file:
                yield decoder.decode(line)

    def chunks(self, first: int, upto: int) -> Iterator[bytes]:
        """The lines of the entries from number `first` to before `upto`, in pieces of some thousand entries."""
        with open(self.path, "rb", buffering=BUFFER) as file:
            skipped = first + 1  # the header is a line, too
            if first >= self._after.entry:
                file.seek(self._after.offset)
                skipped = first - self._after.entry
            for _ in range(skipped):
                file.readline()
            left = upto - first
            while left > 0:
                lines = [file.readline() for _ in range(min(left, CHUNK_ENTRIES))]
                left -= len(lines)
                yield b"".join(lines)

    def close(self) -> None:
        os.close(self._file)
