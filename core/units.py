"""Integer nanoseconds and bytes, and the only place that converts.

Time inside Turnstile is an ``int`` of nanoseconds since the run began, memory an ``int`` of bytes. Floats
appear at the edges only (files, terminals). Conversions *to* nanoseconds round up: a timer must never ring
before the instant it was set for, or whoever re-arms it spins.
"""

import math
from fractions import Fraction

NS_PER_S = 1_000_000_000
BYTES_PER_GIB = 1 << 30


def ns(seconds: float) -> int:
    """Seconds to nanoseconds, rounded up to the next whole one."""
    return math.ceil(seconds * NS_PER_S) if seconds % 1 else int(seconds) * NS_PER_S


def ns_written(seconds: float) -> int:
    """Seconds as a person wrote them, rounded up: 8.3 is 8_300_000_000 ns, although the float 8.3 is a bit more."""
    return math.ceil(Fraction(repr(seconds)) * NS_PER_S)


def seconds(nanos: int) -> float:
    """Nanoseconds to seconds."""
    return nanos / NS_PER_S


def gib(gibibytes: float) -> int:
    """GiB to bytes, rounded up."""
    return math.ceil(gibibytes * BYTES_PER_GIB)


def in_gib(n_bytes: int) -> float:
    """Bytes to GiB."""
    return n_bytes / BYTES_PER_GIB


def show_s(nanos: int) -> str:
    """A duration or instant as a person reads it: ``12.5 s``."""
    return f"{nanos / NS_PER_S:.3f}".rstrip("0").rstrip(".") + " s"


def show_gib(n_bytes: int) -> str:
    """Memory as a person reads it: ``12.5 GiB``; little of it in a smaller unit, for 0 GiB would say nothing."""
    if 0 < n_bytes < BYTES_PER_GIB // 100:
        return f"{n_bytes / 1024:.1f} KiB" if n_bytes < 1 << 20 else f"{n_bytes / (1 << 20):.1f} MiB"
    return f"{n_bytes / BYTES_PER_GIB:.2f}".rstrip("0").rstrip(".") + " GiB"
