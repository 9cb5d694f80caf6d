"""What a real backend trains on: model, prompts, rewards and the settings of the optimiser, as one plain record.

1. The simulator ignores all of it; the core carries it from the scenario file to the backend, and into the log.
2. The fields are the keys of `workload:` in a scenario file, with seconds and MiB there for ns and bytes here.
3. None means "what suits the model, the task and the device"; `settled` decides, once these are known.
4. Nothing is opened here: whether the model, the file and the function exist is asked by the backend, before its run.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core.errors import ConfigError
from core.model import Record
from core.reading import Table, number, read_text, read_whole, read_word
from core.units import ns

TINY = "tiny"
SMOLLM2 = "smollm2"
TASKS = ("arithmetic", "copy", "sort")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")

MIB = 1 << 20
MOST_TOKENS = 1 << 24
MOST_BUCKET_MIB = 1 << 16


class Workload(Record, frozen=True, kw_only=True):
    """What one pipeline trains on, and how. Where a default comes from stands below it."""

    model: str = TINY
    """`tiny` (random, made on the spot), `smollm2`, a folder in Hugging Face's format, or the id of one on its hub."""
    task: str = "copy"
    """One of `TASKS`; empty with `prompts`."""
    size: int | None = None
    """How hard the task is: symbols to copy, numbers to sort, digits to add."""
    prompts: str = ""
    """A JSONL file, instead of a task."""
    reward: str = ""
    """`module:function`; empty: the task's own."""
    reward_limit: int = ns(30)
    """ns for one reward. An exact check takes microseconds; half a minute leaves room for a sandbox or a call."""

    max_tokens: int | None = None
    """Tokens generated for one prompt, at most, the end token included."""
    temperature: float = 1.0
    """At 1 the samples are the policy's own, which is what the policy gradient is an expectation over."""
    top_p: float = 1.0
    """Likewise: anything cut off here would be missing from the ratio's denominator."""

    learning_rate: float | None = None
    adam_beta1: float = 0.9
    """Kingma & Ba (arXiv 1412.6980)."""
    adam_beta2: float = 0.95
    """Instead of their 0.999, as GPT-3 (arXiv 2005.14165, app. B) and Llama 2 (arXiv 2307.09288, 2.2): an average over
    the last 20 steps follows a policy whose gradients change in size while it learns."""
    weight_decay: float = 0.0
    """The KL term and the clip keep a policy near; decay towards 0 would pull a pretrained one away from itself."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; GPT-3 and Llama 2 as above."""
    clip_low: float = 0.2
    """How far the probability ratio may fall below 1: PPO (arXiv 1707.06347), and DAPO (arXiv 2503.14476)."""
    clip_high: float = 0.28
    """And rise above it. DAPO 3.1: a higher bound above than below keeps rare tokens alive."""
    kl: float = 0.0
    """Weight of the KL divergence to the initial model; 0: no reference is kept. DAPO 2.3 and Dr. GRPO (arXiv
    2503.20783) do without for rewards that are checked exactly."""
    micro_batch_tokens: int = 8192
    """Tokens, padding included, of one forward and backward pass. With 50,000 words in the vocabulary their fp32 logits
    are 1.6 GB."""

    dtype: str | None = None
    """One of `DTYPES`, for trainer and engines."""
    kv_tokens: int = 65_536
    """Tokens that an engine's KV cache holds: the default 16 requests at once, of 4,096 tokens each. Never a share of
    the GPU, because others live there too."""
    bucket_bytes: int = 128 * MIB
    """Size of a bucket of packed weights: large enough to copy at full speed, and the most that a broken transfer has
    to repeat."""


class Bounds(NamedTuple):
    """What a number may be. `least` itself only if `closed`; `most` always."""

    least: float
    most: float
    closed: bool = False


NUMBERS = {
    "temperature": Bounds(0, 100),
    "top_p": Bounds(0, 1),
    "learning_rate": Bounds(0, 1),
    "adam_beta1": Bounds(0, 0.999_999, closed=True),
    "adam_beta2": Bounds(0, 0.999_999, closed=True),
    "weight_decay": Bounds(0, 1, closed=True),
    "grad_clip": Bounds(0, 1_000_000),
    "clip_low": Bounds(0, 1),
    "clip_high": Bounds(0, 1000),
    "kl": Bounds(0, 1000, closed=True),
}
TOKENS = ("max_tokens", "micro_batch_tokens", "kv_tokens")
WORKLOAD_KEYS = (
    "model", "task", "size", "prompts", "reward", "reward_limit_s", "max_tokens", "temperature", "top_p",
    "learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "grad_clip", "clip_low", "clip_high", "kl",
    "micro_batch_tokens", "dtype", "kv_tokens", "bucket_mib",
)  # fmt: skip
MOST_SIZE = 64


# --- from a scenario file ---------------------------------------------------------------------------------


