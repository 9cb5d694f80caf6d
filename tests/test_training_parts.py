"""The parts of a trainer that need no process group: advantages, batches, weight layout, refusals, parking."""

import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

from training_world import SHAPE, make_rows  # noqa: E402

from backends.ray_gpu.meeting import loopback_store  # noqa: E402
from backends.ray_gpu.training import layout  # noqa: E402
from backends.ray_gpu.training.architecture import Architecture, Rope, check_parallel, read_architecture  # noqa: E402
from backends.ray_gpu.training.batches import batches_of, micro_batches, shares  # noqa: E402
from backends.ray_gpu.training.conversion import HfFolder  # noqa: E402
from backends.ray_gpu.training.grpo import group_advantages, policy_loss  # noqa: E402
from backends.ray_gpu.training.offload import Parking  # noqa: E402
from backends.ray_gpu.training.records import Row, TrainerConfig, check_config  # noqa: E402
from core.errors import ConfigError  # noqa: E402

REWARDS = st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100, allow_subnormal=False)), max_size=40)


# --- advantages -------------------------------------------------------------------------------------------


def by_group(values, groups) -> dict:
    found: dict = {}
    for value, group in zip(values, groups, strict=True):
        found.setdefault(group, []).append(value)
    return found


@given(REWARDS)
def test_advantages_of_a_group_have_mean_zero_and_deviation_at_most_one(drawn) -> None:
    groups, rewards = [group for group, _ in drawn], [reward for _, reward in drawn]
    for members in by_group(group_advantages(rewards, groups), groups).values():
        assert math.fsum(members) == pytest.approx(0, abs=1e-6 * len(members))
        assert math.fsum(value**2 for value in members) / len(members) <= 1 + 1e-9


@given(REWARDS)
def test_a_better_reward_never_gets_a_smaller_advantage_within_its_group(drawn) -> None:
    groups, rewards = [group for group, _ in drawn], [reward for _, reward in drawn]
    advantages = group_advantages(rewards, groups)
    for pairs in by_group(zip(rewards, advantages, strict=True), groups).values():
        assert [advantage for _, advantage in sorted(pairs)] == sorted(advantage for _, advantage in pairs)


@given(REWARDS, st.randoms(use_true_random=False))
def test_groups_do_not_see_each_other_nor_the_order(drawn, chance: random.Random) -> None:
    order = list(range(len(drawn)))
    chance.shuffle(order)
    straight = group_advantages([reward for _, reward in drawn], [group for group, _ in drawn])
    shuffled = group_advantages([drawn[i][1] for i in order], [drawn[i][0] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-9, abs=1e-9)
    for group, rewards in by_group([reward for _, reward in drawn], [group for group, _ in drawn]).items():
        alone = group_advantages(rewards, [0] * len(rewards))
        assert by_group(straight, [group for group, _ in drawn])[group] == alone


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_rewards_teach_exactly_nothing(reward: float, count: int) -> None:
    assert group_advantages([reward] * count, ["g"] * count) == [0.0] * count


def test_advantages_of_a_known_group() -> None:
    deviation = math.sqrt(3 / 16)
    wanted = [0.75 / (deviation + 1e-6)] + [-0.25 / (deviation + 1e-6)] * 3
    assert group_advantages([1, 0, 0, 0], ["g"] * 4) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="2 rewards but 1 groups"):
        group_advantages([1, 0], ["g"])


@given(
    st.lists(st.tuples(*[st.floats(-3, 3)] * 4), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 0.2, 0.4]), st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_the_policy_loss_of_each_token_by_hand(tokens, low: float, high: float, kl_coef: float) -> None:
    now, old, advantage, base = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    found = policy_loss(
        now, old, advantage, clip_low=low, clip_high=high, kl_coef=kl_coef, reference=base if kl_coef else None
    )
    for index, (lp, before, adv, ref) in enumerate(tokens):
        ratio = math.exp(lp - before)
        bounded = min(max(ratio, 1 - low), 1 + high)
        kl = math.exp(ref - lp) - (ref - lp) - 1 if kl_coef else 0.0
        assert found.loss[index].item() == pytest.approx(-min(ratio * adv, bounded * adv) + kl_coef * kl)
        assert found.kl[index].item() == pytest.approx(kl)
        assert found.clipped[index].item() == (bounded * adv < ratio * adv)


