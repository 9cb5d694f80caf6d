"""Cards as NVML shows them, the map from logical GPUs to cards, and whose memory is whose; on a fake driver, and on a
real one where there is one (marked `gpu`)."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.ray_gpu.devices.attribution import Tenant, leftovers, readings, split_card, unnamed
from backends.ray_gpu.devices.budget import cards_of
from backends.ray_gpu.devices.cuda_map import CudaMap, LogicalGpu, parse_devices, prove, visible_cards
from backends.ray_gpu.devices.gpu_watch import FRESH_S, GpuWatch
from backends.ray_gpu.devices.nvml import Card, Nvml, ProcessMemory
from core.errors import ConfigError, OperationFailed
from core.model import Cluster
from core.units import gib

GIB = gib(1)


class FakeNvml:
    """As much of `pynvml` as is used, over plain data: [(total, used, reserved, [(pid, bytes)])] by index."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self, cards, *, old_driver=False, broken=False):
        self.cards, self.old_driver, self.broken, self.open = cards, old_driver, broken, False

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open = True

    def nvmlShutdown(self):
        self.open = False

    def nvmlDeviceGetCount(self):
        if not self.open:
            raise self.NVMLError("Uninitialized")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}{handle}-card".encode()

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        total, used, reserved, _ = self.cards[handle]
        if version is None:  # version 1 counts what is reserved as used
            return SimpleNamespace(total=total, used=used + reserved, free=total - used - reserved)
        if self.old_driver:
            raise self.NVMLError("Argument Version Mismatch")
        return SimpleNamespace(total=total, used=used, reserved=reserved, free=total - used - reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in self.cards[handle][3]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        raise self.NVMLError("Not Supported")


def card(index=0, used=0, processes=(), total=100):
    named = tuple(ProcessMemory(pid=pid, nbytes=nbytes) for pid, nbytes in processes)
    return Card(index=index, uuid=f"GPU-{index}", name="fake", total=total, used=used, processes=named)


CARDS = (card(0), card(1))


# --- NVML ---------------------------------------------------------------------------------------------------


def test_a_card_is_read_with_what_the_driver_reserves_left_out_of_what_programs_can_have():
    with Nvml(FakeNvml([(143 * GIB, 5 * GIB, 1 * GIB, [(7, 4 * GIB), (8, None)])])) as nvml:
        (seen,) = nvml.cards()
    assert (seen.total, seen.used, seen.free) == (142 * GIB, 5 * GIB, 137 * GIB)
    assert seen.uuid == "GPU-00-card"
    assert seen.processes == (ProcessMemory(pid=7, nbytes=4 * GIB), ProcessMemory(pid=8, nbytes=None))
    assert seen.attributed == 4 * GIB


def test_an_old_driver_is_read_by_its_first_version():
    (seen,) = Nvml(FakeNvml([(143 * GIB, 5 * GIB, 1 * GIB, [])], old_driver=True)).cards()
    assert (seen.total, seen.free) == (143 * GIB, 137 * GIB)


def test_without_a_driver_the_error_says_what_to_look_at():
    with pytest.raises(ConfigError, match="Driver Not Loaded; is the NVIDIA driver running"):
        Nvml(FakeNvml([], broken=True))


def test_a_reading_that_fails_is_the_worlds_fault():
    nvml = Nvml(FakeNvml([]))
    nvml.close()
    with pytest.raises(OperationFailed, match="Uninitialized"):
        nvml.cards()


# --- the map ------------------------------------------------------------------------------------------------


def test_by_default_there_is_one_logical_gpu_on_each_card_with_all_of_it():
    world = parse_devices("", CARDS)
    assert [(gpu.id, gpu.uuid, gpu.budget) for gpu in world.gpus] == [(0, "GPU-0", 100), (1, "GPU-1", 100)]


def test_two_logical_gpus_on_one_card_share_it():
    world = parse_devices("0,0", CARDS)
    assert [(gpu.id, gpu.uuid, gpu.budget) for gpu in world.gpus] == [(0, "GPU-0", 50), (1, "GPU-0", 50)]
    assert world.same_card(0, 1)


def test_budgets_are_in_gib_and_the_rest_of_the_card_goes_to_those_without():
    world = parse_devices("0@3,0,1@2", (card(0, total=10 * GIB), card(1, total=10 * GIB)))
    assert [gpu.budget for gpu in world.gpus] == [3 * GIB, 7 * GIB, 2 * GIB]


def test_a_node_may_count_its_gpus_from_another_number():
    assert [gpu.id for gpu in parse_devices("0,1", CARDS, first=8).gpus] == [8, 9]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2", "'2' is none of the cards here; they are 0 .GPU-0., 1 .GPU-1."),
        ("GPU-", "'GPU-' is none"),
        ("0,x", "'x' is none"),
        ("0@none", "gives no budget"),
        ("0@-1", "gives no budget"),
        ("0@nan", "gives no budget"),
        ("0@1", "do not fit on card 0"),
    ],
)
def test_devices_that_are_not_there_or_do_not_fit_are_refused_with_what_is(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_devices(text, CARDS)


def test_no_card_at_all_is_refused():
    with pytest.raises(ConfigError, match="no NVIDIA card is visible"):
        parse_devices("", ())


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-1", [1]), ("", []), ("1,9,0", [1]), (" 1 , 0", [1, 0]), ("GPU-", [])],
)
def test_cards_are_visible_as_cuda_counts_them(visible, indices):
    assert [seen.index for seen in visible_cards(CARDS, visible)] == indices


