"""Which way weights take from a trainer to an engine; both ends of the two direct ways; and what a trainer lends."""

import multiprocessing
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.ray_gpu.meeting import loopback_store
from backends.ray_gpu.plan import CrewPlan
from backends.ray_gpu.ways import direct_ranks, ways_of
from backends.ray_gpu.weights.choice import AGREE, ASKED, Side, choose
from core.errors import ConfigError, OperationFailed, OutOfMemory
from core.model import Cluster, OnPreempt
from core.scenario_file import parse_scenario

torch = pytest.importorskip("torch", reason="torch is not installed")

from backends.ray_gpu.weights.reader import read  # noqa: E402
from backends.ray_gpu.weights.staged import Staging, digest, tensors  # noqa: E402
from backends.ray_gpu.weights.transports import (  # noqa: E402
    BACKENDS,
    Meeting,
    close_group,
    export_handles,
    join_group,
    open_group,
    open_handles,
    receive,
    send,
)
from backends.ray_gpu.weights.writer import WeightWriter  # noqa: E402
from backends.ray_gpu.workers.lender import Lender, nccl_settings  # noqa: E402

LIMIT_S = 300
"""How long a thread or process of a test may take; it takes milliseconds, and importing torch a second or two."""


def on_cards(count):
    there = torch.cuda.device_count()
    return [pytest.mark.gpu, pytest.mark.skipif(there < count, reason=f"needs {count} NVIDIA GPUs, there are {there}")]


# --- the choice -------------------------------------------------------------------------------------------


def side(**changes):
    return Side(**({"node": 0, "cards": (0,), "nccl": ("0", "1", "unset")} | changes))


TRAINER = side()


@pytest.mark.parametrize(
    ("engine", "asked", "transport", "reason"),
    [
        (side(), "auto", "ipc", "trainer and engine share a card"),
        (side(cards=(1,)), "auto", "broadcast", "cards of one node; not ipc: a rank of the engine is on another"),
        (side(cards=(0, 1)), "auto", "cache", "not broadcast: NCCL cannot join two ranks on one card"),
        (side(cards=(1, 2)), "auto", "broadcast", "on cards of one node"),
        (side(node=1, cards=(9,)), "auto", "cache", "they are on two nodes"),
        (side(awake=False), "auto", "cache", "the engine's weights are asleep"),
        (side(drains=True), "auto", "cache", "the engine drains before it takes weights"),
        (side(drains=True), "ipc", "ipc", "asked for"),
        (
            side(cards=(1,), nccl=("unset", "1", "unset")), "auto", "cache",
            "NCCL_CUMEM_ENABLE is 0 in the trainer and unset in the engine",
        ),
        (
            side(cards=(1,), nccl=("0", "1", "1048576")), "broadcast", "cache",
            "broadcast was asked for, but NCCL_BUFFSIZE is unset in the trainer and 1048576 in the engine",
        ),
        (side(), "cache", "cache", "asked for"),
        (side(), "broadcast", "cache", "broadcast was asked for, but NCCL cannot join two ranks on one card"),
        (side(cards=(1,)), "ipc", "cache", "ipc was asked for, but a rank of the engine is on another card"),
    ],
)  # fmt: skip
def test_the_transport_follows_from_where_both_sides_are_and_says_why(engine, asked, transport, reason):
    choice = choose("cuda", TRAINER, engine, asked)
    assert choice.transport == transport
    assert reason in choice.why


def test_a_trainer_that_sleeps_leaves_only_the_cache():
    choice = choose("cuda", side(awake=False), side())
    assert (choice.transport, choice.why) == ("cache", "the trainer's weights are off the device")


@pytest.mark.parametrize("asked", ["ipc", "broadcast"])
def test_on_a_cpu_the_direct_ways_are_taken_only_if_asked_for(asked):
    assert choose("cpu", TRAINER, side()).why == "on a CPU the cache is in shared memory already"
    assert choose("cpu", TRAINER, side(cards=(1,)), asked).transport == asked


def test_an_unknown_transport_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="there is no 'rdma'; known: auto, cache, ipc, broadcast"):
        choose("cuda", TRAINER, side(), "rdma")


SIDES = st.builds(
    Side,
    node=st.integers(0, 1),
    cards=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
    nccl=st.tuples(st.sampled_from(("unset", "0", "1")), st.just("unset"), st.sampled_from(("unset", "1048576"))),
    awake=st.booleans(),
    drains=st.booleans(),
)


