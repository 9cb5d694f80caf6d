"""Options that only some backends take: which machine, which model, what it is trained on.

1. A backend says which of these it takes by the class attribute `takes` (names without dashes; `workload` stands for
   all of `WORKLOAD`). Any other is refused, so that nobody believes that it had an effect.
2. What concerns a pipeline changes the declared workloads; the rest reaches the backend as keyword arguments.
3. Nothing heavy is imported: whether there is a GPU is a question about files here, not about torch.
"""

import argparse
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from core.config import Scenario
from core.errors import ConfigError
from core.workload import DEVICES, MOST_TOKENS, NUMBERS, TASKS, changed, read_bounded, read_function
from scenarios.parsing import one_of, whole

MACHINE = (
    "device", "devices", "address", "output", "transport", "verify_weights", "checkpoint_every", "resume",
)  # fmt: skip
WORKLOAD = ("model", "task", "prompts", "reward", "max_tokens", "learning_rate")

AUTO = "auto"
CACHE = "cache"
"""What is used unless something else is asked for: it works wherever trainer and engine are, up or not."""
TRANSPORTS = (AUTO, CACHE, "ipc", "broadcast", "nccl")
"""`nccl` is what a broadcast is on GPUs; on a CPU there is only its other name."""
MOST_PORT = 65_535
MOST_CARD = 1_000_000
CARD = r"(\d{1,6}|GPU-[0-9A-Fa-f-]+)@0*[1-9]\d{0,5}(\.\d{1,9})?|GPU-[0-9A-Fa-f-]+"
MOST_STEPS = 1_000_000


# --- what can be asked for --------------------------------------------------------------------------------


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    _add_machine(parser.add_argument_group("machine", "for backends with real workers"))
    _add_workload(parser.add_argument_group("workload", "for backends with real workers; of every pipeline"))


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", type=one_of(DEVICES), metavar="|".join(DEVICES), help="default: cuda if this machine has a GPU"
    )
    group.add_argument(
        "--devices",
        type=_cards,
        metavar="IDS",
        help="the card of each GPU of the scenario: 0,0 puts two on card 0, 0@60,0@60 with 60 GiB each; or UUIDs",
    )
    group.add_argument(
        "--address", type=_address, metavar="HOST:PORT|auto", help="join this Ray cluster (default: start one here)"
    )
    group.add_argument("--output", metavar="DIR", help="folder of the run (default: out/SCENARIO-TIME-PID)")
    group.add_argument(
        "--transport", type=one_of(TRANSPORTS), metavar="|".join(TRANSPORTS), help="how weights get to engines (cache)"
    )
    group.add_argument(
        "--verify-weights", action="store_true", default=None, help="compare every tensor of every engine after a sync"
    )

    group.add_argument(
        "--checkpoint-every", type=whole(1, MOST_STEPS), metavar="N", help="keep the newest checkpoint in --output"
    )
    group.add_argument("--resume", metavar="DIR", help="go on from the checkpoints in an earlier run's --output")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    help_ = "tiny, smollm2, a local folder, or an id on Hugging Face's hub"
    group.add_argument("--model", metavar="NAME", help=help_)
    group.add_argument("--task", type=one_of(TASKS), metavar="|".join(TASKS), help="a built-in task")
    group.add_argument("--prompts", metavar="FILE", help="instead: JSON lines with prompt, answer and what else")
    group.add_argument("--reward", type=_function, metavar="MODULE:FUNCTION", help="how good a completion is")
    group.add_argument("--max-tokens", type=whole(1, MOST_TOKENS), metavar="N", help="longest completion")
    group.add_argument("--learning-rate", type=_learning_rate, metavar="X", help="of the optimiser")


def _cards(text: str) -> tuple[int | str, ...]:
    """Numbers as numbers; `CARD@GIB` and UUIDs, which the backend understands, as they are."""
    return tuple(_card(part) for part in text.split(","))


def _card(text: str) -> int | str:
    if re.fullmatch(CARD, text, re.ASCII):
        return text
    if "@" in text or text.startswith("GPU-"):
        shape = "a card is its number or GPU-UUID, with @GIB (at least 1) for a budget"
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {shape}, such as 0@60")
    parsed: int = whole(0, MOST_CARD)(text)
    return parsed


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text != AUTO and not (_is_host(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) <= MOST_PORT):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither HOST:PORT nor auto, such as 10.0.0.1:6379")
    return text


