"""The trainer on CUDA: bf16 with Megatron's distributed optimizer over NCCL, held against transformers and the CPU.

    python -m pytest -m gpu tests/test_training_gpu.py

One GPU is enough for all but the last test.
"""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from training_world import VOCAB, Ranks, built, make_model, make_rows  # noqa: E402

from core.errors import OperationFailed  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="torch sees no CUDA device")]

BIGGER = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "initializer_range": 0.05}
STEP = {"learning_rate": 1e-3, "grad_clip": 0.5, "weight_decay": 0.1, "kl_coef": 0.3}
BF16 = {"device": "cuda", "dtype": "bfloat16", **STEP}
FP32 = {"device": "cuda", "dtype": "float32", **STEP}
MIB = 1 << 20
TWO = {
    "tp2": {"world_size": 2, "tp": 2},
    "dp2": {"world_size": 2},
    "pp2": {"world_size": 2, "pp": 2},
}


def environment(rank: int) -> dict[str, str]:
    """One GPU a rank, and NCCL's buffers kept small: what a trainer actor gets too."""
    return {
        "CUDA_VISIBLE_DEVICES": str(rank % GPUS),
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_MAX_NCHANNELS": "1",
        "NCCL_BUFFSIZE": str(MIB),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


@pytest.fixture(scope="module")
def ranks():
    processes = Ranks(min(2, GPUS), environment)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "qwen3", **BIGGER)


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama_tied")


def exported(trainer) -> dict:
    return {name: tensor.clone() for name, tensor in trainer.export()}


def repeatable() -> None:
    """Attention's backward adds up in any order unless told not to."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def logits_and_export(config, ids):
    with built(config) as trainer, torch.no_grad():
        ids = ids.cuda()
        logits = trainer.policy(ids, torch.arange(ids.shape[1], device="cuda").expand_as(ids), None)
        return logits.float().cpu(), exported(trainer)


def steps(config, rows, count):
    repeatable()
    with built(config) as trainer:
        before = trainer.log_probs(rows)
        reports = [trainer.train(rows) for _ in range(count)]
        return reports, before, trainer.log_probs(rows), exported(trainer)


def steps_with_sleeps(config, rows, count):
    """As `steps`, and what torch holds (allocated, reserved) asleep and awake, beyond what it held before: Megatron
    keeps some of a trainer that was closed for as long as its process lives."""
    repeatable()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with built(config) as trainer:
        before = trainer.log_probs(rows)
        reports, asleep, awake = [], [], []
        for _ in range(count):
            trainer.offload()
            torch.cuda.synchronize()
            asleep.append((trainer.resident_bytes() - allocated, torch.cuda.memory_reserved() - reserved))
            with pytest.raises(OperationFailed, match="onload it first"):
                trainer.log_probs(rows)
            trainer.onload()
            awake.append((trainer.resident_bytes() - allocated, trainer.loaded_bytes(), trainer.host_bytes()))
            reports.append(trainer.train(rows))
        return reports, before, trainer.log_probs(rows), exported(trainer), asleep, awake


def save_after(config, rows, count, directory):
    repeatable()
    with built(config) as trainer:
        for _ in range(count):
            trainer.train(rows)
        trainer.save(directory, {"open_batch": [1, 2]})


def resume(config, rows, directory):
    repeatable()
    with built(config) as trainer:
        extra = trainer.load(directory)
        trainer.offload()
        trainer.onload()
        return extra, trainer.train(rows), trainer.log_probs(rows), exported(trainer)


def test_float32_logits_are_those_of_transformers(ranks, model) -> None:
    ids = torch.randint(0, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(ids).logits
    [(found, _)] = ranks.run(logits_and_export, ids, model=model, **FP32)
    assert (found - wanted).abs().max().item() < 1e-3 * wanted.abs().max().item()


def test_a_bf16_export_is_the_folder_rounded(ranks, model) -> None:
    [(_, found)] = ranks.run(logits_and_export, torch.zeros(1, 2, dtype=torch.int64), model=model, **BF16)
    source = load_file(model / "model.safetensors")
    assert sorted(found) == sorted(source)
    assert [name for name in source if not torch.equal(found[name], source[name].bfloat16())] == []


def test_float32_steps_are_those_of_the_cpu(ranks, tied) -> None:
    rows = make_rows()
    [(wanted, *_)] = ranks.run(steps, rows, 3, model=tied, **STEP)
    [(found, *_)] = ranks.run(steps, rows, 3, model=tied, **FP32)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=5e-3, abs=1e-4)


def test_bf16_training_makes_good_rows_likelier_and_bad_ones_less_likely(ranks, model) -> None:
    rows = make_rows(12)
    [(reports, before, after, _)] = ranks.run(steps, rows, 8, model=model, **BF16 | {"kl_coef": 0.0})
    assert reports[-1]["loss"] < reports[0]["loss"]
    gains = [row.advantage * (sum(b) - sum(a)) for row, a, b in zip(rows, before, after, strict=True)]
    assert sum(gains) > 0


def test_sleeps_free_the_device_and_change_nothing(ranks, model) -> None:
    rows = make_rows(16)
    [control] = ranks.run(steps, rows, 4, model=model, **BF16)
    [(*slept, asleep, awake)] = ranks.run(steps_with_sleeps, rows, 4, model=model, **BF16)
    assert slept[:3] == list(control[:3])
    assert [name for name in control[3] if not torch.equal(slept[3][name], control[3][name])] == []
    loaded = {need for _, need, _ in awake}
    assert len(loaded) == 1, "what an onload needs never grows"
    floats = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    assert loaded.pop() >= (2 + 4 + 12 + 2) * floats  # weights, gradients, master and two moments, reference
    for resident, need, host in awake:
        assert need <= resident <= need + 16 * MIB
        assert host > 0
    for allocated, reserved in asleep:
        assert allocated <= 2 * MIB
        assert reserved <= 8 * MIB


def test_a_resumed_run_goes_on_bit_for_bit(ranks, model, tmp_path) -> None:
    rows, directory = make_rows(), str(tmp_path / "checkpoint")
    [(reports, _, probs, weights)] = ranks.run(steps, rows, 3, model=model, **BF16)
    ranks.run(save_after, rows, 2, directory, model=model, **BF16)
    [(extra, report, found, after)] = ranks.run(resume, rows, directory, model=model, **BF16)
    assert extra == {"open_batch": [1, 2]}
    assert (report, found) == (reports[2], probs)
    assert [name for name in weights if not torch.equal(after[name], weights[name])] == []


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", TWO)
def test_two_gpus_train_as_one_does(ranks, tied, layout: str) -> None:
    rows = make_rows()
    [(wanted, *_)] = ranks.run(steps, rows, 3, model=tied, micro_batch_tokens=24, **FP32)
    found = ranks.run(steps, rows, 3, model=tied, micro_batch_tokens=24, **FP32, **TWO[layout])
    for reports, *_ in found:
        for mine, theirs in zip(reports, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=5e-3, abs=1e-4)
