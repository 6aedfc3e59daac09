"""A target writes dialogues by itself, the user's turns too: what draft heads learn from.

One batch at a time, all rows in step, and on CUDA in captured steps; shards are kept, so that writing resumes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from flashspec_core.engine.kv_cache import cache_argument

OPENERS = {
    "chat": ("", "", "", "How", "What", "Why", "Can you", "Explain", "Tell me", "Give me", "Describe", "I", "Write"),
    "code": (
        "Write a Python function that",
        "Write a Python function to",
        "Write a Python class",
        "Write a short Python script that",
        "Implement",
        "In Python, how do I",
        "Write a JavaScript function that",
        "Write a SQL query that",
        "Write a C++ function that",
        "Write a bash script that",
        "Fix the bug in this Python code:\n\n```python\ndef",
        "Explain what this code does:\n\n```python\n",
        "Write unit tests for a Python function that",
        "Given a list of",
    ),
}


@dataclass
class Dialogues:
    """Texts that a target wrote: ids of whole dialogues, and where each one's answer begins."""

    ids: list[np.ndarray]
    answers: list[int]

    @property
    def num_tokens(self) -> int:
        """Ids altogether."""
        return sum(map(len, self.ids))

    def save(self, path) -> None:
        """Write as .npz, whole or not at all. Args: path: of the file."""
        partial = Path(path).with_suffix(".partial.npz")
        lengths = np.array([len(ids) for ids in self.ids], dtype=np.int32)
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, np.int32)
        np.savez_compressed(partial, ids=ids.astype(np.int32), lengths=lengths, answers=np.array(self.answers))
        partial.replace(path)

    @classmethod
    def load(cls, *paths) -> Dialogues:
        """Read files, one behind the other. Args: paths: of .npz files."""
        ids, answers = [], []
        for path in paths:
            with np.load(path) as data:
                ids += np.split(data["ids"], data["lengths"].cumsum()[:-1]) if len(data["lengths"]) else []
                answers += data["answers"].tolist()
        return cls(ids, answers)


class _Slots:
    """Keys and values of a batch in step: every row writes at the same slot, which lies on the device."""

    is_compileable, is_sliding = False, [False]

    def __init__(self, capacity: int, slot):
        self.capacity, self.slot, self.end, self.kept = capacity, slot, capacity, []

    def update(self, keys, values, layer, *args, **kwargs):
        """As transformers' attention layers call it: keys, values: [batch, heads, 1, dim]; layer: which one."""
        if len(self.kept) <= layer:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.kept.append((keys.new_zeros(shape), values.new_zeros(shape)))
        for kept, new in zip(self.kept[layer], (keys, values), strict=True):
            kept.index_copy_(2, self.slot, new)
        return tuple(kept[:, :, : self.end] for kept in self.kept[layer])

    def get_seq_length(self, layer=0) -> int:
        """Not used where positions are given. Args: layer: not used."""
        return 0


