"""Where a run keeps its checkpoints, and how another run goes on from them.

    OUTPUT/<pipeline>/checkpoint/      the newest one: weights, optimizer and a note with the steps that are done

A resumed pipeline does the steps that are left, on the prompts that an uninterrupted run would have come to. Its
versions count from 0 again, for they are a matter of this run's cache. What was rolled out of the batch that was open
when the first run ended is not kept: on-policy samples of an older policy would have to be dropped anyway.
"""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from core.config import Job
from core.errors import ConfigError
from core.model import Record

NOTE = "turnstile.json"
"""As `training.checkpoint` writes it; that module imports torch."""


class Progress(Record, frozen=True, kw_only=True):
    """What a pipeline has behind it, as a checkpoint carries it along."""

    steps: int = 0
    batches: int = 0
    """Batches used, evaluations included: where the sequence of prompts goes on."""


class _Note(msgspec.Struct):
    extra: Progress


def checkpoint_of(output: str | Path, pipeline: str) -> Path:
    """The folder of a pipeline's newest checkpoint in a run's output folder."""
    return Path(output) / quote(pipeline, safe="@") / "checkpoint"


def read_progress(folder: Path) -> Progress:
    """How far the checkpoint is. Raises ConfigError if there is none."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=_Note).extra
    except FileNotFoundError:
        raise ConfigError(
            "--resume", f"there is no checkpoint in {folder}", "name the output folder of a run"
        ) from None
    except (OSError, msgspec.DecodeError) as bad:
        raise ConfigError("--resume", f"{folder / NOTE} cannot be read: {bad}") from bad


def left_of(job: Job, done: Progress) -> Job:
    """The job with the steps that are left. Raises ConfigError if there are none."""
    left = job.steps - done.steps
    if left <= 0:
        raise ConfigError(
            "--resume", f"{job.spec.id} has done {done.steps} steps already, and {job.steps} are asked for",
            "ask for more with --steps",
        )  # fmt: skip
    return msgspec.structs.replace(job, steps=left)


def as_extra(progress: Progress) -> dict[str, Any]:
    """As `Trainer.save` takes it."""
    return msgspec.to_builtins(progress)
