"""Slots: what living processes hold is what counts, to the byte, and the budget is never exceeded."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.ray_gpu.devices.process import Process, parse, this_process
from backends.ray_gpu.devices.slots import Holding, Slots
from core.errors import InvariantBroken, OperationFailed, OutOfMemory

BUDGETS = {0: 1000, 1: 500}
fork = multiprocessing.get_context("fork")


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    return Slots(tmp_path, BUDGETS)


def holdings(slots: Slots, gpu: int) -> dict[tuple[str, str], int]:
    return {(holding.owner, holding.kind): holding.nbytes for holding in slots.holders(gpu)}


@contextmanager
def another_process(work: Callable[[], None]) -> Iterator[int]:
    """The pid of a process that did `work` and then waits; killed in the end if it still lives."""
    ready = fork.Event()

    def body() -> None:
        work()
        ready.set()
        signal.pause()

    process = fork.Process(target=body)
    process.start()
    try:
        assert ready.wait(30)
        yield process.pid
    finally:
        process.kill()
        process.join()


# --- one process ------------------------------------------------------------------------------------------


def test_what_is_held_is_not_free(slots: Slots) -> None:
    slots.hold(0, "p1/0", 600, "weights")
    slots.hold(0, "p1/0", 100, "kv_cache")
    slots.hold(1, "p1/0", 5)
    assert (slots.free(0), slots.used(0), slots.free(1)) == (300, 700, 495)
    assert slots.holders(1) == [Holding(gpu=1, owner="p1/0", kind="", nbytes=5, pid=os.getpid())]
    assert holdings(slots, 0) == {("p1/0", "weights"): 600, ("p1/0", "kv_cache"): 100}


def test_holding_replaces_what_was_held_as_that_kind(slots: Slots) -> None:
    slots.hold(0, "p1/0", 900, "weights")
    slots.hold(0, "p1/0", 1000, "weights")
    slots.hold(0, "p1/0", 10, "weights")
    assert holdings(slots, 0) == {("p1/0", "weights"): 10}
    slots.hold(0, "p1/0", 0, "weights")
    assert slots.holders(0) == []


def test_dropping_takes_every_kind_of_one_owner_on_one_slot(slots: Slots) -> None:
    for gpu in (0, 1):
        slots.hold(gpu, "p1/0", 10, "weights")
        slots.hold(gpu, "p1/0", 20, "kv_cache")
        slots.hold(gpu, "p2/0", 30, "weights")
    slots.drop(0, "p1/0")
    slots.drop(0, "p1/0")
    assert holdings(slots, 0) == {("p2/0", "weights"): 30}
    assert slots.free(1) == 440


def test_more_than_the_budget_is_refused_with_the_sums_and_changes_nothing(slots: Slots) -> None:
    slots.hold(0, "p1/0", 600, "weights")
    slots.hold(0, "p2/0", 300)
    with pytest.raises(OutOfMemory) as refused:
        slots.hold(0, "p2/1", 101, "kv_cache")
    assert str(refused.value) == (
        "GPU 0: p2/1 (kv_cache) needs 101 bytes, and 100 of 1000 are free; "
        "900 are held by: p1/0 (weights) 600, p2/0 300"
    )
    assert slots.free(0) == 100
    slots.hold(0, "p2/1", 100, "kv_cache")
    assert slots.free(0) == 0


def test_growing_needs_room_only_for_the_difference(slots: Slots) -> None:
    slots.hold(0, "p1/0", 600)
    slots.hold(0, "p1/0", 1000)
    with pytest.raises(OutOfMemory, match="p1/0 needs 1001 bytes, and 1000 of 1000 are free"):
        slots.hold(0, "p1/0", 1001)
    assert slots.used(0) == 1000


def test_a_bundle_is_held_whole_or_not_at_all(slots: Slots) -> None:
    slots.hold(1, "p2/0", 200)
    with pytest.raises(OutOfMemory, match="GPU 1: p1/0 needs 400 bytes, and 300 of 500 are free"):
        slots.hold_bundle({0: 400, 1: 400}, "p1/0")
    assert (slots.free(0), slots.free(1)) == (1000, 300)
    slots.hold_bundle({0: 300, 1: 300}, "p1/0")
    assert (slots.free(0), slots.free(1)) == (700, 0)


def test_holding_less_is_never_refused(slots: Slots, tmp_path: Path) -> None:
    slots.hold(0, "p1/0", 800)
    smaller = Slots(tmp_path, {0: 500})
    smaller.hold(0, "p1/0", 700)
    assert smaller.free(0) == -200
    with pytest.raises(OutOfMemory):
        smaller.hold(0, "p1/0", 701)


def test_slots_that_are_not_and_bytes_below_zero_are_mistakes(slots: Slots) -> None:
    for wrong in (lambda: slots.free(2), lambda: slots.hold(2, "p1/0", 1), lambda: slots.holders(-1)):
        with pytest.raises(InvariantBroken, match="there is no slot for GPU"):
            wrong()
    with pytest.raises(InvariantBroken, match="negative"):
        slots.hold(0, "p1/0", -1)


def test_who_holds_nothing_leaves_no_page(slots: Slots, tmp_path: Path) -> None:
    slots.hold(0, "p1/0", 5)
    assert sorted(os.listdir(tmp_path)) == [f"{this_process()}.json", "lock"]
    slots.hold(0, "p1/0", 0)
    assert os.listdir(tmp_path) == ["lock"]


operations = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y"]),
        st.integers(0, 700) | st.none(),
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_the_book_is_what_a_dictionary_would_be(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    slots, book = Slots(tmp_path_factory.mktemp("slots"), BUDGETS), {}
    for gpu, owner, kind, nbytes in steps:
        if nbytes is None:
            slots.drop(gpu, owner)
            book = {key: n for key, n in book.items() if key[:2] != (gpu, owner)}
        else:
            wanted = book | {(gpu, owner, kind): nbytes}
            if sum(n for key, n in wanted.items() if key[0] == gpu) <= BUDGETS[gpu]:
                slots.hold(gpu, owner, nbytes, kind)
                book = wanted
            else:
                with pytest.raises(OutOfMemory):
                    slots.hold(gpu, owner, nbytes, kind)
        for slot, budget in BUDGETS.items():
            assert slots.free(slot) == budget - sum(n for key, n in book.items() if key[0] == slot)


# --- several processes ------------------------------------------------------------------------------------


def busy(slots: Slots, seed: int, refusals: "multiprocessing.Queue[int]", calm: "multiprocessing.Barrier") -> None:
    """Holds at random, then, when all are done, a little; reports how often it was refused, and waits for its end."""
    chance, refused = random.Random(seed), 0
    for _ in range(60):
        try:
            slots.hold(0, f"p{seed}", chance.choice((0, 200, 350, 450)), chance.choice(("x", "y")))
        except OutOfMemory:
            refused += 1
    slots.drop(0, f"p{seed}")
    calm.wait(30)
    slots.hold(0, f"p{seed}", 100 + seed)
    refusals.put(refused)
    signal.pause()


def test_processes_at_once_never_exceed_the_budget_and_the_sum_is_exact(slots: Slots) -> None:
    refusals, calm = fork.Queue(), fork.Barrier(4)
    workers = [fork.Process(target=busy, args=(slots, seed, refusals, calm)) for seed in range(4)]
    for worker in workers:
        worker.start()
    try:
        seen = []
        while refusals.qsize() < len(workers) and all(worker.is_alive() for worker in workers):
            seen.append(slots.free(0))
        assert min(seen) >= 0
        assert max(seen) > min(seen), "somebody watched while they worked"
        assert sum(refusals.get(timeout=30) for _ in workers) > 0, "the budget was tried"
        assert slots.free(0) == 1000 - (100 + 101 + 102 + 103)
        assert {holding.pid for holding in slots.holders(0)} == {worker.pid for worker in workers}
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    assert slots.free(0) == 1000


def test_owners_of_one_name_in_two_processes_are_two(slots: Slots) -> None:
    slots.hold(0, "p1/0", 100)
    with another_process(lambda: slots.hold(0, "p1/0", 200)) as pid:
        assert {(holding.pid, holding.nbytes) for holding in slots.holders(0)} == {(os.getpid(), 100), (pid, 200)}
        slots.drop(0, "p1/0")
        assert slots.free(0) == 800


def test_a_killed_holder_frees_its_slot_even_before_its_parent_looks(slots: Slots) -> None:
    with another_process(lambda: slots.hold(0, "p1/0", 900)) as pid:
        assert slots.free(0) == 100
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead now, and still a zombie
        assert slots.free(0) == 1000
        slots.hold(0, "p2/0", 1000)


def test_whatever_a_dead_process_left_is_harmless_and_removed_by_the_next_writer(slots: Slots, tmp_path: Path) -> None:
    with another_process(lambda: slots.hold(0, "p1/0", 900)):
        page = next(tmp_path.glob("*.json"))
    for leftover in (page, page.with_suffix(".half")):
        leftover.write_bytes(b'[{"gpu": 0, "own')
    assert slots.free(0) == 1000
    slots.hold(0, "p2/0", 1)
    assert sorted(os.listdir(tmp_path)) == [f"{this_process()}.json", "lock"]


def test_a_lock_does_not_outlive_its_process(slots: Slots) -> None:
    def stop_within() -> None:
        slots._locked(2).__enter__()  # LOCK_EX

    with another_process(stop_within) as pid:
        os.kill(pid, signal.SIGKILL)
        slots.hold(0, "p1/0", 1)
    assert slots.used(0) == 1


def test_a_pid_that_was_used_again_is_another_process(slots: Slots, tmp_path: Path) -> None:
    slots.hold(0, "p1/0", 300)
    mine = this_process()
    (tmp_path / f"{mine}.json").rename(tmp_path / f"{mine._replace(started=mine.started - 1)}.json")
    assert slots.free(0) == 1000


def test_a_damaged_page_of_a_living_process_is_named(slots: Slots, tmp_path: Path) -> None:
    page = tmp_path / f"{this_process()}.json"
    page.write_bytes(b"[1]")
    with pytest.raises(OperationFailed, match=rf"{page.name} is damaged although its process lives"):
        slots.free(0)


def test_a_process_has_a_name_that_is_read_back() -> None:
    mine = this_process()
    assert parse(str(mine)) == mine
    assert mine.alive
    assert not Process(mine.pid, mine.started + 1).alive
    assert [parse(name) for name in ("lock", "12", "12-", "-12", "1-2-3", "a-b")] == [None] * 6
