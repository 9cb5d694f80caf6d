"""Same scenario, same seed, same log: byte for byte, in any process, whatever the hash seed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from core import events
from core.trace import read_log, replay

ROOT = Path(__file__).parents[1]

FAULTS = """
faults:
  - {at: 60, kind: lose_message, pipeline: p1, count: 2}
  - {at: 100, kind: kill_engine, pipeline: p2, dp_rank: 1}
  - {at: 130, kind: duplicate_message, pipeline: p2, count: 3}
  - {at: 150, kind: hang_engine, pipeline: p1, dp_rank: 0}
  - {at: 170, kind: restart_control_plane, duration: 3}
"""


def log_of(scenario: Path, target: Path, hash_seed: str) -> bytes:
    """The event log of a run in a process of its own."""
    command = [sys.executable, "-m", "scenarios.run", str(scenario), "--quiet", "--seed", "11", "--trace", str(target)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return target.read_bytes()


@pytest.mark.parametrize("faults", ["", FAULTS], ids=["calm", "faults"])
def test_two_processes_with_different_hash_seeds_write_the_same_log(tmp_path: Path, faults: str) -> None:
    text = (ROOT / "scenarios/files/overlap_2gpu.yaml").read_text()
    scenario = tmp_path / "case.yaml"
    scenario.write_text(text + faults)
    logs = [log_of(scenario, tmp_path / f"{seed}.jsonl", seed) for seed in ("0", "1", "4242")]
    assert len({hashlib.sha256(log).hexdigest() for log in logs}) == 1
    assert logs[0].count(b"\n") > 300


def test_a_log_fed_through_decide_gives_the_actions_it_recorded(tmp_path: Path) -> None:
    text = (ROOT / "scenarios/files/overlap_2gpu.yaml").read_text()
    scenario = tmp_path / "case.yaml"
    scenario.write_text(text + FAULTS)
    target = tmp_path / "log.jsonl"
    log_of(scenario, target, "7")
    assert replay(*read_log(target)) is None


def test_a_log_with_one_event_changed_does_not_replay(tmp_path: Path) -> None:
    """The replay can fail: another memory reading, and the next action is another one."""
    target = tmp_path / "log.jsonl"
    log_of(ROOT / "scenarios/files/overlap_2gpu.yaml", target, "7")
    header, entries = read_log(target)
    changed = []
    for entry in entries:
        if isinstance(entry.item, events.WeightsPublished) and entry.item.version == 1:
            entry = msgspec.structs.replace(entry, item=msgspec.structs.replace(entry.item, version=2))
        changed.append(entry)
    assert replay(header, changed) is not None
