"""The control plane's journal on disk: whole lines, a snapshot beside them, and nothing read twice that need not be."""

from pathlib import Path

import msgspec
import pytest
from test_restore import recorded, restored

from backends.ray_gpu import journal as journals
from backends.ray_gpu.journal import Journal
from core import actions
from core.service import Snapshot
from core.trace import Entry, header_of

SOME = 50
"""Entries before a snapshot, and after it."""


def opened(folder: Path) -> Journal:
    scenario, _ = recorded()
    return Journal(folder / "journal.jsonl", header_of(scenario, "ray_gpu"))


def write(journal: Journal, entries: tuple[Entry, ...]) -> None:
    for entry in entries:
        journal(entry.i, entry.t, entry.cause, entry.item)


def known_after(entries: int) -> Snapshot:
    return restored(entries).service.snapshot()


@pytest.fixture
def entries() -> tuple[Entry, ...]:
    return recorded()[1][: 2 * SOME]


def test_a_journal_that_is_opened_again_is_read_from_its_first_entry(tmp_path: Path, entries) -> None:
    write(opened(tmp_path), entries)
    again = opened(tmp_path)
    assert (again.entries, tuple(again.read()), again.known) == (len(entries), entries, None)


def test_after_a_snapshot_only_what_came_later_is_read(tmp_path: Path, entries) -> None:
    journal = opened(tmp_path)
    write(journal, entries[:SOME])
    journal.keep(known_after(SOME))
    write(journal, entries[SOME:])
    again = opened(tmp_path)
    assert tuple(again.read()) == entries[SOME:]
    assert (again.entries, again.latest_ns) == (len(entries), entries[SOME - 1].t)
    assert again.known is not None and again.known.entries == SOME


def test_a_line_that_death_cut_short_is_cut_off_also_behind_a_snapshot(tmp_path: Path, entries) -> None:
    journal = opened(tmp_path)
    write(journal, entries[:SOME])
    journal.keep(known_after(SOME))
    write(journal, entries[SOME : SOME + 1])
    with journal.path.open("ab") as file:
        file.write(b'{"i": 51, "t"')
    again = opened(tmp_path)
    assert again.entries == SOME + 1
    write(again, entries[SOME + 1 :])
    assert tuple(opened(tmp_path).read()) == entries[SOME:]


@pytest.mark.parametrize("again", [False, True], ids=["as it was written", "opened again"])
def test_a_driver_is_told_the_whole_log_from_wherever_it_left_off(tmp_path: Path, entries, again: bool) -> None:
    journal = opened(tmp_path)
    write(journal, entries[:SOME])
    journal.keep(known_after(SOME))
    write(journal, entries[SOME:])
    journal = opened(tmp_path) if again else journal
    decoder = msgspec.json.Decoder(Entry)
    for first in (0, 1, SOME - 1, SOME, SOME + 1, len(entries)):
        lines = b"".join(journal.chunks(first, len(entries))).splitlines()
        assert tuple(decoder.decode(line) for line in lines) == entries[first:]
    assert b"".join(journal.chunks(0, 3)).count(b"\n") == 3


def test_a_snapshot_is_due_after_so_much_journal_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = 8 << 10
    monkeypatch.setattr(journals, "SNAPSHOT_BYTES", 10 * line)
    monkeypatch.setattr(journals, "SNAPSHOT_TIMES", 0)
    journal = opened(tmp_path)

    def fill(lines: int) -> None:
        for _ in range(lines):
            journal(journal.entries, 0, -1, actions.Note(kind="long", text="x" * line))

    for _ in range(2):
        fill(9)
        assert not journal.due
        fill(1)
        assert journal.due
        journal.keep(known_after(1))
        assert not journal.due
    fill(10)
    assert opened(tmp_path).due
    monkeypatch.setattr(journals, "SNAPSHOT_TIMES", 1000)
    assert not journal.due, "a snapshot may not cost more than what it saves"
