"""Real runs for tests: the command line in a process of its own, Ray clusters of one or two nodes, and eyes on both.

1. Everything a run starts inherits a mark in its environment, so that whatever is left of it can be found, and nothing
   else is ever touched.
2. A run has its own temporary folder; what Turnstile and Ray keep on disk lies there. It is short, because sockets lie
   in it.
3. What happens is read from the control plane's journal, which has each entry before anything it leads to begins.
"""

import asyncio
import getpass
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from backends.ray_gpu.processes import Processes

ROOT = Path(__file__).parent.parent
MARK = "TURNSTILE_TEST"
LIMIT_S = 150.0
"""How long anything is waited for: many times what it takes on a machine that does nothing else."""
LOOK_S = 0.05

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str, limit_s: float = LIMIT_S, pause_s: float = LOOK_S) -> T:
    """Look until something is there (anything true), and return it. Raises AssertionError past the limit."""
    end = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(pause_s)


# --- processes, from outside ----------------------------------------------------------------------------------


def marked(mark: str) -> dict[int, str]:
    """Living processes with the mark: what each calls itself, by pid."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:  # else it is dead, and only not yet waited for
                    found[int(entry.name)] = command
        except OSError:
            continue  # not ours, or gone
    return found


def listening(pids: dict[int, str]) -> dict[str, int]:
    """Addresses on which these processes accept TCP connections, as `/proc/net` writes them, and by whom."""
    sockets = {}
    for pid in pids:
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(link)
                if target.startswith("socket:["):
                    sockets[target[8:-1]] = pid
        except OSError:
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found[fields[1].rpartition(":")[0]] = sockets[fields[9]]
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1, and the former written as the latter."""


def end_all(mark: str) -> None:
    """Kill whatever still has the mark."""
    while left := marked(mark):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(LOOK_S)


# --- a place to run in ------------------------------------------------------------------------------------------


class Place:
    """A folder, a mark, and the environment that goes with them. A context manager: leaving it leaves nothing."""

    def __init__(self, cache: Path) -> None:
        """`cache`: where models are kept that had to be made, for several places."""
        self.mark = secrets.token_hex(8)
        self._holder = tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp", ignore_cleanup_errors=True)
        self.folder = Path(self._holder.name)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TURNSTILE_", "RAY_"))}
        self.environment = kept | {
            MARK: self.mark,
            "TMPDIR": str(self.folder),
            "XDG_CACHE_HOME": str(cache),
            "RAY_worker_niceness": "0",  # Ray's 15 would have them starve beside whatever else runs here
        }

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *problem: object) -> None:
        end_all(self.mark)
        self._holder.cleanup()

    def run(self, name: str, *arguments: str, python: tuple[str, ...] = ()) -> "Run":
        """Start `python -m ARGUMENTS` here."""
        return Run(self, name, [sys.executable, *python, "-m", *arguments])

    # --- what Turnstile keeps here ------------------------------------------------------------------------------

    def session(self, folder: Path | None = None) -> str:
        """Name of the session that is kept here, or empty."""
        kept = (folder or self.folder) / f"turnstile-{getpass.getuser()}"
        names = sorted(entry.name for entry in kept.iterdir()) if kept.is_dir() else []
        return names[0] if names else ""

    def disk(self, folder: Path | None = None) -> Path:
        return (folder or self.folder) / f"turnstile-{getpass.getuser()}" / self.session(folder)

    def events(self, type_: str, /, **fields: Any) -> list[dict[str, Any]]:
        """Items in the journal; see `logged`. It is gone with the control plane."""
        return logged(self.disk() / "journal.jsonl", type_, **fields)

    def worker(self, name: str, folder: Path | None = None) -> int:
        """Pid of a worker, such as `p1/engine-0`; 0 if there is none. A cold start gives it another."""
        pids, _ = Processes(self.disk(folder) / "processes").by_owner().get(name, ((), ()))
        return pids[0] if pids else 0


