"""A model with a static key-value cache that has a length per row; rolling back is setting a length.

`CachedModel` remembers which ids it has read: it reads on from the longest common prefix, so rejected drafts, an idle
drafter's catch-up and the next turn of a chat are one case. It leaves out captured steps (cuda_graphs.py).
"""

from __future__ import annotations

import inspect

import torch

from flashspec_core.engine.cpu import narrow_pays, narrow_products, plain_linears
from flashspec_core.engine.heads import tapped

PREFILL_CHUNK = 512  # tokens a row and pass while a long prompt is read


class KVCache:
    """Keys and values of every layer, [batch, kv_heads, capacity, head_dim], as transformers' attention layers call it.

    Rows share the capacity and have their own lengths; what stands behind a row's length is never attended to.
    """

    is_compileable = False
    is_sliding = [False]  # asked for by some versions of transformers' mask builders

    def __init__(self):
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.capacity = self.end = 0
        self.starts = self._where = None  # where this pass writes: one number, or one a row

    def begin(self, starts: list[int], width: int):
        """Set where the next pass writes.

        Args: starts, width: [batch] tokens that each row keeps, and how many new ones follow in every row.
        """
        self.end = max(starts) + width
        if self.end > self.capacity:
            self.capacity = max(2 * self.capacity, self.end + 256)
            self.keys = [_grown(k, self.capacity) for k in self.keys]
            self.values = [_grown(v, self.capacity) for v in self.values]
        self.starts = starts[0] if min(starts) == max(starts) else starts
        self._where = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write a layer's new keys and values and return all of them up to the pass's end.

        Args:
            key_states, value_states: [batch, kv_heads, width, head_dim].
            layer_idx: which layer; what some versions of transformers add behind it is not used.
        Returns: keys and values, [batch, kv_heads, end, head_dim]; the mask hides what is not a row's own.
        """
        while len(self.keys) <= layer_idx:  # zeros and not garbage: a hidden NaN times weight 0 is NaN
            batch, heads, _, dim = key_states.shape
            self.keys.append(key_states.new_zeros(batch, heads, self.capacity, dim))
            self.values.append(value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1]))
        keys, values, width = self.keys[layer_idx], self.values[layer_idx], key_states.shape[2]
        if isinstance(self.starts, int):
            keys[:, :, self.starts : self.end] = key_states
            values[:, :, self.starts : self.end] = value_states
        else:
            if self._where is None:
                starts = torch.tensor(self.starts, device=keys.device)
                self._where = (starts[:, None] + torch.arange(width, device=keys.device))[:, None, :, None]
            keys.scatter_(2, self._where.expand_as(key_states), key_states)
            values.scatter_(2, self._where.expand_as(value_states), value_states)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def get_seq_length(self, layer_idx=0) -> int:
        """Tokens that every row keeps, as transformers asks. Args: layer_idx: not used."""
        return self.starts if isinstance(self.starts, int) else max(self.starts or [0])

    def select(self, rows: list[int]):
        """Keep only these rows, in this order. Args: rows: indices into the batch."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]


def _grown(tensor, capacity):
    bigger = tensor.new_zeros(*tensor.shape[:2], capacity, tensor.shape[3])
    bigger[:, :, : tensor.shape[2]] = tensor
    return bigger


class CachedRows:
    """Caches, and the ids that they hold, row by row; rows have names, so that some may leave."""

    def __init__(self):
        self.clear()

    def clear(self):
        """Forget everything and free the memory."""
        self.cache, self.states = KVCache(), KVCache()  # states: of tapped layers, [batch, 1, capacity, hidden] each
        self.ids, self.row_ids = [], []

    def select(self, row_ids: list[int]):
        """Keep these rows, in this order; where one is new, begin anew. Args: row_ids: their names."""
        if row_ids == self.row_ids:
            return
        if set(row_ids) <= set(self.row_ids):
            rows = [self.row_ids.index(row) for row in row_ids]
            self.cache.select(rows)
            self.states.select(rows)
            self.ids = [self.ids[i] for i in rows]
        else:
            self.clear()
            self.ids = [[] for _ in row_ids]
        self.row_ids = list(row_ids)


