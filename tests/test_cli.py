"""The command line: options, first line, refusals, files, exit codes, and what people are shown.

Most tests replace the run itself by a short scripted log, so they are about the shell alone; the last section runs the
real thing in a process of its own.
"""

import html.parser
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from core import actions, events
from core.backend import Backend
from core.config import Expect, Scenario
from core.errors import ConfigError, InvariantBroken
from core.model import Priority, Role
from core.snapshot import plan_snapshot
from core.timeline import STATES, Segment
from core.topology import OVERLAP_NAMES, check_world
from core.trace import read_log
from core.units import ns
from scenarios import catalogue, common, display, outcome, plan, replay, summary, timeline
from scenarios import list as scenario_list
from scenarios import run as scenario_run
from scenarios.board import SEGMENTS, Board, coarser

ROOT = Path(__file__).parent.parent
INCIDENT = catalogue.FILES / "overlap_2gpu.yaml"


def summary_of(scenario: Scenario, backend: str = "sim", **changes: object) -> outcome.Summary:
    """A summary as a run would give it: completed, unless said otherwise."""
    gpus = [{"id": gpu, "busy_s": 60.0, "switching_s": 20.0, "idle_s": 30.0} for gpu in range(scenario.cluster.gpus)]
    figures = {"trajectories": 96, "max_wait_s": 45.5, "resizes": 5, "error": None}
    pipelines = [{"id": job.spec.id, "steps_done": job.steps} | figures for job in scenario.jobs]
    made = {
        "scenario": scenario.name, "backend": backend, "demand": str(scenario.demand), "seed": scenario.seed,
        "outcome": "completed", "makespan_s": 110.0, "handovers": 4, "gpus": gpus, "pipelines": pipelines,
        "violations": [], "diagnosis": None,
    }  # fmt: skip
    return made | changes


def script(scenario: Scenario) -> list[tuple[float, object]]:
    """(seconds, item): the first pipeline initialises, rolls out one batch on its first engine, trains, ends."""
    spec = scenario.jobs[0].spec
    name, gpus, bundle = spec.id, spec.union, spec.infer.bundle(0)
    engine = {"pipeline": name, "dp_rank": 0, "epoch": 2}
    first = {"batch": 0, "delivered": 8, "trajectory": 0, "attempt": 0, "dp_rank": 0}
    train = {"pipeline": name, "role": Role.ACTOR_TRAIN}
    return [
        *arrival(scenario, name),
        (0, actions.GrantLease(action=1, request=0, epoch=1, gpus=gpus, **train)),
        (0, events.PhaseStarted(phase="init", gpus=gpus, **train)),
        (40, events.PhaseEnded(phase="init", **train)),
        (40, events.BatchOpened(pipeline=name, seq=3, batch=0, target=32)),
        (40, events.LeaseReleased(pipeline=name, seq=4, epoch=1)),
        (40, actions.AwaitMemory(action=2, gpus=gpus, need=(0,) * len(gpus))),
        (41, events.ActionDone(action=2)),
        (41, actions.WakeEngine(action=3, gpus=bundle, **engine)),
        (42, events.ActionDone(action=3)),
        (42, actions.SyncEngine(action=4, version=0, **engine)),
        (45, events.ActionDone(action=4)),
        (45, events.EngineBusy(pipeline=name, dp_rank=0)),
        (60, events.TrajectoryCompleted(pipeline=name, seq=5, **first)),
        (80, events.EngineIdle(pipeline=name, dp_rank=0)),
        (80, events.BatchClosed(pipeline=name, seq=6, batch=0, reason="taken")),
        (80, actions.SleepEngine(action=5, emptying=actions.Emptying.ABORT, **engine)),
        (81, events.ActionDone(action=5)),
        (81, actions.AwaitMemory(action=6, gpus=bundle, need=(0,) * len(bundle))),
        (82, events.ActionDone(action=6)),
        (100, events.StepCompleted(pipeline=name, step=0)),
        (110, events.PipelineEnded(pipeline=name)),
    ]  # fmt: skip


def arrival(scenario: Scenario, name: str) -> list[tuple[float, object]]:
    """A pipeline registers, is admitted and asks for its initialisation (`seq` 0 to 2)."""
    (spec,) = (job.spec for job in scenario.jobs if job.spec.id == name)
    wanted = {"request": 0, "role": Role.ACTOR_TRAIN, "priority": Priority.INITIALIZATION}
    return [
        (0, events.PipelineRegistered(pipeline=name, seq=0, spec=spec)),
        (0, events.PipelineAdmitted(pipeline=name, seq=1)),
        (0, events.LeaseRequested(pipeline=name, seq=2, **wanted)),
    ]