class Run:
    """A command that was started."""

    def __init__(self, place: Place, name: str, command: list[str]) -> None:
        self.name = name
        self.out, self.err = (place.folder / f"{name}.{stream}" for stream in ("out", "err"))
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            # A group of its own, so that Ctrl-C can be sent to it as a terminal does, and to nobody else.
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=place.environment, stdout=out, stderr=err, process_group=0
            )

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code."""
        until(lambda: self.process.poll() is not None, f"the end of {self.name}: {self.said()[-2000:]}", limit_s)
        return self.process.returncode

    def wait_for(self, text: str) -> None:
        """Wait until it has written that."""
        until(lambda: text in self.said() or self.process.poll() is not None, f"{text!r} from {self.name}")
        assert text in self.said(), self.said()

    def said(self) -> str:
        """Everything it wrote, standard output first."""
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def result(self) -> dict[str, Any]:
        """What it wrote for `--json -`."""
        return json.loads(self.out.read_text())


# --- a cluster that drivers share --------------------------------------------------------------------------------


class Cluster:
    """Ray with one node or two, all on this machine, and a token that nobody else knows. The second node has its own
    folders, as if it were another machine."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.second = place.folder / "2"
        self.memory = tuple(Path(tempfile.mkdtemp(prefix="ts-", dir="/dev/shm")) for _ in range(2))
        """Shared memory of each node."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        place.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_raylet_start_wait_time_s": "120",
        }

    def start(self, nodes: int) -> "Cluster":
        """Start it; ready when it can be joined."""
        port = self.address.rpartition(":")[2]
        head = self._node(
            "head", self.place.folder, self.memory[0], "--head", "--port", port, "--include-dashboard=false"
        )
        head.wait_for("Ray runtime started")
        if nodes == 2:
            self.second.mkdir()
            self.other = self._node("other", self.second, self.memory[1], "--address", self.address)
            self.other.wait_for("Ray runtime started")
        return self

    def _node(self, name: str, folder: Path, memory: Path, *arguments: str) -> Run:
        before = dict(self.place.environment)
        self.place.environment |= {"TMPDIR": str(folder), "TURNSTILE_SHARED_MEMORY": str(memory)}
        try:
            return self.place.run(
                name, "ray.scripts.scripts", "start", "--block", *arguments, "--num-cpus", "2", "--disable-usage-stats",
                "--object-store-memory", "100000000", "--min-worker-port", "0", "--max-worker-port", "0",
            )  # fmt: skip
        finally:
            self.place.environment = before

    def lose_second(self) -> None:
        """The second node is gone, like a machine whose power failed: its raylet first, everything else with it."""
        here = f"--node-ip-address={self.address}"
        raylets = [
            pid for pid, command in marked(self.place.mark).items()
            if "/raylet/raylet " in command and str(self.second) in _environment(pid).get("TMPDIR", here)
        ]  # fmt: skip
        assert len(raylets) == 1, raylets
        os.kill(raylets[0], signal.SIGKILL)

    def processes(self, *titles: str) -> list[str]:
        """Processes of actors with these classes, or of janitors."""
        return [
            command for command in marked(self.place.mark).values()
            if "ray_gpu.janitor" in command or any(command.startswith(f"ray::{title}") for title in titles)
        ]  # fmt: skip

    def close(self) -> None:
        end_all(self.place.mark)
        for folder in self.memory:
            for left in sorted(folder.rglob("*"), reverse=True):
                left.rmdir() if left.is_dir() else left.unlink()
            folder.rmdir()


ACTORS = ("ControlPlane", "NodeAgent", "TrainerWorker", "EngineWorker", "Desk")


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs)


# --- scenarios -----------------------------------------------------------------------------------------------------


SMALL = {"kv_tokens": 4096}
"""A workload that needs little memory."""


def pipeline(name: str, train: int, infer: list[int], steps: int, **given: Any) -> dict[str, Any]:
    """A small one, as in a scenario file; `given` is added to it."""
    return {
        "id": name,
        "train": {"gpus": [train], "tp": 1},
        "infer": {"gpus": infer, "tp": 1},
        "steps": steps,
        "batch": {"prompts": 2, "samples_per_prompt": 4},
        "memory": {"train_gib": 0.2, "engine_gib": 0.2, "residue_gib": 0.01, "host_cache_gib": 0.01},
        "workload": SMALL,
    } | given


def scenario(folder: Path, name: str, cluster: dict[str, Any], *pipelines: dict[str, Any], **given: Any) -> str:
    """Write a scenario file; its path."""
    file = folder / f"{name}.yaml"
    sizes = {"gpu_memory_gib": 1, "host_memory_gib": 4}
    file.write_text(yaml.safe_dump({"name": name, "cluster": sizes | cluster, "pipelines": list(pipelines)} | given))
    return str(file)


# --- a reward that a test can hold back --------------------------------------------------------------------------


def held_file() -> Path:
    return Path(tempfile.gettempdir()) / "held"


async def held(prompt: dict[str, Any], completion: str) -> float:
    """As long as a file is there, no completion gets its reward: the pipeline stays in the middle of a rollout."""
    while held_file().exists():
        await asyncio.sleep(LOOK_S)
    return float(len(completion) % 2)


def logged(log: Path, type_: str, /, **fields: Any) -> list[dict[str, Any]]:
    """Items of that type in an event log that have these fields, oldest first. A log that is not there is empty."""
    try:
        whole = log.read_bytes().split(b"\n")[1:-1]
    except OSError:
        return []
    tag = f'"type":"{type_}"'.encode()
    items = [json.loads(line)["item"] for line in whole if tag in line]
    return [item for item in items if all(item.get(name) == value for name, value in fields.items())]


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """A file of JSON lines."""
    return (json.loads(line) for line in file.read_text().splitlines())
