"""Processes by name: a pid alone is not one, because the kernel uses it again.

A process is its pid and the time it started, in clock ticks since the machine booted (`/proc/PID/stat`, field 22; see
proc(5)). A zombie counts as dead: it holds no memory any more, only its parent's attention.
"""

import os
from typing import NamedTuple


class Process(NamedTuple):
    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return started_at(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"


def this_process() -> Process:
    """Asked anew each time: a fork is another process."""
    pid = os.getpid()
    started = started_at(pid)
    assert started is not None, "a running process has an entry in /proc"
    return Process(pid, started)


def parse(name: str) -> Process | None:
    """The process that `str` turned into `name`; None if it is no such name."""
    pid, dash, started = name.partition("-")
    return Process(int(pid), int(started)) if dash and pid.isdecimal() and started.isdecimal() else None


def started_at(pid: int) -> int | None:
    """When the living process `pid` started; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The second field is the command in parentheses and may hold anything, parentheses and blanks included.
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], int(fields[19])
    return None if state in (b"Z", b"X") else started
