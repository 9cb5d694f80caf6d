"""A copy of the packages with one piece of text replaced. The original is only read."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PARTS = ("core", "backends/__init__.py", "backends/sim", "scenarios", "tests", "docs", "README.md", "pyproject.toml")
"""What the detectors need; the other backends are not theirs to judge."""
ROOMS = ("core", "backends", "scenarios", "tests")
"""What of it they run."""


class Mutant(NamedTuple):
    """One fault. `old` must be in `file` exactly once, so that it cannot silently become no fault, or another one."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    """The guarantee it breaks, in one sentence."""

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")


class BadMutant(Exception):
    """The table does not fit the source any more."""


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The whole text of the file with the fault in it. Raises BadMutant if the table is wrong."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        raise BadMutant(f"{mutant.name}: its old text is {count} times in {mutant.file}, not once: {mutant.old!r}")
    changed = text.replace(mutant.old, mutant.new)
    try:
        compile(changed, mutant.file, "exec")
    except SyntaxError as wrong:
        raise BadMutant(f"{mutant.name}: {mutant.file} does not compile any more: {wrong}") from None
    return changed


@contextmanager
def copied(mutant: Mutant | None, root: Path = ROOT) -> Iterator[Path]:
    """A temporary copy with the fault in it (None: without any). Compiled code comes along: it is known by the time of
    its source, which the copy keeps, and only the changed file is compiled again."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for part in PARTS:
            (tree / part).parent.mkdir(parents=True, exist_ok=True)
            if (root / part).is_dir():
                shutil.copytree(root / part, tree / part)
            else:
                shutil.copy2(root / part, tree / part)
        if mutant is not None:
            (tree / mutant.file).write_text(mutated(mutant, root), encoding="utf-8")
        yield tree


def digest(tree: Path) -> str:
    """Of all that the detectors run: whether two copies are the same."""
    whole = hashlib.sha256()
    for file in sorted(file for room in ROOMS for file in (tree / room).rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            whole.update(f"{file.relative_to(tree)}\0".encode() + file.read_bytes())
    return whole.hexdigest()[:8]