def _is_host(text: str) -> bool:
    """A name, an IPv4 address, or an IPv6 address in brackets."""
    return re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", text, re.ASCII) is not None


def _function(text: str) -> str:
    try:
        return read_function(text, "")
    except ConfigError as bad:
        raise argparse.ArgumentTypeError(str(bad)) from None


def _learning_rate(text: str) -> float:
    try:
        return read_bounded(float(text), "", NUMBERS["learning_rate"])
    except ConfigError as bad:
        raise argparse.ArgumentTypeError(str(bad)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text[:40]!r}") from None


# --- what they make of the scenario -----------------------------------------------------------------------


def with_workload(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """The scenario with the workloads that were asked for. Raises ConfigError."""
    given = {name: getattr(options, name) for name in WORKLOAD if getattr(options, name) is not None}
    if not given:
        return scenario
    if "prompts" in given and not Path(given["prompts"]).is_file():
        raise ConfigError("--prompts", f"there is no file {given['prompts']}")
    jobs = tuple(msgspec.structs.replace(job, workload=changed(job.workload, **given)) for job in scenario.jobs)
    return msgspec.structs.replace(scenario, jobs=jobs)


# --- what they tell the backend ---------------------------------------------------------------------------


def backend_options(options: argparse.Namespace, scenario: Scenario, takes: Collection[str]) -> dict[str, Any]:
    """The keyword arguments of a backend that takes these options. Raises ConfigError for one that it does not take."""
    for name in (*MACHINE, *WORKLOAD):
        known = name in takes or (name in WORKLOAD and "workload" in takes)
        if getattr(options, name) is not None and not known:
            raise ConfigError(_flag(name), f"the backend {options.backend} does not take it", "leave it out")
    if options.costs is not None and "workload" in takes:
        problem = f"what things take on the backend {options.backend} is what its workers take"
        raise ConfigError("--costs", problem, "leave it out")
    device = options.device or default_device()
    values = {
        "device": device,
        "devices": _devices(options, scenario, device),
        "address": options.address,
        "output": str(_output(options, scenario)),
        "transport": _transport(options, device),
        "verify_weights": bool(options.verify_weights),
        "checkpoint_every": options.checkpoint_every or 0,
        "resume": options.resume,
    }
    return {name: value for name, value in values.items() if name in takes}


def for_policy(values: dict[str, Any], policy: str) -> dict[str, Any]:
    """The same for one run of several: each has a folder of its own."""
    return values | {"output": f"{values['output']}-{policy}"} if "output" in values else values


def default_device() -> str:
    """cuda if the machine has a GPU. `nvidia-smi` would not tell: GPU images have it on machines without one."""
    names = os.listdir("/dev") if os.path.isdir("/dev") else []
    return "cuda" if any(re.fullmatch(r"nvidia\d+|dxg", name) for name in names) else "cpu"


def _devices(options: argparse.Namespace, scenario: Scenario, device: str) -> tuple[int | str, ...] | None:
    """The card of each GPU, on its own node; None: each GPU is a card of its own, or there are no cards."""
    cards, cluster = options.devices, scenario.cluster
    if cards is None:
        return None
    if device == "cpu":
        raise ConfigError("--devices", "there are no cards with --device cpu", "leave it out")
    if len(cards) == cluster.gpus_per_node:
        return cards * cluster.nodes
    if len(cards) != cluster.gpus:
        each = f" or {cluster.gpus_per_node} (the same on each node)" if cluster.nodes > 1 else ""
        problem = f"names {len(cards)} cards, and the scenario has {cluster.gpus} GPUs"
        raise ConfigError("--devices", problem, f"list {cluster.gpus}{each}")
    return cards


def _transport(options: argparse.Namespace, device: str) -> str:
    transport = options.transport or CACHE
    if transport != "nccl":
        return transport
    if device == "cpu":
        raise ConfigError("--transport", "nccl needs GPUs", "broadcast is the same through gloo")
    return "broadcast"


def _output(options: argparse.Namespace, scenario: Scenario) -> Path:
    """Absolute, because workers have another working folder. Made by the backend, if it gets that far."""
    if options.output is None:
        name = re.sub(r"[^\w.-]+", "-", scenario.name).strip("-.") or "run"
        return Path("out", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("--output", f"{folder} is no folder", "name another")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("--output", f"{folder} is not empty", "name a new folder for each run")
    return folder.absolute()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
