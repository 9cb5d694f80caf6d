"""Reaching a Ray cluster: join the one that was named, or start one on this machine that nobody else can reach.

1. Token authentication is always on. A cluster of our own gets a token of its own; joining takes Ray's usual sources.
2. A cluster of our own listens on loopback only, and ends with the process that started it.
3. Ray is imported here, after its environment is set, and nothing heavier.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core.errors import ConfigError, OperationFailed

OBJECT_STORE_BYTES = 256 << 20
"""Weights and samples of small models; Ray spills beyond it. Its default is a third of the machine's memory."""

QUIET = {
    # Ray restricts itself to loopback only where it takes clusters for impossible, and this is how one tells it so.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its 30 s are not enough on a machine where many processes start at once.
    "RAY_raylet_start_wait_time_s": "120",
    # Memory is accounted by the scheduler; a monitor that kills the largest process would only hide who took it.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray starts workers at nice 15, so that they would starve beside anything else that runs on the machine.
    "RAY_worker_niceness": "0",
}
# What Ray's daemons have to say goes to the driver's standard output, where the result may be. Ray leaves out what
# matches this pattern, if it looks for repetitions at all. What happened to a worker we say ourselves.
MUTE = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
# By itself Ray asks twenty times, for 45 s each, whether what listens there is a cluster.
IMPATIENT = {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_py_gcs_connect_timeout_s": "10"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECT_S = 5.0


def connect(address: str | None) -> bool:
    """Join the cluster at `address` (`HOST:PORT` or `auto`), or start one; whether it is ours.

    Raises ConfigError if there is none at that address, or it runs another version of Ray or Python.
    """
    os.environ.update(MUTE)
    if address is None:
        _start()
        return True
    _join(address)
    return False


def living_nodes() -> list[dict[str, Any]]:
    """The cluster's nodes as Ray describes them: the head first, then by address, in the same order for every process
    that asks. Two nodes may have one address; then their ids decide."""
    import ray

    def place(node: dict[str, Any]) -> tuple[bool, str, str]:
        return "node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"], node["NodeID"]

    return sorted((node for node in ray.nodes() if node["Alive"]), key=place)


def _start() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_AUTH_MODE"] = "token"
    # Ray reads it once a process: a second cluster of this process (`--demand all`) has the same one.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    try:
        _init(
            ray, address="local", num_cpus=os.cpu_count() or 1, num_gpus=0, include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )  # fmt: skip
    except Exception as error:  # Ray raises bare ones where its daemons do not come up
        disconnect()
        why = " ".join(str(error).split())[:300]
        raise OperationFailed(f"Ray could not be started on this machine: {why}") from error


def _join(address: str) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    for name, value in IMPATIENT.items():
        os.environ.setdefault(name, value)
    if address != "auto":
        _look_for(address)
    _need_token(address)
    import ray

    try:
        with _silent():
            _init(ray, address=address)
    except ConnectionError as error:
        raise ConfigError(
            "--address", f"there is no Ray cluster at {address}", "start one: ray start --head"
        ) from error
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ConfigError("--address", f"the Ray cluster at {address} cannot be joined: {text[:300]}") from error
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            "--address", f"the Ray cluster at {address} does not take our token",
            "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that cluster's (ray get-auth-token shows it there)",
        ) from error  # fmt: skip


def _need_token(address: str) -> None:
    """Raises ConfigError if a token is needed and there is none: Ray says then that a wrong one was shown."""
    if os.environ["RAY_AUTH_MODE"].lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not file.is_file():
        raise ConfigError(
            "--address", f"the Ray cluster at {address} is joined with its token, and there is none here (no {file})",
            "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that cluster's (ray get-auth-token shows it there)",
        )  # fmt: skip


def _look_for(address: str) -> None:
    """See whether anybody listens at `HOST:PORT`: Ray itself would ask for minutes. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not _listens(host, int(port)):
        raise ConfigError("--address", f"nothing listens at {address}", "start a cluster there: ray start --head")
    if host in LOOPBACK and not _listens(_own_address(), int(port)):
        # Ray would take the machine's own address instead, where a cluster that was bound to loopback is not heard.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), CONNECT_S):
        return True
    return False


def _own_address() -> str:
    """The address from which this machine would reach others, as Ray finds it: nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anyone:
        anyone.connect(("8.8.8.8", 80))
        return anyone.getsockname()[0]
    return "127.0.0.1"


@contextmanager
def _silent() -> Iterator[None]:
    """Ray's native half writes to standard error, before it can be told not to, what its exceptions say anyway."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _init(ray: Any, **options: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options)


def disconnect() -> None:
    """Leave the cluster; end it if it is ours. Also twice."""
    import ray

    ray.shutdown()
