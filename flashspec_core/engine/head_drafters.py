"""Drafters with a head on the target's own hidden states: Medusa and EAGLE, by name or from a file.

They draw and keep EAGLE's cache; the heads themselves stand in heads.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flashspec_core.engine.drafters import CascadeDrafter, Drafter, NGramDrafter, drafted
from flashspec_core.engine.heads import WEIGHTS, EagleHead, Head, load_head
from flashspec_core.engine.kv_cache import CachedRows, common_prefix, padded, placed
from flashspec_core.records import Arm, Draft
from flashspec_core.verify import draw_draft
from flashspec_core.verify.logits import greedy_ids


def drawn(head, logits, samplings, noise, index: int, vocab: int, workspaces=None):
    """A head's next tokens as target ids, and what their laws sum to; see verify.draw_draft.

    Args: head: a Head; logits: [batch, draft_vocab]; samplings, noise, index, workspaces: see draw_draft; vocab: of
        the target.
    """
    if noise.positions is None:
        column, sums = draw_draft(logits, samplings, noise, index, workspaces)
        return head.vocab_ids[column], sums
    wide = logits.new_full((len(logits), vocab), -torch.inf)  # "coupled": an id's noise is its own
    return draw_draft(wide.index_copy_(1, head.vocab_ids, logits), samplings, noise, index, workspaces)


class HeadDrafter(Drafter):
    """What drafters with a head on the target's hidden states share; in a row's first step they draft nothing.

    Args:
        head: an engine.heads.Head, made for the target that it drafts for.
        name: shown in records.
    """

    def __init__(self, head: Head, name: str | None = None):
        self.head, self.name = head, name or head.config.kind
        self.feature_layers = head.config.layers
        self.reset()

    def reset(self):
        """Forget all rows and free the cache."""
        self.workspaces = {}

    @torch.inference_mode()
    def draft(self, context, gamma, sampling, noise) -> Draft:
        """Draw up to gamma tokens a row.

        Args: context, gamma, sampling, noise: see Drafter.
        Returns: Draft: token_ids [batch, gamma]; logits [batch, gamma, draft_vocab] with vocab_ids, None where all rows
            are greedy; of width 0 before the target has read what is committed.
        """
        read = [len(ids) - 1 for ids in context.token_ids]
        if not context.features or min(read) < 1 or context.num_features != read:
            return Draft(self.head.vocab_ids.new_empty(len(read), 0))
        noise, greedy = noise.on(self.head.vocab_ids.device), all(s.greedy for s in sampling)
        ids, all_ids, all_logits, all_sums = None, [], [], []
        for i in range(min(gamma, self.most)):
            logits = self._logits(context, i, ids)
            if greedy:
                ids = self.head.vocab_ids[greedy_ids(logits)]
            else:
                ids, sums = drawn(self.head, logits, sampling, noise, i, context.vocab_size, self.workspaces)
                all_logits.append(logits)
                all_sums.append(sums)
            all_ids.append(ids)
        return drafted(sampling, all_ids, all_logits, all_sums, self.head.vocab_ids)

    def _logits(self, context, i, ids):
        """[batch, draft_vocab] of the i-th drafted token; ids: [batch] the one before it, None at i = 0."""
        raise NotImplementedError


class MedusaDrafter(HeadDrafter):
    """Medusa's blocks: each depth is drawn from a law of its own, so that verification is lossless.

    Rule: x_i is drawn from softmax(logits of block i on the last hidden state) after the row's sampling.

    Args: head: a MedusaHead; name: see HeadDrafter.
    Cost: one small product a depth and the output rows, all depths at once; no cache.
    Source: Cai et al. 2024 (arXiv 2401.10774); no trees here.
    """

    @property
    def most(self) -> int:
        """Tokens that it can draft at a time."""
        return self.head.config.depth

    def _logits(self, context, i, ids):
        if not i:
            (layer,) = self.feature_layers
            at = torch.tensor(context.num_features, device=self.head.vocab_ids.device) - 1
            self._all = self.head(context.features[layer][torch.arange(len(at), device=at.device), at], self.most)
        return self._all[:, i]


class EagleDrafter(HeadDrafter):
    """EAGLE's layer: reads what the target's layers put out, then its own output.

    Rule: x_i is drawn from softmax(logits of the entry before it) after the row's sampling. The target's features of
    verified tokens are read as they are; entries made from own output are made anew once the target's are there. After
    an idle time one longer pass catches up.

    Args: head: an EagleHead; name: see HeadDrafter.
    Cost: a pass of one layer and the output rows a token.
    Source: Li et al. 2025 (arXiv 2503.01840); a chain and no tree.
    """

    most = 2**31

    def reset(self):
        """Forget all rows and free the cache."""
        super().reset()
        self.rows = CachedRows()

    def _logits(self, context, i, ids):
        if i:
            starts = [start + 1 for start in self._ends]
            states = self._pass(ids[:, None], self._own, starts)
        else:
            starts, new = self._catch_up(context)
            token_ids = padded(new, self.head.vocab_ids.device)
            rows = torch.arange(len(new), device=token_ids.device)[:, None]
            at, _ = placed(starts, token_ids.shape[1], 0, token_ids.device)
            kept = [context.features[layer] for layer in self.feature_layers]
            kept = torch.cat([k[rows, at.clamp(max=k.shape[1] - 1)] for k in kept], -1)
            states = self._pass(token_ids, self.head.reduce(kept), starts)
            states = states[rows, torch.tensor([[len(row) - 1] for row in new], device=token_ids.device)]
            starts = [start + len(row) - 1 for start, row in zip(starts, new, strict=True)]
            self.rows.ids = [list(now) for now in context.token_ids]  # not before its entries are there
        self._own, self._ends = states, starts
        return self.head.logits(self.head.last_norm(states[:, 0]))

    def _catch_up(self, context):
        """Where each row's cache goes on, and the ids behind it. Entry t is made of the ids up to t + 1."""
        self.rows.select(context.row_ids)
        same = [common_prefix(held, now) for held, now in zip(self.rows.ids, context.token_ids, strict=True)]
        starts = [max(0, min(n - 1, len(now) - 2)) for n, now in zip(same, context.token_ids, strict=True)]
        self.rows.ids = [now[: start + 1] for start, now in zip(starts, context.token_ids, strict=True)]
        return starts, [now[start + 1 :] for start, now in zip(starts, context.token_ids, strict=True)]

    def _pass(self, token_ids, features, starts):
        cache, width = self.rows.cache, token_ids.shape[1]
        cache.begin(starts, width)
        positions, mask = placed(starts, width, cache.end, token_ids.device)
        return self.head(token_ids, features, cache, positions, mask if mask.shape[0] > 1 or width > 1 else None)


