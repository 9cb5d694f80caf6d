"""Trainer groups for real: Megatron-Core over gloo in separate processes, held against transformers and plain torch."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

if find_spec("megatron") is None:  # imported by the ranks only: it takes seconds
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402
from training_world import KINDS, VOCAB, Ranks, built, make_model, make_rows  # noqa: E402

from backends.ray_gpu.training.records import Row  # noqa: E402
from core.errors import ConfigError, OperationFailed, RequestError  # noqa: E402

ONE = {"world_size": 1}
TWO = {
    "tp2": {"world_size": 2, "tp": 2},
    "dp2": {"world_size": 2},
    "pp2": {"world_size": 2, "pp": 2},
}
STEP = {"learning_rate": 1e-2, "grad_clip": 0.5, "weight_decay": 0.1, "kl_coef": 0.3, "temperature": 0.7}


@pytest.fixture(scope="module")
def ranks():
    processes = Ranks(2)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder, kind) for kind in KINDS}


def reference_model(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


# --- what the ranks do ------------------------------------------------------------------------------------


def exported(trainer) -> dict:
    return {name: tensor.clone() for name, tensor in trainer.export()}


def whole_logits(config, ids):
    """[b, s, vocab], gathered over tensor-parallel ranks."""
    with built(config) as trainer, torch.no_grad():
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        mine = trainer.policy(ids, positions, None)
        parts = [torch.empty_like(mine) for _ in range(config.tp)]
        torch.distributed.all_gather(parts, mine.contiguous())
        return torch.cat(parts, -1)[..., :VOCAB]


def export_only(config):
    with built(config) as trainer:
        return exported(trainer)


def steps(config, rows, count):
    with built(config) as trainer:
        reports = [trainer.train(rows) for _ in range(count)]
        return reports, trainer.log_probs(rows), exported(trainer)


def steps_with_sleeps(config, rows, count):
    with built(config) as trainer:
        reports, seen = [], []
        for _ in range(count):
            trainer.offload()
            trainer.offload()
            seen.append((trainer.resident_bytes(), trainer.host_bytes()))
            with pytest.raises(OperationFailed, match="onload it first"):
                trainer.train(rows)
            trainer.onload()
            trainer.onload()
            seen.append((trainer.resident_bytes(), trainer.loaded_bytes()))
            reports.append(trainer.train(rows))
        return reports, trainer.log_probs(rows), exported(trainer), seen


def save_after(config, rows, count, directory, extra):
    with built(config) as trainer:
        for _ in range(count):
            trainer.train(rows)
        trainer.save(directory, extra)
        return trainer.log_probs(rows)


def resume(config, rows, count, directory):
    with built(config) as trainer:
        extra = trainer.load(directory)
        at_once = trainer.log_probs(rows)
        trainer.offload()
        trainer.onload()
        reports = [trainer.train(rows) for _ in range(count)]
        return extra, at_once, reports, trainer.log_probs(rows), exported(trainer)


def train_after_a_bad_batch(config, bad, rows):
    with built(config) as trainer:
        before = exported(trainer)
        with pytest.raises(OperationFailed, match="no weight was changed"):
            trainer.train(bad)
        after = exported(trainer)
        return before, after, trainer.train(rows)


def refuse_rows(config, batches):
    with built(config) as trainer:
        said = []
        for rows in batches:
            with pytest.raises(RequestError) as caught:
                trainer.train(rows)
            said.append(str(caught.value))
        return said


def build_twice(config):
    with built(config) as trainer, pytest.raises(OperationFailed, match="a process of its own"):
        type(trainer)(config).build()
    with pytest.raises(OperationFailed, match="not built"):
        trainer.train([])
    trainer.close()
    return trainer.resident_bytes()


# --- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_transformers(ranks, models, kind: str, tp: int) -> None:
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference_model(models[kind])(ids).logits
    for found in ranks.run(whole_logits, ids, model=models[kind], world_size=tp, tp=tp):
        assert (found - wanted).abs().max().item() < 1e-4


@pytest.mark.parametrize("layout", [ONE, TWO["tp2"], TWO["pp2"]], ids=["one", "tp2", "pp2"])
@pytest.mark.parametrize("kind", ["llama_untied", "qwen2", "qwen3"])
def test_an_export_gives_back_every_bit_on_rank_0_only(ranks, models, kind: str, layout: dict) -> None:
    first, *others = ranks.run(export_only, model=models[kind], **layout)
    source = load_file(models[kind] / "model.safetensors")
    assert sorted(first) == sorted(source)
    assert [name for name in source if not torch.equal(first[name], source[name])] == []
    assert others == [{}] * len(others)


# --- training ---------------------------------------------------------------------------------------------


def reference_log_probs(model, row: Row, temperature: float):
    """Log-prob of each generated token, one row at a time, the long way round."""
    logits = model(torch.tensor([row.tokens])).logits[0] / temperature
    return torch.stack(
        [logits[at - 1].log_softmax(-1)[row.tokens[at]] for at in range(row.prompt_tokens, len(row.tokens))]
    )


def reference_loss(model, frozen, rows, kl_coef: float, temperature: float, low: float = 0.2, high: float = 0.2):
    total, tokens = 0.0, 0
    for row in rows:
        now = reference_log_probs(model, row, temperature)
        with torch.no_grad():
            base = reference_log_probs(frozen, row, temperature)
        for lp, old, ref in zip(now, row.logprobs, base, strict=True):
            ratio = torch.exp(lp - old)
            surrogate = torch.min(ratio * row.advantage, torch.clamp(ratio, 1 - low, 1 + high) * row.advantage)
            total = total - surrogate + kl_coef * (torch.exp(ref - lp) - (ref - lp) - 1)
            tokens += 1
    return total / tokens


def reference_steps(folder: Path, rows, count: int):
    """GRPO and AdamW written out on the transformers model; returns (losses, gradient norms, final weights)."""
    model, frozen = reference_model(folder), reference_model(folder)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": STEP["weight_decay"]},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=STEP["learning_rate"], betas=(0.9, 0.999), eps=1e-8)
    losses, norms = [], []
    for _ in range(count):
        adam.zero_grad()
        loss = reference_loss(model, frozen, rows, STEP["kl_coef"], STEP["temperature"])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, STEP["grad_clip"]).item())
        losses.append(loss.item())
        adam.step()
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2"])
def test_steps_are_those_of_grpo_and_adam_written_out(ranks, models, kind: str) -> None:
    rows = make_rows()
    losses, norms, weights = reference_steps(models[kind], rows, 3)
    [(reports, _, found)] = ranks.run(steps, rows, 3, model=models[kind], **STEP)
    assert [report["loss"] for report in reports] == pytest.approx(losses, rel=1e-4)
    assert [report["grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > STEP["grad_clip"], "the clip must have something to do"
    assert reports[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert reports[2]["kl"] > 1e-3
    assert [report["tokens"] for report in reports] == [sum(row.generated for row in rows)] * 3
    assert max((found[name] - weights[name]).abs().max().item() for name in found) < 1e-3


def assert_same_training(found, wanted, kind: str) -> None:
    """Reports and log-probs agree to float32 rounding; weights to a small part of one Adam step.

    Adam divides by the gradient's own size, so rounding in a nearly zero gradient shows up in the weight.
    """
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5), kind
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-3)
    for name, tensor in wanted[2].items():
        assert (found[2][name] - tensor).abs().max().item() < 0.1 * STEP["learning_rate"], name


@pytest.mark.parametrize("kind", ["qwen3", "llama_untied"])
@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_train_as_one_does(ranks, models, layout: str, kind: str) -> None:
    rows = make_rows()
    [alone] = ranks.run(steps, rows, 3, model=models[kind], micro_batch_tokens=24, **STEP)
    first, second = ranks.run(steps, rows, 3, model=models[kind], micro_batch_tokens=24, **STEP, **TWO[layout])
    assert_same_training(first, alone, kind)
    assert second[:2] == first[:2], "every rank is told the same"


def test_micro_batches_change_nothing_but_the_memory(ranks, models) -> None:
    rows = make_rows(9)
    [whole] = ranks.run(steps, rows, 2, model=models["qwen2"], micro_batch_tokens=10_000, **STEP)
    [split] = ranks.run(steps, rows, 2, model=models["qwen2"], micro_batch_tokens=1, **STEP)
    assert_same_training(split, whole, "one row at a time")


def test_more_ranks_than_rows_is_no_trouble(ranks, models) -> None:
    rows = make_rows(1)
    [alone] = ranks.run(steps, rows, 1, model=models["qwen2"], **STEP)
    first, _ = ranks.run(steps, rows, 1, model=models["qwen2"], **STEP, **TWO["dp2"])
    assert_same_training(first, alone, "an idle rank")


def test_log_probs_come_back_in_the_order_of_the_rows(ranks, models) -> None:
    rows = make_rows(7, seed=3)
    model = reference_model(models["llama_untied"])
    with torch.no_grad():
        wanted = [reference_log_probs(model, row, 1.0).tolist() for row in rows]
    settings = {"model": models["llama_untied"], "micro_batch_tokens": 20, "learning_rate": 1e-30}
    for layout in TWO.values():
        for _, found, _ in ranks.run(steps, rows, 0, **settings, **layout):
            for mine, theirs in zip(found, wanted, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_gradient_that_is_not_finite_changes_no_weight(ranks, models) -> None:
    rows = make_rows(3)
    bad = [Row(tokens=(1, 2, 3), prompt_tokens=1, logprobs=(-1e9, -1.0), advantage=-1.0)]
    [(before, after, report)] = ranks.run(train_after_a_bad_batch, bad, rows, model=models["qwen2"])
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert math.isfinite(report["loss"])
    assert report["step"] == 1


def test_impossible_rows_are_refused_by_number(ranks, models) -> None:
    good = make_rows(1)[0]
    batches = [
        [],
        [Row(tokens=(1, 2), prompt_tokens=2, logprobs=(), advantage=1.0)],
        [good, Row(tokens=(1, 2), prompt_tokens=0, logprobs=(-1.0, -1.0), advantage=1.0)],
        [good, Row(tokens=(1, 2), prompt_tokens=1, logprobs=(), advantage=1.0)],
        [good, Row(tokens=(1, 2), prompt_tokens=1, logprobs=(-1.0,), advantage=math.nan)],
    ]
    [said] = ranks.run(refuse_rows, batches, model=models["qwen2"])
    assert ["nothing to train on" in text for text in said] == [True, True, False, False, False]
    assert [text.startswith("row 1: ") for text in said] == [False, False, True, True, True]


# --- sleeping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [ONE, TWO["tp2"]], ids=["one", "tp2"])
def test_an_offload_frees_everything_and_changes_nothing(ranks, models, layout: dict) -> None:
    rows = make_rows()
    awake = ranks.run(steps, rows, 3, model=models["qwen3"], **STEP, **layout)
    for mine, (reports, found, weights, seen) in zip(
        awake, ranks.run(steps_with_sleeps, rows, 3, model=models["qwen3"], **STEP, **layout), strict=True
    ):
        assert (reports, found) == mine[:2]
        assert all(torch.equal(weights[name], mine[2][name]) for name in mine[2])
        for asleep, loaded in zip(seen[::2], seen[1::2], strict=True):
            assert asleep[0] == 0 < asleep[1]
            assert loaded[0] == loaded[1] > 0


def test_loaded_bytes_are_parameters_gradients_two_moments_and_the_reference(ranks, models) -> None:
    source = load_file(models["qwen3"] / "model.safetensors")
    floats = 4 * sum(tensor.numel() for tensor in source.values())
    [(*_, plain)] = ranks.run(steps_with_sleeps, make_rows(), 1, model=models["qwen3"])
    [(*_, with_reference)] = ranks.run(steps_with_sleeps, make_rows(), 1, model=models["qwen3"], kl_coef=0.1)
    assert plain == [(0, 3 * floats), (4 * floats, 4 * floats)]
    assert with_reference == [(0, 4 * floats), (5 * floats, 5 * floats)]


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [ONE, TWO["tp2"], TWO["pp2"]], ids=["one", "tp2", "pp2"])
def test_a_resumed_run_goes_on_bit_for_bit(ranks, models, tmp_path, layout: dict) -> None:
    rows, directory = make_rows(), str(tmp_path / "checkpoint")
    extra = {"open_batch": {"rows": [1, 2], "name": "b"}}
    settings = {"model": models["llama_tied"], **STEP, **layout}
    unbroken = ranks.run(steps, rows, 3, **settings)
    ranks.run(save_after, rows, 1, directory, {}, **settings)
    ranks.run(save_after, rows, 2, directory, extra, **settings)
    for mine, (kept, _, reports, found, weights) in zip(
        unbroken, ranks.run(resume, rows, 1, directory, **settings), strict=True
    ):
        assert kept == extra
        assert reports == mine[0][2:]
        assert found == mine[1]
        assert all(torch.equal(weights[name], mine[2][name]) for name in mine[2])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_of_one_rank_can_be_read_by_two(ranks, models, tmp_path) -> None:
    rows, directory = make_rows(), str(tmp_path / "checkpoint")
    settings = {"model": models["qwen2"], **STEP}
    [saved] = ranks.run(save_after, rows, 2, directory, {}, **settings)
    [unbroken] = ranks.run(steps, rows, 3, **settings)
    (_, at_once, reports, found, weights), _ = ranks.run(resume, rows, 1, directory, **settings, **TWO["tp2"])
    for mine, theirs in zip(at_once, saved, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert_same_training((reports, found, weights), (unbroken[0][2:], *unbroken[1:]), "read by two")


def test_a_checkpoint_that_is_not_there_or_of_another_model_is_refused(ranks, models, tmp_path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        ranks.run(resume, [], 0, str(tmp_path / "nothing"), model=models["qwen2"])
    directory = str(tmp_path / "checkpoint")
    ranks.run(save_after, [], 0, directory, {}, model=models["qwen2"])
    with pytest.raises(ConfigError, match="holds a Qwen2ForCausalLM"):
        ranks.run(resume, [], 0, directory, model=models["qwen3"])
    with pytest.raises(RequestError, match="not plain JSON"):
        ranks.run(save_after, [], 0, directory, {"bad": {1, 2}.__iter__}, model=models["qwen2"])


def test_one_trainer_a_process_and_none_after_close(ranks, models) -> None:
    assert ranks.run(build_twice, model=models["qwen2"]) == [0]
