"""What proposes tokens: an n-gram lookup, a small model, the target's first layers, several in turn, or your own.

Drafters draw from the noise that they are given and hand over the logits that they drew from. They verify nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.noise import DraftNoise
from flashspec_core.records import PLACEHOLDER_TOKEN_ID, Arm, Draft, Sampling
from flashspec_core.verify import draw_draft
from flashspec_core.verify.logits import greedy_ids


@dataclass
class DraftContext:
    """What is committed: all that a drafter may look at.

    Args:
        token_ids: for each row prompt and new ids.
        row_ids: names of the rows; rows that ended are gone.
        vocab_size: ids below it may be drafted.
        features: {layer: [batch, capacity, hidden]}, what the target's layers put out for these ids: of the layers that
            the arms' drafters name in `feature_layers`.
        num_features: for each row how many of its ids they cover; all but the last, once the target has read.
    """

    token_ids: list[list[int]]
    row_ids: list[int]
    vocab_size: int
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    num_features: list[int] = field(default_factory=list)


class Drafter(Protocol):
    """A drafter of your own needs a name and three methods; `commit` and `reset` may do nothing, as inherited.

    >>> class Echo:
    ...     name = "echo"  # proposes that the last token comes again
    ...     def draft(self, context, gamma, sampling, noise):
    ...         return Draft(torch.tensor([[ids[-1]] * gamma for ids in context.token_ids]))
    ...     def commit(self, context, result): pass
    ...     def reset(self): pass
    >>> context = DraftContext([[3, 4]], [0], 10)
    >>> Echo().draft(context, 2, [Sampling()], None).token_ids
    tensor([[4, 4]])
    """

    name: str

    def draft(self, context: DraftContext, gamma: int, sampling: list[Sampling], noise: DraftNoise) -> Draft:
        """Up to gamma ids a row, drawn with `noise.gumbels(i, vocab)` from the logits that are returned, or None."""

    def commit(self, context: DraftContext, result) -> None:
        """The step is over: `context` holds what was emitted, `result` is the VerifyResult."""

    def reset(self) -> None:
        """A new generation begins: forget what earlier ones left."""


class NGramDrafter(Drafter):
    """Prompt lookup: find where the text's last tokens stood before, and propose what followed there.

    Rule: the longest match of the last ids, at most `max_ngram` long and at least `min_ngram`, the latest among equals;
    a match of m ids proposes at most `trust * m` ids, so a chance match costs little. Deterministic: q is one-hot.

    Args:
        min_ngram: shortest match, in ids; at least 1.
        max_ngram: longest match looked for.
        trust: proposed ids a matched id.
    Raises: ValueError: not 1 <= min_ngram <= max_ngram, or trust below 1.
    Cost: microseconds a step, no model.
    Source: Saxena 2023, "Prompt lookup decoding".

    >>> drafter = NGramDrafter()
    >>> drafter.draft(DraftContext([[5, 6, 7, 8, 5, 6]], [0], 10), 3, [Sampling()], None).token_ids
    tensor([[7, 8, 5]])
    """

    name = "n-gram"

    def __init__(self, min_ngram: int = 2, max_ngram: int = 16, trust: int = 4):
        if not 1 <= min_ngram <= max_ngram or trust < 1:
            wanted = "1 <= min_ngram <= max_ngram and trust >= 1"
            raise ValueError(f"expected {wanted}, got {min_ngram}, {max_ngram}, {trust}")
        self.min_ngram, self.max_ngram, self.trust = min_ngram, max_ngram, trust
        self.reset()

    def reset(self):
        """Forget all rows."""
        self._seen: dict[int, tuple[list[int], dict]] = {}

    def draft(self, context, gamma, sampling, noise) -> Draft:
        """Propose what followed the longest earlier match.

        Args: context, gamma: see Drafter; sampling, noise: not used.
        Returns: Draft with logits None; token_ids [batch, longest proposal], -1 behind a shorter one.
        """
        rows = [self._lookup(row, ids, gamma) for row, ids in zip(context.row_ids, context.token_ids, strict=True)]
        width = max(map(len, rows))
        return Draft(torch.tensor([r + [PLACEHOLDER_TOKEN_ID] * (width - len(r)) for r in rows], dtype=torch.int64))

    def _lookup(self, row, ids, gamma):
        read, ends = self._seen.get(row, ([], {}))
        n = self.min_ngram
        if len(read) > len(ids) or ids[: len(read)] != read:  # another text under this name
            read, ends = [], {}
        for end in range(max(n, len(read)), len(ids)):  # the n-gram that ends in front of `end`
            ends.setdefault(tuple(ids[end - n : end]), []).append(end)
        self._seen[row] = (ids[: len(ids)], ends)
        best, length = None, 0
        for end in reversed(ends.get(tuple(ids[-n:]), [])):
            match = n
            while match < self.max_ngram and match < end and ids[end - match - 1] == ids[-match - 1]:
                match += 1
            if match > length:
                best, length = end, match
            if length == self.max_ngram:
                break
        proposed = []
        for i in range(min(gamma, self.trust * length)):  # behind the text's end its last period comes again
            proposed.append(ids[best + i] if best + i < len(ids) else proposed[best + i - len(ids)])
        return proposed


class ModelDrafter(Drafter):
    """A smaller causal language model with the target's tokenizer.

    Rule: x_i is drawn from softmax(draft logits after the row's sampling), argmax where the row is greedy.
    At a commit nothing is to be done: the cache rolls back to what is committed when it reads on.

    Args:
        model: a transformers causal language model, or what `load_target` returns.
        tokenizer: its tokenizer, compared with the target's; None: taken to be the target's.
        name: shown in records.
    Raises: ValueError: a model whose cache cannot roll back.
    Cost: a pass of the draft model a token; after an idle time one longer pass that catches up.
    Source: Leviathan et al. 2023.
    """

    def __init__(self, model, tokenizer=None, name: str | None = None):
        self.tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
        model = getattr(model, "model", model) if hasattr(model, "tokenizer") else model
        self.name = name or f"model:{getattr(model.config, '_name_or_path', '') or type(model).__name__}"
        self.cached, self.workspaces = CachedModel(model), {}

    def reset(self):
        """Forget all rows and free the cache."""
        self.cached.clear()
        self.workspaces.clear()

    def draft(self, context, gamma, sampling, noise) -> Draft:
        """Draw gamma tokens a row, one pass each.

        Args: context, gamma, sampling, noise: see Drafter.
        Returns: Draft: token_ids [batch, gamma]; logits [batch, gamma, draft_vocab], None where all rows are greedy.
        """
        known = self.cached.model.config.get_text_config().vocab_size
        rows = [list(ids) for ids in context.token_ids]
        if known < context.vocab_size:  # what it cannot read it reads as id 0; q may depend on anything
            rows = [[token_id if token_id < known else 0 for token_id in ids] for ids in rows]
        noise, greedy = noise.on(self.cached.model.device), all(s.greedy for s in sampling)
        all_ids, all_logits, all_sums = [], [], []
        for i in range(gamma):
            logits = self.cached.logits(rows, 1, context.row_ids)[:, 0, : context.vocab_size]
            if greedy:
                ids = greedy_ids(logits)
            else:
                ids, sums = draw_draft(logits, sampling, noise, i, self.workspaces)
                all_logits.append(logits)
                all_sums.append(sums)
            all_ids.append(ids)
            for row, token_id in zip(rows, ids.tolist(), strict=True):
                row.append(token_id)
        return drafted(sampling, all_ids, all_logits, all_sums)


def drafted(samplings, ids, logits, sums, vocab_ids=None) -> Draft:
    """A Draft of what was drawn; deterministic where all rows are greedy.

    Args: samplings: one a row; ids, logits, sums: lists of a tensor a token; vocab_ids: of a trimmed vocabulary.
    """
    ids = torch.stack(ids, 1)
    if all(s.greedy for s in samplings):
        return Draft(ids)
    return Draft(ids, torch.stack(logits, 1), torch.stack(sums, 1), vocab_ids)


class EarlyExitDrafter(ModelDrafter):
    """The target's first layers with its own norm and head, untrained: a poor drafter, there to be beaten.

    Args:
        target: what `load_target` returns, or a Llama-like causal language model.
        num_layers: how many of its layers, from the first.
    Raises: ValueError: num_layers is not in 1..layers - 1, or the model has no `model.layers`.
    Cost: num_layers / layers of a target pass a token; shares the target's weights.
    Source: Zhang et al. 2023, "Draft and verify" (there with chosen layers).
    """

    def __init__(self, target, num_layers: int):
        model = target.model if hasattr(target, "tokenizer") else target
        layers = getattr(getattr(model, "model", None), "layers", None)
        if layers is None or not 1 <= num_layers < len(layers):
            wanted = "a model with `model.layers`" if layers is None else f"num_layers in 1..{len(layers) - 1}"
            raise ValueError(f"expected {wanted}, got {type(model).__name__}, {num_layers}")
        short = copy.copy(model)
        short._modules = dict(model._modules)
        short.model = copy.copy(model.model)
        short.model._modules = dict(model.model._modules)
        short.model.layers = layers[:num_layers]
        short.config = short.model.config = copy.copy(model.config)
        short.config.num_hidden_layers = num_layers
        super().__init__(short, getattr(target, "tokenizer", None), f"early-exit:{num_layers}")


class CascadeDrafter(Drafter):
    """The first of several drafters that proposes something for every row: n-grams where they match, else a head.

    Rule: which one it is hangs on committed tokens alone, so the text keeps its law.

    Args: arms: Arms, the first choice first; each drafts up to its own gamma, or as many as are asked for.
    Raises: ValueError: no arm, or one without a drafter.
    Cost: that of the drafters that are asked.
    """

    def __init__(self, *arms: Arm):
        if not arms or any(arm.drafter is None for arm in arms):
            raise ValueError(f"expected arms with a drafter, at least one, got {arms}")
        self.arms, self.name = arms, ", else ".join(arm.drafter.name for arm in arms)
        self.asked = arms[0].drafter  # whose draft the last one was

    def reset(self):
        """Reset all of them."""
        for arm in self.arms:
            arm.drafter.reset()

    def commit(self, context, result):
        """Tell the one whose draft it was. Args: context, result: see Drafter."""
        self.asked.commit(context, result)

    def draft(self, context, gamma, sampling, noise) -> Draft:
        """Ask one after another.

        Args: context, gamma, sampling, noise: see Drafter.
        Returns: The first Draft that has an id for every row, or the last one's.
        """
        for arm in self.arms:
            self.asked = arm.drafter
            draft = arm.drafter.draft(context, min(gamma, arm.gamma or gamma), sampling, noise)
            if draft.token_ids.shape[1] and bool((draft.token_ids[:, 0] >= 0).all()):
                break
        return draft


def all_drafters(arms) -> list:
    """Every drafter once, those that ask others and the asked ones. Args: arms: Arms."""
    found = {}
    for arm in arms:
        if arm.drafter is not None:
            found |= {id(d): d for d in [arm.drafter, *all_drafters(getattr(arm.drafter, "arms", ()))]}
    return list(found.values())


def reset_drafters(arms) -> None:
    """Forget and free what the arms' drafters keep. Args: arms: Arms."""
    for arm in arms:
        if arm.drafter is not None:
            arm.drafter.reset()


def feature_layers(arms) -> set[int]:
    """The target's layers whose outputs some arm's drafter reads. Args: arms: Arms."""
    return {layer for drafter in all_drafters(arms) for layer in getattr(drafter, "feature_layers", ())}
