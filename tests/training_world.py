"""Tiny models of every supported kind, rows to train on, and processes to be the ranks of a trainer group.

Rank processes are started once and kept: importing torch and Megatron takes seconds. Each call builds a whole trainer
group in them and closes it again, so every test also shows that a process can be used again after `close`.
"""

import contextlib
import multiprocessing
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backends.ray_gpu.training.records import Row, TrainerConfig

ANSWER_LIMIT_S = 120  # the first answer includes importing torch and Megatron, on however busy a machine
VOCAB = 97  # odd, so that two ranks need a padded row
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
SLOW_TURNS = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_untied": ("LlamaConfig", {"tie_word_embeddings": False, "rope_parameters": SLOW_TURNS}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 16}),
}


def make_model(folder: Path, kind: str, **other: Any) -> Path:
    """A random model of that kind, with nothing left at a value that would hide a mistake (biases, norms)."""
    import torch
    import transformers

    config_class, settings = KINDS[kind]
    config = getattr(transformers, config_class)(**SHAPE | settings | other)
    torch.manual_seed(sorted(KINDS).index(kind))
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.2)
    model.save_pretrained(folder / kind)
    return folder / kind


def make_rows(count: int = 6, seed: int = 0) -> list[Row]:
    """Rows of different lengths, sampled a little off the policy."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, generated = chance.randint(1, 5), chance.randint(1, 12)
        rows.append(
            Row(
                tokens=tuple(chance.randrange(VOCAB) for _ in range(prompt + generated)),
                prompt_tokens=prompt,
                logprobs=tuple(chance.uniform(-6.0, -3.0) for _ in range(generated)),
                advantage=chance.uniform(-1.5, 1.5),
            )
        )
    return rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """Processes 0..n-1; `run(task, *args)` calls `task(config_of_rank, *args)` in the first `world_size` of them."""

    def __init__(self, count: int, environment: Callable[[int], dict[str, str]] = lambda _rank: {}) -> None:
        """`environment(rank)` is set in a rank before it imports anything heavy."""
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, environment(rank)), daemon=True)
            process.start()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *args: Any, model: Path, world_size: int = 1, **settings: Any) -> list[Any]:
        """What the task returned on each rank; the first rank's error is raised with its traceback."""
        settings = {"master_port": free_port(), "model": str(model), "world_size": world_size, **settings}
        lines = self._lines[:world_size]
        for rank, line in enumerate(lines):
            line.send((task, TrainerConfig(rank=rank, **settings), args))
        answers = []
        for line in lines:
            assert line.poll(ANSWER_LIMIT_S), f"a rank did not answer within {ANSWER_LIMIT_S} s"
            answers.append(line.recv())
        for error, text, _ in answers:
            if error is not None:
                raise error from RuntimeError(text)
        return [value for _, _, value in answers]

    def close(self) -> None:
        for line in self._lines:
            line.send(None)
        for process in self._processes:
            process.join(10)
            assert process.exitcode == 0, "a rank process did not end by itself"


def _serve(line: Connection, environment: dict[str, str]) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - Megatron's warnings, for as long as the process lives
    # Nothing here is compiled, and loading the compiler takes seconds.
    os.environ.update({"TORCHDYNAMO_DISABLE": "1", **environment})
    import torch

    import backends.ray_gpu.training.trainer  # noqa: F401 - in all ranks at once, not when each is first asked

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while (asked := line.recv()) is not None:
            task, config, args = asked
            try:
                line.send((None, "", task(config, *args)))
            except Exception as error:
                line.send((error, traceback.format_exc(), None))
    os._exit(0)  # tearing down an interpreter full of torch takes seconds, and every trainer was closed


@contextlib.contextmanager
def built(config: TrainerConfig) -> Iterator[Any]:
    """A trainer of that rank, built, and closed at the end."""
    from backends.ray_gpu.training.trainer import Trainer

    trainer = Trainer(config)
    try:
        trainer.build()
        yield trainer
    finally:
        trainer.close()
