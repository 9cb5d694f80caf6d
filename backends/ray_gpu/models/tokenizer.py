"""Text to token ids and back, whatever the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from backends.ray_gpu.models.byte_tokenizer import MARK, ByteTokenizer
from backends.ray_gpu.models.folder import read_json
from backends.ray_gpu.tasks.base import Prompt
from core.errors import ConfigError
from core.reading import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids that a completion is to follow. Raises ConfigError if this model cannot be asked that."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises ConfigError if it cannot be read."""
    path = Path(folder)
    config = read_json(path / "tokenizer_config.json", str(path)) if (path / "tokenizer_config.json").is_file() else {}
    if config.get(MARK):
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        return HubTokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True), _stop_ids(path))
    except Exception as bad:  # whatever a broken tokenizer makes its library raise
        raise ConfigError(str(path), f"its tokenizer cannot be read: {one_line(str(bad))}") from bad


class HubTokenizer:
    """One of transformers' tokenizers. With a chat template a prompt is the user's turn, and the reply is begun."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.stop_ids = tuple(dict.fromkeys((*own, *stop_ids)))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        if self._tokenizer.chat_template:
            return self._chat(prompt)
        if not prompt.text:
            raise ConfigError("model", "its tokenizer has no chat template", "give prompts as text, or a chat model")
        return tuple(self._tokenizer(prompt.text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _chat(self, prompt: Prompt) -> tuple[int, ...]:
        turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
        turns = turns or [{"role": "user", "content": prompt.text}]
        # As text first: what the method returns for ids differs between transformers 4 and 5.
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _stop_ids(path: Path) -> tuple[int, ...]:
    """What the model's own settings end on: a chat model often has several."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            ids = read_json(path / name, str(path)).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return tuple(i for i in found if isinstance(i, int))
