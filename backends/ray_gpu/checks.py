"""What the real backend refuses before anything starts: in one line each, with what to do."""

import subprocess
import sys
from pathlib import Path

from backends.ray_gpu.models import smollm2
from backends.ray_gpu.models.folder import check_folder
from backends.ray_gpu.models.resolve import BUILT_IN, is_hub_id
from backends.ray_gpu.places import models
from backends.ray_gpu.prompts import load_prompts
from backends.ray_gpu.weights.choice import ASKED
from core.config import Job, Scenario
from core.errors import ConfigError
from core.model import Cluster, Role
from core.workload import SMOLLM2

FAULTS = ("kill_engine", "hang_engine", "kill_trainer", "hang_trainer", "kill_client", "restart_control_plane")
"""What can be done to real processes on purpose."""

_TRY_REWARD = """
import sys
from backends.ray_gpu.rewards import load_reward
from core.errors import ConfigError
try:
    load_reward(sys.argv[1], 1)
except ConfigError as error:
    sys.exit(str(error))
"""


def check_scenario(scenario: Scenario, transport: str) -> None:
    """Raises ConfigError for the first thing that cannot be run for real."""
    if transport not in ASKED:
        raise ConfigError("--transport", f"there is no {transport!r}", f"known: {', '.join(ASKED)}")
    for fault in scenario.faults:
        if fault.kind not in FAULTS:
            raise ConfigError(
                "faults",
                f"{fault.kind} cannot be done to real workers",
                f"use --backend sim, or one of {', '.join(FAULTS)}",
            )
    tried: dict[str, None] = {}
    for job in scenario.jobs:
        _check_roles(job)
        if job.spec.in_flight_updates:
            raise ConfigError(
                f"pipelines.{job.spec.id}.in_flight_updates", "real engines take new weights only while they are idle",
                "leave it out, or use --backend sim",
            )  # fmt: skip
        _check_engines(job, scenario.cluster)
        _check_workload(job, tried)


def _check_roles(job: Job) -> None:
    for role in (Role.CRITIC, Role.REFERENCE):
        if job.spec.group(role) is not None:
            raise ConfigError(
                f"pipelines.{job.spec.id}.{'critic' if role is Role.CRITIC else 'reference'}",
                f"GRPO on real workers has no worker group {role}",
                "leave it out; workload.kl keeps the policy near its initial model" if role is Role.REFERENCE
                else "leave it out, or use --backend sim",
            )  # fmt: skip


def _check_engines(job: Job, cluster: Cluster) -> None:
    """An engine is one process, and a process is on one node."""
    infer = job.spec.infer
    for rank in range(infer.size):
        nodes = {cluster.node_of(gpu) for gpu in infer.bundle(rank)}
        if len(nodes) > 1:
            raise ConfigError(
                f"pipelines.{job.spec.id}.infer", f"engine {rank} would run on {len(nodes)} nodes",
                f"choose a tp of at most {cluster.gpus_per_node}",
            )  # fmt: skip


def _check_workload(job: Job, tried: dict[str, None]) -> None:
    workload = job.workload
    folder = Path(workload.model).expanduser()
    if workload.model not in BUILT_IN and (folder.is_dir() or not is_hub_id(workload.model)):
        check_folder(folder, f"{job.spec.id}: model {workload.model}")
    if workload.model == SMOLLM2 and not (models() / smollm2.NAME).is_dir():
        smollm2.check_packages()
    if workload.prompts:
        load_prompts(workload.prompts)
    if workload.reward and workload.reward not in tried:
        tried[workload.reward] = None
        _try_reward(workload.reward)


def _try_reward(reward: str) -> None:
    """Import it in a process of its own: what it drags in is the workers' business, not the driver's."""
    tried = subprocess.run([sys.executable, "-c", _TRY_REWARD, reward], capture_output=True, text=True, check=False)
    if tried.returncode:
        lines = [line for line in tried.stderr.splitlines() if line.strip()]
        raise ConfigError("--reward", lines[-1] if lines else f"{reward} cannot be imported")