@settings(deadline=None)
@given(SIDES, SIDES)
def test_a_transport_that_cannot_work_is_never_chosen_and_one_that_can_is_taken_if_asked_for(trainer, engine):
    possible = {"cache"}
    for asked in ASKED:
        choice = choose("cuda", trainer, engine, asked)
        assert choice.why
        if choice.transport != "cache":
            assert trainer.node == engine.node
            assert trainer.awake and engine.awake
        if choice.transport == "ipc":
            assert set(engine.cards) == {trainer.cards[0]}
        if choice.transport == "broadcast":
            assert trainer.cards[0] not in engine.cards
            assert trainer.nccl == engine.nccl
        assert asked == "auto" or choice.transport in (asked, "cache")
        possible.add(choice.transport)
    # `auto` takes the fastest that can work at all, unless the trainer would have to wait for an engine that drains.
    best = next(way for way in ("ipc", "broadcast", "cache") if way in possible)
    assert choose("cuda", trainer, engine).transport == ("cache" if engine.drains else best)


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from(ASKED))
def test_whoever_falls_asleep_can_only_be_reached_through_the_cache(trainer, engine, asked):
    asleep = msgspec.structs.replace(engine, awake=False)
    assert choose("cuda", trainer, asleep, asked).transport == "cache"
    assert choose("cuda", msgspec.structs.replace(trainer, awake=False), engine, asked).transport == "cache"


def plan(train, infer, tp=1, **changes):
    text = f"""
cluster: {{nodes: 2, gpus_per_node: 4}}
pipelines:
  - {{id: p, train: {{gpus: {train}}}, infer: {{gpus: {infer}, tp: {tp}}}, steps: 1, batch: {{prompts: 1}}}}
"""
    scenario = parse_scenario(text, "x.yaml")
    return CrewPlan(**({"job": scenario.jobs[0], "seed": 0, "device": "cuda"} | changes)), scenario.cluster


def chosen(crew, cluster, devices=()):
    return [way.meant.transport for way in ways_of(crew, cluster, devices)]


def test_placement_on_cards_decides_for_each_engine():
    crew, cluster = plan([0], [0, 1, 4])
    assert chosen(crew, cluster) == ["ipc", "broadcast", "cache"]  # its own card; a neighbour; another node
    assert chosen(crew, cluster, (0, 0, 1, 1) * 2) == ["ipc", "ipc", "cache"]
    assert direct_ranks(ways_of(crew, cluster, ())) == (0, 1)


def test_an_engine_of_several_ranks_gets_a_broadcast_only_from_a_trainer_with_buffers_as_large():
    crew, cluster = plan([0], [2, 3], tp=2)
    (way,) = ways_of(crew, cluster, ())
    assert way.meant.transport == "cache"
    assert "NCCL_MAX_NCHANNELS is 1 in the trainer and unset in the engine" in way.meant.why
    assert chosen(*plan([0, 1], [2, 3], tp=2)) == ["broadcast"]


def test_an_engine_that_drains_is_not_waited_for_unless_a_way_was_asked_for():
    crew, cluster = plan([0], [1])
    spec = msgspec.structs.replace(crew.job.spec, on_preempt=OnPreempt.DRAIN)
    crew = msgspec.structs.replace(crew, job=msgspec.structs.replace(crew.job, spec=spec))
    assert chosen(crew, cluster) == ["cache"]
    assert chosen(msgspec.structs.replace(crew, transport="broadcast"), cluster) == ["broadcast"]


def test_a_cluster_without_the_transport_asked_for_is_refused():
    crew, cluster = plan([0], [1], transport="rdma")
    with pytest.raises(ConfigError, match="there is no 'rdma'"):
        ways_of(crew, cluster, ())
    assert isinstance(cluster, Cluster)


# --- a published version on the trainer's device ----------------------------------------------------------


def some_tensors():
    torch.manual_seed(5)
    return {
        "wide": torch.randn(300, 70), "half": torch.randn(33).to(torch.bfloat16), "none": torch.zeros(0),
        "odd": torch.randn(7).to(torch.bfloat16), "large": torch.randn(9000), "last": torch.ones(3),
    }  # fmt: skip


def published(folder, bucket_bytes=4096, version=3):
    """(manifest, buckets as staged), of the same tensors."""
    staging = Staging(bucket_bytes)
    with WeightWriter(folder, "p", version, bucket_bytes) as writer:
        for name, tensor in some_tensors().items():
            writer.add(name, tensor)
            staging.add(tensor)
        manifest = writer.commit()
    return manifest, staging.finish(manifest)


