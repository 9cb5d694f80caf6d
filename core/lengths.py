"""How long things take: reading a declared distribution, its quantiles, and what formulas make of one.

Drawing from one belongs to the backend that simulates; the formulas of limits need only a quantile.
"""

import csv
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from core.config import Cost, Durations
from core.errors import ConfigError
from core.reading import MOST_SECONDS, Table, number, read_list, read_seconds, shown
from core.units import NS_PER_S, ns_written

SHAPES = ("lognormal", "constant", "uniform")
KINDS = (*SHAPES, "csv", "mixture", "samples", "drift")
DRIFT_KEYS = ("every", "in_order", "samples")
SIGMA_UNIT = 1_000_000
MOST_SIGMA = 10
MOST_PARTS = 100
MOST_WEIGHT = 1_000_000
MOST_SAMPLES = 100_000

Part = tuple[float, str, int, int]


# --- reading --------------------------------------------------------------------------------------------


def read_durations(value: object, where: str, folder: Path) -> Durations:
    """A bare number of seconds, or a mapping with exactly one of the shapes, `csv` or `mixture`.

    `folder` is where a relative CSV path starts. Raises ConfigError.
    """
    if not isinstance(value, dict):
        return Durations(parts=(_constant(1.0, value, where),))
    return _read_kind(Table(value, where, KINDS), folder)


def read_cost(value: object, where: str, folder: Path) -> Cost:
    """What a phase takes: a number of seconds (ns here), or a distribution, which may have a `first` beside it."""
    if not isinstance(value, dict):
        return read_seconds(value, where)
    table = Table(value, where, (*KINDS, "first"))
    read = _read_kind(table, folder)
    if read.in_order:
        raise ConfigError(table.at("drift.in_order"), "is for trajectories, which have a place in a batch", "remove it")
    return msgspec.structs.replace(read, first=table.seconds("first", positive=True)) if table.has("first") else read


def _read_kind(table: Table, folder: Path) -> Durations:
    match _only_one(table, KINDS):
        case "csv":
            return Durations(samples=read_samples(folder / table.text("csv"), table.at("csv")))
        case "samples":
            return Durations(samples=_sample_list(table))
        case "drift":
            return _drift(table.table("drift", DRIFT_KEYS))
        case "mixture":
            return Durations(parts=_mixture(table))
        case kind:
            return Durations(parts=(_shape(table, kind, 1.0),))


def _sample_list(table: Table) -> tuple[int, ...]:
    rows = table.rows("samples")
    if not 1 <= len(rows) <= MOST_SAMPLES:
        raise ConfigError(table.at("samples"), f"must be 1 to {MOST_SAMPLES} durations, not {len(rows)}")
    return tuple(read_seconds(value, where) for where, value in rows)


def _drift(table: Table) -> Durations:
    rows = table.rows("samples")
    if not rows:
        raise ConfigError(table.at("samples"), "must be a list of lists of durations")
    lists = tuple(_sample_list(Table({"samples": row}, where, ("samples",))) for where, row in rows)
    return Durations(drift=lists, every=table.whole("every", 1, least=1), in_order=table.flag("in_order", False))


def _only_one(table: Table, kinds: tuple[str, ...]) -> str:
    given = [kind for kind in kinds if table.has(kind)]
    if len(given) != 1:
        has = f"has {' and '.join(given)}" if given else "is empty"
        raise ConfigError(table.path, f"{has}, but needs exactly one of {', '.join(kinds)}")
    return given[0]


def _mixture(table: Table) -> tuple[Part, ...]:
    rows = table.rows("mixture")
    if not 1 <= len(rows) <= MOST_PARTS:
        raise ConfigError(table.at("mixture"), f"must have 1 to {MOST_PARTS} parts, not {len(rows)}")
    return tuple(_weighted(Table(row, where, ("weight", *SHAPES))) for where, row in rows)


def _weighted(table: Table) -> Part:
    weight = float(number(table.need("weight"), table.at("weight"), "a number", MOST_WEIGHT))
    if weight <= 1e-9:
        raise ConfigError(table.at("weight"), "must be more than 0")
    return _shape(table, _only_one(table, SHAPES), weight)


def _shape(table: Table, kind: str, weight: float) -> Part:
    value, where = table.get(kind), table.at(kind)
    match kind:
        case "lognormal":
            return _lognormal(weight, Table(value, where, ("median", "sigma")))
        case "uniform":
            return _uniform(weight, value, where)
        case _:
            return _constant(weight, value, where)


