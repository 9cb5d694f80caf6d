"""The control plane's event log on disk: what a restarted control plane rebuilds itself from, and what a driver that
joins late is told.

1. An entry is in the file before anything it leads to begins. It is handed to the operating system at once, so it
   survives the death of the process, though not of the machine.
2. The format is that of `core.trace` without checkpoints: a header line, then a line an entry. A line cut short by a
   death is cut off when the journal is opened again.
3. Nothing of it is kept in memory.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from core.trace import Entry, Header

CHUNK_ENTRIES = 1_000
BUFFER = 1 << 20


class Journal:
    """An append-only log. Calling it with an entry writes the line and returns it."""

    def __init__(self, path: Path, header: Header) -> None:
        """Opens the journal, or makes it."""
        self.path = path
        self.entries = 0
        """How many are in it."""
        self._encode = msgspec.json.Encoder().encode
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        if os.fstat(self._file).st_size == 0:
            self._write(self._encode(header) + b"\n")
        else:
            self._recover()

    def __call__(self, i: int, t_ns: int, cause: int, item: object) -> bytes:
        line = self._encode(Entry(i, t_ns, cause, item)) + b"\n"  # type: ignore[arg-type]
        self._write(line)
        self.entries += 1
        return line

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    def _recover(self) -> None:
        """Count what is whole, and cut off what is not."""
        with open(self.path, "rb", buffering=BUFFER) as file:
            end = len(file.readline())
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.entries += 1
                end += len(line)
        os.ftruncate(self._file, end)

    def read(self) -> Iterator[Entry]:
        """All entries from the first."""
        decoder = msgspec.json.Decoder(Entry)
        with open(self.path, "rb", buffering=BUFFER) as file:
            file.readline()
            for line in file:
                yield decoder.decode(line)

    def chunks(self, first: int, upto: int) -> Iterator[bytes]:
        """The lines of the entries from number `first` to before `upto`, in pieces of some thousand entries."""
        with open(self.path, "rb", buffering=BUFFER) as file:
            for _ in range(first + 1):
                file.readline()
            left = upto - first
            while left > 0:
                lines = [file.readline() for _ in range(min(left, CHUNK_ENTRIES))]
                left -= len(lines)
                yield b"".join(lines)

    def close(self) -> None:
        os.close(self._file)
