"""What is printed when a run is over: verdict, tables, timeline, diagnosis; and the three policies side by side.

Figures come from the summary that `--json` writes; only the timeline comes from the board.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.config import Scenario
from core.timeline import Segment
from core.units import ns, seconds
from scenarios.board import Board
from scenarios.outcome import STUCK_OUTCOMES, Summary, as_table, unmet
from scenarios.timeline import LEGEND, Painter, strip

PIPELINES_SHOWN = 32
VIOLATIONS_SHOWN = 10
LOOKS_GOOD, LOOKS_BAD = "bold green", "bold red"


class Run(NamedTuple):
    """One finished run, as reports need it."""

    scenario: Scenario
    summary: Summary
    board: Board
    by_table: bool = False
    """Judged by `outcome.TABLE` (`--demand all`) instead of the scenario's `expect`."""
    log_lost: bool = False
    """The event log that was asked for could not be written to its end."""

    @property
    def problems(self) -> list[str]:
        """What keeps it from being a success, one sentence each."""
        if self.by_table:
            return [] if as_table(self.summary) else ["this is not how this policy is known to end on the incident"]
        return unmet(self.summary, self.scenario.expect)

    @property
    def timeline(self) -> list[list[Segment]]:
        """A row a GPU; empty if there are too many."""
        return self.board.history(ns(self.summary["makespan_s"]))

    @property
    def idle_held_s(self) -> float:
        """GPU-seconds held by engines without demand that a peer with demand could have used (`core.idle_holders`)."""
        held: float = self.summary["details"]["idle_held_gpu_s"]
        return held

    @property
    def attracted(self) -> int:
        """Engines woken for a pipeline without demand."""
        woken: int = self.summary["details"]["attracted"]
        return woken


def print_run(console: Console, run: Run) -> None:
    """Everything about one run, the verdict last, where the eye is."""
    if run.summary["pipelines"]:
        console.print(pipelines_table(run))
    print_timeline(console, run)
    for line in totals(run):
        say(console, line)
    print_brief(console, run)


def print_brief(console: Console, run: Run) -> None:
    """The result alone."""
    print_violations(console, run.summary)
    print_diagnosis(console, run.summary)
    print_verdict(console, run)


def say(console: Console, line: str, style: str = "") -> None:
    """Print one line as it is: no markup, no wrapping."""
    console.print(Text(line, style), soft_wrap=True)


def pipelines_table(run: Run) -> Table:
    painter = Painter(run.scenario)
    steps = {job.spec.id: job.steps for job in run.scenario.jobs}
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("pipeline")
    for heading in ("steps", "trajectories", "longest wait", "resizes"):
        table.add_column(heading, justify="right")
    table.add_column("error")
    for pipeline in run.summary["pipelines"][:PIPELINES_SHOWN]:
        table.add_row(
            Text(pipeline["id"], painter.colour(pipeline["id"])),
            f"{pipeline['steps_done']}/{steps[pipeline['id']]}",
            str(pipeline["trajectories"]),
            f"{pipeline['max_wait_s']:.1f} s",
            str(pipeline["resizes"]),
            Text(pipeline["error"] or "-"),
        )
    if len(run.summary["pipelines"]) > PIPELINES_SHOWN:
        table.add_row(f"and {len(run.summary['pipelines']) - PIPELINES_SHOWN} more")
    return table


def print_timeline(console: Console, run: Run) -> None:
    """A row a GPU over the whole run, as wide as the terminal, and what the signs mean."""
    timeline, makespan = run.timeline, run.summary["makespan_s"]
    if not timeline or makespan <= 0:
        return
    painter = Painter(run.scenario)
    busy = busy_shares(run.summary)
    label, tail = len(f"gpu {len(timeline) - 1}") + 1, len(" 100 % busy")
    width = max(20, console.width - label - tail)
    console.print()
    say(console, f"{'':{label}}0 s{f'{makespan:.0f} s':>{width - 3}}", "dim")
    drawn = ""
    for gpu, segments in enumerate(timeline):
        row = Text(f"{f'gpu {gpu}':<{label}}")
        for state, pipeline in strip(segments, ns(makespan), width):
            row.append(painter.sign(state, pipeline), painter.style(state, pipeline))
        drawn += row.plain[label:]
        row.append(f" {busy[gpu]:3.0f} % busy" if gpu in busy else "")
        console.print(row, soft_wrap=True)
    _print_legend(console, painter, drawn)