def _constant(weight: float, value: object, where: str) -> Part:
    return weight, "constant", read_seconds(value, where, positive=True), 0


def _lognormal(weight: float, table: Table) -> Part:
    sigma = number(table.need("sigma"), table.at("sigma"), "a number", MOST_SIGMA)
    return weight, "lognormal", table.seconds("median", positive=True), round(sigma * SIGMA_UNIT)


def _uniform(weight: float, value: object, where: str) -> Part:
    ends = read_list(value, where)
    if len(ends) != 2:
        raise ConfigError(where, f"must be two numbers of seconds, not {len(ends)}")
    low = read_seconds(ends[0], f"{where}[0]")
    high = read_seconds(ends[1], f"{where}[1]", positive=True)
    if low > high:
        raise ConfigError(where, f"{shown(ends[0])} is more than {shown(ends[1])}", "the smaller one comes first")
    return weight, "uniform", low, high


def read_samples(path: Path, where: str) -> tuple[int, ...]:
    """Durations (ns) from a CSV file of seconds: one a line, or the column named `seconds`."""
    try:
        reader = csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (OSError, ValueError, csv.Error) as bad:
        reason = bad.strerror if isinstance(bad, OSError) and bad.strerror else str(bad)
        raise ConfigError(where, f"cannot read {shown(str(path))}: {reason}") from None
    column, first = _column([cell.strip() for cell in rows[0][1]] if rows else [], f"{where}: {path}")
    samples = tuple(_sample(row, column, f"{where}: {path}:{line}") for line, row in rows[first:])
    if not samples:
        raise ConfigError(f"{where}: {path}", "holds no durations")
    return samples


def _column(head: list[str], where: str) -> tuple[int, int]:
    """Which column holds the durations, and the first row that does."""
    if "seconds" in head:
        return head.index("seconds"), 1
    if len(head) > 1:
        raise ConfigError(where, "has several columns and none is called 'seconds'", "name it in the first line")
    return 0, 0


def _sample(row: list[str], column: int, where: str) -> int:
    cell = row[column].strip() if column < len(row) else ""
    try:
        value = float(cell)
    except ValueError:
        raise ConfigError(where, f"{shown(cell)} is not a duration in seconds") from None
    return read_seconds(value, where, positive=True)


# --- quantiles ------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # each default limit asks for the same few, at a millisecond each
def quantile(durations: Durations, q: float) -> int:
    """The duration (ns) that a share `q` of them does not exceed, rounded up to a whole millisecond.

    The rounding hides the last bits of `log` and `erf`, which differ between C libraries. At most 3 years.
    """
    if durations.drift:  # at its longest: what holds at one time of the run may not hold at another
        return max(_of_samples(samples, q) for samples in durations.drift)
    if durations.samples:
        return _of_samples(durations.samples, q)
    wanted = (q - 1e-9) * sum(weight for weight, *_ in durations.parts)
    low, high = 0, ns_written(MOST_SECONDS)
    while low < high:
        middle = (low + high) // 2
        below = sum(weight * _share_below(kind, a, b, middle) for weight, kind, a, b in durations.parts)
        low, high = (low, middle) if below >= wanted else (middle + 1, high)
    return _whole_ms(low)


def _of_samples(samples: Sequence[int], q: float) -> int:
    ordered = sorted(samples)
    return _whole_ms(ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)])


def usual(cost: Cost) -> int:
    """What half of them do not exceed (ns); of a constant, itself."""
    return cost if isinstance(cost, int) else quantile(cost, 0.5)


def most(cost: Cost) -> int:
    """What all but 1 % do not exceed, the first of a process included (ns); of a constant, itself."""
    return cost if isinstance(cost, int) else max(cost.first, quantile(cost, 0.99))


def _whole_ms(nanos: int) -> int:
    ms = NS_PER_S // 1000
    return -(-nanos // ms) * ms


def _share_below(kind: str, a: int, b: int, nanos: int) -> float:
    """The share of one part that is at most `nanos`."""
    if nanos <= 0:
        return 0.0
    if kind == "uniform" and b > a:
        return min(1.0, max(0.0, (nanos - a) / (b - a)))
    if kind == "lognormal" and b:
        return 0.5 * (1 + math.erf(math.log(nanos / a) / (b / SIGMA_UNIT * math.sqrt(2))))
    return 1.0 if nanos >= a else 0.0
