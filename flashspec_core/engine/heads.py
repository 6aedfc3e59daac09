"""Draft heads on a target's own hidden states: Medusa (a block a depth) and EAGLE (one decoder layer, fed with itself).

Both speak a trimmed vocabulary and take the rows of their output from the target. They leave out drawing (drafters.py)
and training (lab/distill.py).
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class HeadConfig:
    """What a head needs to be built again.

    Args:
        kind: "eagle" or "medusa".
        hidden_size, vocab_size, num_layers: of the target that it was made for.
        layers: the target's layers whose outputs it reads, counted from 1; medusa: the last one.
        depth: drafted tokens that it was trained for; medusa drafts no more.
        num_heads, num_kv_heads, intermediate_size, rope_theta: of the eagle's decoder layer.
        eps: of its norms.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    layers: tuple[int, ...]
    depth: int = 4
    num_heads: int = 0
    num_kv_heads: int = 0
    intermediate_size: int = 0
    rope_theta: float = 10_000.0
    eps: float = 1e-5


def head_config(target, kind: str, *, layers=None, depth: int = 4, intermediate_size: int | None = None) -> HeadConfig:
    """A head's shape for a target.

    Args:
        target: what `load_target` returns; a Llama-like model.
        kind: "eagle" or "medusa".
        layers: see HeadConfig; None: a third, two thirds and all of the layers (eagle), the last (medusa).
        depth: tokens that it drafts in training.
        intermediate_size: None: twice the hidden size.
    Raises: ValueError: an unknown kind, layers that the target lacks, or a model without `model.layers`.
    """
    config = target.model.config.get_text_config()
    count = len(_stack(target.model).layers)
    layers = tuple(layers or ((count,) if kind == "medusa" else sorted({max(1, count * i // 3) for i in (1, 2, 3)})))
    fits = all(1 <= layer <= count for layer in layers) and (kind != "medusa" or layers == (count,))
    if kind not in KINDS or not fits:
        wanted = f"kind 'eagle' or 'medusa' and layers in 1..{count} (medusa: {count} alone)"
        raise ValueError(f"expected {wanted}, got {kind!r}, {layers}")
    shape = dict(hidden_size=config.hidden_size, vocab_size=target.vocab_size, num_layers=count, layers=layers)
    if kind == "medusa":
        return HeadConfig(kind, depth=depth, eps=config.rms_norm_eps, **shape)
    theta = getattr(config, "rope_theta", None) or (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return HeadConfig(
        kind,
        depth=depth,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=intermediate_size or 2 * config.hidden_size,
        rope_theta=float(theta or 10_000.0),
        eps=config.rms_norm_eps,
        **shape,
    )


class Head(nn.Module):
    """What both kinds share: the trimmed vocabulary and the target's own output rows for it.

    Args:
        config: HeadConfig.
        target: what `load_target` returns; its embeddings, last norm and output rows are used and never stored.
        vocab_ids: [draft_vocab] int64, sorted: the ids that it can draft.
    """

    def __init__(self, config: HeadConfig, target, vocab_ids):
        super().__init__()
        model, self.config = target.model, config
        vocab_ids = torch.as_tensor(vocab_ids, dtype=torch.int64)
        rows = model.get_output_embeddings().weight.detach()[vocab_ids.to(target.device)]
        self.register_buffer("vocab_ids", vocab_ids.to(target.device))
        self.register_buffer("rows", rows, persistent=False)
        self.shared = {"embed": model.get_input_embeddings(), "norm": _stack(model).norm}  # a dict: not submodules

    def logits(self, states):
        """Raw logits of the trimmed vocabulary. Args: states: [..., hidden], normed. Returns: [..., draft_vocab]."""
        return F.linear(states, self.rows)


class MedusaHead(Head):
    """Residual blocks on the target's last hidden state, one a depth.

    Rule: logits_i = rows (h + silu(W_i h)), h the normed state of the last token that the target has read; W_i = 0 at
    first. The i-th block knows no token behind h's, so each depth has a law of its own.

    Args: config, target, vocab_ids: see Head.
    Source: Cai et al. 2024, "Medusa" (arXiv 2401.10774), section 2.1.
    """

    def __init__(self, config, target, vocab_ids):
        super().__init__(config, target, vocab_ids)
        size = config.hidden_size
        self.blocks = nn.Parameter(torch.zeros(config.depth, size, size))
        self.to(target.device, target.dtype)

    def forward(self, features, depth: int):
        """All depths at once.

        Args: features: [batch, hidden], the last layer's output; depth: up to config.depth.
        Returns: [batch, depth, draft_vocab] logits.
        """
        h = self.shared["norm"](features)
        return self.logits(h[:, None] + F.silu(torch.einsum("bh,doh->bdo", h, self.blocks[:depth])))


class EagleHead(Head):
    """One decoder layer over the next token's embedding and the target's features, then over its own output.

    Rule: entry t reads x_{t+1} and the features of t, and its logits are of x_{t+2}; behind what is committed its own
    output stands in for the features that the target has not computed yet.

    Args: config, target, vocab_ids: see Head.
    Source: Li et al. 2025, "EAGLE-3" (arXiv 2503.01840): several layers' features, trained unrolled.
    """

    def __init__(self, config, target, vocab_ids):
        super().__init__(config, target, vocab_ids)
        size, c = config.hidden_size, config
        self.head_dim = size // c.num_heads
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.reduce = linear(len(c.layers) * size, size)
        self.mix = linear(2 * size, size)
        self.qkv = linear(size, (c.num_heads + 2 * c.num_kv_heads) * self.head_dim)
        self.out = linear(c.num_heads * self.head_dim, size)
        self.gate_up = linear(size, 2 * c.intermediate_size)
        self.down = linear(c.intermediate_size, size)
        for name in ("embed_norm", "feature_norm", "attention_norm", "mlp_norm", "last_norm"):
            setattr(self, name, nn.RMSNorm(size, eps=c.eps))
        self.to(target.device, target.dtype)
        # no buffer: float32 whatever the head's dtype, or far positions turn by wrong angles
        self.frequencies = c.rope_theta ** (-torch.arange(0, self.head_dim, 2, device=target.device) / self.head_dim)

    def start(self, token_ids, features):
        """The layer's input. Args: token_ids: [...]; features: [..., hidden], reduced or own. Returns: as features."""
        embedded = self.embed_norm(self.shared["embed"](token_ids).to(features.dtype))
        return self.mix(torch.cat([embedded, self.feature_norm(features)], -1))

    def attend(self, x, positions):
        """Queries, keys and values. Args: x: [batch, width, hidden]; positions: [batch, width]. Returns: q, k, v."""
        c, shape = self.config, (*x.shape[:2], -1, self.head_dim)
        sizes = [n * self.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).split(sizes, -1))
        angles = positions[:, None, :, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return _turned(q, cos, sin), _turned(k, cos, sin), v

    def finish(self, x, attended):
        """The rest of the layer. Args: x: its input; attended: [batch, heads, width, head_dim]. Returns: as x."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, token_ids, features, cache, positions, mask):
        """Some entries of each row behind those that the cache holds.

        Args:
            token_ids: [batch, width].
            features: [batch, width, hidden], reduced or own.
            cache: a KVCache that was told where they go (`begin`).
            positions: [batch, width].
            mask: [batch, 1, width, end] bool or None.
        Returns: [batch, width, hidden]: own features; `logits(last_norm(.))` are the drafted token's.
        """
        x = self.start(token_ids, features)
        q, k, v = self.attend(x, positions)
        k, v = cache.update(k, v, 0)
        grouped = self.config.num_kv_heads != self.config.num_heads
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped))


KINDS = {"eagle": EagleHead, "medusa": MedusaHead}


def _turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _stack(model):
    stack = getattr(model, "model", None)
    if not all(hasattr(stack, name) for name in ("layers", "norm")):
        raise ValueError(
            f"expected a Llama-like model with `model.layers` and `model.norm`, got {type(model).__name__}"
        )
    return stack


@contextmanager
def tapped(model, layers):
    """Within it a pass of the model leaves what some layers put out.

    Args: model: Llama-like; layers: counted from 1.
    Yields: {layer: [batch, width, hidden]}, of the last pass.
    """
    seen: dict[int, torch.Tensor] = {}
    thread = threading.get_ident()

    def keeper(layer):
        def keep(module, inputs, output):
            if threading.get_ident() == thread:  # others' passes of the same model are theirs
                seen[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    hooks = [_stack(model).layers[layer - 1].register_forward_hook(keeper(layer)) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def save_head(head: Head, path, card: dict) -> None:
    """Write a head as int8 rows with a scale each, and its card (JSON) beside it.

    Args:
        head: any Head.
        path: of the .safetensors file; the card goes beside it as .json and gets the file's SHA-256.
        card: how it was made.
    """
    from safetensors.torch import save_file

    tensors = {"vocab_ids": head.vocab_ids.to(torch.int32).cpu()}
    for name, weight in head.named_parameters():
        weight = weight.detach().float().cpu()
        if weight.dim() == 1:
            tensors[name] = weight
            continue
        scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[name + ".scale"] = scale
    path = Path(path)
    save_file(tensors, path, metadata={"config": json.dumps(asdict(head.config))})
    card = {**card, "config": asdict(head.config), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def load_head(path, target) -> Head:
    """Read what `save_head` wrote.

    Args: path: of the .safetensors file; target: what `load_target` returns, of the shape that it was made for.
    Raises:
        OSError: no such file.
        ValueError: it is no head, or of another target.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            values = json.loads(file.metadata()["config"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        config = HeadConfig(**{**values, "layers": tuple(values["layers"])})
        kind = KINDS[config.kind]
    except FileNotFoundError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"expected a draft head in {path}, got: {error}") from error
    own = target.model.config.get_text_config()
    ours = (own.hidden_size, target.vocab_size, own.num_hidden_layers)
    theirs = (config.hidden_size, config.vocab_size, config.num_layers)
    if ours != theirs:
        what = "(hidden size, vocabulary, layers)"
        raise ValueError(f"expected a head for a target of {what} {ours}, got one for {theirs} in {path}")
    head = kind(config, target, tensors["vocab_ids"])
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name not in tensors:
                raise ValueError(f"expected a draft head in {path}, got one without {name}")
            weight = tensors[name].float()
            parameter.copy_(weight * tensors[name + ".scale"] if name + ".scale" in tensors else weight)
    return head.eval().requires_grad_(False)