def _print_legend(console: Console, painter: Painter, drawn: str) -> None:
    """What the signs in `drawn` mean."""
    for signs, meaning in (*painter.who()[:PIPELINES_SHOWN], *LEGEND):
        if any(sign in drawn for sign in signs.split()):
            say(console, f"  {signs:<4} {meaning}", "dim")
    console.print()


def busy_shares(summary: Summary) -> dict[int, float]:
    """Percent of the makespan that each GPU was busy."""
    return {gpu["id"]: percent(gpu["busy_s"], summary["makespan_s"]) for gpu in summary["gpus"]}


def percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def shares(summary: Summary) -> tuple[float, float, float]:
    """Percent of all GPU time that was busy, switching, idle."""
    whole = summary["makespan_s"] * len(summary["gpus"])
    busy, switching, idle = (
        percent(sum(gpu[field] for gpu in summary["gpus"]), whole) for field in ("busy_s", "switching_s", "idle_s")
    )
    return busy, switching, idle


def totals(run: Run) -> list[str]:
    """What the GPUs' time went into, in one or two lines."""
    summary = run.summary
    busy, switching, idle = shares(summary)
    lines = [
        f"{summary['makespan_s']:.1f} s in all, {count(summary['handovers'], 'hand-over')} between pipelines; "
        f"GPUs {busy:.0f} % busy, {switching:.0f} % switching, {idle:.0f} % idle"
    ]
    if run.idle_held_s or run.attracted:
        lines.append(
            f"idle holders: {run.idle_held_s:.1f} GPU-seconds held with nothing to roll out while a peer wanted them; "
            f"{count(run.attracted, 'engine')} woken with nothing to roll out"
        )
    return lines + lost_turns(run) + deliveries(run)


def lost_turns(run: Run) -> list[str]:
    """Who may never be done, for as long as others want its engines too, and what to do about it."""
    lines = []
    for id, figures in run.summary["details"]["pipelines"].items():
        lost = figures["lost_turns"]
        if lost > 1:
            lines.append(
                f"{id}: completed nothing in {lost} whole turns; if its trajectories take longer than limits.turn_s, "
                "set that above the longest, or partial: resume"
            )
    return lines


def deliveries(run: Run) -> list[str]:
    """How weights came to engines, a line a way; nothing where every one came through the cache and was meant to."""
    found = run.board.deliveries
    if all(way.transport == "cache" and not way.fallback for way in found):
        return []
    lines = []
    for way, took in found.items():
        because = f", not by {way.meant}: {way.fallback}" if way.fallback else ""
        name = "through the cache" if way.transport == "cache" else f"by {way.transport}"
        times = f"{count(len(took), 'load')}, {seconds(sum(took)) / len(took):.3f} s on average"
        lines.append(f"weights came {name} ({times}){because}")
    return lines


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def print_violations(console: Console, summary: Summary) -> None:
    """One line each; the rest of a long detail is the diagnosis, or in `--json`."""
    for violation in summary["violations"][:VIOLATIONS_SHOWN]:
        first = (violation["detail"].splitlines() or [""])[0]
        say(console, f"{violation['rule']} broken at {violation['at_s']:g} s: {first}", "red")
    more = len(summary["violations"]) - VIOLATIONS_SHOWN
    if more > 0:
        say(console, f"and {count(more, 'more violation')} (--json has them all)", "red")


