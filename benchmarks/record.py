"""What the log of one run shows of its speed: how long a GPU takes from one tenant to the next, part by part, how long
each phase takes, what each GPU held when, and how little of the time was the scheduler's.

    python -m benchmarks.record LOG [--memory FILE.csv]

1. Only the log is read, so it works on any backend's. Times are those at which things reached the scheduler: a part
   includes the way of its message.
2. A switch is followed from cause to cause, never by nearness in time: memory seen free because something let go, a
   tenant started because memory was seen free.
3. The scheduler's share is measured by deciding everything again, here and now, on the machine that reads the log.
"""

import csv
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from core import actions, events
from core.errors import ConfigError
from core.trace import Entry, read_log, replay
from scenarios.common import guarded
from scenarios.parsing import Parser, check_writable, same_file

MS = 1e6
S = 1e9
MIB = 1 << 20
Parts = dict[str, float]
"""Durations in ns by name, in the order in which they happen."""

TO_TRAINER = "engine -> trainer"
TO_ENGINE = "trainer -> engine"
BETWEEN_ENGINES = "engine -> engine"


class Phase(NamedTuple):
    pipeline: str
    name: str
    began: int
    ended: int
    """ns."""


class Recording:
    """A whole log in memory, with the ways through it."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self._at = {entry.i: entry for entry in self.entries}
        self._outcomes = {entry.cause: entry for entry in self.entries if isinstance(entry.item, events.ActionDone)}
        self._orders: dict[tuple[type, int], Entry] = {
            (type(entry.item), entry.cause): entry for entry in self.entries if isinstance(entry.item, actions.Action)
        }
        self.phases = list(_phases(self.entries))

    def before(self, entry: Entry) -> Entry | None:
        """What led to it."""
        return self._at.get(entry.cause)

    def done(self, order: Entry) -> Entry | None:
        """The good end of an action."""
        return self._outcomes.get(order.i)

    def follows(self, event: Entry | None, kind: type) -> Entry | None:
        """The action of this kind that an event led to."""
        return None if event is None else self._orders.get((kind, event.i))

    def after(self, entry: Entry, kind: type, **fields: object) -> Entry | None:
        """The first entry of a kind, with these fields, later than another."""
        for later in self.entries[self.entries.index(entry) :]:
            if type(later.item) is kind and all(getattr(later.item, name) == is_ for name, is_ in fields.items()):
                return later
        return None


def _phases(entries: Iterable[Entry]) -> Iterator[Phase]:
    open_: dict[tuple[str, str, str], int] = {}
    for entry in entries:
        item = entry.item
        if isinstance(item, events.PhaseStarted):
            open_[item.pipeline, item.role, item.phase] = entry.t
        elif isinstance(item, events.PhaseEnded):
            began = open_.pop((item.pipeline, item.role, item.phase), None)
            if began is not None:
                yield Phase(item.pipeline, item.phase, began, entry.t)


# --- switches of a GPU ------------------------------------------------------------------------------------


def switches(log: Recording) -> dict[str, list[Parts]]:
    """Every switch of a GPU from one tenant to the next that came to its end undisturbed, by kind."""
    found: dict[str, list[Parts]] = {TO_TRAINER: [], TO_ENGINE: [], BETWEEN_ENGINES: []}
    for entry in log.entries:
        if not isinstance(entry.item, actions.GrantLease | actions.WakeEngine):
            continue
        given = _given_up(log, entry)
        taken = _trained(log, entry) if isinstance(entry.item, actions.GrantLease) else _woken(log, entry)
        if given is None or taken is None:
            continue
        by_engine, parts = given
        found[_kind(entry, by_engine)].append(parts | taken)
    return found


def _kind(start: Entry, by_engine: bool) -> str:
    if isinstance(start.item, actions.GrantLease):
        return TO_TRAINER
    return BETWEEN_ENGINES if by_engine else TO_ENGINE


def _given_up(log: Recording, start: Entry) -> tuple[bool, Parts] | None:
    """Of the former tenant, up to its memory being seen free: whether it was an engine, and the parts."""
    seen = log.before(start)
    watch = None if seen is None else log.before(seen)
    let_go = None if watch is None else log.before(watch)
    if watch is None or not isinstance(watch.item, actions.AwaitMemory) or let_go is None:
        return None
    free = {"memory seen free": seen.t - let_go.t}
    if isinstance(let_go.item, events.LeaseReleased):
        offload = _last(log.phases, let_go.item.pipeline, "offload", let_go.t)
        return None if offload is None else (False, {"trainer offloads": offload.ended - offload.began} | free)
    sleep = log.before(let_go)
    if sleep is None or not isinstance(sleep.item, actions.SleepEngine):
        return None
    decided = _shrink_note(log, sleep)
    return True, {"shrink decided, sleep begun": sleep.t - decided, "engine asleep": let_go.t - sleep.t} | free


def _shrink_note(log: Recording, sleep: Entry) -> int:
    """When it was decided that the engine is to sleep: it may have been busy with something else then."""
    engine = "shrink", sleep.item.pipeline, sleep.item.dp_rank
    notes = (entry for entry in log.entries[: log.entries.index(sleep)] if isinstance(entry.item, actions.Note))
    times = [note.t for note in notes if (note.item.kind, note.item.pipeline, note.item.dp_rank) == engine]
    return times[-1] if times else sleep.t


def _last(phases: Iterable[Phase], pipeline: str, name: str, before: int) -> Phase | None:
    fitting = [phase for phase in phases if (phase.pipeline, phase.name) == (pipeline, name) and phase.ended <= before]
    return fitting[-1] if fitting else None


def _trained(log: Recording, grant: Entry) -> Parts | None:
    """From the grant of a lease to the beginning of training; None for other leases."""
    onload = log.after(grant, events.PhaseStarted, pipeline=grant.item.pipeline)
    train = log.after(grant, events.PhaseStarted, pipeline=grant.item.pipeline, phase="train")
    loaded = log.after(grant, events.PhaseEnded, pipeline=grant.item.pipeline, phase="onload")
    if onload is None or onload.item.phase != "onload" or train is None or loaded is None:
        return None
    return {
        "granted, pipeline told": onload.t - grant.t,
        "trainer onloads": loaded.t - onload.t,
        "training begins": train.t - loaded.t,
    }


def _woken(log: Recording, wake: Entry) -> Parts | None:
    """From the order to wake to the first request on the engine."""
    woken = log.done(wake)
    sync = log.follows(woken, actions.SyncEngine)
    synced = None if sync is None else log.done(sync)
    gate = log.follows(synced, actions.OpenGate)
    opened = None if gate is None else log.done(gate)
    if woken is None or synced is None or gate is None or opened is None:
        return None
    engine = {"pipeline": wake.item.pipeline, "dp_rank": wake.item.dp_rank}
    # The gateway hears of the open gate on the way that the outcome takes, too, and may be the first.
    busy = log.after(gate, events.EngineBusy, **engine)
    slept = log.after(gate, actions.SleepEngine, **engine)
    parts = {"engine wakes": woken.t - wake.t, "weights synced, KV cache woken": synced.t - woken.t}
    parts["gate open"] = opened.t - synced.t
    if busy is None or (slept is not None and slept.t < busy.t):
        return None  # put to sleep again before anything was asked of it
    return parts | {"first request sent": max(0, busy.t - opened.t)}


# --- showing ----------------------------------------------------------------------------------------------


def _show_switches(kind: str, found: list[Parts]) -> None:
    print(f"\n{kind}: {len(found)} switches" + (", ms" if found else ""))
    if not found:
        return
    # A switch lacks what did not happen in it: an engine that died was not put to sleep.
    for name in dict.fromkeys(name for parts in found for name in parts):
        _line(name, [parts[name] for parts in found if name in parts], MS)
    _line("in all", [sum(parts.values()) for parts in found], MS)


def _show_phases(phases: list[Phase]) -> None:
    print("\nphases, s")
    for pipeline, name in dict.fromkeys((phase.pipeline, phase.name) for phase in phases):
        times = [phase.ended - phase.began for phase in phases if (phase.pipeline, phase.name) == (pipeline, name)]
        _line(f"{pipeline} {name}", times, S)


def _line(name: str, times: list[float], unit: float) -> None:
    shown = [at / unit for at in (times[0], median(times), max(times))]
    print(f"  {name:<32} n {len(times):>4}   first {shown[0]:9.3f}   median {shown[1]:9.3f}   max {shown[2]:9.3f}")


def _show_memory(log: Recording, file: str | None) -> None:
    looks = [(entry.t / S, entry.item) for entry in log.entries if isinstance(entry.item, events.MemoryUsed)]
    print("\nmemory seen, MiB")
    for gpu in sorted({item.gpu for _, item in looks}):
        used = [item.used // MIB for _, item in looks if item.gpu == gpu]
        print(
            f"  GPU {gpu}: n {len(used)}   least {min(used)}   median {median(used):.0f}   "
            f"most {max(used)}   last {used[-1]}"
        )
    if file is not None:
        _write_memory(looks, file)


def _write_memory(looks: list[tuple[float, events.MemoryUsed]], file: str) -> None:
    """A row a look: whose bytes were seen, in columns; `nobody` is what belongs to no worker of ours."""
    owners = sorted({owner for _, item in looks for owner in item.by})
    try:
        with open(file, "w", encoding="utf-8", newline="") as out:
            rows = csv.writer(out, lineterminator="\n")
            rows.writerow(["at_s", "gpu", "used_mib", *(owner or "nobody" for owner in owners)])
            for at, item in looks:
                held = (item.by.get(owner, 0) // MIB for owner in owners)
                rows.writerow([f"{at:.3f}", item.gpu, item.used // MIB, *held])
    except OSError as failed:
        raise ConfigError(f"--memory {file}", f"cannot be written: {failed.strerror}") from None


def _show_overhead(path: str, log: Recording) -> None:
    header, entries = read_log(path)
    began = time.perf_counter()
    divergence = replay(header, entries)
    spent = time.perf_counter() - began
    ran = log.entries[-1].t / S
    print(f"\nreplay: {divergence or 'decide gives the same actions'}")
    share = f"{100 * spent / ran:.2f} % of the {ran:.1f} s that the run took" if ran else "and the run took no time"
    print(f"reading and deciding all of it again took {spent:.2f} s, {share}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.record", description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("log", metavar="LOG", help="a file that --trace wrote, on any backend")
    parser.add_argument("--memory", metavar="FILE.csv", help="also write what each GPU held when")
    options = parser.parse_args(argv)
    return guarded(lambda: _show(options.log, options.memory))


def _show(path: str, memory: str | None) -> int:
    if memory is not None:
        check_writable(Path(memory), "--memory")
        if same_file(Path(memory), Path(path)):
            raise ConfigError("--memory", f"{memory} is the log", "name another file")
    _, entries = read_log(path)
    log = Recording(entries)
    if not log.entries:
        raise ConfigError(path, "nothing happened in it", "record a run with --trace")
    for kind, found in switches(log).items():
        _show_switches(kind, found)
    _show_phases(log.phases)
    _show_memory(log, memory)
    _show_overhead(path, log)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
