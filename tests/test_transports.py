"""Which way weights take from a trainer to an engine, and the trainer's side of each."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.ray_gpu.meeting import loopback_store
from backends.ray_gpu.weights.transports import TRANSPORTS, Side, choose, export_ipc, flatten
from core.errors import ConfigError, OperationFailed

torch = pytest.importorskip("torch", reason="torch is not installed")


def side(**changes):
    return Side(**({"node": "a", "device": "cuda", "cards": ("GPU-0",), "cumem": "0"} | changes))


TRAINER = side()


@pytest.mark.parametrize(
    ("engine", "forced", "transport", "reason"),
    [
        (side(), "", "ipc", "trainer and engine share a card"),
        (
            side(cards=("GPU-1",)),
            "",
            "broadcast",
            "on two cards of one node; not ipc: a rank of the engine is on another",
        ),
        (side(cards=("GPU-0", "GPU-1")), "", "cache", "not broadcast: NCCL cannot join two ranks on one card"),
        (side(cards=("GPU-1", "GPU-2")), "", "broadcast", "on two cards"),
        (side(node="b", cards=("GPU-9",)), "", "cache", "not ipc: they are on two nodes"),
        (side(device="cpu", cards=()), "", "cache", "there is no GPU on both sides"),
        (side(awake=False), "", "cache", "the engine's weights are asleep"),
        (
            side(cards=("GPU-1",), cumem=None),
            "",
            "cache",
            "NCCL_CUMEM_ENABLE is 0 in the trainer and None in the engine",
        ),
        (side(), "cache", "cache", "asked for"),
        (side(), "ipc", "ipc", "asked for"),
        (side(), "broadcast", "cache", "broadcast was asked for, but NCCL cannot join two ranks on one card"),
        (side(cards=("GPU-1",)), "ipc", "cache", "ipc was asked for, but a rank of the engine is on another card"),
    ],
)
def test_the_transport_follows_from_where_both_sides_are_and_says_why(engine, forced, transport, reason):
    chosen, why = choose(TRAINER, engine, forced)
    assert chosen == transport
    assert reason in why


def test_a_trainer_that_sleeps_leaves_only_the_cache():
    assert choose(side(awake=False), side()) == (
        "cache",
        "not ipc: the trainer's weights are off the device; not broadcast: the trainer's weights are off the device",
    )


def test_an_unknown_transport_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="there is no 'rdma'; known: cache, ipc, broadcast"):
        choose(TRAINER, side(), "rdma")


SIDES = st.builds(
    Side,
    node=st.sampled_from("ab"),
    device=st.sampled_from(("cpu", "cuda")),
    cards=st.lists(st.sampled_from(("GPU-0", "GPU-1", "GPU-2")), min_size=1, max_size=3, unique=True).map(tuple),
    cumem=st.sampled_from((None, "0", "1")),
    awake=st.booleans(),
)


@given(SIDES, SIDES, st.sampled_from(("", *TRANSPORTS)))
def test_a_transport_that_cannot_work_is_never_chosen(trainer, engine, forced):
    transport, why = choose(trainer, engine, forced)
    assert why
    if transport != "cache":
        assert trainer.node == engine.node
        assert trainer.device == engine.device == "cuda"
        assert trainer.awake and engine.awake
    if transport == "ipc":
        assert set(engine.cards) == {trainer.cards[0]}
    if transport == "broadcast":
        assert trainer.cards[0] not in engine.cards
        assert trainer.cumem == engine.cumem
    if forced:
        assert transport in (forced, "cache")


def test_flattened_tensors_lie_one_after_another_and_come_back_as_they_were():
    named = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3, dtype=torch.bfloat16)), ("c", torch.zeros(0))]
    entries, flat = flatten(named)
    assert [(e.name, e.dtype, e.shape, e.offset, e.nbytes) for e in entries] == [
        ("a", "float32", (2, 3), 0, 24), ("b", "bfloat16", (3,), 24, 6), ("c", "float32", (0,), 30, 0),
    ]  # fmt: skip
    for entry, (_, tensor) in zip(entries[:2], named[:2], strict=True):
        part = flat[entry.offset : entry.offset + entry.nbytes].view(tensor.dtype).reshape(entry.shape)
        assert torch.equal(part, tensor)


def test_a_tensor_that_would_not_be_aligned_is_refused():
    with pytest.raises(OperationFailed, match="b would begin at byte 2"):
        flatten([("a", torch.ones(1, dtype=torch.bfloat16)), ("b", torch.ones(1))])


def test_there_is_no_handle_to_a_tensor_on_the_cpu():
    with pytest.raises(OperationFailed, match="a is not on a GPU"):
        export_ipc([("a", torch.ones(1))])


JOIN = """
import sys
from datetime import timedelta
import torch.distributed as dist
store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", 1, 2, timeout=timedelta(seconds=30)))
store.set("from the other", "here")
"""


def test_a_meeting_point_on_loopback_is_met_by_its_address_and_listens_nowhere_else():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = loopback_store(port, world=2, host=True, timeout_s=30)
    with subprocess.Popen([sys.executable, "-c", JOIN, str(port)]) as other:
        assert store.get("from the other") == b"here"
        assert other.wait() == 0
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listening = [line.split()[1] for line in lines if f":{port:04X} " in line and line.split()[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]
    with pytest.raises(OperationFailed, match=f"port {port} on loopback is taken"):
        loopback_store(port, world=2, host=True, timeout_s=30)