def test_numbers_count_the_visible_cards():
    assert parse_devices("0", visible_cards(CARDS, "1")).gpus[0].uuid == "GPU-1"


def test_a_worker_is_shown_its_own_cards_in_rank_order():
    shown = parse_devices("1,0", CARDS).environment((0, 1))
    assert shown["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"


def test_a_worker_group_cannot_have_two_ranks_on_one_card():
    with pytest.raises(ConfigError, match="GPUs 0, 1 of one worker group lie on the same card"):
        parse_devices("0,0", CARDS).environment((0, 1))


def test_a_worker_on_another_card_than_it_was_pointed_at_is_found_out():
    world = parse_devices("0,1", CARDS)
    prove(world, {0: "GPU-0", 1: "GPU-1"})
    with pytest.raises(OperationFailed, match="a worker for GPU 1 runs on the card GPU-0, not on GPU-1"):
        prove(world, {0: "GPU-0", 1: "GPU-0"})


@given(st.lists(st.sampled_from("01"), min_size=1, max_size=6), st.integers(1, 1 << 40))
def test_budgets_without_a_size_never_exceed_their_card(entries, total):
    cards = (card(0, total=total * 8), card(1, total=total * 8))
    world = parse_devices(",".join(entries), cards)
    for seen in cards:
        budgets = [gpu.budget for gpu in world.on_card(seen.uuid)]
        assert sum(budgets) <= seen.total
        assert all(budget >= seen.total // len(budgets) for budget in budgets)


# --- what --devices asks for --------------------------------------------------------------------------------

TWO = Cluster(nodes=1, gpus_per_node=2, gpu_memory=140 * GIB, host_memory=GIB, memory_margin=0)


def cards_asked(*entries, address=None, totals=(140 * GIB, 100 * GIB)):
    nvml = Nvml(FakeNvml([(total, 0, 0, []) for total in totals]))
    return cards_of("cuda", entries, TWO, address, nvml)


def test_without_budgets_each_gpu_gets_an_equal_share_of_the_fullest_card():
    assert cards_asked() == ((), 100 * GIB)
    assert cards_asked(0, 0) == ((0, 0), 70 * GIB)
    assert cards_asked(1, 0) == ((1, 0), 100 * GIB)


def test_budgets_and_uuids_are_taken_from_the_command_line():
    assert cards_asked("0@60", "0@60") == ((0, 0), 60 * GIB)
    assert cards_asked("GPU-11", "GPU-00") == ((1, 0), 100 * GIB)
    assert cards_asked("GPU-11-card@0.5", "0@0.5") == ((1, 0), GIB // 2)


def test_on_a_cpu_and_elsewhere_nobody_looks_at_cards():
    assert cards_of("cpu", (), TWO, None) == ((), None)
    assert cards_of("cuda", (0, 0), TWO, "10.0.0.1:6379") == ((0, 0), None)
    assert cards_of("cuda", ("0@60", "0@60"), TWO, "10.0.0.1:6379") == ((0, 0), 60 * GIB)


@pytest.mark.parametrize(
    ("entries", "address", "says"),
    [
        ((2, 0), None, "card 2 is not on this machine, which has 2; put several"),
        (("0@60", "0@70"), None, "budgets differ .@60 and @70.; all GPUs of a cluster have the same memory"),
        (("0@60", 0), None, "budgets differ .@60 and none."),
        (("0@71", "0@71"), None, "budgets of 142 GiB do not fit on card 0, which has 140 GiB; make them smaller"),
        (("GPU-2", 0), None, "GPU-2 is the beginning of 0 cards' UUIDs; cards here: 0 .GPU-00-card., 1"),
        (("GPU-", 0), None, "GPU- is the beginning of 2 cards' UUIDs"),
        (("GPU-00", 0), "10.0.0.1:6379", "GPU-00: cards of a cluster elsewhere go by number"),
    ],
)
def test_devices_that_cannot_be_are_refused_before_the_run(entries, address, says):
    with pytest.raises(ConfigError, match=f"^--devices: {says}"):
        cards_asked(*entries, address=address)


# --- whose memory it is -------------------------------------------------------------------------------------

SHARED = parse_devices("0,0", CARDS)
P1 = Tenant(owner="p1/train", gpus=(0,), pids=(10,), witnesses=(10,))
P2 = Tenant(owner="p2/infer/0", gpus=(1,), pids=(20, 21, 22), witnesses=(21,))


def test_logical_gpus_on_one_card_are_told_apart_by_process():
    seen = card(used=62, processes=[(10, 30), (21, 25), (99, 5)])
    first, second = readings(SHARED, [seen], [P1, P2], {"GPU-0": 2})
    assert (first.method, first.used, first.tenants) == ("process", 30, {"p1/train": 30})
    assert (second.used, second.tenants) == (25, {"p2/infer/0": 25})
    assert first.foreign == second.foreign == (ProcessMemory(pid=99, nbytes=5),)
    assert (first.free, second.free) == (20, 25)


def test_what_is_free_on_the_card_limits_what_is_free_of_a_budget():
    (first, _) = readings(SHARED, [card(used=95, processes=[(99, 95)])], [])
    assert (first.used, first.free) == (0, 5)


def test_memory_that_a_dead_process_has_not_given_back_counts_against_everybody_on_the_card():
    before, after = card(used=2), card(used=32)  # 30 bytes, and nobody is named for them
    baseline = unnamed([before])
    first, second = readings(SHARED, [after], [], baseline)
    assert (first.unexplained, first.used, first.free) == (30, 30, 20)
    assert second.free == 20
    assert [reading.free for reading in readings(SHARED, [before], [], baseline)] == [50, 50]


def test_where_the_driver_names_other_pids_the_card_is_read_by_its_total_and_says_so():
    seen = card(used=70, processes=[(10, 30), (4242, 40)])  # pid 21 has a context, but not by that name
    for reading in readings(SHARED, [seen], [P1, P2]):
        assert reading.method == "card"
        assert reading.reason == "the driver does not name process 21 of p2/infer/0, which has a context there"
        assert (reading.free, reading.used, reading.foreign) == (30, 20, ())


def test_where_the_driver_hides_amounts_the_card_is_read_by_its_total():
    (first, _) = readings(SHARED, [card(used=70, processes=[(10, None), (21, 5)])], [P1, P2])
    assert (first.method, first.free) == ("card", 30)
    assert first.reason == "the driver does not say what process 10 of p1/train holds"


def test_a_worker_with_two_logical_gpus_on_one_card_is_read_by_the_total():
    both = Tenant(owner="p1/train", gpus=(0, 1), pids=(10,))
    (first, _) = readings(SHARED, [card(used=40, processes=[(10, 40)])], [both])
    assert (first.method, first.reason) == ("card", "p1/train has several logical GPUs on it")


def test_a_card_that_is_gone_has_nothing_free():
    (first, second) = readings(SHARED, [], [P1])
    assert (first.free, second.free) == (0, 0)
    assert first.reason == "the card GPU-0 is not there any more"


def test_an_engine_over_two_cards_is_held_against_each_of_its_gpus():
    world = parse_devices("0,1", CARDS)
    engine = Tenant(owner="p1/infer/0", gpus=(0, 1), pids=(20, 21, 22), witnesses=())
    cards = [card(0, used=30, processes=[(21, 30)]), card(1, used=40, processes=[(22, 40)])]
    assert [reading.used for reading in readings(world, cards, [engine])] == [30, 40]


def test_what_is_left_after_a_run_is_told_by_card():
    assert leftovers([card(0, used=5), card(1, used=5)], [card(0, used=9), card(1, used=60)], tolerance=10) == {
        "GPU-1": 55
    }


TENANTS = st.lists(st.tuples(st.sampled_from((0, 1)), st.sets(st.integers(1, 30), max_size=4)), max_size=4)
PROCESSES = st.dictionaries(st.integers(1, 40), st.integers(0, 50), max_size=12)


def disjoint(drawn):
    """Tenants of the shared card, each pid belonging to the first that has it."""
    taken, tenants = set(), []
    for at, (gpu, pids) in enumerate(drawn):
        tenants.append(Tenant(owner=f"t{at}", gpus=(gpu,), pids=tuple(sorted(pids - taken))))
        taken |= pids
    return tenants


@given(TENANTS, PROCESSES, st.integers(0, 100))
def test_every_byte_of_a_card_belongs_to_somebody_and_sums_add_up(drawn, processes, extra):
    tenants = disjoint(drawn)
    used = sum(processes.values()) + extra
    split = split_card(card(used=used, processes=sorted(processes.items())), SHARED.gpus, tenants)
    held = sum(sum(owners.values()) for owners in split.held.values())
    foreign = sum(process.nbytes or 0 for process in split.foreign)
    assert held + foreign + split.nobody == used


@given(TENANTS, PROCESSES)
def test_foreign_memory_is_never_attributed_and_ours_is_never_foreign(drawn, processes):
    tenants = disjoint(drawn)
    ours = {pid for tenant in tenants for pid in tenant.pids}
    seen = card(used=sum(processes.values()), processes=sorted(processes.items()), total=10_000)
    for reading in readings(SHARED, [seen], tenants):
        assert {process.pid for process in reading.foreign} == set(processes) - ours
        mine = [t for t in tenants if t.gpus == (reading.gpu,)]
        assert sum(reading.tenants.values()) == sum(processes.get(pid, 0) for t in mine for pid in t.pids)


@given(TENANTS, PROCESSES, st.integers(0, 60), st.booleans())
def test_nothing_is_called_free_that_is_not(drawn, processes, extra, hide):
    tenants = disjoint(drawn)
    if hide:
        tenants.append(Tenant(owner="hidden", gpus=(0,), pids=(77,), witnesses=(77,)))
    used = sum(processes.values()) + extra
    seen = card(used=used, processes=sorted(processes.items()), total=max(100, used))
    for reading in readings(SHARED, [seen], tenants):
        assert 0 <= reading.free <= max(0, seen.free)
        assert reading.free <= reading.budget
        assert (reading.method == "card") == hide


def test_the_rooms_import_nothing_heavy():
    modules = ("nvml", "cuda_map", "attribution", "gpu_watch")
    code = "; ".join(f"import backends.ray_gpu.devices.{name}" for name in modules)
    code += "; import sys; print(sorted({'torch', 'pynvml', 'ray'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


# --- the watch ----------------------------------------------------------------------------------------------


def watch(cards, records, budgets=None, devices=(0, 0)):
    nvml = FakeNvml(cards)
    return GpuWatch(lambda: records, budgets or {0: 50, 1: 50}, devices, Nvml(nvml)), nvml


def test_a_workers_children_count_for_it_without_being_recorded():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        watching, nvml = watch([(100, 0, 0, [])], {"p1/engine-0": ((os.getpid(),), (1,))})
        nvml.cards[0] = (100, 30, 0, [(child.pid, 30)])
        time.sleep(2 * FRESH_S)
        assert watching.used_by(1) == {"p1/engine-0": 30}
        assert (watching.free(0), watching.free(1)) == (50, 20)
        assert "GPU-00-card, read by process" in watching.describe()[1]
        child.stdin.close()


def test_a_foreign_process_is_told_of_and_not_counted_as_anybodys():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as stranger:
        watching, _ = watch([(100, 80, 0, [(stranger.pid, 80)])], {})
        assert watching.used_by(0) == {}
        assert watching.free(0) == 20
        assert "1 foreign processes on it" in watching.describe()[0]
        stranger.stdin.close()


def test_pids_of_another_namespace_make_the_watch_read_totals_and_say_so():
    watching, nvml = watch([(100, 0, 0, [])], {"p1/engine-0": ((os.getpid(),), (1,))})
    nvml.cards[0] = (100, 70, 0, [(2**22 + 1, 70)])  # above pid_max: no process can have this pid
    time.sleep(2 * FRESH_S)
    assert watching.free(0) == watching.free(1) == 30
    assert (
        "read by the card's total, because the driver names processes that do not exist here" in watching.describe()[1]
    )
    assert watching.used_by(1) == {"": 20}


def test_a_driver_that_names_nobody_makes_the_watch_read_totals():
    big = 10 * GIB
    watching, nvml = watch([(big, 0, 0, [])], {"w": ((os.getpid(),), (0,))}, {0: big // 2, 1: big // 2})
    assert "read by process" in watching.describe()[0]  # nothing is there yet, so nothing is hidden
    nvml.cards[0] = (big, 7 * GIB, 0, [])
    time.sleep(2 * FRESH_S)
    assert "because the driver names no processes" in watching.describe()[0]
    assert watching.free(1) == 3 * GIB


def test_memory_of_a_killed_worker_counts_until_the_driver_has_it_back():
    watching, nvml = watch([(100, 4, 0, [])], {})
    assert watching.free(0) == 50  # what was there at the start is the driver's own
    nvml.cards[0] = (100, 44, 0, [])
    time.sleep(2 * FRESH_S)
    assert watching.free(0) == 10
    assert watching.used_by(0) == {"": 40}


@pytest.mark.parametrize(
    ("budgets", "devices", "says"),
    [
        ({0: 50, 1: 50}, (0, 7), "card 7 is not on this node; there are cards 0"),
        ({0: 60, 1: 50}, (0, 0), "do not fit on card 0"),
    ],
)
def test_logical_gpus_that_cannot_be_placed_are_refused(budgets, devices, says):
    with pytest.raises(ConfigError, match=says):
        watch([(100, 0, 0, [])], {}, budgets, devices)


# --- on a real driver ---------------------------------------------------------------------------------------


@pytest.fixture
def real_cards():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    try:
        nvml = Nvml()
    except ConfigError as error:
        pytest.skip(f"no NVIDIA driver: {error}")
    with nvml:
        cards = visible_cards(nvml.cards(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not cards:
            pytest.skip("no NVIDIA card is visible")
        yield nvml, cards


HOLD = """
import os, sys, torch
from backends.ray_gpu.devices.cuda_map import cuda_uuids
held = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(os.getpid(), *cuda_uuids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_a_real_worker_runs_on_the_card_it_was_pointed_at_and_its_memory_is_attributed(real_cards):
    nvml, cards = real_cards
    world: CudaMap = parse_devices("0,0", cards)
    assert all(isinstance(gpu, LogicalGpu) for gpu in world.gpus)
    before = nvml.cards()
    env = os.environ | world.environment((1,))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        pid, *uuids = worker.stdout.readline().split()
        prove(world, {1: uuids[0]})
        assert len(uuids) == 1
        tenant = Tenant(owner="worker", gpus=(1,), pids=(int(pid),), witnesses=(int(pid),))
        first, second = readings(world, nvml.cards(), [tenant], unnamed(before))
        print("with a worker on GPU 1:", first, second)
        used = world[1].budget - second.free
        assert used >= 256 << 20
        if second.method == "process":
            assert first.tenants == {}
            assert second.tenants["worker"] >= 256 << 20
        worker.stdin.close()
    after = nvml.cards()
    print("left:", [now.used - then.used for then, now in zip(before, after, strict=True)])
    assert leftovers(before, after, tolerance=50 << 20) == {}
