"""What was made faster gives the same answers, leaves no garbage, and is measured by benchmarks that can fail."""

import gc
from typing import Any

import msgspec
import pytest
from core_world import spec
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import __main__ as benchmarks
from benchmarks.table import Row, at_least, at_most, fact, show
from core.draft import Draft
from core.ledger import Engine, Ledger, PipelineBook
from core.model import Cluster, DemandPolicy
from core.run import execute
from core.shares import Claim, balance
from scenarios.catalogue import load

ENGINES = 6


def on_which_the_turn_rests(book: PipelineBook, gone: dict[Engine, None]) -> Engine | None:
    """The rule of `Turn`, word for word."""
    left = [engine for engine in book.up.values() if engine not in gone]
    serving = [engine for engine in left if engine.routable_since >= 0]
    if any(engine.completed for engine in serving):
        return None
    if serving:
        return min(serving, key=lambda engine: (engine.routable_since, engine.dp_rank))
    return left[0] if left else None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(-1, 2), st.booleans()), min_size=ENGINES, max_size=ENGINES),
    st.permutations(range(ENGINES)),
    st.permutations(range(ENGINES)),
)
def test_a_turn_rests_on_the_same_engine_whatever_was_taken_and_asked_before(
    engines: list[tuple[int, bool]], promised: list[int], taken: list[int]
) -> None:
    ledger = Ledger(Cluster(nodes=1, gpus_per_node=ENGINES, gpu_memory=1, host_memory=1), DemandPolicy.BATCH)
    book = PipelineBook(spec("a", infer=tuple(range(ENGINES))), 0)
    for rank in promised:
        book.up[rank] = engine = book.engines[rank]
        engine.routable_since, completed = engines[rank]
        engine.completed = int(completed and engine.routable_since >= 0)
        ledger.gpus[rank].promised = engine
        ledger.promised[engine] = None
    draft = Draft(ledger)
    for rank in taken:
        bearers = [engine for engine in book.engines if engine not in draft.gone and draft.bears_turn(engine)]
        expected = on_which_the_turn_rests(book, draft.gone)
        assert bearers == ([] if expected is None else [expected])
        draft.evict((rank,), book.engines[rank])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 30))
def test_one_class_is_poured_as_high_as_its_gpus_reach(claims: list[tuple[int, int]], gpus: int) -> None:
    made = [Claim(weight, 1, max(1, ceiling), 0) for weight, ceiling in claims]
    (parts,) = balance([(gpus, made)])
    most = sum(claim.ceiling for claim in made)
    assert sum(parts) == pytest.approx(min(gpus, most), abs=1e-6)
    assert [claim.share for claim in made] == parts


def garbage_of_a_run(steps: int) -> int:
    """Objects that only the collector could free after a run."""
    found: list[int] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop":
            found.append(info["collected"])

    scenario = load("overlap_2gpu")
    jobs = tuple(msgspec.structs.replace(job, steps=steps) for job in scenario.jobs)
    gc.collect()
    gc.callbacks.append(count)
    try:
        execute(msgspec.structs.replace(scenario, jobs=jobs), "sim")
    finally:
        gc.callbacks.remove(count)
    return sum(found)


def test_a_longer_run_leaves_no_more_garbage() -> None:
    garbage_of_a_run(1)  # what is built once a process is not the run's
    short, long = garbage_of_a_run(1), garbage_of_a_run(8)
    assert long - short < 7 * 32, f"{long} objects after 8 steps of 64 trajectories, {short} after one"


def test_a_row_says_whether_its_bound_is_met() -> None:
    assert at_most("a", 2.0, "ms", 2.0).ok and not at_most("a", 2.1, "ms", 2.0).ok
    assert at_least("a", 2.0, "/s", 2.0).ok and not at_least("a", 1.9, "/s", 2.0).ok
    assert show(at_most("plan", 3.0, "ms", 2.0)).split()[-1] == "MISSED"
    assert "at least 150" in show(at_least("worlds", 151.0, "/s", 150.0))
    assert show(fact("worlds", 151.0, "/s")).endswith("/s")


def test_the_benchmarks_exit_1_if_a_bound_is_missed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from benchmarks import planning

    def rows(bound: float) -> list[Row]:
        return [at_most("plan", 3.0, "ms", bound)]

    monkeypatch.setattr("sys.argv", ["benchmarks", "planning"])
    for bound, code in ((4.0, 0), (2.0, 1)):
        monkeypatch.setattr(planning, "run", lambda quick, bound=bound: rows(bound))
        assert benchmarks.main() == code
    assert "1 of 1 bounds are missed: plan" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "planing"])
    with pytest.raises(SystemExit) as refused:
        benchmarks.main()
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "'planing' is not one of loop, planning, " in error and "did you mean 'planning'?" in error
