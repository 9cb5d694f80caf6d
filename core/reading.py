"""YAML text into checked values, and the errors of a file that is wrong.

1. Whatever is wrong is one `ConfigError` of one line. Its place is a path such as `pipelines[1].costs.train`, or the
   line where the text is no YAML.
2. A key that its table does not know is an error that names the nearest known one; so is a key given twice.
3. null means "not given". Nothing else is converted: 1 is not true, and "12" is not a number.

What the keys mean is in `core.scenario_file`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

import yaml

from core.errors import ConfigError
from core.units import gib, ns_written

E = TypeVar("E", bound=StrEnum)

# Far beyond any real run, and small enough that every formula of declared values fits 64 bits.
MOST_SECONDS = 100_000_000
MOST_GIB = 1_000_000
MOST_WHOLE = 1_000_000_000

# Merge keys (`<<: [*a, *a]`) multiply; no real mapping comes near this many entries.
MOST_KEYS = 1_000

# Octal, hexadecimal, binary and base 60.
_UNUSUAL = re.compile(r"[-+]?0[0-9_xb]|.*:")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but it refuses a key given twice and endless merges, and knows every error's line."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {shown(key.value)} is given twice"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_KEYS:
            problem = f"the mapping has more than {MOST_KEYS} entries"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as bad:
            # PyYAML lets these escape for dates, numbers and tags that are none (`2020-99-99`, `!!int ''`).
            problem = "the value cannot be read; put text in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from bad

    def construct_plain_number(self, node: yaml.ScalarNode) -> int | float:
        """YAML 1.1 reads 010 as 8 and 1:30 as 90; a person who writes that means something else."""
        if _UNUSUAL.match(node.value):
            problem = f"{shown(node.value)} is no plain decimal number"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_plain_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_plain_number)


def parse_yaml(text: str, where: str) -> object:
    """The one document in `text` as plain data. Raises ConfigError with the line of the problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as bad:
        mark = bad.problem_mark or bad.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}", _said(bad)) from None
    except yaml.reader.ReaderError as bad:
        line = f":{text.count(chr(10), 0, bad.position) + 1}"
        raise ConfigError(f"{where}{line}", f"the character U+{bad.character:04X} is not allowed") from None
    except RecursionError:
        raise ConfigError(where, "nested too deeply") from None


def _said(bad: yaml.MarkedYAMLError) -> str:
    """PyYAML's own words; some of its problems only make sense after their context."""
    problem = bad.problem or "no valid YAML"
    return one_line(f"{bad.context}, {problem}" if problem.startswith("but ") and bad.context else problem)


def one_line(text: str) -> str:
    """Text that may hold anything, as one printable line of bounded length."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    return clean if len(clean) <= 200 else clean[:197] + "..."


def kind_of(value: object) -> str:
    """What a value is, in the words of a person who writes YAML."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """A value for an error message. Containers by kind only: an alias can make them endless."""
    match value:
        case str():
            clean = one_line(value)
            return repr(clean if len(clean) <= 40 else clean[:37] + "...")
        case bool():
            return str(value).lower()
        case int() if abs(value) > 10**18:
            return "a very large number"
        case int() | float():
            return str(value)
        case _:
            return kind_of(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """The remedy for a word nobody knows: the nearest known one, else all of them."""
    words = list(known)
    return meant(word, words) or f"known: {', '.join(words)}"


def meant(word: str, known: Sequence[str]) -> str:
    """The same where all of them are named already: nothing if none is near."""
    close = get_close_matches(word[:100], known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else ""


def _wrong(where: str, wanted: str, value: object) -> ConfigError:
    got = f"the text {shown(value)}" if isinstance(value, str) else shown(value)
    return ConfigError(where, f"must be {wanted}, not {got}", _hint(value))


def _hint(value: object) -> str:
    """YAML 1.1 reads `1e9` as text; nobody expects that."""
    if not isinstance(value, str) or len(value) > 30:
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    digits, e, exponent = repr(number).partition("e")
    written = f"{digits}{'' if '.' in digits else '.0'}e{exponent}" if e else digits  # without a point it is text again
    return f"write it as {written}, without quotes"


def number(value: object, where: str, wanted: str, most: float) -> int | float:
    """A finite number from 0 to `most`, as it stands in the file."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(where, wanted, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, f"must be {wanted}, not {value}")
    if value < 0:
        raise ConfigError(where, f"must be {wanted}, and {shown(value)} is negative")
    if value > most:
        raise ConfigError(where, f"{shown(value)} is too large", f"at most {most}")
    return value


