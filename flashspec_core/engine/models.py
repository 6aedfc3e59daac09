"""Load a target and its tokenizer by name: the bundled SmolLM2, a local folder or a Hub id.

Chooses device and dtype where none is asked for. It leaves out drafters (drafters.py) and decoding (decode.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flashspec_core.engine import bundled


@dataclass
class Target:
    """The big model, ready to decode.

    Args:
        model: a transformers causal language model in eval mode.
        tokenizer: its tokenizer, or None: prompts are ids and text stays empty.
        name: what it was loaded by.
        path: the folder of the weights, or None.
        stations: what captured steps keep between calls; `.clear()` frees it.
    """

    model: Any
    tokenizer: Any = None
    name: str = "model"
    path: Path | None = None
    stations: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self):
        """Where the model lies."""
        return self.model.device

    @property
    def dtype(self):
        """The dtype of its weights."""
        return self.model.dtype

    @cached_property
    def vocab_size(self) -> int:
        """Logits a position."""
        return self.model.config.get_text_config().vocab_size

    @cached_property
    def max_length(self) -> int:
        """Positions that the model was made for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31

    @property
    def eos_token_ids(self) -> set[int]:
        """The ids that end a text: none, one or several."""
        ids = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ids = self.model.config.get_text_config().eos_token_id if ids is None else ids
        return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def default_device() -> torch.device:
    """CUDA where there is a device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device) -> torch.dtype:
    """The fast dtype that a device has natively.

    Rule: CUDA: bfloat16 from compute capability 8.0, else float16. CPU: bfloat16 where its instructions include
    bfloat16 products (AVX512_BF16, AMX, Arm BF16), else float32.

    Args: device: a torch device or its name.
    Returns: torch.bfloat16, torch.float16 or torch.float32.
    """
    device = torch.device(device)
    if device.type == "cuda":  # the capability, for "supported" may mean emulated
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.bfloat16 if any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else torch.float32


def load_target(
    name: str = bundled.NAME,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    quantization: str | None = None,
    *,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Target:
    """Load a causal language model and its tokenizer.

    Args:
        name: "smollm2-135m" (fetched once, then offline), a local folder, or a Hub id; weights as safetensors only.
        dtype: torch dtype or its name; None: `default_dtype(device)`.
        device: where to; None: CUDA where there is one.
        quantization: None, or "nf4": the linear layers' weights in 4 bits through bitsandbytes, products in `dtype`.
        trust_remote_code: run code that comes with a Hub model; only if you have read it.
        progress: show a bar while the bundled model downloads.
    Returns: Target: .model .tokenizer .device .dtype .path
    Raises:
        OSError: no such model, or it cannot be fetched, read or written.
        ValueError: an unknown dtype or quantization.
        ImportError: "nf4" without bitsandbytes and accelerate.
    Cost: the bundled model loads in about 2 s, once its files are there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if quantization not in (None, "nf4"):
        raise ValueError(f"quantization must be None or 'nf4', got {quantization!r}")
    device = torch.device(device) if device is not None else default_device()
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or default_dtype(device)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("dtype must be a torch dtype, its name, or None; see torch.float32, 'bfloat16'")
    source = str(bundled.smollm2_folder(progress)) if name == bundled.NAME else os.path.expanduser(name)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": os.path.isdir(source)}
    try:
        AutoConfig.from_pretrained(source, **options)  # one question first: is it there?
        packed = _nf4(dtype, device) if quantization else {}
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True, **options, **packed)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise OSError(
            f"expected '{bundled.NAME}', a local folder or a Hub id that can be reached, got {name!r}: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    path = Path(source) if os.path.isdir(source) else None
    return Target((model if packed else model.to(device)).eval(), tokenizer, name, path)


def _nf4(dtype, device) -> dict:
    """What `from_pretrained` needs to pack weights into four bits as it reads them."""
    from transformers import BitsAndBytesConfig

    missing = [name for name in ("bitsandbytes", "accelerate") if find_spec(name) is None]
    if missing:
        raise ImportError(f"quantization='nf4' needs {' and '.join(missing)}: pip install bitsandbytes accelerate")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}
