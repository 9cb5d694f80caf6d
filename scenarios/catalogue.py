"""The scenarios that come with Turnstile: YAML files beside this module, found by name.

Those in `files/incidents` restate what has gone wrong for others; `i06` is enough of a name there (docs/incidents.md).
"""

from pathlib import Path

from core.config import Scenario
from core.errors import ConfigError
from core.reading import nearest
from core.scenario_file import load_scenario

FILES = Path(__file__).parent / "files"
INCIDENTS = FILES / "incidents"
SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    """Incidents last."""
    return [name for folder in (FILES, INCIDENTS) for name in sorted(file.stem for file in folder.glob("*.yaml"))]


def about(name: str) -> str:
    """What the scenario shows: the comment on the first line of its file."""
    with find(name).open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()


def find(name_or_file: str) -> Path:
    """The file of a shipped scenario (`overlap_2gpu`, `overlap-2gpu`, `i06`), or the file named. Raises ConfigError."""
    if "/" in name_or_file or name_or_file.endswith(SUFFIXES) or Path(name_or_file).is_file():
        return Path(name_or_file)
    name = name_or_file.replace("-", "_")
    exactly = FILES / f"{name}.yaml"
    if exactly.is_file():
        return exactly
    for file in sorted(INCIDENTS.glob("*.yaml")):
        if name in (file.stem, file.stem.partition("_")[0]):
            return file
    raise ConfigError("", f"no scenario or file is called {name_or_file!r}", nearest(name, names()))


def load(name_or_file: str) -> Scenario:
    """Raises ConfigError for whatever is wrong with the name or the file."""
    return load_scenario(find(name_or_file))