def read_workload(table: Table, folder: Path) -> Workload:
    """The `workload` of a pipeline; paths in it are relative to `folder`. Raises ConfigError."""
    if table.has("task") and table.has("prompts"):
        raise ConfigError(table.at("task"), "there are prompts too", "keep task or prompts, not both")
    values: dict[str, Any] = {key: _number(table, key) for key in NUMBERS if table.has(key)}
    values |= {key: table.whole(key, least=1, most=MOST_TOKENS) for key in TOKENS if table.has(key)}
    if table.has("model"):
        values["model"] = _beside(table.text("model"), folder)
    if table.has("task"):
        values["task"] = read_word(table.get("task"), table.at("task"), TASKS)
    if table.has("size"):
        values["size"] = read_whole(table.get("size"), table.at("size"), least=1, most=MOST_SIZE)
    if table.has("prompts"):
        values |= {"prompts": str(folder / table.text("prompts")), "task": ""}
    if table.has("reward"):
        values["reward"] = read_function(table.get("reward"), table.at("reward"))
    if table.has("reward_limit_s"):
        values["reward_limit"] = table.seconds("reward_limit_s", positive=True)
    if table.has("dtype"):
        values["dtype"] = read_word(table.get("dtype"), table.at("dtype"), DTYPES)
    if table.has("bucket_mib"):
        values["bucket_bytes"] = table.whole("bucket_mib", least=1, most=MOST_BUCKET_MIB) * MIB
    return _consistent(Workload(**values), table.at("prompts"), table.at("size"))


def _beside(model: str, folder: Path) -> str:
    """A model that is written as a path is looked for beside the scenario."""
    return str(folder / model) if model.startswith(("./", "../")) else model


def _number(table: Table, key: str) -> float:
    return read_bounded(table.get(key), table.at(key), NUMBERS[key])


def read_bounded(value: object, where: str, bounds: Bounds) -> float:
    """A number within bounds. Raises ConfigError."""
    found = float(number(value, where, "a number", bounds.most))
    if found < bounds.least or (found == bounds.least and not bounds.closed):
        raise ConfigError(where, f"must be more than {bounds.least:g}, not {found:g}")
    return found


def read_function(value: object, where: str) -> str:
    """`module:function`, as far as that can be told from the text. Raises ConfigError."""
    text = read_text(value, where)
    module, _, function = text.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(where, f"{text[:80]!r} names no function", "write module:function, such as my_rewards:exact")
    return text


def _consistent(workload: Workload, at_prompts: str, at_size: str) -> Workload:
    if workload.prompts and not workload.reward:
        raise ConfigError(at_prompts, "needs a reward beside it", "add reward: module:function")
    if workload.prompts and workload.size is not None:
        raise ConfigError(at_size, "is how hard a built-in task is, and there are prompts", "remove it")
    return workload


# --- from the command line --------------------------------------------------------------------------------


def changed(
    workload: Workload,
    *,
    model: str | None = None,
    task: str | None = None,
    prompts: str | None = None,
    reward: str | None = None,
    max_tokens: int | None = None,
    learning_rate: float | None = None,
) -> Workload:
    """The workload with what was asked for instead; None: as it is. The values are valid in themselves.

    A task takes the place of prompts and of the reward that judged them; prompts take the place of a task. Raises
    ConfigError if what results is not consistent.
    """
    if task is not None and prompts is not None:
        raise ConfigError("--task", "--prompts is given too", "give one of the two")
    given = {"model": model, "reward": reward, "max_tokens": max_tokens, "learning_rate": learning_rate}
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if task is not None and task != workload.task:
        values = {"task": task, "prompts": "", "reward": "", "size": None} | values
    if prompts is not None:
        values |= {"prompts": prompts, "task": "", "size": None}
    result = msgspec.structs.replace(workload, **values)
    if result.prompts and not result.reward:
        raise ConfigError("--prompts", "needs a reward beside it", "add --reward module:function")
    return result


# --- what was left open -----------------------------------------------------------------------------------

# By measurement: the tiny model learns to copy from nothing in about 100 steps (docs/scenarios.md). A small pretrained
# model stands more than the 1e-6 that DeepSeekMath (arXiv 2402.03300) and most after it use for 7B.
LEARNING_RATES = {TINY: 3e-3, SMOLLM2: 1e-5}
USUAL_LEARNING_RATE = 1e-6

# The smallest of each that is no foregone conclusion.
SIZES = {"arithmetic": 1, "copy": 3, "sort": 3}

# The tiny model gets no room for more than an answer: it would have to find out when to stop before anything else.
# A pretrained one knows how to stop, and may say something around its answer.
CHAT_TOKENS = 32
PROMPT_TOKENS = 512


def settled(workload: Workload, device: str) -> Workload:
    """The same with everything decided that was left to the model, the task or the device (`cpu` or `cuda`)."""
    size = workload.size or SIZES.get(workload.task)
    rate = workload.learning_rate or LEARNING_RATES.get(workload.model, USUAL_LEARNING_RATE)
    dtype = workload.dtype or ("bfloat16" if device == "cuda" and workload.model != TINY else "float32")
    tokens = workload.max_tokens or _tokens(workload, size)
    return msgspec.structs.replace(workload, size=size, learning_rate=rate, dtype=dtype, max_tokens=tokens)


def _tokens(workload: Workload, size: int | None) -> int:
    """One token is at least one symbol of an answer."""
    if size is None:
        return PROMPT_TOKENS
    answer = {"arithmetic": size + 1, "copy": size, "sort": size}[workload.task]
    return answer if workload.model == TINY else CHAT_TOKENS + 2 * answer
