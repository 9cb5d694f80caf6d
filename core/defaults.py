"""What a scenario leaves out: every default in one place, with where it comes from.

Costs are published measurements of 7B models, rounded to two digits or so; docs/scenarios.md repeats the table.
Limits and the like are formulas of the costs, so that a slower world gets longer limits by itself. What a real backend
trains on has its defaults, with reasons, beside its fields: `core.workload`.
"""

import math
from typing import Any, NamedTuple

from core.config import Costs, Durations
from core.lengths import SIGMA_UNIT, most, quantile
from core.model import Limits
from core.units import gib, ns, ns_written

# key: (seconds, source)
COSTS: dict[str, tuple[float, str]] = {
    "init": (38.8, "RollMux, arXiv 2512.11306, Fig. 4: cold start of a 7B rollout, the slower of its two cold starts"),
    "train": (113.1, "RollMux Fig. 2: one training phase of its job 7B-8K, single turn"),
    "offload": (5.2, "slime pull request 1102: offloading a Megatron trainer takes 4.0 to 6.3 s"),
    "onload": (4.1, "RollMux Fig. 4: warm switch to a 7B trainer"),
    "publish": (0.6, "14.2 GiB of 7B bf16 weights at 24.4 GiB/s, a measured device copy to pinned host memory"),
    "sync": (0.9, "RollMux Fig. 12: 7B weights from 8 to 8 GPUs over 20 Gb/s"),
    "sleep": (0.31, "vLLM sleep level 2 (weights are dropped; the sync brings them back), 8B on an A100"),
    "wake": (0.9, "RollMux Fig. 4: warm switch to a 7B rollout"),
}


class CostSet(NamedTuple):
    """Costs that a scenario can name (`costs: h200`) in place of the published ones above."""

    about: str
    """What was measured."""
    records: tuple[str, ...]
    """The logs they come from; `python -m scenarios.calibrate LOG ... --typical` gives them again."""
    costs: dict[str, Any]
    """By key, as a scenario file writes them (seconds)."""


COST_SETS = {
    "h200": CostSet(
        about="SmolLM2 135M, two pipelines on two halves of one H200, as Turnstile ran them; steps of 32 short answers",
        records=(
            "docs/runs/2026-11-30-h200/batch.jsonl.gz",
            "docs/runs/2026-11-30-h200/batch30.jsonl.gz",
            "docs/runs/2026-11-30-h200/faults.jsonl.gz",
        ),
        costs={
            "init": 19.5415, "onload": 0.0441, "train": 0.1631, "offload": {"first": 0.9461, "constant": 0.2883},
            "publish": 0.2317, "sync": 0.0854, "sleep": 0.0122, "wake": 0.0065, "restart": 20.9176, "warmup": 0.2897,
            "gate": 0.0026, "command": 0.0031, "release": 0.0082,
            "trajectory": {"lognormal": {"median": 0.1003, "sigma": 0.568}},
        },
    ),
}  # fmt: skip

# RLinf's published decode times of a 1.5B model: half take at most 59.9 s, 99 % at most 160.2 s.
TRAJECTORY = Durations(parts=((1.0, "lognormal", ns_written(59.9), round(0.423 * SIGMA_UNIT)),))

# Of a training phase; Miles, Qwen 27B on 8 H200: log-probs 33 s beside 415 s of training.
LOG_PROBS_SHARE = 33 / 415

ENGINE_SLOTS = 16

# The example world of the design: H200 nodes, a model that leaves room for one trainer or one engine.
CLUSTER_NODES = 1
GPU_MEMORY = gib(141)
HOST_MEMORY = gib(256)
TRAIN_MEMORY = gib(40)
ENGINE_MEMORY = gib(60)
RESIDUE = gib(1)
HOST_CACHE = gib(2)

MAX_ATTEMPTS = 4


def cost(key: str) -> int:
    """The default of a cost, in ns."""
    return ns_written(COSTS[key][0])


def log_probs(train: int) -> int:
    """One pass of log-probs or values, beside a training phase of `train` ns. Rounded up to a millisecond."""
    return ns(math.ceil(train * LOG_PROBS_SHARE / ns(0.001)) / 1000)


def min_residence(costs: Costs) -> int:
    """Four times what a turn costs, so that at most a fifth of an engine's time is spent on switching."""
    return max(ns(30), 4 * (most(costs.wake) + most(costs.sync) + most(costs.sleep)))


def reissue_after(costs: Costs) -> int:
    """Ten times what all but 1 % of the trajectories need: by then the engine, not the prompt, is to blame."""
    return max(ns(300), 10 * quantile(costs.trajectory, 0.99))


def suspicion(reissue_after: int, max_attempts: int) -> int:
    """How long an engine can leave one trajectory unanswered, attempt after attempt, before it is taken for hung: up to
    the last attempt but one (`core.gateway`). With two trajectories, or with others that it answers, it is shorter."""
    return max(1, max_attempts - 1) * reissue_after


def hold(costs: Costs) -> int:
    """Longest a non-rollout lease is held: four times everything a trainer may do under one lease."""
    work = max(most(costs.train), most(costs.critic_train)) + most(costs.log_probs)
    return max(ns(600), 4 * (most(costs.onload) + work + most(costs.publish) + most(costs.offload)))


def limits(costs: Costs, residence: int) -> Limits:
    """The limits that follow from the costs: four times the usual duration, and never too short to be real."""
    slow = 4 * quantile(costs.trajectory, 0.99)
    return Limits(
        hold=hold(costs),
        init=max(ns(600), 4 * most(costs.init)),
        wake=max(ns(120), 4 * max(most(costs.wake), most(costs.restart))),
        sync=max(ns(120), 4 * most(costs.sync)),
        sleep=max(ns(60), 4 * most(costs.sleep)),
        drain=max(ns(120), slow),
        release=ns(30),
        quarantine=ns(600),
        turn=max(ns(600), slow, residence),
        command=ns(10),
    )
