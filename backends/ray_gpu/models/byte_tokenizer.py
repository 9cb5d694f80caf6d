"""A tokenizer for models that are made on the spot: one token a byte, no files, no training, nothing to import.

Its folder also holds the same as a `tokenizer.json`, so that any other tool can load the model.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.ray_gpu.tasks.base import Prompt

BYTES = 256
BEGIN, END, PAD = 256, 257, 258
SPECIALS = {BEGIN: "<|begin|>", END: "<|end|>", PAD: "<|pad|>"}
MARK = "turnstile_bytes"
"""The key of `tokenizer_config.json` that says: this tokenizer."""
VOCAB_SIZE = 264
"""259 tokens and five that are never used: embeddings can be split among 2, 4 or 8 ranks."""


class ByteTokenizer:
    """Text as its UTF-8 bytes; a prompt begins with `BEGIN`."""

    stop_ids: tuple[int, ...] = (END,)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        text = prompt.text or "\n".join(turn.content for turn in prompt.messages)
        return (BEGIN, *text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Special and unused tokens are left out; bytes that are no UTF-8 show as U+FFFD."""
        return bytes(i for i in ids if i < BYTES).decode(errors="replace")


def write_tokenizer(folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, which give the same ids (tests/test_models.py compares them)."""
    letters = byte_letters()
    template = [{"SpecialToken": {"id": SPECIALS[BEGIN], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*template, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {"id": SPECIALS[BEGIN], "ids": [BEGIN], "tokens": [SPECIALS[BEGIN]]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in SPECIALS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing", "single": template, "pair": pair,
            "special_tokens": {SPECIALS[BEGIN]: special},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {letters[byte]: byte for byte in range(BYTES)}, "merges": [],
        },
    }  # fmt: skip
    _write(folder / "tokenizer.json", tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", MARK: True,
        "bos_token": SPECIALS[BEGIN], "eos_token": SPECIALS[END], "pad_token": SPECIALS[PAD],
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    _write(folder / "tokenizer_config.json", config)


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE (GPT-2, `bytes_to_unicode`) writes for each byte: itself if it is visible
    in Latin-1, else the next free one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(BYTES) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(BYTES)]


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
