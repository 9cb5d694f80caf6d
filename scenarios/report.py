"""One HTML file about a run (or three), with everything inside it: no script, no network, opens anywhere."""

from collections.abc import Iterable, Sequence
from html import escape

from core.timeline import STATES, Segment
from core.units import ns, seconds
from scenarios.outcome import Summary
from scenarios.summary import MEASURES, Run, floor_cost, totals
from scenarios.timeline import Painter, stretches

PALETTE = ("#1e88e5", "#fb8c00", "#43a047", "#d81b60", "#c0a000", "#00acc1", "#e53935", "#8e24aa")
PLAIN = {"free": "var(--free)", "lost": "#555555", "quarantine": "#b71c1c"}
OPACITY = {"busy": 1.0, "switching": 0.45, "idle": 0.18}

WIDTH, ROW, GAP, LABEL = 1000, 18, 4, 60
VIOLATIONS_SHOWN = 200

STYLE = """
:root { --back: #ffffff; --text: #1b1b1b; --rule: #cccccc; --free: #eeeeee; }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --text: #e6e6e6; --rule: #444444; --free: #2a2d33; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
       max-width: 1100px; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .9rem .25rem 0; text-align: left; }
td + td { font-variant-numeric: tabular-nums; }
pre { border-left: 4px solid #b71c1c; padding: .5rem 1rem; white-space: pre-wrap; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
.good { color: #2e7d32; } .bad { color: #c62828; } .key { display: inline-block; margin-right: 1.2rem; }
.key i { display: inline-block; height: .8em; margin-right: .4em; width: 1.2em; }
"""


def render(runs: Sequence[Run], topology: str) -> str:
    """The page, for one run or for several to compare."""
    title = f"Turnstile: {runs[0].summary['scenario']}"
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(topology)}</p>"]
    if len(runs) > 1:
        parts += _comparison(runs)
    for run in runs:
        parts += _section(run)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _comparison(runs: Sequence[Run]) -> list[str]:
    rows = [[name, *(measure(run) for run in runs)] for name, measure in MEASURES]
    cost = "".join(f"{line} " for line in floor_cost(runs))
    return [
        "<h2>The policies side by side</h2>",
        _table(["demand counted by", *(run.summary["demand"] for run in runs)], rows),
        f"<p>{escape(cost)}</p>" if cost else "",
    ]


def _section(run: Run) -> list[str]:
    summary = run.summary
    return [
        f"<h2>Demand: {escape(summary['demand'])}</h2>",
        _verdict(run),
        "".join(f"<p>{escape(line)}</p>" for line in totals(run)),
        _pipelines(run),
        _timeline(run),
        _violations(summary),
        f"<h3>Diagnosis</h3><pre>{escape(summary['diagnosis'])}</pre>" if summary["diagnosis"] else "",
    ]


def _verdict(run: Run) -> str:
    summary = run.summary
    note = f" ({'; '.join(run.problems)})" if run.problems else ""
    line = f"<b class={'bad' if run.problems else 'good'}>{escape(summary['outcome'])}</b>{escape(note)}"
    return f"<p>{line} on {escape(summary['backend'])}, seed {summary['seed']}</p>"


def _pipelines(run: Run) -> str:
    rows = [
        [
            pipeline["id"],
            pipeline["steps_done"],
            pipeline["trajectories"],
            f"{pipeline['max_wait_s']:.1f} s",
            pipeline["resizes"],
            pipeline["error"] or "",
        ]
        for pipeline in run.summary["pipelines"]
    ]
    return _table(["pipeline", "steps", "trajectories", "longest wait", "resizes", "error"], rows)


def _violations(summary: Summary) -> str:
    if not summary["violations"]:
        return ""
    shown = summary["violations"][:VIOLATIONS_SHOWN]
    rows = [[violation["rule"], f"{violation['at_s']:g} s", violation["detail"]] for violation in shown]
    more = len(summary["violations"]) - len(shown)
    tail = f"<p>and {more} more</p>" if more else ""
    return f"<h3>Rules broken</h3>{_table(['rule', 'at', 'what'], rows)}{tail}"


def _table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(str(heading))}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# --- the timeline as a drawing ----------------------------------------------------------------------------


def _timeline(run: Run) -> str:
    """A row a GPU; strong colour: busy, half: switching, faint: held idle. Hovering says what and how long."""
    timeline, makespan = run.timeline, run.summary["makespan_s"]
    if not run.board.has_rows:
        return f"<p>No timeline: {run.scenario.cluster.gpus} GPUs are too many rows.</p>"
    if makespan <= 0:
        return ""
    painter = Painter(run.scenario)
    end = ns(makespan)
    height = len(timeline) * (ROW + GAP) + 20
    rows = "".join(_row(gpu, stretches(segments, end, WIDTH), end, painter) for gpu, segments in enumerate(timeline))
    axis = (
        f'<text x="{LABEL}" y="{height - 4}">0 s</text>'
        f'<text x="{LABEL + WIDTH}" y="{height - 4}" text-anchor="end">{makespan:.0f} s</text>'
    )
    return f'<svg viewBox="0 0 {LABEL + WIDTH} {height}" role="img">{rows}{axis}</svg>{_key(painter)}'


def _row(gpu: int, segments: Sequence[Segment], end: int, painter: Painter) -> str:
    top = gpu * (ROW + GAP)
    drawn = "".join(_stretch(segment, top, WIDTH / end, painter) for segment in segments)
    return f'<text x="0" y="{top + 13}">gpu {gpu}</text>{drawn}'


def _stretch(segment: Segment, top: int, scale: float, painter: Painter) -> str:
    start, length = segment.start * scale, (segment.end - segment.start) * scale
    when = f"{seconds(segment.start):.1f} to {seconds(segment.end):.1f} s"
    title = f"{segment.pipeline or 'nobody'}: {segment.state}, {when}"
    return (
        f'<rect x="{LABEL + start:.2f}" y="{top}" width="{length:.2f}" height="{ROW}" fill="{_fill(segment, painter)}" '
        f'fill-opacity="{_opacity(segment):g}"><title>{escape(title)}</title></rect>'
    )


def _fill(segment: Segment, painter: Painter) -> str:
    if segment.pipeline not in painter.number or segment.state in PLAIN:
        return PLAIN.get(segment.state, "#777777")
    return PALETTE[painter.number.get(segment.pipeline, -1) % len(PALETTE)]


def _opacity(segment: Segment) -> float:
    if segment.state in PLAIN:
        return 1.0
    return 0.75 if segment.state == "decoding" else OPACITY[STATES[segment.state]]


def _key(painter: Painter) -> str:
    keys = [(PALETTE[number % len(PALETTE)], 1.0, pipeline) for pipeline, number in painter.number.items()]
    first = PALETTE[0]
    keys += [(first, 1.0, "training"), (first, 0.75, "rolling out"), (first, OPACITY["switching"], "switching")]
    keys += [(first, OPACITY["idle"], "held, nothing running"), (PLAIN["quarantine"], 1.0, "quarantined")]
    return "".join(
        f'<span class="key"><i style="background:{colour};opacity:{opacity:g}"></i>{escape(name)}</span>'
        for colour, opacity, name in keys
    )
