"""Targets by name: a local folder round trip, the dtype that a device has natively, clear errors for the rest."""

from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from conftest import greedy_ids, make_target, plain_logits
from tokenizers import Tokenizer, models, pre_tokenizers

import flashspec_core as fs
from flashspec_core.engine import models as engine_models
from flashspec_core.engine.models import default_device, default_dtype

WORDS = "<unk> <end> the cat sat on a mat and saw dog".split()


def save(path, **options):
    """A tiny Llama and a tokenizer of whole words, as save_pretrained leaves them."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    make_target(vocab=len(WORDS), layers=2, **options).model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the variable is read at import only


def test_a_local_folder_comes_back_as_it_was_saved(folder):
    target = fs.load_target(str(folder), dtype="float32", device="cpu")
    assert plain_logits(target.model, [2, 3, 4]).equal(plain_logits(make_target(vocab=11, layers=2).model, [2, 3, 4]))
    assert (target.path, target.name, target.vocab_size, target.max_length) == (folder, str(folder), 11, 512)
    assert target.dtype == torch.float32 and target.device.type == "cpu" and not target.model.training
    assert target.tokenizer("the cat sat").input_ids == [2, 3, 4]
    out = fs.generate(target, fs.ModelDrafter(target), "the cat sat", max_new_tokens=6)
    assert out.prompt_token_ids == [2, 3, 4] and out.token_ids == greedy_ids(target, [2, 3, 4], 6)
    assert out.text == target.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert set(out.text.split()) <= set(WORDS)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float16", torch.float32])
def test_the_dtype_asked_for(folder, dtype):
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert fs.load_target(str(folder), dtype=dtype, device="cpu").dtype == wanted


def test_the_dtype_nobody_asked_for(folder, monkeypatch):
    for capabilities, wanted in (({"avx512_bf16": True}, torch.bfloat16), ({}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert fs.load_target(str(folder), device="cpu").dtype == wanted


def test_a_home_folder_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert fs.load_target(f"~/{folder.name}", dtype="float32", device="cpu").path == folder


@pytest.mark.parametrize("name", ["nobody/has-this-model", "no-such-model", "/no/such/folder", ""])
def test_an_unknown_name_offline(offline, name):
    with pytest.raises(OSError, match="expected 'smollm2-135m', a local folder or a Hub id that can be reached, got"):
        fs.load_target(name)


def test_a_folder_without_a_model(tmp_path, offline):
    with pytest.raises(OSError, match=f"expected .* got '{tmp_path}'"):
        fs.load_target(str(tmp_path))


def test_weights_that_are_no_safetensors_are_refused(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    torch.save(make_target(vocab=11, layers=2).model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=f"got '{tmp_path}'"):
        fs.load_target(str(tmp_path), dtype="float32", device="cpu")


@pytest.mark.parametrize("dtype", ["float33", "nn", 32])
def test_an_unknown_dtype_is_refused(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be a torch dtype, its name, or None"):
        fs.load_target(str(folder), dtype=dtype)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_four_bits_decode_speculatively_as_they_decode_plainly(tmp_path):
    packed = fs.load_target(str(save(tmp_path, hidden=64)), dtype="float32", device="cpu", quantization="nf4")
    layer = packed.model.model.layers[0].self_attn.q_proj
    assert type(layer).__name__ == "Linear4bit" and layer.compute_dtype == packed.dtype == torch.float32
    assert type(packed.model.get_output_embeddings()) is torch.nn.Linear  # the head stays as it is
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
    plain = fs.generate(packed, fs.Arm(None), prompts, max_new_tokens=16)
    fast = fs.generate(packed, fs.EarlyExitDrafter(packed, 1), prompts, max_new_tokens=16, gamma=3)
    assert [p.token_ids for p in plain] == [f.token_ids for f in fast]


def test_four_bits_need_two_packages(folder, monkeypatch):
    monkeypatch.setattr(engine_models, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs bitsandbytes and accelerate: pip install bitsandbytes accelerate"):
        fs.load_target(str(folder), quantization="nf4")


def test_an_unknown_quantization_is_refused(folder):
    with pytest.raises(ValueError, match="quantization must be .*got 'int3'"):
        fs.load_target(str(folder), quantization="int3")


@pytest.mark.parametrize(
    "capability, dtype",
    [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((7, 5), "float16"), ((6, 1), "float16")],
)
def test_default_dtype_of_cuda_devices(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)  # true also where it is emulated
    assert default_dtype("cuda") == default_dtype(torch.device("cuda", 0)) == getattr(torch, dtype)


@pytest.mark.parametrize(
    "capabilities, dtype",
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True, "avx2": True}, "bfloat16"),
        ({"bf16": True}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": False, "avx512": True}, "float32"),
        ({}, "float32"),
        (None, "float32"),
    ],
)
def test_default_dtype_of_cpus(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:  # an older torch does not say
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert default_dtype("cpu") == getattr(torch, dtype)


@pytest.mark.parametrize("there, device", [(True, "cuda"), (False, "cpu")])
def test_default_device(monkeypatch, there, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert default_device().type == device


def test_what_a_target_says_of_itself():
    target = make_target("qwen2", vocab=77, max_position_embeddings=64)
    assert (target.vocab_size, target.max_length, target.eos_token_ids) == (77, 64, set())
    for given, ids in ((5, {5}), ([5, 6], {5, 6}), (0, {0})):
        target.model.generation_config.eos_token_id = given
        assert target.eos_token_ids == ids
    target.model.generation_config.eos_token_id, target.model.config.eos_token_id = None, 9
    assert target.eos_token_ids == {9}
    unbounded = SimpleNamespace(vocab_size=9)  # a config without a number of positions
    assert fs.Target(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: unbounded))).max_length >= 2**31