@pytest.mark.parametrize("bucket_bytes", [64, 4096, 1 << 20])
def test_what_is_lent_is_what_was_published_byte_for_byte(tmp_path, bucket_bytes):
    manifest, buckets = published(tmp_path, bucket_bytes)
    assert [bytes(bucket.numpy()) for bucket in buckets] == [Path(b.file).read_bytes() for b in manifest.buckets]
    lent = [pair for bucket, flat in zip(manifest.buckets, buckets, strict=True) for pair in tensors(bucket, flat)]
    for (name, tensor), (published_name, original) in zip(lent, read(manifest), strict=True):
        assert name == published_name
        assert torch.equal(tensor, original) and tensor.shape == original.shape


def test_what_is_lent_is_a_copy_and_never_the_models_own_memory():
    own = torch.ones(8)
    staging = Staging(64)
    staging.add(own)
    own.zero_()
    staging._close_bucket()
    assert staging._buckets[0].view(torch.float32).tolist() == [0.0] * 8  # read when the bucket is complete
    own.fill_(2)
    assert staging._buckets[0].view(torch.float32).tolist() == [0.0] * 8


def test_a_trainer_without_room_for_a_copy_lends_none_and_says_so(tmp_path):
    held = []

    def hold(nbytes):
        held.append(nbytes)
        if nbytes > 40_000:
            raise OutOfMemory("GPU 0 has no room for 80 KiB")

    staging = Staging(4096, hold)
    with WeightWriter(tmp_path, "p", 1, 4096) as writer:
        for name, tensor in some_tensors().items():
            writer.add(name, tensor)
            staging.add(tensor)
        manifest = writer.commit()
    assert staging.finish(manifest) == ()
    assert staging.refusal == "the trainer has no room for a copy to lend: GPU 0 has no room for 80 KiB"
    assert held[-1] == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_a_digest_changes_with_any_byte_and_is_the_sum_over_buckets(parts, data):
    buckets = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    before = digest(buckets)
    assert before == sum(digest([bucket]) for bucket in buckets) % 2**64
    which = data.draw(st.sampled_from(buckets))
    which[data.draw(st.integers(0, len(which) - 1))] += data.draw(st.integers(1, 255))
    assert digest(buckets) != before


# --- handles and broadcasts between processes ----------------------------------------------------------------


def _take(payload, answer):
    buckets = open_handles(payload)
    answer.put((digest(buckets), [len(bucket) for bucket in buckets]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cards(1))])
def test_another_process_reads_the_trainers_memory_through_handles(tmp_path, device):
    manifest, buckets = published(tmp_path)
    buckets = tuple(bucket.to(device) for bucket in buckets)
    payload = export_handles(buckets, "label")
    spawn = multiprocessing.get_context("spawn")  # unrelated, as an engine is: it inherits nothing
    answer = spawn.Queue()
    engine = spawn.Process(target=_take, args=(payload, answer))
    engine.start()
    assert answer.get(timeout=LIMIT_S) == (digest(buckets), [len(bucket) for bucket in buckets])
    engine.join(LIMIT_S)
    assert engine.exitcode == 0
    if device == "cuda":
        lender, held = Lender(), torch.cuda.memory_allocated()
        lender.offer(manifest, buckets)
        del buckets
        lender.withdraw()
        assert torch.cuda.memory_allocated() < held, "what was lent stays allocated"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def meeting(backend):
    port = free_port()
    return Meeting(name=f"p/engine-0/{port}", port=port, ranks=1, backend=backend, timeout_s=LIMIT_S)


def _receive_and_die(meeting, sizes, dies, answer):
    group = join_group(meeting, 1)
    arrived = []
    for bucket in receive(sizes, group, "cuda:1" if meeting.backend == "nccl" else "cpu"):
        arrived.append(digest([bucket]))
        if dies:
            answer.put(arrived)
            answer.close()
            answer.join_thread()
            multiprocessing.process.os._exit(1)
    answer.put(arrived)
    close_group(group)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cards(2))])
