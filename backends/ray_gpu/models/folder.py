"""A model folder in Hugging Face's format: what it must have, and how one is put in place."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.model import Record
from core.reading import one_line

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


class ModelFolder(Record, frozen=True, kw_only=True):
    """A checked model on this machine's disk."""

    path: str
    """Absolute."""
    architecture: str
    """One of `ARCHITECTURES`."""
    vocab_size: int
    max_tokens: int
    """Positions the model was made for: prompt and completion together."""
    layers: int
    heads: int
    """Query heads; a TP size must divide them."""
    kv_heads: int


def check_folder(path: Path, name: str) -> ModelFolder:
    """What is in the folder. Raises ConfigError, with `name` as the place, if it is no model that can be trained."""
    if not path.is_dir():
        raise ConfigError(name, f"there is no folder {path}", "give a folder with config.json and *.safetensors")
    config = read_json(path / "config.json", name)
    architecture = next(iter(config.get("architectures") or ()), "none")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(name, f"the architecture {one_line(str(architecture))} is not supported", f"known: {known}")
    _check_weights(path, name)
    if not any((path / file).is_file() for file in TOKENIZERS):
        raise ConfigError(name, f"no tokenizer in {path}", f"it needs one of {', '.join(TOKENIZERS)}")
    heads = _positive(config, "num_attention_heads", path, name)
    return ModelFolder(
        path=str(path.resolve()),
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size", path, name),
        max_tokens=_positive(config, "max_position_embeddings", path, name),
        layers=_positive(config, "num_hidden_layers", path, name),
        heads=heads,
        kv_heads=_positive({"num_key_value_heads": heads} | config, "num_key_value_heads", path, name),
    )


def _check_weights(path: Path, name: str) -> None:
    """All files that the weights are spread over are there; an interrupted copy is found here, not in a worker."""
    if (path / WEIGHTS[0]).is_file():
        return
    if not (path / WEIGHTS[1]).is_file():
        raise ConfigError(name, f"no weights in {path}", f"it needs {' or '.join(WEIGHTS)}")
    parts = read_json(path / WEIGHTS[1], name).get("weight_map")
    if not isinstance(parts, dict):
        raise ConfigError(name, f"{path / WEIGHTS[1]} has no weight_map")
    missing = sorted({part for part in map(str, parts.values()) if not (path / part).is_file()})
    if missing:
        raise ConfigError(name, f"{len(missing)} files of weights are missing in {path}", f"the first is {missing[0]}")


def read_json(file: Path, name: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(name, f"no {file.name} in {file.parent}", "is it a model in Hugging Face's format?") from None
    except (OSError, ValueError) as bad:
        raise ConfigError(name, f"{file} cannot be read: {one_line(str(bad))}") from None
    if not isinstance(found, dict):
        raise ConfigError(name, f"{file} is no JSON object")
    return found


def _positive(config: dict[str, Any], key: str, path: Path, name: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(name, f"{path / 'config.json'} has no usable {key}")
    return value


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, made by `build(folder)` unless it is there already.

    Several processes may do this at once: each builds in a folder of its own, the first to finish moves it into place,
    the others drop theirs. One that is killed leaves its folder, named `.<target>-...`, and never a half-made target.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)  # mkdtemp's 0700 would shut out the workers of other users on a shared folder
        try:
            os.rename(scratch, target)
        except OSError:  # renaming onto a folder that is not empty fails: somebody was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
