"""The figures of a recorded log: what is wrong with it, or with the file to write, is one line, and no log is lost."""

from pathlib import Path

import pytest

from benchmarks import record
from scenarios import run as scenario_run


def lines_of_a_log(folder: Path) -> list[str]:
    log = folder / "log.jsonl"
    assert scenario_run.main(["overlap_2gpu", "--steps", "1", "--quiet", "--trace", str(log)]) == 0
    return log.read_text().splitlines(keepends=True)


def test_a_log_has_a_record_and_what_each_gpu_held_in_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines_of_a_log(tmp_path)
    table = tmp_path / "memory.csv"
    assert record.main([str(tmp_path / "log.jsonl"), "--memory", str(table)]) == 0
    assert "replay: decide gives the same actions" in capsys.readouterr().out
    assert table.read_text().startswith("at_s,gpu,used_mib,")


@pytest.mark.parametrize(
    ("kept", "memory", "words"),
    [
        (1, None, "cut.jsonl: nothing happened in it"),
        (None, ".", "is a directory"),
        (None, "no/such/x.csv", "there is no directory"),
        (None, "cut.jsonl", "cut.jsonl is the log"),
        (None, "linked.jsonl", "linked.jsonl is the log"),
    ],
)
def test_a_record_that_cannot_be_is_one_line_and_exit_2(
    kept: int | None, memory: str | None, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    text = "".join(lines_of_a_log(tmp_path)[:kept])
    Path("cut.jsonl").write_text(text)
    Path("linked.jsonl").hardlink_to("cut.jsonl")
    capsys.readouterr()
    assert record.main(["cut.jsonl", *(["--memory", memory] if memory else [])]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err and printed.err.count("\n") == 1
    assert Path("cut.jsonl").read_text() == text


def test_a_log_that_is_cut_off_at_its_beginning_has_a_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cut.jsonl").write_text("".join(lines_of_a_log(tmp_path)[:2]))
    assert record.main([str(tmp_path / "cut.jsonl")]) == 0
    assert "the run took no time" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_table_that_cannot_be_written_is_said_of_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines_of_a_log(tmp_path)
    assert record.main([str(tmp_path / "log.jsonl"), "--memory", "/dev/full"]) == 2
    assert capsys.readouterr().err == "error: --memory /dev/full: cannot be written: No space left on device\n"


def test_the_help_is_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        record.main(["--help"])
    assert ended.value.code == 0 and "the scheduler's.\n" in capsys.readouterr().out
