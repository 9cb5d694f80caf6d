"""The name of a model -> its folder, checked."""

from pathlib import Path

from backends.ray_gpu.models import smollm2, tiny
from backends.ray_gpu.models.folder import ModelFolder, build_once, check_folder
from core.errors import ConfigError
from core.reading import one_line
from core.workload import SMOLLM2, TINY

BUILT_IN = {TINY: tiny, SMOLLM2: smollm2}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve(name: str, cache_dir: Path) -> ModelFolder:
    """The folder of a model. What has to be made for it is kept below `cache_dir`.

    `name`: `tiny`, `smollm2`, a local folder, or `owner/model` on Hugging Face's hub. Raises ConfigError if there is no
    such model, it cannot be fetched, or it is of a kind that cannot be trained here.
    """
    if name in BUILT_IN:
        module = BUILT_IN[name]
        return check_folder(build_once(cache_dir / module.NAME, module.build), name)
    folder = Path(name).expanduser()
    if folder.is_dir() or not is_hub_id(name):
        return check_folder(folder, name)
    return check_folder(_fetch(name), name)


def is_hub_id(name: str) -> bool:
    """`owner/model`: one slash, and nothing that only a path has."""
    owner, _, model = name.partition("/")
    return bool(owner and model) and "/" not in model and not name.startswith((".", "~", "/"))


def _fetch(name: str) -> Path:
    """The hub's own download and cache, which also knows about being offline and about access tokens."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as bad:  # its errors come from several packages, and their messages are pages long
        reason = one_line(str(bad).partition("\n")[0] or type(bad).__name__)
        remedy = "check the id and the connection, or give a local folder"
        raise ConfigError(name, f"is no local folder, and could not be fetched from the hub: {reason}", remedy) from bad
