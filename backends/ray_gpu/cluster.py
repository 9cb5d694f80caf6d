"""Reaching a Ray cluster: join the one that was named, or start one on this machine that nobody else can reach.

1. Token authentication is always on. A cluster of our own gets a token of its own; joining takes Ray's usual sources.
2. A cluster of our own listens on loopback only, and ends with the process that started it.
3. Ray is imported here, after its environment is set, and nothing heavier.
"""

import logging
import os
import secrets
from typing import Any

from core.errors import ConfigError

OBJECT_STORE_BYTES = 256 << 20
"""Weights and samples of small models; Ray spills beyond it. Its default is a third of the machine's memory."""

QUIET = {
    # Ray restricts itself to loopback only where it takes clusters for impossible, and this is how one tells it so.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Memory is accounted by the scheduler; a monitor that kills the largest process would only hide who took it.
    "RAY_memory_monitor_refresh_ms": "0",
}
# What Ray's daemons have to say goes to the driver's standard output, where the result may be. Ray leaves out what
# matches this pattern, if it looks for repetitions at all. What happened to a worker we say ourselves.
MUTE = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


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


def _start() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import ray

    _init(
        ray, address="local", num_cpus=os.cpu_count() or 1, num_gpus=0, include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )  # fmt: skip


def _join(address: str) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    try:
        _init(ray, address=address)
    except ConnectionError as error:
        raise ConfigError("--address", f"there is no Ray cluster at {address}", "start one: ray start --head") from error
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ConfigError("--address", f"the Ray cluster at {address} cannot be joined: {text[:300]}") from error
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            "--address", f"the Ray cluster at {address} does not take our token",
            "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to that cluster's (ray get-auth-token shows it there)",
        ) from error  # fmt: skip


def _init(ray: Any, **options: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options)


def disconnect() -> None:
    """Leave the cluster; end it if it is ours. Also twice."""
    import ray

    ray.shutdown()
