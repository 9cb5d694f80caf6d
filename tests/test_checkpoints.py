"""Going on from an earlier run: how far it was, and what is left."""

from pathlib import Path

import pytest

from backends.ray_gpu.checkpoints import NOTE, Progress, as_extra, checkpoint_of, left_of, read_progress
from core.errors import ConfigError
from tests.worlds import make_job


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / NOTE).write_text(text, encoding="utf-8")
    return folder


def test_two_pipelines_of_a_run_keep_their_checkpoints_apart(tmp_path: Path) -> None:
    folders = {checkpoint_of(tmp_path, name) for name in ("p1", "p2", "team/p1", "p1@3f")}
    assert len(folders) == 4
    assert all(folder.parent.parent == tmp_path for folder in folders), "a slash in an id makes no folders"


def test_progress_comes_back_as_the_trainer_s_checkpoint_carries_it(tmp_path: Path) -> None:
    from backends.ray_gpu.training.checkpoint import Note, _encoded

    done = Progress(steps=6, batches=9)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / NOTE).write_bytes(_encoded(Note(architecture="llama", step=6, extra=as_extra(done))))
    assert read_progress(folder) == done


@pytest.mark.parametrize("text", ["", "{}", '{"extra": {"steps": "six"}}', "[]"])
def test_a_note_that_says_nothing_useful_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    folder = written(tmp_path / "checkpoint", text)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_progress(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        read_progress(checkpoint_of(tmp_path, "p1"))


def test_a_resumed_pipeline_does_the_steps_that_are_left(tmp_path: Path) -> None:
    job = make_job("p1")
    longer = type(job)(**{**{name: getattr(job, name) for name in job.__struct_fields__}, "steps": 10})
    assert left_of(longer, Progress(steps=4)).steps == 6
    with pytest.raises(ConfigError, match="10 steps already"):
        left_of(longer, Progress(steps=10))