# --- batches ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    groups = micro_batches(lengths, limit)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) * max(lengths[index] for index in group) <= limit or len(group) == 1


def test_micro_batches_are_filled() -> None:
    assert micro_batches([10] * 6, 30) == [[0, 1, 2], [3, 4, 5]]
    assert micro_batches([1, 9, 2, 8], 18) == [[1, 3], [2, 0]]


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 99))
def test_shares_hold_every_row_once_and_are_even(count: int, ranks: int, seed: int) -> None:
    rows = make_rows(count, seed)
    taken = shares(rows, ranks)
    assert sorted(index for share in taken for index in share) == list(range(count))
    loads = [sum(len(rows[index].tokens) for index in share) for share in taken]
    assert max(loads) - min(loads) <= max((len(row.tokens) for row in rows), default=0)


@given(st.integers(1, 12), st.integers(0, 99), st.integers(1, 60))
def test_a_batch_points_at_every_generated_token(count: int, seed: int, limit: int) -> None:
    rows = make_rows(count, seed)
    seen = []
    for batch in batches_of(rows, list(range(count)), limit, torch.device("cpu")):
        inputs, at = batch.ids.flatten().tolist(), 0
        for line, (index, generated) in enumerate(zip(batch.rows, batch.counts, strict=True)):
            row, mine = rows[index], slice(at, at + generated)
            starts = [where - line * batch.ids.shape[1] for where in batch.where[mine].tolist()]
            assert starts == list(range(row.prompt_tokens - 1, len(row.tokens) - 1))
            assert [inputs[where] for where in batch.where[mine]] == list(row.tokens[row.prompt_tokens - 1 : -1])
            assert tuple(batch.targets[mine].tolist()) == row.tokens[row.prompt_tokens :]
            assert batch.behaviour[mine].tolist() == pytest.approx(row.logprobs)
            assert batch.advantages[mine].tolist() == pytest.approx([row.advantage] * generated)
            seen, at = [*seen, index], at + generated
    assert sorted(seen) == list(range(count))


# --- layout -----------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 40))
def test_joining_the_pieces_gives_back_every_bit(tp, per_group, tied, qkv_bias, qk_norm, vocab) -> None:
    arch = Architecture(
        name="any", layers=2, hidden=12, ffn=16, heads=4 * per_group, kv_heads=4, head_dim=6, vocab=vocab,
        max_positions=8, norm_eps=1e-6, tied=tied, qkv_bias=qkv_bias, qk_norm=qk_norm, rope=Rope(),
    )  # fmt: skip
    chance = torch.Generator().manual_seed(vocab)
    for entry in layout.entries(arch):
        tensors = [torch.randn(shape, generator=chance) for shape in entry.shapes]
        pieces = [layout.cut(entry, tensors, arch, rank, tp) for rank in range(tp)]
        assert {tuple(piece.shape) for piece in pieces} == {layout.piece_shape(entry, arch, tp)}
        back = layout.join(entry, pieces, arch)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(back, tensors, strict=True))


