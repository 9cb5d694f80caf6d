"""The event log: what is written comes back, damage is named, and replay finds the first departure."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from core import actions, events
from core.errors import ConfigError
from core.perfetto import export_perfetto
from core.trace import (
    CHECKPOINT_EVERY,
    Entry,
    Item,
    Log,
    TraceWriter,
    Verdict,
    feed,
    first_difference,
    header_of,
    read_log,
    replay,
)
from tests.stories import Story, make_spec, one_step


def story_of(count: int = 0) -> Story:
    """A life of one pipeline, made longer if asked."""
    story = one_step(Story())
    while len(story.entries) < count:
        story.wait(1).note("ignored")
    return story


def write(path: Path, story: Story) -> TraceWriter:
    with TraceWriter(path, header_of(story.scenario, "sim")) as writer:
        feed(story.entries, writer)
    return writer


def damaged(path: Path, line: int, text: bytes) -> Path:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = text
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    write(path, story_of(2_500))
    return path


# --- writing and reading --------------------------------------------------------------------------------


def test_what_is_written_comes_back(tmp_path: Path):
    story = story_of()
    story.verdict()
    write(tmp_path / "log.jsonl", story)
    header, entries = read_log(tmp_path / "log.jsonl")
    assert list(entries) == story.entries
    assert entries.truncated == ""
    assert header == header_of(story.scenario, "sim")
    assert header.config == story.scenario


def test_an_entry_is_one_object_a_line_with_number_time_cause_and_item(log: Path):
    line = json.loads(log.read_bytes().splitlines()[1])
    assert list(line) == ["i", "t", "cause", "item"]
    assert line["item"]["type"] == "PipelineRegistered"


def test_every_kind_of_item_has_a_name_of_its_own():
    kinds = [kind.__name__ for kind in get_args(Item)]
    assert len(kinds) == len(set(kinds)) > 40


def test_the_header_holds_no_path_and_no_time(log: Path):
    header = json.loads(log.read_bytes().splitlines()[0])
    assert list(header) == ["schema", "scenario", "backend", "demand", "seed", "config", "python", "turnstile"]
    assert str(log.parent) not in json.dumps(header)


def test_the_same_entries_give_the_same_bytes_however_often_they_are_flushed():
    story = story_of(2_500)
    files = [io.BytesIO(), io.BytesIO()]
    once, often = (TraceWriter(file, header_of(story.scenario, "sim")) for file in files)
    feed(story.entries, once, often, lambda *entry: often.flush() if entry[0] % 7 == 0 else None)
    once.close()
    often.close()
    assert files[0].getvalue() == files[1].getvalue()
    assert once.digest == often.digest == once.checkpoints[-1]


def test_checkpoints_agree_up_to_the_first_difference_and_never_after():
    stories = [story_of(3_500), story_of(3_500)]
    stories[1].entries[1_234] = Entry(1_234, stories[1].entries[1_234].t, -1, actions.Note(kind="other", text=""))
    writers = [TraceWriter(io.BytesIO(), header_of(story.scenario, "sim")) for story in stories]
    for story, writer in zip(stories, writers, strict=True):
        feed(story.entries, writer)
    equal = [a == b for a, b in zip(writers[0].checkpoints, writers[1].checkpoints, strict=True)]
    assert equal == [True, False, False]
    assert first_difference(*(story.entries for story in stories)) == 1_234
    assert first_difference(stories[0].entries, stories[0].entries[:-1]) == len(stories[0].entries) - 1
    assert first_difference(stories[0].entries, stories[0].entries) is None


def test_the_log_is_frozen_by_its_verdict():
    story = story_of()
    story.verdict("starved")
    story.note("ignored")
    memory, file = Log(), io.BytesIO()
    writer = TraceWriter(file, header_of(story.scenario, "sim"))
    feed(story.entries, memory, writer)
    writer.close()
    assert memory.verdict == Verdict(outcome="starved")
    assert list(memory.entries) == story.entries[:-1]
    assert b"ignored" not in file.getvalue()


def test_a_log_in_memory_may_keep_the_last_entries_only():
    story = story_of()
    memory = story.told(Log(limit=5))
    assert list(memory.entries) == story.entries[-5:]
    assert [type(item) for item in memory.items(events.PipelineEnded)] == [events.PipelineEnded]


def test_a_full_disk_ends_the_writing_and_not_the_run():
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    story = story_of(1_500)
    writer = TraceWriter(Full(), header_of(story.scenario, "sim"))
    feed(story.entries, writer)
    writer.close()
    assert "No space" in str(writer.error)


def test_a_log_that_cannot_be_created_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written here: No such file"):
        TraceWriter(tmp_path / "missing" / "log.jsonl", header_of(Story().scenario, "sim"))


# --- damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "the file is empty"),
        (b'{"schema":1,', "ends before its header does"),
        (b"hello\n", "not the header of a Turnstile log"),
        (b"\xff\xfe\n", "not the header of a Turnstile log"),
        (b'{"schema":99}\n', "a log of schema 99; this version reads 1"),
        (b'{"schema":1,"scenario":"x"}\n', "missing required field"),
        (b"[1]\n", "not the header of a Turnstile log"),
    ],
)
def test_a_foreign_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_log(path)
    assert refused.value.where == f"{path}:1"


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_log(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "text, problem",
    [
        (b"nonsense\n", "not an entry of a log"),
        (b'{"i":8,"t":0,"cause":-1,"item":{"type":"Unheard"}}\n', "Invalid value 'Unheard'"),
        (b'{"i":8,"t":0,"cause":-1,"item":{"type":"EngineBusy","pipeline":"p1","dp_rank":"0"}}\n', "Expected `int`"),
        (b"", "entry 9 where entry 8 should be"),
        (b'{"checkpoint":"8"}\n', "not a checkpoint"),
        (b"\xff\n", "not an entry of a log"),
    ],
)
def test_a_damaged_line_is_named(log: Path, text: bytes, problem: str):
    damaged(log, 10, text)
    _, entries = read_log(log)
    with pytest.raises(ConfigError, match=problem) as refused:
        list(entries)
    assert refused.value.where == f"{log}:10"


def test_a_changed_entry_is_noticed_at_the_next_checkpoint(log: Path):
    line = log.read_bytes().splitlines(keepends=True)[9]
    damaged(log, 10, line.replace(b'"t":', b'"t":1'))
    _, entries = read_log(log)
    with pytest.raises(ConfigError, match="are not those that were written") as refused:
        list(entries)
    assert refused.value.where == f"{log}:{CHECKPOINT_EVERY + 2}"


def test_nothing_may_follow_the_closing_line(log: Path):
    log.write_bytes(log.read_bytes() + b"{}\n")
    with pytest.raises(ConfigError, match="something follows the closing line"):
        list(read_log(log)[1])


@pytest.mark.parametrize("cut", [1, 40, 150, 400, 10_000])
def test_a_killed_writer_leaves_a_log_that_is_read_up_to_the_cut(log: Path, cut: int):
    whole = list(read_log(log)[1])
    log.write_bytes(log.read_bytes()[:-cut])
    _, entries = read_log(log)
    read = list(entries)
    assert read == whole[: len(read)]
    assert "the writer was killed after entry" in entries.truncated


def test_a_log_cut_off_between_two_lines_says_so_too(log: Path):
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]))
    _, entries = read_log(log)
    assert len(list(entries)) == 2_500
    assert "no closing line" in entries.truncated


# --- replay ---------------------------------------------------------------------------------------------


def timer(number: int) -> actions.StartTimer:
    return actions.StartTimer(action=number, timer="t", generation=number, at=0)


def left(seq: int) -> events.PipelineLeft:
    return events.PipelineLeft(pipeline="p1", seq=seq)


def recorded(*items: Any) -> list[Entry]:
    return [Entry(i, i, -1, item) for i, item in enumerate(items)]


def two_timers_each(now_ns: int, event: Any) -> SimpleNamespace:
    return SimpleNamespace(actions=[timer(2 * event.seq), timer(2 * event.seq + 1)])


def diverges(*items: Any) -> Any:
    return replay(header_of(Story().scenario, "sim"), recorded(*items), two_timers_each)


def test_replay_of_the_same_actions_finds_no_divergence():
    note = actions.Note(kind="grant", text="")
    busy = events.EngineBusy(pipeline="p1", dp_rank=0)
    assert diverges(left(0), note, timer(0), timer(1), busy, left(1), timer(2), timer(3)) is None


@pytest.mark.parametrize(
    "items, entry, has, gives",
    [
        ((left(0), timer(0), timer(7)), 2, timer(7), timer(1)),
        ((left(0), timer(0), left(1)), 2, None, timer(1)),
        ((left(0), timer(0), timer(1), timer(2)), 3, timer(2), None),
    ],
    ids=["another action", "one missing", "one too many"],
)
def test_replay_names_the_first_divergence(items: Any, entry: int, has: Any, gives: Any):
    found = diverges(*items)
    assert (found.entry, found.recorded, found.replayed) == (entry, has, gives)
    assert str(found).startswith(f"at entry {entry} the log has")


def test_a_log_that_ends_within_a_decision_is_no_divergence():
    assert diverges(left(0), timer(0)) is None


def test_what_the_scheduler_decided_is_decided_again_from_the_log():
    scheduler = pytest.importorskip("core.scheduler")
    story = Story(make_spec("p1"), make_spec("p2", train=(1,)))
    story.register("p1").register("p2")
    state = scheduler.new_state(story.scenario.cluster, story.scenario.demand)
    entries: list[Entry] = []
    for told in story.entries:
        entries.append(Entry(len(entries), told.t, -1, told.item))
        for action in scheduler.decide(state, told.t, told.item).actions:
            entries.append(Entry(len(entries), told.t, -1, action))
    assert replay(header_of(story.scenario, "sim"), entries) is None


# --- Perfetto -------------------------------------------------------------------------------------------


def test_the_perfetto_export_has_a_track_a_gpu_and_a_process_a_pipeline(tmp_path: Path):
    story = one_step(Story(make_spec("p1"), make_spec("p2", train=(1,))), "p1")
    story.verdict()
    export_perfetto(header_of(story.scenario, "sim"), story.entries, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["ph"] == "M"]
    engines = ["phases", "engine 0", "engine 1"]
    assert names == ["GPUs", "GPU 0", "GPU 1", "p1", *engines, "p2", *engines]
    spans = [(event["pid"], event["tid"], event["name"]) for event in trace if event["ph"] == "X"]
    assert {(1, 0, "p1 init"), (1, 1, "p1 decoding"), (1, 0, "p1 train")} < set(spans)
    assert {(2, 0, "actor_train train"), (2, 1, "decoding")} < set(spans)
    init = next(event for event in trace if event["name"] == "p1 init")
    assert (init["ts"], init["dur"]) == (0, 40e6)


def test_an_empty_log_is_a_valid_trace(tmp_path: Path):
    export_perfetto(header_of(Story().scenario, "sim"), [], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written here"):
        export_perfetto(header_of(Story().scenario, "sim"), [], tmp_path / "missing" / "trace.json")
