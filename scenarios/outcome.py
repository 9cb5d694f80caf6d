"""Exit codes: what a finished run means for whoever called it. Works on the JSON summary alone.

1. Stuck and interrupted runs have codes of their own, whatever was expected.
2. Otherwise an `expect` decides; without one only `completed` with no violation is a success.
3. `--demand all` is judged by `TABLE`: each policy must end as it is known to end on the incident. A policy may
   starve a pipeline there, but none may break a safety rule.
"""

from collections.abc import Sequence
from typing import Any

from core.config import Expect
from core.units import seconds, show_s

OK = 0
FAILED = 1
REFUSED = 2
STUCK = 3
INTERRUPTED = 130

STUCK_OUTCOMES = ("deadlock", "starved")

# How each policy ends on overlap_2gpu, in the order they are run and shown.
TABLE: dict[str, tuple[str, ...]] = {
    "batch": ("completed",),
    "floor": ("completed",),
    "signal": STUCK_OUTCOMES,
}

Summary = dict[str, Any]
"""One run in the field names of `--json`."""


def exit_code(summary: Summary, expect: Expect | None) -> int:
    """The exit code of one run."""
    forced = _forced(summary)
    if forced is not None:
        return forced
    return FAILED if unmet(summary, expect) else OK


def table_code(summaries: Sequence[Summary]) -> int:
    """The exit code of `--demand all`: 0 if each policy ended as `TABLE` says."""
    if any(summary["outcome"] == "interrupted" for summary in summaries):
        return INTERRUPTED
    unforeseen = [summary["outcome"] for summary in summaries if summary["outcome"] not in TABLE[summary["demand"]]]
    if any(outcome in STUCK_OUTCOMES for outcome in unforeseen):
        return STUCK
    return OK if len(summaries) == len(TABLE) and all(as_table(summary) for summary in summaries) else FAILED


def as_table(summary: Summary) -> bool:
    """Whether a policy ended as `TABLE` says, with no safety rule (S1 to S7) broken."""
    unsafe = any(violation["rule"].startswith("S") for violation in summary["violations"])
    return summary["outcome"] in TABLE[summary["demand"]] and not unsafe


def unmet(summary: Summary, expect: Expect | None) -> list[str]:
    """What keeps the run from being a success, one sentence each."""
    expect = expect or Expect(outcome="completed")
    return [
        *_other_outcome(summary, expect),
        *_too_long(summary, expect),
        *_too_few_handovers(summary, expect),
        *_other_failures(summary, expect),
        *_broken(summary, expect.violations),
    ]


def _forced(summary: Summary) -> int | None:
    if summary["outcome"] in STUCK_OUTCOMES:
        return STUCK
    return INTERRUPTED if summary["outcome"] == "interrupted" else None


def _other_outcome(summary: Summary, expect: Expect) -> list[str]:
    if expect.outcome in (None, summary["outcome"]):
        return []
    return [f"the outcome is {summary['outcome']}, expected was {expect.outcome}"]


def _too_long(summary: Summary, expect: Expect) -> list[str]:
    found = []
    if expect.max_wait is not None:
        found += [
            f"{pipeline['id']} waited {pipeline['max_wait_s']:g} s, expected were at most {show_s(expect.max_wait)}"
            for pipeline in summary["pipelines"]
            if pipeline["max_wait_s"] > seconds(expect.max_wait)
        ]
    if expect.max_makespan is not None and summary["makespan_s"] > seconds(expect.max_makespan):
        found.append(f"it took {summary['makespan_s']:g} s, expected were at most {show_s(expect.max_makespan)}")
    return found


def _too_few_handovers(summary: Summary, expect: Expect) -> list[str]:
    if expect.min_handovers is None or summary["handovers"] >= expect.min_handovers:
        return []
    return [f"there were {summary['handovers']} hand-overs, expected were at least {expect.min_handovers}"]


def _other_failures(summary: Summary, expect: Expect) -> list[str]:
    failed = sorted(pipeline["id"] for pipeline in summary["pipelines"] if pipeline["error"])
    if expect.failed is None or failed == sorted(expect.failed):
        return []
    return [f"failed: {', '.join(failed) or 'none'}; expected was: {', '.join(sorted(expect.failed)) or 'none'}"]


def _broken(summary: Summary, allowed: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    for violation in summary["violations"]:
        counts[violation["rule"]] = counts.get(violation["rule"], 0) + 1
    return [
        f"rule {rule} was broken" + (f" {count} times" if count > 1 else "")
        for rule, count in counts.items()
        if rule not in allowed
    ]