def read_seconds(value: object, where: str, *, positive: bool = False) -> int:
    """Seconds in the file, ns here. `positive`: 0 is refused."""
    nanos = ns_written(number(value, where, "a number of seconds", MOST_SECONDS))
    if positive and not nanos:
        raise ConfigError(where, "must be more than 0 seconds")
    return nanos


def read_whole(value: object, where: str, *, least: int = 0, most: int = MOST_WHOLE) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, "a whole number", value)
    if not least <= value <= most:
        raise ConfigError(where, f"must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def read_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        remedy = "" if isinstance(value, list | dict) else "put it in quotes"
        raise ConfigError(where, f"must be text, not {shown(value)}", remedy)
    if not value.strip() or not value.isprintable() or len(value) > 1000:
        raise ConfigError(where, f"must be one line of text, not {shown(value)}")
    return value


def read_word(value: object, where: str, known: Sequence[str]) -> str:
    """One of the known words."""
    if not isinstance(value, str) or value not in known:
        remedy = nearest(value, known) if isinstance(value, str) else ""
        raise ConfigError(where, f"{shown(value)} is not one of {', '.join(known)}", remedy)
    return value


def read_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    return value


class Table:
    """One mapping of the file with the keys it may have; read by key, each problem with its place."""

    def __init__(self, value: object, path: str, known: Sequence[str]) -> None:
        if not isinstance(value, dict):
            raise ConfigError(path, f"must be a mapping of keys to values, not {shown(value)}")
        self.path = path
        self._values = value
        for key in value:
            self._check_key(key, known)

    def _check_key(self, key: object, known: Sequence[str]) -> None:
        if not isinstance(key, str):
            raise ConfigError(self.path, f"the key {shown(key)} must be text", f"known: {', '.join(known)}")
        if key not in known:
            raise ConfigError(self.at(one_line(key)[:100]), "unknown key", nearest(key, known))

    def at(self, key: str) -> str:
        """The place of a key, for messages."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """The raw value; None if not given."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def need(self, key: str) -> Any:
        """The raw value. Raises ConfigError if not given."""
        value = self._values.get(key)
        if value is None:
            raise ConfigError(self.at(key), "missing", f"{self.path or 'the scenario'} needs {key!r}")
        return value

    def table(self, key: str, known: Sequence[str]) -> "Table":
        """A mapping in this one; empty if not given."""
        return Table(self._values.get(key) if self.has(key) else {}, self.at(key), known)

    def rows(self, key: str) -> list[tuple[str, Any]]:
        """A list in this mapping, each item with its place; empty if not given."""
        items = read_list(self.get(key), self.at(key)) if self.has(key) else []
        return [(f"{self.at(key)}[{i}]", item) for i, item in enumerate(items)]

    # `default` None: the key must be given.

    def seconds(self, key: str, default: int | None = None, *, positive: bool = False) -> int:
        """Seconds in the file, ns here (`default` too)."""
        if default is not None and not self.has(key):
            return default
        return read_seconds(self.need(key), self.at(key), positive=positive)

    def gib(self, key: str, default: int | None = None) -> int:
        """GiB in the file, bytes here (`default` too)."""
        if default is not None and not self.has(key):
            return default
        return gib(number(self.need(key), self.at(key), "a number of GiB", MOST_GIB))

    def whole(self, key: str, default: int | None = None, *, least: int = 0, most: int = MOST_WHOLE) -> int:
        if default is not None and not self.has(key):
            return default
        return read_whole(self.need(key), self.at(key), least=least, most=most)

    def text(self, key: str, default: str | None = None) -> str:
        if default is not None and not self.has(key):
            return default
        return read_text(self.need(key), self.at(key))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(self.at(key), "true or false", value)
        return value

    def choice(self, key: str, default: E) -> E:
        """A member of the default's enumeration, by its value."""
        if not self.has(key):
            return default
        return type(default)(read_word(self.get(key), self.at(key), [str(member.value) for member in type(default)]))