def play(items: list[tuple[float, object]], *listeners) -> None:
    for i, (t, item) in enumerate(items):
        for listener in listeners:
            listener(i, ns(t), -1, item)


class Stage:
    """Stands in for the run: plays the script, remembers what it was given, and ends as told."""

    def __init__(self) -> None:
        self.ran: list[Scenario] = []
        self.changes: dict[str, dict[str, object]] = {}
        self.error: BaseException | None = None

    def __call__(self, scenario: Scenario, backend: Backend, listeners, board) -> outcome.Summary:
        self.ran.append(scenario)
        play(script(scenario), board, *listeners)
        if self.error is not None:
            raise self.error
        return summary_of(scenario, backend.name, **self.changes.get(scenario.demand, {}))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(common, "execute", made)
    monkeypatch.setattr(common, "load_backend", _only_sim)
    for name in OVERLAP_NAMES:
        monkeypatch.delenv(f"TURNSTILE_{name.upper()}", raising=False)
    return made


def _only_sim(name: str) -> None:
    if name != "sim":
        raise ConfigError("--backend", f"no backend is called {name!r}", "known: sim")


STARVED = {"outcome": "starved", "diagnosis": "p1 waits for an engine\n  since 40 s: GPU 0 is held by [p2]"}


# --- refusals ---------------------------------------------------------------------------------------------

REFUSED = [
    (["--demand", "batsh"], "did you mean 'batch'?"),
    (["--demand", "nope"], "'nope' is not one of batch, floor, signal, all (see --help)"),
    (["--steps", "0"], "--steps"),
    (["--steps", "three"], "--steps"),
    (["--seed", "-1"], "--seed"),
    (["--sed", "1"], "--sed"),
    (["--backend", "simm"], "no backend is called 'simm'"),
    (["--p1-train", "0"], "--p1-infer, --p2-train, --p2-infer missing"),
    (["--p1-train", "0", "--p1-infer", "0,1", "--p2-train", "1", "--p2-infer", "0,7"], "GPU 7 does not exist"),
    (["--p1-train", "x", "--p1-infer", "0,1", "--p2-train", "1", "--p2-infer", "0,1"], "'x' is no GPU id"),
    (["--trace", "no/such/folder/log"], "there is no directory"),
    (["--report", "."], "is a directory"),
    (["--trace", "-"], "only --json"),
    (["--trace", "same", "--report", "same"], "name another file"),
    (["--trace", ""], "the argument after --trace is empty; is a variable unset?"),
    (["--trace="], "the argument after --trace is empty"),
    ([""], "the argument given is empty"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(each[0][:2]) for each in REFUSED])