@pytest.mark.parametrize("dies", [False, True])
def test_buckets_are_broadcast_in_order_and_a_receiver_that_dies_ends_the_broadcast(dies, device, monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    meet = meeting(BACKENDS[device])
    buckets = [torch.full((size,), size % 251, dtype=torch.uint8, device=device) for size in (1 << 22, 5, 1 << 22)]
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    engine = spawn.Process(target=_receive_and_die, args=(meet, [len(b) for b in buckets], dies, answer))
    engine.start()
    group = open_group(meet)
    told, dead = [], threading.Event()
    arrived = None

    def notice():
        nonlocal arrived
        arrived = answer.get(timeout=LIMIT_S)
        engine.join(LIMIT_S)
        if dies:
            dead.set()  # as the control plane tells it, for NCCL, which would wait for ever

    watcher = threading.Thread(target=notice)
    watcher.start()
    try:
        send(buckets, group, dead)
        send(buckets, group, dead) if dies else None
    except OperationFailed as error:
        told.append(str(error))
    watcher.join(LIMIT_S)
    close_group(group, broken=dies)
    assert arrived == [digest([bucket]) for bucket in (buckets[:1] if dies else buckets)]
    assert bool(told) == dies
    assert not told or told[0].startswith(("the broadcast failed: ", "the engine is gone"))


# --- lending ---------------------------------------------------------------------------------------------------


def test_nothing_is_lent_before_an_offer_of_another_version_or_after_the_offload(tmp_path):
    manifest, buckets = published(tmp_path)
    lender = Lender()
    assert lender.lend("engine-0", 3, "", nccl_settings()).refusal == "the trainer's weights are off the device"
    lender.offer(manifest, buckets)
    assert lender.lend("engine-0", 4, "", nccl_settings()).refusal == "the trainer offers version 3"
    loan = lender.lend("engine-0", 3, "", nccl_settings())
    assert (loan.refusal, loan.digest) == ("", digest(buckets))
    lender.give_back("engine-0")
    assert lender.withdraw() is True
    assert lender.withdraw() is False
    assert lender.lend("engine-0", 3, "", nccl_settings()).refusal == "the trainer's weights are off the device"


@pytest.mark.parametrize("dead", [False, True])
def test_an_offload_waits_for_whoever_borrows_and_refuses_whoever_comes_meanwhile(tmp_path, dead):
    manifest, buckets = published(tmp_path)
    lender = Lender()
    lender.offer(manifest, buckets)
    for name in ("engine-0", "engine-1"):
        assert lender.lend(name, 3, "", nccl_settings()).payload
    offload = threading.Thread(target=lender.withdraw)
    offload.start()
    while not lender.lend("engine-2", 3, "", nccl_settings()).refusal:
        lender.give_back("engine-2")  # the offload has not begun yet
    lender.give_back("engine-1")
    offload.join(0.05)
    assert offload.is_alive()
    lender.give_back("engine-0", dead=dead)
    offload.join(LIMIT_S)
    assert not offload.is_alive()


def test_a_broadcast_is_refused_where_the_engines_nccl_is_set_otherwise(tmp_path, monkeypatch):
    manifest, buckets = published(tmp_path)
    monkeypatch.setenv(AGREE[0], "0")
    lender = Lender()
    lender.offer(manifest, buckets)
    theirs = ("1", *nccl_settings()[1:])
    assert lender.lend("engine-0", 3, None, theirs).refusal == f"{AGREE[0]} is 0 in the trainer and 1 in the engine"
    assert lender.lend("engine-0", 3, "", theirs).payload  # handles do not need NCCL


def test_nothing_is_sent_to_an_engine_that_has_borrowed_nothing(tmp_path):
    lender = Lender()
    lender.offer(*published(tmp_path))
    with pytest.raises(OperationFailed, match="engine-0 has borrowed nothing, or is in no group"):
        lender.send("engine-0")


def test_what_cannot_be_lent_is_told_until_the_trainer_offloads():
    lender = Lender()
    lender.cannot("the trainer has no room")
    assert lender.lend("engine-0", 3, "", nccl_settings()).refusal == "the trainer has no room"
    lender.withdraw()
    assert lender.lend("engine-0", 3, "", nccl_settings()).refusal == "the trainer's weights are off the device"


# --- where they meet -----------------------------------------------------------------------------------------

JOIN = """
import sys
from datetime import timedelta
import torch.distributed as dist
store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", 1, 2, timeout=timedelta(seconds=300)))
store.set("from the other", "here")
"""


def test_a_meeting_point_on_loopback_is_met_by_its_address_and_listens_nowhere_else():
    port = free_port()
    store = loopback_store(port, world=2, host=True, timeout_s=LIMIT_S)
    with subprocess.Popen([sys.executable, "-c", JOIN, str(port)]) as other:
        assert store.get("from the other") == b"here"
        assert other.wait() == 0
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listening = [line.split()[1] for line in lines if f":{port:04X} " in line and line.split()[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]
    with pytest.raises(OperationFailed, match=f"port {port} on loopback is taken"):
        loopback_store(port, world=2, host=True, timeout_s=LIMIT_S)
