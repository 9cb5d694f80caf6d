"""Where things lie on a node and what actors are called. Names are made here and nowhere else.

One control plane has one *session* name, made when it is created, so two clusters on one host share nothing. On each
node it has two directories: one on disk (journal, slot book, process records) and one in shared memory (weights).
"""

import getpass
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from core.model import Role

CONTROL = "control"
CONTROL_NAMESPACE = "turnstile"
SHARED_MEMORY = "/dev/shm"


class Places(NamedTuple):
    """The directories of one session on whatever node asks."""

    session: str

    @property
    def disk(self) -> Path:
        return Path(tempfile.gettempdir()) / f"turnstile-{getpass.getuser()}" / self.session

    @property
    def memory(self) -> Path:
        """In shared memory where the system has it; elsewhere weights are files on disk. TURNSTILE_SHARED_MEMORY in the
        environment of a node's Ray names another folder for that node."""
        base = Path(os.environ.get("TURNSTILE_SHARED_MEMORY") or SHARED_MEMORY)
        return (base if base.is_dir() else Path(tempfile.gettempdir())) / f"turnstile-{self.session}"

    @property
    def journal(self) -> Path:
        return self.disk / "journal.jsonl"

    @property
    def runs(self) -> Path:
        return self.disk / "runs.msgpack"

    @property
    def slots(self) -> Path:
        return self.disk / "slots"

    @property
    def processes(self) -> Path:
        return self.disk / "processes"


def models() -> Path:
    """Where models are kept that had to be made or converted: once for all runs on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnstile" / "models"


def namespace_of(pipeline: str) -> str:
    """The Ray namespace that holds the pipeline's workers and nothing else."""
    return f"turnstile/{pipeline}"


def engine_name(dp_rank: int) -> str:
    return f"engine-{dp_rank}"


def trainer_name(role: Role, rank: int) -> str:
    return f"{role}-{rank}"


DESK = "desk"


def agent_name(node: int) -> str:
    return f"node-{node}"


def owner(pipeline: str, name: str) -> str:
    """A worker by its full name, as it stands in the books of memory and processes."""
    return f"{pipeline}/{name}"
