"""The four detectors, each a child process in the mutated copy: a mutant may crash, hang or eat all memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.mutants.tree import Mutant, copied

DETECTORS = ("unit", "property", "explorer", "verifier")
SEEDS = 40
"""Of the explorer."""
DIED = "the detector itself died"
CPU_S = 90
"""Processor time of one detector. Without a mutant each takes a quarter of it: past it something goes round in circles,
which is a way of being found."""


class Found(NamedTuple):
    """What one detector says of one mutant."""

    found: bool
    how: str = ""
    """The first test that failed, the rules that broke, the verdict."""
    why: str = ""
    """What it said, in one line; kept in the results only."""
    hits: int = 0
    seeds: int = 0
    """Explorer: in how many seeds of how many."""
    blind: bool = False
    """It never loads the mutated module."""
    cpu_s: float = 0.0


def detect(tree: Path, mutant: Mutant | None, detector: str, seeds: int = SEEDS, cpu_s: int = CPU_S) -> Found:
    """Let one detector look at a copy."""
    answer = tree / f"{detector}.json"
    module = mutant.module if mutant is not None else ""
    command = [sys.executable, "-m", "tests.mutants.probe", detector, module, str(answer), str(seeds), str(cpu_s)]
    path = {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    said = subprocess.run(command, cwd=tree, env=os.environ | path, capture_output=True, text=True, check=False)
    if not answer.exists():
        last = said.stderr.strip().splitlines()[-1:] or [f"exit code {said.returncode}"]
        if said.returncode in (-24, -9):
            return Found(True, f"hung: over {cpu_s} s of processor time", cpu_s=cpu_s)
        return Found(True, f"{DIED}: {last[0]}"[:200])
    told = json.loads(answer.read_text(encoding="utf-8"))
    return Found(**{name: told[name] for name in Found._fields if name in told})


def examine(mutant: Mutant | None, detector: str, seeds: int = SEEDS) -> Found:
    """The same with a copy of its own."""
    with copied(mutant) as tree:
        return detect(tree, mutant, detector, seeds)