def _grouped_attention(module, query, key, value, mask, scaling=None, **kwargs):
    """One query a row, its heads folded into the length, so that keys and values are read as they are."""
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError("expected a target with plain attention, got one with soft caps or sinks")
    batch, heads, _, dim = query.shape
    folded = query.view(batch, key.shape[1], heads // key.shape[1], dim)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.view(batch, 1, heads, dim), None


class _Writer:
    """A batch of dialogues, written side by side: one body a step, and nothing in it waits for the host."""

    def __init__(self, target, openers, batch, steps, temperatures, longest, generator):
        tokenizer, device = target.tokenizer, target.device
        marks = [{"role": "user", "content": "@U@"}, {"role": "assistant", "content": "@A@"}]
        text = tokenizer.apply_chat_template(marks, tokenize=False)
        if text.count("@U@") != 1 or text.count("@A@") != 1 or text.endswith("@A@"):
            raise ValueError(f"expected a chat template that shows each message once and ends an answer, got {text!r}")
        prefix, rest = text.split("@U@")
        encode = lambda words: tokenizer(words, add_special_tokens=False)["input_ids"]  # noqa: E731
        between, behind = (encode(words) for words in rest.split("@A@"))
        scripts = [encode(prefix + opener) for opener in openers]
        long = lambda values: torch.tensor(values, device=device)  # noqa: E731
        width = max(map(len, scripts))
        self.scripts = long([script + [0] * (width - len(script)) for script in scripts])
        self.lengths, self.between, self.behind = long([len(s) for s in scripts]), long(between), behind[0]
        self.target, self.steps, self.longest, self.generator = target, steps, longest, generator
        self.temperatures = long(temperatures).repeat(-(-batch // len(temperatures)))[:batch, None]
        self.logits = torch.zeros(batch, target.vocab_size, device=device, dtype=target.dtype)
        self.phase = torch.full((batch,), 4, device=device)  # 0 script, 1 user, 2 between, 3 answer, 4 ended
        self.opener, self.at, self.first = (torch.zeros_like(self.phase) for _ in range(3))
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.cache = _Slots(steps, self.step)
        self.ids, self.phases = (torch.zeros(batch, steps, dtype=torch.int64, device=device) for _ in range(2))

    def choose(self):
        """The next id of every row, from the last logits or from what the template says."""
        user, answer = self.phase == 1, self.phase == 3
        heat = torch.where(answer[:, None], self.temperatures, 0.8)
        noise = torch.empty_like(self.logits, dtype=torch.float32).exponential_(generator=self.generator).log_()
        drawn = (self.logits.float() / heat.clamp_min(1e-4) - noise * (heat > 0)).argmax(-1)
        late = self.at >= torch.where(user, self.longest[0], self.longest[1])
        ends = torch.where(user, self.between[0], self.behind)
        drawn = torch.where(late, ends, drawn)
        new = self.phase == 4
        choice = torch.randint(len(self.scripts), self.phase.shape, device=self.phase.device, generator=self.generator)
        self.opener.copy_(torch.where(new, choice, self.opener))
        self.first.copy_(torch.where(new, self.step, self.first))
        at, phase = torch.where(new, 0, self.at), torch.where(new, 0, self.phase)
        script = self.scripts[self.opener, at.clamp(max=self.scripts.shape[1] - 1)]
        between = self.between[at.clamp(max=len(self.between) - 1)]
        ids = torch.where(phase == 0, script, torch.where(phase == 2, between, drawn))
        at = at + 1
        said = torch.where(phase == 2, at >= len(self.between), ids == ends)
        over = torch.where(phase == 0, at == self.lengths[self.opener], said)
        self.ids.index_copy_(1, self.step, ids[:, None])
        self.phases.index_copy_(1, self.step, phase[:, None])
        skips = over & (phase == 1)  # the first id between has been said
        self.phase.copy_(phase + over)
        self.at.copy_(torch.where(over, skips.long(), at))
        return ids

    def body(self):
        """A step: choose, read the chosen ids, keep the logits behind them."""
        ids = self.choose()
        slots = torch.arange(self.cache.end, device=ids.device)
        mask = ((slots >= self.first[:, None]) & (slots <= self.step))[:, None, None]
        options = {"use_cache": True, "logits_to_keep": 1, self.argument: self.cache}
        positions = (self.step - self.first)[:, None]
        out = self.target.model(input_ids=ids[:, None], attention_mask=mask, position_ids=positions, **options)
        self.logits.copy_(out.logits[:, -1])
        self.step.add_(1)

    def run(self, bucket: int = 128):
        """All steps; on CUDA each bucket's body is captured once and replayed."""
        self.argument = cache_argument(self.target.model)
        for start in range(0, self.steps, bucket):
            self.cache.end, stop = min(start + bucket, self.steps), min(start + bucket, self.steps)
            if self.step.device.type != "cuda":
                for _ in range(start, stop):
                    self.body()
                continue
            with torch.cuda.device(self.step.device):
                self.body()
                graph = torch.cuda.CUDAGraph()
                graph.register_generator_state(self.generator)
                with torch.cuda.graph(graph):
                    self.body()
                for _ in range(start + 1, stop):
                    graph.replay()
        return self.dialogues()

    def dialogues(self) -> Dialogues:
        """The dialogues; of one that the last step has cut, what was said, if its answer has begun."""
        kept = Dialogues([], [])
        for ids, phases in zip(self.ids.cpu().numpy(), self.phases.cpu().numpy(), strict=True):
            starts = np.flatnonzero((phases == 0) & (np.roll(phases, 1) != 0))
            starts = np.unique(np.concatenate([[0], starts, [self.steps]]))
            for start, stop in zip(starts[:-1], starts[1:], strict=True):
                if phases[stop - 1] == 3:
                    kept.ids.append(ids[start:stop].astype(np.int32))
                    kept.answers.append(int((phases[start:stop] < 3).sum()))
        return kept


def _rows(target, steps: int) -> int:
    """Rows side by side: 8 on a CPU; on CUDA up to 1,024, whose keys and values take half of the memory at most."""
    if target.device.type != "cuda":
        return 8
    c = target.model.config.get_text_config()
    numbers = 2 * c.num_hidden_layers * c.num_key_value_heads * c.hidden_size // c.num_attention_heads * steps
    row = numbers * target.dtype.itemsize + 12 * target.vocab_size
    return max(1, min(1024, int(0.5 * torch.cuda.mem_get_info(target.device)[1] / row)))


def write(
    target,
    domain: str,
    num_tokens: int,
    folder,
    *,
    seed: int = 0,
    batch: int | None = None,
    steps: int | None = None,
    longest: tuple[int, int] = (96, 400),
    temperatures=(0.7, 0.7, 0.7, 0.0, 1.0),
    progress: bool = True,
) -> Dialogues:
    """Dialogues in which the target plays the user too, whose turn starts with one of the domain's openers.

    Rule: user turns are drawn at temperature .8, answers at one of `temperatures`, a row each. A shard's seed is (seed,
    its number), so that an interrupted run goes on where it stopped and ends with the same texts on the same device.

    Args:
        target: what `load_target` returns, with a chat template.
        domain: "chat", "code" or "mixed" (half and half).
        num_tokens: at least so many ids altogether.
        folder: where the shards are kept.
        seed, batch, steps: of the draws; rows side by side and ids a row of one shard (None: by device; 768). Shards of
            other settings, or of another target, are not taken up.
        longest: ids of a user's turn and of an answer, which are ended there.
        temperatures: of the answers.
        progress: show a bar.
    Returns: All dialogues, shard by shard.
    Cost: a pass of the target over `batch` ids a step.
    """
    from tqdm.auto import tqdm
    from transformers import AttentionInterface

    if domain == "mixed":
        halves = dict(seed=seed, batch=batch, steps=steps, longest=longest, temperatures=temperatures)
        parts = [write(target, d, num_tokens // 2, folder, progress=progress, **halves) for d in ("chat", "code")]
        return Dialogues(parts[0].ids + parts[1].ids, parts[0].answers + parts[1].answers)
    if domain not in OPENERS:
        raise ValueError(f"domain must be one of {(*OPENERS, 'mixed')}, got {domain!r}")
    folder, steps = Path(folder), steps or 768
    batch = batch or _rows(target, steps)
    settings = repr((target.name, batch, steps, tuple(longest), tuple(temperatures))).encode()
    weights = target.model.get_input_embeddings().weight[:4].detach().float().cpu().numpy().tobytes()
    digest = hashlib.sha256(settings + weights).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    AttentionInterface.register("grouped_queries", _grouped_attention)
    before = target.model.config._attn_implementation
    target.model.set_attn_implementation("grouped_queries")
    paths, written = [], 0
    try:
        with tqdm(total=num_tokens, unit="token", desc=f"{target.name} writes {domain}", disable=not progress) as bar:
            while written < num_tokens:
                path = folder / f"{domain}-{seed}-{digest}-{len(paths):03}.npz"
                if not path.exists():
                    generator = torch.Generator(target.device).manual_seed(seed * 1_000_003 + len(paths))
                    with torch.inference_mode():
                        arguments = OPENERS[domain], batch, steps, temperatures, longest, generator
                        new = _Writer(target, *arguments).run()
                    if not new.ids:
                        raise ValueError(f"expected steps that let an answer begin, got {steps}")
                    new.save(path)
                new = Dialogues.load(path).num_tokens
                paths.append(path)
                written += new
                bar.update(new)
    finally:
        target.model.set_attn_implementation(before)
    return Dialogues.load(*paths)
