"""A Llama-like model's pass on buffers that stay: joined products, our kernels between them, lengths on the device.

For captured steps (cuda_graphs.py): nothing waits for the host or hangs on how long a row is. transformers' modules
keep their weights, as parts of the joined ones. It leaves out prompts, which the model itself reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from weakref import WeakKeyDictionary

import torch

from flashspec_core.engine.kv_cache import KVCache, check_can_roll_back
from flashspec_core.engine.layer_kernels import Places, gate, norm
from flashspec_core.engine.product_kernels import by_weight, product

DIMS = (16, 32, 64, 128)  # widths of a head that the kernels take
KINDS = {"llama", "mistral", "qwen2", "qwen3"}
_JOINED: WeakKeyDictionary = WeakKeyDictionary()  # first module: weight and bias of it and its neighbours


def why_not(model) -> str | None:
    """What keeps a model from `FusedModel`. Args: model: of transformers. Returns: None, or the reason."""
    config = model.config.get_text_config()
    if config.model_type not in KINDS:
        return f"a {config.model_type} model is none of {', '.join(sorted(KINDS))}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act} and not silu"
    if check_can_roll_back(model) is not None:
        return "it has a sliding window"
    dim = _head_dim(config)
    if dim not in DIMS:
        return f"its heads are {dim} wide and not 16, 32, 64 or 128"
    kind = getattr(model.model.rotary_emb, "rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary angles are {kind!r} and change with the length"
    return None


class FusedModel:
    """One pass over a few tokens a row, equal to transformers' up to rounding.

    Args: model: a transformers causal language model that `why_not` has nothing against.
    """

    def __init__(self, model):
        self.model, config = model, model.config.get_text_config()
        self.config, self.eps, self.dim = config, config.rms_norm_eps, _head_dim(config)
        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.layers.append(
                SimpleNamespace(
                    norm=layer.input_layernorm.weight,
                    qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
                    norms=[getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")],
                    out=product(attention.o_proj),
                    mlp_norm=layer.post_attention_layernorm.weight,
                    gate_up=joined(mlp.gate_proj, mlp.up_proj),
                    down=product(mlp.down_proj),
                )
            )
        self.output = product(model.get_output_embeddings())
        self.places = Places(config.num_attention_heads, config.num_key_value_heads, self.dim)

    def angles(self, capacity: int):
        """Cosines and sines for positions below `capacity`, made when more are asked for."""
        if self.places.cos is None or len(self.places.cos) < capacity:
            position = torch.arange(capacity, device=self.model.device)[None]
            like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
            cos, sin = self.model.model.rotary_emb(like, position)
            self.places.set_angles(cos[0, :, : self.dim // 2], sin[0, :, : self.dim // 2])

    @torch.inference_mode()
    def states(self, token_ids, starts, cache, layers=()):
        """What the last norm puts out for all given tokens; keys and values go into the cache from `starts` on.

        Args:
            token_ids: [batch, width] int64.
            starts: [batch] int64 on the device.
            cache: a KVCache with room; what stands behind the new tokens is not attended to.
            layers: whose outputs are asked for, counted from 1.
        Returns: [batch, width, hidden], for `logits`; {layer: [batch, width, hidden]}.
        """
        batch, width = token_ids.shape
        self.angles(cache.capacity)
        x = self.model.get_input_embeddings()(token_ids).flatten(0, 1)
        more, seen = None, {}
        for i, layer in enumerate(self.layers):
            x, normed = norm(x, more, layer.norm, self.eps)
            if i in layers:
                seen[i] = x.view(batch, width, -1)
            held = cache.keys[i], cache.values[i]
            attended = self.places.attend(layer.qkv(normed), starts, *held, width, *layer.norms, self.eps)
            x, normed = norm(x, layer.out(attended), layer.mlp_norm, self.eps)
            more = layer.down(gate(layer.gate_up(normed)))
        x, normed = norm(x, more, self.model.model.norm.weight, self.eps)
        if len(self.layers) in layers:
            seen[len(self.layers)] = x.view(batch, width, -1)
        return normed.view(batch, width, -1), seen

    @torch.inference_mode()
    def logits(self, states):
        """[..., vocab]. Args: states: [..., hidden], from `states`."""
        return self.output(states.flatten(0, -2)).view(*states.shape[:-1], -1)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """A KVCache of a fixed size, all zeros. Args: batch, capacity: rows, and tokens a row."""
        cache, shape = KVCache(), (batch, self.config.num_key_value_heads, capacity, self.dim)
        cache.capacity = capacity
        for held in (cache.keys, cache.values):
            held += [torch.zeros(shape, dtype=self.model.dtype, device=self.model.device) for _ in self.layers]
        return cache


def joined(*linears):
    """Products of the same input as one; plain layers then share one weight, of which theirs are views.

    Args: linears: modules with `in_features`; others than plain nn.Linear are called one by one.
    Returns: f(x [rows, size]) -> [rows, sum of their sizes].
    """
    if any(type(m) is not torch.nn.Linear for m in linears):
        return lambda x: torch.cat([m(x) for m in linears], -1)
    first, sizes = linears[0], [m.out_features for m in linears]
    whole, bias = _JOINED.get(first, (None, None))
    if whole is None or whole.data_ptr() != first.weight.data_ptr():
        with torch.inference_mode(False):
            whole = torch.cat([m.weight.detach() for m in linears])
            bias = None if first.bias is None else torch.cat([m.bias.detach() for m in linears])
            for module, part in zip(linears, whole.split(sizes), strict=True):
                module.weight.data = part
        _JOINED[first] = whole, bias
    return lambda x: by_weight(x, whole, bias)


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
