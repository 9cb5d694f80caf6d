"""The Ray backend on CPU, by its command line: what a run leaves, says and survives. The real thing throughout.

Few runs, looked at by many tests: starting a worker takes seconds of a processor.
"""

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray_world import ACTORS, LOOPBACK, ROOT, Cluster, Place, Run, lines, listening, marked, pipeline, scenario, until

from scenarios import replay

for package in ("ray", "torch", "megatron", "transformers"):
    if find_spec(package) is None:  # importing it takes seconds, and is the workers' business
        pytest.skip(f"{package} is not installed", allow_module_level=True)

REAL = ("--backend", "ray_gpu", "--device", "cpu")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(cache: Path) -> Iterator[Place]:
    with Place(cache) as place:
        yield place


# --- the incident, alone on this machine ------------------------------------------------------------------------


class Alone:
    """A run of the incident, and what was seen while it ran."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.log = place.folder / "log.jsonl"
        self.output = place.folder / "out"
        self.run = place.run(
            "incident", "scenarios.overlap_2gpu", *REAL, "--steps", "2", "--verify-weights", "--json", "-", "--quiet",
            "--trace", str(self.log), "--output", str(self.output), python=("-X", "importtime"),
        )  # fmt: skip
        until(lambda: place.events("Note", kind="rollout_granted", pipeline="p2"), "p2's first engines")
        self.session = place.session()
        self.seen = marked(place.mark)
        self.ports = listening(self.seen)
        self.memory = Path(f"/dev/shm/turnstile-{self.session}")
        self.cached = sorted(entry.name for entry in self.memory.iterdir())
        self.code = self.run.wait()
        self.left = {pid: name for pid, name in marked(place.mark).items() if pid in self.seen}
        self.summary = self.run.result()


@pytest.fixture(scope="module")
def alone(cache: Path) -> Iterator[Alone]:
    with Place(cache) as place:
        yield Alone(place)


def test_the_incident_runs_to_its_end_on_real_workers(alone: Alone) -> None:
    assert alone.code == 0, alone.run.said()
    summary = alone.summary
    assert (summary["backend"], summary["outcome"], summary["violations"]) == ("ray_gpu", "completed", [])
    assert summary["diagnosis"] is None
    assert [(one["id"], one["steps_done"], one["trajectories"], one["error"]) for one in summary["pipelines"]] == [
        ("p1", 2, 64, None), ("p2", 2, 64, None)
    ]  # fmt: skip
    assert summary["handovers"] > 0
    for gpu in summary["gpus"]:
        assert gpu["busy_s"] > 0
        assert gpu["busy_s"] + gpu["switching_s"] + gpu["idle_s"] == pytest.approx(summary["makespan_s"], abs=1e-6)


def test_the_log_of_a_real_run_replays_to_the_same_actions(alone: Alone, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(alone.log)]) == 0
    assert "same actions" in capsys.readouterr().out


def test_the_output_folder_tells_the_reward_of_every_step(alone: Alone) -> None:
    for name in ("p1", "p2"):
        trained = [line for line in lines(alone.output / f"{name}.jsonl") if line["phase"] == "train"]
        assert [line["step"] for line in trained] == [1, 2]
        assert all(0 <= line["reward"] <= 1 and line["grad_norm"] >= 0 for line in trained)


def test_a_run_says_nothing_but_its_result(alone: Alone) -> None:
    said = [line for line in alone.run.err.read_text().splitlines() if not line.startswith("import time:")]
    assert said == []


def test_a_driver_imports_nothing_heavy(alone: Alone) -> None:
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in alone.run.err.read_text().splitlines()}
    assert {"ray", "msgspec"} <= imported  # it can be seen at all
    assert not {"torch", "transformers", "megatron", "sglang", "simpy"} & imported


def test_weights_lie_in_shared_memory_while_a_run_lasts_and_no_longer(alone: Alone) -> None:
    assert alone.cached == ["p1", "p2"]
    assert not alone.memory.exists()


def test_a_run_leaves_no_process_and_no_folder(alone: Alone) -> None:
    titles = [title for name in ACTORS for title in alone.seen.values() if title.startswith(f"ray::{name}")]
    assert len(titles) == 2 + 2 * 4, alone.seen  # a control plane, an agent; trainer, two engines and desk of each
    assert alone.left == {}
    assert not list(alone.place.folder.glob("turnstile-*/*"))


def test_a_run_of_its_own_can_be_reached_from_this_machine_only(alone: Alone) -> None:
    assert alone.ports, "nothing listens at all"
    elsewhere = {address: alone.seen[pid] for address, pid in alone.ports.items() if address not in LOOPBACK}
    assert elsewhere == {}