def test_what_is_refused_is_one_line_and_exit_2_and_no_json(arguments, words, stage, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_of(lambda: common.main("overlap_2gpu", [*arguments, "--json", "out.json"])) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert words in printed.err
    assert list(tmp_path.iterdir()) == [] and stage.ran == []


def exit_of(command) -> int:
    """The exit code, whether it is returned or raised (argparse raises)."""
    try:
        return command()
    except SystemExit as stopped:
        return stopped.code


def test_a_json_path_that_cannot_be_written_is_found_before_the_run(stage, capsys, tmp_path):
    assert common.main("overlap_2gpu", ["--json", str(tmp_path / "no" / "out.json")]) == 2
    assert stage.ran == [] and "there is no directory" in capsys.readouterr().err


def test_a_report_is_never_written_over_the_scenario(stage, capsys, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_bytes(INCIDENT.read_bytes())
    assert scenario_run.main([str(mine), "--report", str(mine)]) == 2
    assert mine.read_bytes() == INCIDENT.read_bytes() and stage.ran == []


def test_a_log_is_never_written_over_the_scenario_under_another_name(stage, tmp_path):
    mine, linked = tmp_path / "mine.yaml", tmp_path / "linked"
    mine.write_bytes(INCIDENT.read_bytes())
    linked.hardlink_to(mine)
    assert scenario_run.main([str(mine), "--trace", str(linked)]) == 2
    assert mine.read_bytes() == INCIDENT.read_bytes() and stage.ran == []


def test_an_unknown_scenario_is_answered_with_the_nearest_one(stage, capsys):
    assert scenario_run.main(["overlap_3gpu"]) == 2
    assert "did you mean 'overlap_" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(stage, capsys):
    assert scenario_run.main(["nowhere/mine.yaml"]) == 2
    assert capsys.readouterr().err == "error: nowhere/mine.yaml: No such file or directory\n"


def test_a_mistyped_key_is_answered_with_the_nearest_one(stage, capsys, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(INCIDENT.read_text().replace("staleness: 0 ", "stalenes: 0 ", 1))
    assert scenario_run.main([str(mine)]) == 2
    printed = capsys.readouterr().err
    assert "stalenes" in printed and "did you mean 'staleness'" in printed and printed.count("\n") == 1


def test_no_scenario_at_all_is_refused(stage, capsys):
    assert exit_of(lambda: scenario_run.main([])) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- topology, overrides, first line ----------------------------------------------------------------------

SWAPPED = {"p1_train": "1", "p1_infer": "1,0", "p2_train": "0", "p2_infer": "0,1"}


def as_options(mapping: dict[str, str]) -> list[str]:
    return [word for name, ids in mapping.items() for word in (f"--{name.replace('_', '-')}", ids)]


def set_environment(monkeypatch: pytest.MonkeyPatch, mapping: dict[str, str]) -> None:
    for name, ids in mapping.items():
        monkeypatch.setenv(f"TURNSTILE_{name.upper()}", ids)


def test_the_first_line_is_the_topology_and_its_source(stage, capsys):
    common.main("overlap_2gpu", [])
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "topology: 2 GPUs on 1 node; p1 train=[0] infer=[0,1]; p2 train=[1] infer=[0,1] (from: scenario)"


def test_the_environment_replaces_the_scenario_s_topology(stage, capsys, monkeypatch):
    set_environment(monkeypatch, SWAPPED)
    common.main("overlap_2gpu", ["--quiet"])
    assert stage.ran[0].jobs[0].spec.infer.gpus == (1, 0)
    assert "p1 train=[1] infer=[1,0]" in (out := capsys.readouterr().out) and "(from: environment)" in out


def test_options_win_over_the_environment(stage, capsys, monkeypatch):
    set_environment(monkeypatch, {name: "0" for name in OVERLAP_NAMES})
    common.main("overlap_2gpu", as_options(SWAPPED))
    assert "p1 train=[1] infer=[1,0]" in (out := capsys.readouterr().out) and "(from: options)" in out


def test_a_partial_environment_is_refused_by_naming_what_is_missing(stage, capsys, monkeypatch):
    set_environment(monkeypatch, {"p1_train": "0", "p2_infer": "0,1"})
    assert common.main("overlap_2gpu", []) == 2
    assert "TURNSTILE_P1_INFER, TURNSTILE_P2_TRAIN missing" in capsys.readouterr().err


def test_steps_seed_and_demand_reach_the_run(stage):
    common.main("overlap_2gpu", ["--steps", "7", "--seed", "11", "--demand", "floor"])
    (scenario,) = stage.ran
    assert ([job.steps for job in scenario.jobs], scenario.seed, scenario.demand) == ([7, 7], 11, "floor")


def test_what_no_option_names_comes_from_the_file(stage, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(INCIDENT.read_text() + "\nseed: 5\ndemand: floor\n")
    scenario_run.main([str(mine)])
    assert (stage.ran[0].seed, stage.ran[0].demand) == (5, "floor")


def test_a_hundred_pipelines_still_make_one_first_line(monkeypatch):
    scenario = catalogue.load("overlap_2gpu")
    many = msgspec.structs.replace(scenario, jobs=scenario.jobs * 50)
    line = common.topology_line(many)
    assert "and 92 more pipelines" in line and "\n" not in line and len(line) < 400


# --- what is written --------------------------------------------------------------------------------------


def test_json_on_standard_output_is_all_there_is_on_it(stage, capsys):
    assert common.main("overlap_2gpu", ["--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["outcome"] == "completed"
    assert printed.err.startswith("topology: ")


def test_quiet_json_on_standard_output_prints_nothing_else_anywhere(stage, capsys):
    common.main("overlap_2gpu", ["--json", "-", "--quiet"])
    printed = capsys.readouterr()
    assert json.loads(printed.out) and printed.err == ""


def test_quiet_prints_the_topology_and_the_result(stage, capsys):
    common.main("overlap_2gpu", ["--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1] == "overlap-2gpu on sim, demand batch, seed 0: completed"


def test_the_json_has_the_fields_of_the_contract(stage, tmp_path):
    common.main("overlap_2gpu", ["--json", str(tmp_path / "out.json"), "--quiet"])
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written)[:11] == [
        "scenario", "backend", "demand", "seed", "outcome", "makespan_s", "handovers", "gpus", "pipelines",
        "violations", "diagnosis",
    ]  # fmt: skip


def test_demand_all_writes_three_results_and_three_logs(stage, capsys, tmp_path):
    stage.changes["signal"] = STARVED
    out, log = tmp_path / "out.json", tmp_path / "log.jsonl"
    assert common.main("overlap_2gpu", ["--demand", "all", "--json", str(out), "--trace", str(log)]) == 0
    assert [each["demand"] for each in json.loads(out.read_text())] == ["batch", "floor", "signal"]
    assert sorted(file.name for file in tmp_path.glob("log*")) == [
        "log-batch.jsonl", "log-floor.jsonl", "log-signal.jsonl",
    ]  # fmt: skip
    assert "The floor costs" in capsys.readouterr().out


def test_the_diagnosis_of_a_stuck_run_is_printed_in_full(stage, capsys):
    stage.changes["signal"] = STARVED
    assert common.main("overlap_2gpu", ["--demand", "signal", "--quiet"]) == 3
    assert STARVED["diagnosis"] in capsys.readouterr().out


class Page(html.parser.HTMLParser):
    """Every tag and every link of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_the_report_is_one_page_that_loads_nothing(stage, tmp_path):
    stage.changes["signal"] = STARVED | {"violations": [{"rule": "L1", "at_s": 300.0, "detail": "p1 <starves>"}]}
    common.main("overlap_2gpu", ["--demand", "all", "--report", str(tmp_path / "run.html"), "--quiet"])
    text = (tmp_path / "run.html").read_text()
    page = Page()
    page.feed(text)
    assert page.links == [] and "script" not in page.tags and page.tags.count("svg") == 3
    assert "p1 &lt;starves&gt;" in text and "<starves>" not in text and "@import" not in text


def test_a_log_that_was_written_can_be_read_again(stage, tmp_path):
    common.main("overlap_2gpu", ["--trace", str(tmp_path / "log.jsonl"), "--seed", "9"])
    header, entries = read_log(tmp_path / "log.jsonl")
    assert header.seed == 9 and len(list(entries)) == len(script(stage.ran[0])) and entries.truncated == ""


# --- exit codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "code"), [("completed", 0), ("failed", 1), ("deadlock", 3), ("starved", 3), ("interrupted", 130)]
)
def test_each_outcome_has_its_exit_code(ended: str, code: int):
    assert outcome.exit_code(summary_of(catalogue.load("overlap_2gpu"), outcome=ended), None) == code


def test_a_broken_rule_fails_a_completed_run_unless_it_is_expected():
    broken = summary_of(catalogue.load("overlap_2gpu"), violations=[{"rule": "L5", "at_s": 1.0, "detail": "thrash"}])
    assert outcome.exit_code(broken, None) == 1
    assert outcome.exit_code(broken, Expect(outcome="completed", violations=("L4",))) == 1
    assert outcome.exit_code(broken, Expect(outcome="completed", violations=("L5",))) == 0


def test_an_expected_failure_is_a_success_and_an_expected_starvation_is_still_3():
    scenario = catalogue.load("overlap_2gpu")
    assert outcome.exit_code(summary_of(scenario, outcome="failed"), Expect(outcome="failed")) == 0
    assert outcome.exit_code(summary_of(scenario), Expect(outcome="failed")) == 1
    assert outcome.exit_code(summary_of(scenario, outcome="starved"), Expect(outcome="starved")) == 3


@pytest.mark.parametrize(
    ("met", "missed"),
    [
        (Expect(max_wait=ns(45.5)), Expect(max_wait=ns(45.4))),
        (Expect(max_makespan=ns(110)), Expect(max_makespan=ns(109))),
        (Expect(min_handovers=4), Expect(min_handovers=5)),
        (Expect(failed=()), Expect(failed=("p1",))),
    ],
)
def test_each_expectation_can_be_met_and_missed(met: Expect, missed: Expect):
    summary = summary_of(catalogue.load("overlap_2gpu"))
    assert (outcome.exit_code(summary, met), outcome.exit_code(summary, missed)) == (0, 1)
    assert outcome.unmet(summary, met) == []


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (("completed", "completed", "starved"), 0),
        (("completed", "completed", "deadlock"), 0),
        (("completed", "completed", "completed"), 1),
        (("failed", "completed", "starved"), 1),
        (("starved", "completed", "starved"), 3),
        (("completed", "interrupted"), 130),
    ],
)
def test_demand_all_is_judged_by_how_each_policy_is_known_to_end(ends: tuple[str, ...], code: int):
    scenario = catalogue.load("overlap_2gpu")
    runs = [summary_of(scenario, demand=name, outcome=end) for name, end in zip(outcome.TABLE, ends, strict=False)]
    assert outcome.table_code(runs) == code


def test_demand_all_forgives_no_broken_safety_rule():
    scenario = catalogue.load("overlap_2gpu")
    ends = {"batch": "completed", "floor": "completed", "signal": "starved"}
    runs = [summary_of(scenario, demand=name, outcome=end) for name, end in ends.items()]
    runs[2]["violations"] = [{"rule": "L1", "at_s": 1.0, "detail": ""}]
    assert outcome.table_code(runs) == 0
    runs[2]["violations"] = [{"rule": "S1", "at_s": 1.0, "detail": ""}]
    assert outcome.table_code(runs) == 1


def test_an_interrupted_run_still_writes_its_json(stage, tmp_path):
    stage.error = KeyboardInterrupt()
    assert common.main("overlap_2gpu", ["--json", str(tmp_path / "out.json")]) == 130
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["outcome"], written["makespan_s"]) == ("interrupted", 110.0)


def test_an_interruption_ends_the_series_of_policies(stage, tmp_path):
    stage.error = KeyboardInterrupt()
    assert common.main("overlap_2gpu", ["--demand", "all", "--json", str(tmp_path / "out.json")]) == 130
    assert [each["outcome"] for each in json.loads((tmp_path / "out.json").read_text())] == ["interrupted"]


def test_a_bug_of_ours_is_one_line_that_says_where_the_log_is(stage, capsys, tmp_path):
    stage.error = InvariantBroken("GPU 0 has two holders")
    log = tmp_path / "log.jsonl"
    assert common.main("overlap_2gpu", ["--quiet", "--trace", str(log)]) == 1
    assert capsys.readouterr().err == f"error: GPU 0 has two holders (the log is {log})\n"


def test_a_json_file_that_fails_at_the_end_turns_success_into_1(stage, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", _disk_full)
    assert common.main("overlap_2gpu", ["--quiet", "--json", str(tmp_path / "out.json")]) == 1
    assert "No space left" in capsys.readouterr().err


def _disk_full(*_args, **_kwargs) -> None:
    raise OSError(28, "No space left on device")


# --- the board --------------------------------------------------------------------------------------------


def played(scenario: Scenario, *more: tuple[float, object]) -> Board:
    board = Board(scenario)
    play([*script(scenario), *more], board)
    return board


def test_the_history_of_a_gpu_goes_from_init_to_the_end_without_a_gap():
    board = played(catalogue.load("overlap_2gpu"))
    first = board.history()[0]
    assert [(segment.end // ns(1), segment.state) for segment in first] == [
        (40, "init"), (41, "release"), (42, "wake"), (45, "sync"), (80, "decoding"), (81, "sleep"), (82, "release"),
        (110, "free"),
    ]  # fmt: skip
    assert all(before.end == after.start for before, after in itertools.pairwise(first))


def test_the_board_knows_steps_demand_and_who_is_over():
    board = Board(catalogue.load("overlap_2gpu"))
    play(script(board.scenario)[:17], board)
    assert (board.open_batch("p1"), board.demand("p1"), board.steps_done("p1")) == ((8, 32), 24, 0)
    assert (board.open_batch("p2"), board.demand("p2"), board.ended) == ((0, 0), 0, {})
    board = played(board.scenario)
    assert (board.open_batch("p1"), board.steps_done("p1"), board.ended) == ((0, 0), 1, {"p1": None})


def test_a_long_history_gets_coarser_but_keeps_its_length():
    busy, idle = (kind(pipeline="p1", dp_rank=0) for kind in (events.EngineBusy, events.EngineIdle))
    scenario = catalogue.load("overlap_2gpu")
    board = Board(scenario)
    play(script(scenario)[:16], board)
    play([(100 + i, (idle, busy)[i % 2]) for i in range(3 * SEGMENTS)], board)
    kept = board.history()[0]
    assert SEGMENTS // 2 < len(kept) <= SEGMENTS and (kept[0].start, kept[-1].end) == (0, board.now)
    assert all(before.end == after.start for before, after in itertools.pairwise(kept))


def test_of_two_neighbours_the_longer_one_stands_for_both():
    segments = [Segment(0, i, i + 1 + i % 2, "train" if i % 2 else "free", "p1") for i in range(5)]
    assert [segment.state for segment in coarser(segments)] == ["train", "train", "free"]


# --- what people see --------------------------------------------------------------------------------------


def test_a_strip_shows_in_each_column_what_took_most_of_it():
    stretches = [(0, 30, "train", "p1"), (30, 34, "free", ""), (34, 100, "decoding", "p2")]
    cells = timeline.strip([Segment(0, *each) for each in stretches], 100, 10)
    painter = timeline.Painter(catalogue.load("overlap_2gpu"))
    assert "".join(painter.sign(*cell) for cell in cells) == "AAAbbbbbbb"


def test_every_state_of_a_gpu_has_a_look_and_no_look_is_left_over():
    assert timeline.LOOK.keys() == STATES.keys()


def test_many_stretches_are_drawn_as_columns_of_what_took_most():
    segments = [Segment(0, i, i + 1, "train" if i < 600 else "free", "p1") for i in range(1000)]
    assert timeline.stretches(segments, 1000, 1000) is segments
    joined = timeline.stretches(segments, 1000, 100)
    assert [(each.start, each.end, each.state) for each in joined] == [(0, 600, "train"), (600, 1000, "free")]


def test_plain_lines_are_a_handful_however_long_the_run():
    scenario = catalogue.load("overlap_2gpu")
    long = msgspec.structs.replace(scenario, jobs=tuple(msgspec.structs.replace(j, steps=1000) for j in scenario.jobs))
    board, lines = Board(long), []
    plain = display.PlainLines(board, lines.append)
    steps = [(i, events.StepCompleted(pipeline=f"p{1 + i % 2}", step=i // 2)) for i in range(2000)]
    faults = [(2000, events.FaultInjected(kind="kill_engine", target="p1/0"))] * 500
    play(steps + faults, board, plain)
    assert 10 <= len(lines) <= display.PLAIN_STEPS + display.PLAIN_TROUBLE + 1
    assert any("2000 of 2000 in all" in line for line in lines)


def drawn(board: Board) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(display.picture(board))
    return console.file.getvalue().splitlines()


def test_the_live_picture_has_a_bar_a_pipeline_and_the_holder_of_each_gpu():
    board = Board(catalogue.load("overlap_2gpu"))
    play(script(board.scenario)[:16], board)
    lines = drawn(board)
    assert lines[0].strip() == "time 60.0 s"
    assert "p1" in lines[1] and "8/32 trajectories" in lines[1] and "step 0/3" in lines[1]
    assert [line.split() for line in lines[3:5]] == [["gpu", "0", "p1", "rolling", "out"], ["gpu", "1", "-", "free"]]


def test_the_live_picture_of_a_thousand_gpus_fits_a_screen():
    scenario = catalogue.load("overlap_2gpu")
    cluster = msgspec.structs.replace(scenario.cluster, nodes=500)
    board = Board(msgspec.structs.replace(scenario, cluster=cluster))
    play(script(board.scenario)[:16], board)
    lines = drawn(board)
    assert len(lines) < 20 and any("999 GPUs" in line and "free" in line for line in lines)
    assert board.history() == []


def test_the_live_view_draws_at_most_a_few_pictures_a_second(monkeypatch):
    board = Board(catalogue.load("overlap_2gpu"))
    pictures = []
    monkeypatch.setattr(display, "picture", lambda board: pictures.append(1) or "")
    with display.LiveView(board, Console(file=io.StringIO(), force_terminal=True)) as view:
        began = time.monotonic()
        for i in range(2000):
            view(i, 0, -1, None)
        elapsed = time.monotonic() - began
    assert 1 <= len(pictures) <= 2 + elapsed * display.FRAMES_PER_S


# --- plan, list, replay, and what is shipped --------------------------------------------------------------

SNAPSHOT = {
    "gpus": 1, "gpus_per_node": 1,
    "pipelines": [{"id": "a", "infer": {"gpus": [0], "tp": 1}, "awake": [], "batch": {"target": 10, "done": 0}}],
    "held": [], "requests": [],
}  # fmt: skip


def test_plan_prints_the_decision_and_with_explain_the_reasons(capsys, tmp_path):
    file = tmp_path / "snapshot.json"
    file.write_text(json.dumps(SNAPSHOT))
    assert plan.main([str(file)]) == 0
    decision = {"shrink": {}, "expand": {"a": {"0": [0]}}, "grant": [], "wait": []}
    assert json.loads(capsys.readouterr().out) == decision
    assert plan.main([str(file), "--explain"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert len(explained.pop("explain")) == 1 and explained == decision


def test_the_snapshot_of_the_documentation_is_decided_as_it_stands():
    text = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    decision = plan_snapshot(json.loads(block))
    assert decision["grant"] == [{"pipeline": "a", "role": "actor_train", "gpus": [0]}]
    assert decision["shrink"] == {"a": [0, 1]} and decision["expand"] == {"b": {"1": [1]}}


def test_plan_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(SNAPSHOT).encode())))
    assert plan.main(["-"]) == 0
    assert "expand" in json.loads(capsys.readouterr().out)


NO_SNAPSHOTS = [
    "", "{", "[]", "{}", '{"gpus": NaN}', '{"gpus": 1, "gpus": 2}', '{"gpu": 1}', '{"gpus": 99999999999999999999}',
    "[" * 100_000, "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_SNAPSHOTS, ids=lambda text: ascii(text[:20]))
def test_a_snapshot_that_is_none_is_one_line_and_exit_2(text: str, capsys, tmp_path):
    file = tmp_path / "snapshot.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert plan.main([str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1


def test_the_list_names_every_shipped_scenario_with_what_it_shows(capsys):
    lines = scenario_list.lines()
    assert [line.split()[0] for line in lines] == catalogue.names() and all(len(line.split()) > 4 for line in lines)
    assert scenario_run.main(["--list"]) == scenario_list.main([]) == 0
    assert capsys.readouterr().out.splitlines() == lines * 2


def test_every_shipped_scenario_has_a_module_and_can_exist():
    assert {"disjoint_4gpu", "overlap_2gpu", "overlap_4gpu"} <= set(catalogue.names())
    for name in catalogue.names():
        incident = catalogue.find(name).parent == catalogue.INCIDENTS
        assert incident or (ROOT / "scenarios" / f"{name}.py").is_file(), name
        check_world(catalogue.load(name))


def test_the_incident_is_the_one_of_the_design():
    first, second = catalogue.load("overlap_2gpu").jobs
    groups = [(job.spec.group(Role.ACTOR_TRAIN).gpus, job.spec.infer.gpus) for job in (first, second)]
    assert groups == [((0,), (0, 1)), ((1,), (0, 1))]
    assert (second.start_after.pipeline, second.start_after.event) == ("p1", "rollout_granted")
    assert (first.dispatch_after.pipeline, first.dispatch_after.event) == ("p2", "init_accepted")


def test_replaying_what_is_no_log_is_refused(capsys):
    assert replay.main([str(INCIDENT)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_ci_calls_make_test_and_nothing_else():
    ci = ROOT / ".ci" / "run"
    lines = [line for line in ci.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert lines == ["make test"] and os.access(ci, os.X_OK)


# --- the real thing ---------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def started(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, **options
    )


@pytest.fixture(scope="module")
def three() -> subprocess.CompletedProcess[str]:
    """The incident under the three policies, run once for all the tests that look at it."""
    return started("scenarios.overlap_2gpu", "--backend", "sim", "--demand", "all", "--json", "-")


def test_the_incident_ends_under_each_policy_as_the_table_says(three):
    assert three.returncode == 0, three.stderr
    ends = {result["demand"]: result["outcome"] for result in json.loads(three.stdout)}
    assert ends["batch"] == ends["floor"] == "completed" and ends["signal"] in ("starved", "deadlock")


def test_the_figures_of_each_gpu_sum_to_the_makespan(three):
    for result in json.loads(three.stdout):
        for gpu in result["gpus"]:
            assert gpu["busy_s"] + gpu["switching_s"] + gpu["idle_s"] == pytest.approx(result["makespan_s"], abs=1e-6)


def test_the_starved_pipeline_is_named_and_its_signal_blamed(three):
    (starved,) = (result for result in json.loads(three.stdout) if result["demand"] == "signal")
    assert "p1" in starved["diagnosis"] and "signal" in starved["diagnosis"]


LONGER_THAN_A_TURN = """
name: long-trajectories
cluster: {gpus_per_node: 1}
pipelines:
  - &job
    id: a
    train: {gpus: [0]}
    infer: {gpus: [0]}
    steps: 1
    batch: {prompts: 1}
    partial: PARTIAL
    min_residence_s: 5
    costs: {init: 1, train: 1, offload: 1, onload: 1, publish: 1, sync: 1, sleep: 1, wake: 1, trajectory: 100}
    limits: {turn_s: 60, hold_s: 60, init_s: 60}
  - {<<: *job, id: b}
"""


@pytest.mark.parametrize(("partial", "code", "told"), [("restart", 3, ["a", "b"]), ("resume", 0, [])])
def test_trajectories_longer_than_a_turn_are_named_with_what_to_do(partial, code, told, tmp_path, capsys):
    file = tmp_path / "long.yaml"
    file.write_text(LONGER_THAN_A_TURN.replace("PARTIAL", partial))
    assert scenario_run.main([str(file)]) == code
    lines = [line for line in capsys.readouterr().out.splitlines() if "limits.turn_s" in line]
    assert [line.split(":")[0] for line in lines] == told
    assert all("whole turns" in line and "partial: resume" in line for line in lines)


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


@FULL
@pytest.mark.parametrize("option", ["--trace", "--perfetto"])
def test_a_log_that_is_not_complete_is_no_success(option, capsys):
    assert scenario_run.main(["overlap_2gpu", "--steps", "1", "--quiet", option, "/dev/full"]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"error: {option} /dev/full: the log is not complete: No space left on device\n"
    assert printed.out.endswith("completed\n"), "the run is not lost"


@FULL
def test_a_full_standard_output_is_one_line_and_exit_1():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "scenarios.list"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: standard output: could not be written: No space left on device\n"


def test_a_reader_who_leaves_early_sees_no_traceback():
    running = subprocess.Popen(
        command("scenarios.overlap_2gpu"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout.readline().startswith("topology: ")
    running.stdout.close()
    assert running.stderr.read() == "" and running.wait(timeout=60) == 0
    running.stderr.close()


def test_ctrl_c_ends_a_long_run_with_130_and_its_json(tmp_path):
    out = tmp_path / "out.json"
    running = subprocess.Popen(
        command("scenarios.overlap_2gpu", "--steps", "100000", "--json", str(out)),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # As from a terminal, also where the tests themselves run in the background and ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while "initialised" not in running.stdout.readline():
        assert running.poll() is None, running.stderr.read()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in err
    assert json.loads(out.read_text())["outcome"] == "interrupted"


def test_what_a_backend_says_of_its_machine_is_shown_before_the_run_unless_quiet(monkeypatch, capsys):
    prepare = common.core_run.prepare

    def on_cards(*arguments, **settings):
        backend = prepare(*arguments, **settings)
        backend.remarks = ("GPU 0 is 69.9 GiB of card 0",)
        return backend

    monkeypatch.setattr(common.core_run, "prepare", on_cards)
    assert common.main("overlap_2gpu", ["--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("note: GPU 0 is 69.9 GiB of card 0\n") < printed.index("asks for")
    assert common.main("overlap_2gpu", ["--steps", "1", "--quiet"]) == 0
    assert "GPU 0 is" not in capsys.readouterr().out


def test_the_report_tells_which_way_weights_came_and_why_not_a_faster_one():
    scenario = catalogue.load("overlap_2gpu")
    board = Board(scenario)
    loaded = {"pipeline": "p1", "dp_rank": 1, "version": 1, "meant": "ipc"}
    came = [("ipc", "they share a card", 0.02), ("ipc", "they share a card", 0.04)]
    came.append(("cache", "the trainer's weights are off the device", 0.09))
    for number, (transport, why, took) in enumerate(came):
        board(number, number, -1, events.WeightsLoaded(**loaded, transport=transport, why=why, took=ns(took)))
    board(9, 9, -1, events.WeightsLoaded(**loaded | {"pipeline": "other"}, transport="ipc", why="", took=1))
    assert summary.deliveries(run_of(scenario, board)) == [
        "weights came by ipc (2 loads, 0.030 s on average)",
        "weights came through the cache (1 load, 0.090 s on average), not by ipc: "
        "the trainer's weights are off the device",
    ]


def test_weights_that_came_as_they_always_do_need_no_line():
    scenario = catalogue.load("overlap_2gpu")
    board = Board(scenario)
    loaded = {"pipeline": "p1", "dp_rank": 1, "version": 1, "meant": "cache", "transport": "cache", "why": "asked for"}
    board(0, 0, -1, events.WeightsLoaded(**loaded, took=1))
    assert summary.deliveries(run_of(scenario, board)) == []


def run_of(scenario, board):
    return summary.Run(scenario, {}, board)