def padded(rows: list[list[int]], device):
    """Ids as a tensor. Args: rows: lists of ids; device. Returns: [batch, width], shorter rows filled with 0."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)


def placed(starts: list[int], width: int, end: int, device):
    """Where a pass's tokens stand, and what they see.

    Args: starts: where each row goes on; width: tokens a row; end: of the cache; device.
    Returns: positions [batch, width]; mask [batch, 1, width, end] bool: key <= query.
    """
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return positions, torch.arange(end, device=device) <= positions[:, None, :, None]


def cache_argument(model) -> str:
    """What a model's forward calls its cache: transformers 5.24 renamed it. Args: model: of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class CachedModel(CachedRows):
    """A causal language model and the ids that its cache holds, row by row.

    Args:
        model: a transformers causal language model; its cache must be able to roll back.
        layers: whose outputs are kept for draft heads, counted from 1.
    Raises: ValueError: the model is recurrent, keeps a cache of another kind, has no positions a row, or looks ahead.
    """

    def __init__(self, model, layers=()):
        self.model, self.layers = model, sorted(set(layers))
        self.window = check_can_roll_back(model)
        check_rows_stand_apart(model)
        self.cache_argument = cache_argument(model)
        self.mask_dtype = None if model.config._attn_implementation in ("sdpa", "flash_attention_2") else model.dtype
        self.linears = plain_linears(model) if narrow_pays() else []
        super().__init__()

    def clear(self):
        """Forget everything and free the memory."""
        super().clear()
        self.num_read = 0

    @torch.inference_mode()
    def logits(self, token_ids: list[list[int]], keep: int, row_ids: list[int] | None = None):
        """Logits at the last `keep` positions of each row, reading only what the cache lacks.

        Args:
            token_ids: for each row all of its ids, keep or more.
            keep: positions a row.
            row_ids: names of the rows, so that rows may leave; None: 0, 1, ...
        Returns: [batch, keep, vocab], in the model's dtype.
        Raises: ValueError: more tokens than a sliding window can hold.
        Cost: one pass over the new tokens; a batch with ragged prompts takes passes of up to 512 tokens a row first.
        """
        self.select(list(range(len(token_ids))) if row_ids is None else row_ids)
        if self.window is not None and max(map(len, token_ids)) > self.window:
            why = "the model's sliding window drops older keys and cannot roll back past it"
            raise ValueError(f"expected at most {self.window} tokens: {why}; got {max(map(len, token_ids))}")
        for held, ids in zip(self.ids, token_ids, strict=True):
            del held[min(common_prefix(held, ids), len(ids) - keep) :]
        while True:
            pending = [ids[len(held) :] for ids, held in zip(token_ids, self.ids, strict=True)]
            width, least = max(map(len, pending)), min(map(len, pending))
            if width <= keep + 8 or (width == least and width <= PREFILL_CHUNK + keep):
                logits = self._forward(pending, width - least + keep)
                if width == least:
                    return logits
                first = torch.tensor([len(ids) - least for ids in pending], device=logits.device)
                at = first[:, None, None] + torch.arange(keep, device=logits.device)[:, None]
                return logits.gather(1, at.expand(-1, -1, logits.shape[2]))
            self._forward([ids[: min(len(ids) - keep, PREFILL_CHUNK)] for ids in pending], 1)

    def features(self, token_ids: list[list[int]], row_ids: list[int]):
        """What the tapped layers put out for the ids that have been read, as far as they are these.

        Args: token_ids, row_ids: see logits.
        Returns: {layer: [batch, capacity, hidden]}, and for each row how many of its ids' are there, the last id aside.
        """
        self.select(row_ids)
        read = [min(common_prefix(held, ids), len(ids) - 1) for held, ids in zip(self.ids, token_ids, strict=True)]
        return {layer: kept[:, 0] for layer, kept in zip(self.layers, self.states.keys, strict=False)}, read

    def _forward(self, pending, keep):
        starts, width, device = [len(held) for held in self.ids], max(map(len, pending)), self.model.device
        self.cache.begin(starts, width)
        input_ids = padded(pending, device)
        positions, mask = placed(starts, width, self.cache.end, device)
        if self.mask_dtype is not None:
            lowest = torch.finfo(self.mask_dtype).min
            mask = torch.zeros(mask.shape, dtype=self.mask_dtype, device=device).masked_fill_(~mask, lowest)
        options = {"use_cache": True, "logits_to_keep": keep, self.cache_argument: self.cache}
        with narrow_products(self.linears), tapped(self.model, self.layers) as seen:
            logits = self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions, **options).logits
        if self.layers:
            self.states.begin(starts, width)
            for i, layer in enumerate(self.layers):
                self.states.update(seen[layer][:, None], seen[layer][:, None, :, :0], i)
        for held, ids in zip(self.ids, pending, strict=True):
            held.extend(ids)
        self.num_read += sum(map(len, pending))
        return logits


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading ids two lists share.

    Args: a, b: lists of ids.
    Returns: The number; found fast where the lists differ only near their ends.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    shortest = min(len(a), len(b))
    start = max(0, shortest - 16)
    if a[:start] != b[:start]:
        start = 0
    return next((i for i in range(start, shortest) if a[i] != b[i]), shortest)


def check_can_roll_back(model) -> int | None:
    """Whether rejected tokens can be taken back from this model's cache.

    Args: model: a transformers causal language model.
    Returns: None, or the sliding window: up to so many tokens nothing is dropped.
    Raises: ValueError: a recurrent or otherwise stateful cache.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"expected a model whose key-value cache can roll back; {type(model).__name__} keeps a recurrent state "
            f"({', '.join(sorted(kinds)) or 'stateful'}), from which a rejected token cannot be taken back"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo counts it from the end of the batch
        return config.window_size
    slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    return getattr(config, "sliding_window", None) if slides else None


def check_rows_stand_apart(model) -> None:
    """Refuse a model whose rows cannot have lengths of their own, or whose tokens see what stands behind them.

    Args: model: a transformers causal language model.
    Raises: ValueError: it is an encoder, keeps no cache, or finds its positions itself, one for all rows.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    bert = getattr(config, "is_decoder", None) is False and hasattr(config, "type_vocab_size")  # some say it so alone
    causal = (module.is_causal for module in model.modules() if hasattr(module, "is_causal"))
    if bert or (next(causal, True) is False and not any(causal)):  # as a rule the first layer says it
        raise ValueError(
            f"expected a causal language model; {name} is an encoder here: tokens see what stands behind them"
        )
    if not type(model).__module__.startswith("transformers."):
        return  # a wrapper may hand on what it does not name
    taken = inspect.signature(type(model).forward).parameters
    if not {"cache", "past_key_values"} & set(taken):
        raise ValueError(f"expected a model with a key-value cache; {name} keeps none")
    if getattr(config, "alibi", False) or ("position_ids" not in taken and config.model_type != "mpt"):
        raise ValueError(  # MPT goes by distances alone
            f"expected a model that takes position_ids, for rows have lengths of their own; {name} finds its positions "
            "itself, one for all rows"
        )