def print_diagnosis(console: Console, summary: Summary) -> None:
    if summary["diagnosis"]:
        say(console, f"\n{summary['diagnosis'].rstrip()}\n")


def print_verdict(console: Console, run: Run) -> None:
    """One line: how it ended, and whether that is what was wanted."""
    summary = run.summary
    head = f"{summary['scenario']} on {summary['backend']}, demand {summary['demand']}, seed {summary['seed']}: "
    note = f" ({'; '.join(run.problems)})" if run.problems else ""
    if not run.problems and summary["outcome"] != "completed":
        note = " (as expected)"
    bad = run.problems or summary["outcome"] in STUCK_OUTCOMES
    say(console, f"{head}{summary['outcome']}{note}", LOOKS_BAD if bad else LOOKS_GOOD)


# --- the three policies side by side ----------------------------------------------------------------------

Measure = tuple[str, Callable[[Run], str]]

MEASURES: tuple[Measure, ...] = (
    ("outcome", lambda run: run.summary["outcome"]),
    ("as the table says", lambda run: "yes" if as_table(run.summary) else "NO"),
    ("makespan", lambda run: f"{run.summary['makespan_s']:.1f} s"),
    ("steps", lambda run: "/".join(str(pipeline["steps_done"]) for pipeline in run.summary["pipelines"])),
    ("trajectories trained", lambda run: str(sum(pipeline["trajectories"] for pipeline in run.summary["pipelines"]))),
    ("longest wait", lambda run: f"{longest_wait(run.summary):.1f} s"),
    ("hand-overs", lambda run: str(run.summary["handovers"])),
    ("resizes", lambda run: str(resizes(run.summary))),
    ("GPUs busy", lambda run: f"{shares(run.summary)[0]:.0f} %"),
    ("GPUs switching", lambda run: f"{shares(run.summary)[1]:.0f} %"),
    ("idle holders: GPU-seconds", lambda run: f"{run.idle_held_s:.1f}"),
    ("idle holders: engines woken", lambda run: str(run.attracted)),
    ("rules broken", lambda run: rules_broken(run.summary)),
)


def longest_wait(summary: Summary) -> float:
    return max((pipeline["max_wait_s"] for pipeline in summary["pipelines"]), default=0.0)


def resizes(summary: Summary) -> int:
    return sum(pipeline["resizes"] for pipeline in summary["pipelines"])


def rules_broken(summary: Summary) -> str:
    return " ".join(dict.fromkeys(violation["rule"] for violation in summary["violations"])) or "none"


def print_comparison(console: Console, runs: Sequence[Run]) -> None:
    """The policies as columns, then what the floor costs in a sentence."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("demand counted by")
    for run in runs:
        table.add_column(run.summary["demand"], justify="right")
    for name, measure in MEASURES:
        table.add_row(name, *(measure(run) for run in runs))
    console.print()
    console.print(table)
    console.print()
    for line in floor_cost(runs):
        say(console, line)


def floor_cost(runs: Sequence[Run]) -> list[str]:
    """What the `floor` policy pays, against `batch` on the same seed; nothing if either did not complete."""
    by_policy = {run.summary["demand"]: run for run in runs if run.summary["outcome"] == "completed"}
    if not {"batch", "floor"} <= by_policy.keys():
        return []
    batch, floor = by_policy["batch"], by_policy["floor"]
    longer = floor.summary["makespan_s"] - batch.summary["makespan_s"]
    return [
        f"The floor costs {floor.idle_held_s:.1f} GPU-seconds held with nothing to roll out while a peer wanted them "
        f"(batch: {batch.idle_held_s:.1f}),",
        f"{floor.attracted} engines woken with nothing to roll out (batch: {batch.attracted}), "
        f"{resizes(floor.summary) - resizes(batch.summary):+d} resizes and {longer:+.1f} s "
        f"({percent(longer, batch.summary['makespan_s']):+.1f} %) until all is done.",
    ]
