"""What a run leaves in its output folder, one file of JSON lines a pipeline: each phase with its duration and figures.

    OUTPUT/<pipeline>.jsonl    {"at_s", "phase", "version", "seconds", "reward", "loss", ...} a line

An engine that loaded weights has a line too (`sync`): which way they came, and why not another.
Seconds count from the beginning of the run. Without a folder nothing is written; the figures are still kept for the
summary.
"""

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from core import events
from core.config import Scenario
from core.errors import ConfigError
from core.units import NS_PER_S


class Record:
    """A listener, too: of the log it keeps how weights came to engines."""

    def __init__(self, output: str | Path | None, scenario: Scenario) -> None:
        """Raises ConfigError if the folder cannot be made."""
        self._began = time.monotonic()
        self._files: dict[str, Any] = {}
        self.rewards: dict[str, list[float]] = {job.spec.id: [] for job in scenario.jobs}
        """Mean reward of each trained batch, by pipeline."""
        if output is None:
            return
        try:
            Path(output).mkdir(parents=True, exist_ok=True)
            for job in scenario.jobs:
                name = quote(job.spec.id, safe="@")
                self._files[job.spec.id] = open(Path(output) / f"{name}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError("--output", f"{output} cannot be written: {error.strerror}") from error

    def __call__(self, i: int, t_ns: int, cause: int, item: Any) -> None:
        if isinstance(item, events.WeightsLoaded):
            what = {"dp_rank": item.dp_rank, "transport": item.transport, "meant": item.meant, "why": item.why}
            line = {"phase": "sync", "version": item.version, "seconds": round(item.took / NS_PER_S, 4), **what}
            self._write(item.pipeline, line)

    def phase(self, pipeline: str, phase: str, version: int, seconds: float, figures: dict[str, float]) -> None:
        """One phase is over."""
        if phase == "train" and "reward" in figures:
            self.rewards[pipeline].append(figures["reward"])
        self._write(pipeline, {"phase": phase, "version": version, "seconds": round(seconds, 4), **figures})

    def evaluation(self, pipeline: str, batch: int, figures: dict[str, float]) -> None:
        """An evaluation batch is over."""
        self._write(pipeline, {"phase": "evaluation", "batch": batch, **figures})

    def _write(self, pipeline: str, line: dict[str, Any]) -> None:
        file = self._files.get(pipeline)
        if file is not None:
            at = round(time.monotonic() - self._began, 3)
            file.write(json.dumps({"at_s": at, **line}) + "\n")
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