def test_a_group_s_queries_lie_before_its_key_and_value() -> None:
    arch = Architecture(
        name="any", layers=1, hidden=1, ffn=2, heads=4, kv_heads=2, head_dim=1, vocab=2, max_positions=8,
        norm_eps=1e-6, tied=True, qkv_bias=False, qk_norm=False, rope=Rope(),
    )  # fmt: skip
    entry = next(entry for entry in layout.entries(arch) if entry.kind == "qkv")
    query, key, value = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert layout.cut(entry, [query, key, value], arch, 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert layout.cut(entry, [query, key, value], arch, 1, 2).flatten().tolist() == [2, 3, 11, 21]


# --- refusals ---------------------------------------------------------------------------------------------


def write_config(folder: Path, **given) -> str:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **given}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
         r"unsupported architecture: MixtralForCausalLM; supported are LlamaForCausalLM, Qwen2.*, Qwen3ForCausalLM"),
        ({"architectures": None}, r"none declared \(model_type llama\)"),
        ({"attention_bias": True}, "LlamaForCausalLM with attention_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type dynamic"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True},
         "use_sliding_window = True"),
    ],
    ids=["architecture", "none", "bias", "activation", "rope", "window"],
)  # fmt: skip
def test_a_model_that_would_be_trained_wrongly_is_refused_by_name(tmp_path, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_architecture(write_config(tmp_path, **settings))


def test_a_folder_without_a_usable_config_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        read_architecture(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_architecture(str(tmp_path))


def test_a_model_that_does_not_divide_is_refused(tmp_path) -> None:
    arch = read_architecture(write_config(tmp_path))
    check_parallel(arch, 2, 2)
    with pytest.raises(ConfigError, match="2 key/value heads, which 4 ranks"):
        check_parallel(arch, 4, 1)
    with pytest.raises(ConfigError, match="2 layers, which 4 stages"):
        check_parallel(arch, 1, 4)


def test_weights_that_are_missing_broken_or_of_another_shape_are_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        HfFolder(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match="not readable as safetensors"):
        HfFolder(str(tmp_path))
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    folder = HfFolder(str(tmp_path))
    assert torch.equal(folder.tensor("a", (2, 3)), torch.ones(2, 3))
    with pytest.raises(ConfigError, match="no tensor b"):
        folder.tensor("b", (1,))
    with pytest.raises(ConfigError, match=r"a has the shape \(2, 3\), config.json says \(3, 2\)"):
        folder.tensor("a", (3, 2))


def test_weights_in_several_files_are_found_by_the_index(tmp_path) -> None:
    from safetensors.torch import save_file

    for name in ("a", "b"):
        save_file({name: torch.full((2,), float(ord(name)))}, tmp_path / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in ("a", "b")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = HfFolder(str(tmp_path))
    assert [folder.tensor(name, (2,))[0].item() for name in ("a", "b")] == [97.0, 98.0]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"tp": 0}, "trainer.tp"),
        ({"world_size": 3, "tp": 2}, "trainer.world_size"),
        ({"rank": 1}, "trainer.rank"),
        ({"dtype": "bfloat16"}, "trainer.dtype"),
        ({"learning_rate": math.nan}, "trainer.learning_rate"),
        ({"kl_coef": -0.1}, "trainer.kl_coef"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_no_trainer_can_have_are_refused(settings: dict, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(TrainerConfig(model="m", master_port=1, **settings))
    assert caught.value.where == where


# --- parking ----------------------------------------------------------------------------------------------


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_parking_gives_back_memory_and_brings_back_every_bit(monkeypatch) -> None:
    monkeypatch.setattr("backends.ray_gpu.training.offload.SLAB_BYTES", 64)  # every tensor spans several slabs
    base = torch.randn(7, 11)
    kept = [base, base[2:4], torch.randn(5).to(torch.bfloat16), torch.arange(3), torch.empty(0)]
    before = [tensor.clone() for tensor in kept]
    gradients = torch.randn(4, 4)
    parking = Parking(kept, [gradients, base], cuda=False)
    sizes = 7 * 11 * 4 + 5 * 2 + 3 * 8
    assert (parking.nbytes, parking.resident_bytes, parking.host_bytes) == (sizes + 64, sizes + 64, 0)
    for _ in range(2):
        parking.park()
        assert (parking.resident_bytes, parking.host_bytes, parking.loaded) == (0, sizes, False)
        parking.load()
        assert parking.resident_bytes == sizes + 64
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, before, strict=True))
        assert not gradients.any()
        kept[0].add_(1)
        before = [tensor.clone() for tensor in kept]


def test_what_is_frozen_is_copied_out_once() -> None:
    weight = torch.ones(4)
    parking = Parking([weight], cuda=False, frozen=True)
    parking.park()
    parking.load()
    weight.add_(1)
    parking.park()
    parking.load()
    assert weight.tolist() == [1.0] * 4


def test_the_operating_system_sees_the_memory_go() -> None:
    gradients = torch.ones(64 << 20, dtype=torch.uint8)
    parking = Parking([], [gradients], cuda=False)
    loaded = resident_mib()
    parking.park()
    assert loaded - resident_mib() > 60
    assert parking.host_bytes == 0


def test_row_counts_its_generated_tokens() -> None:
    assert Row(tokens=(1, 2, 3), prompt_tokens=1, logprobs=(-1.0, -1.0), advantage=0.0).generated == 2


def test_a_group_of_one_meets_at_whichever_port_is_free_by_then() -> None:
    first, second = (loopback_store(0, world=1, host=True, timeout_s=20) for _ in range(2))
    first.set("at", "the first")
    assert first.port != second.port
    assert loopback_store(first.port, world=1, host=False, timeout_s=20).get("at") == b"the first"