def load_drafter(name: str, target):
    """A draft head trained for a target, ready to draft.

    Args:
        name: "eagle-chat", "eagle-code", "eagle-mixed" or "medusa-mixed" (for smollm2-135m), or a .safetensors path;
            "default": n-grams up to 8 tokens, and where they find nothing four of "eagle-mixed", for an Arm of gamma
            8; on CUDA that head alone, which captured steps take; n-grams alone for other targets.
        target: what `load_target` returns.
    Returns: An EagleDrafter or a MedusaDrafter; for "default" a CascadeDrafter or an NGramDrafter too.
    Raises:
        OSError: no such head.
        ValueError: it was made for another target.
    """
    if name == "default":
        lookup = NGramDrafter()
        if target.name != "smollm2-135m":
            return lookup
        head = load_drafter("eagle-mixed", target)
        return head if target.device.type == "cuda" else CascadeDrafter(Arm(lookup, 8), Arm(head, 4))
    path = WEIGHTS / f"{name}.safetensors"
    if not path.exists():
        path = Path(name).expanduser()
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in WEIGHTS.glob("*.safetensors"))) or "none is here"
        raise OSError(f"expected a draft head by name ({known}) or a .safetensors path, got {name!r}")
    head = load_head(path, target)
    drafter = EagleDrafter if isinstance(head, EagleHead) else MedusaDrafter
    return drafter(head, path.stem)
