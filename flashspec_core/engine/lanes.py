"""Drafters within a captured step: the same laws as drafters.py and head_drafters.py, with all state on the device.

A lane's first pass also reads what was committed since its last one; after an idle time, passes of many ids do.
"""

from __future__ import annotations

import torch

from flashspec_core.engine.drafters import EarlyExitDrafter, ModelDrafter, NGramDrafter, drafted
from flashspec_core.engine.fused import DIMS, FusedModel, why_not
from flashspec_core.engine.head_drafters import EagleDrafter, MedusaDrafter, drawn
from flashspec_core.engine.layer_kernels import Places, gate, ngrams, norm
from flashspec_core.engine.product_kernels import by_weight, product
from flashspec_core.records import Draft
from flashspec_core.verify import draw_draft


class Lane:
    """What lanes share.

    Args: drafter: whose law it drafts by; station: a cuda_graphs.Station.
    """

    def __init__(self, drafter, station):
        self.drafter, self.station, self.workspaces = drafter, station, {}
        self.read = torch.zeros_like(station.lengths)  # entries of its cache that are right, [batch]
        self.behind = station.longest  # at most so many are missing, as the host knows it

    def first(self, gamma: int) -> int:
        """Missing entries that a draft of gamma makes good itself; all, for a lane that reads none. Args: gamma."""
        return self.behind

    def catch_up(self, stride: int):
        """Read missing ids. Args: stride: how many a row."""
        raise NotImplementedError

    def draft(self, gamma: int, samplings, noise) -> Draft:
        """Draw; see Drafter.draft. Args: gamma; samplings: one a row; noise: a DraftNoise."""
        raise NotImplementedError

    def after(self, before, lengths):
        """The step is over. Args: before, lengths: [batch], committed ids before and after it."""


def places(starts, width: int, capacity: int):
    """Where some entries of each row stand. Args: starts: [batch]; width: from there on; capacity: of a row.

    Returns: [batch, width]; beyond the ends the first and the last.
    """
    return (starts[:, None] + torch.arange(width, device=starts.device)).clamp(0, capacity - 1)


def gathered(tensor, starts, width: int):
    """Some entries of each row. Args: tensor: [batch, capacity, ...]; starts, width: see places.

    Returns: [batch, width, ...].
    """
    at = places(starts, width, tensor.shape[1])
    return tensor.gather(1, at.view(*at.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:]))


class NGramLane(Lane):
    """Prompt lookup in the committed ids, one program a row."""

    def draft(self, gamma, samplings, noise) -> Draft:
        """See NGramDrafter.draft. Args: gamma: proposals at most; samplings, noise: not used."""
        s, d = self.station, self.drafter
        return Draft(ngrams(s.tokens, s.lengths, gamma, d.min_ngram, d.max_ngram, d.trust))


class DrawingLane(Lane):
    """A lane that draws one token after another."""

    vocab_ids = None
    most = 2**31

    def draft(self, gamma, samplings, noise) -> Draft:
        """Draw. Args: gamma, samplings, noise: see Drafter.draft."""
        all_ids, all_logits, all_sums = [], [], []
        for i in range(min(gamma, self.most)):
            logits = self._logits(i, all_ids[-1] if i else None, gamma)
            ids, sums = self._drawn(logits, samplings, noise, i)
            all_ids.append(ids)
            all_logits.append(logits)
            all_sums.append(sums)
        return drafted(samplings, all_ids, all_logits, all_sums, self.vocab_ids)

    def _logits(self, i: int, ids, gamma: int):
        """Of the i-th of gamma drafted tokens, contiguous; ids: [batch] the one before it, None at i = 0."""
        raise NotImplementedError

    def _drawn(self, logits, samplings, noise, i: int):
        return draw_draft(logits, samplings, noise, i, self.workspaces)


class HeadLane(DrawingLane):
    """A lane with a head on the target's states."""

    def __init__(self, drafter, station):
        super().__init__(drafter, station)
        self.head, self.vocab_ids, self.most = drafter.head, drafter.head.vocab_ids, drafter.most

    def _drawn(self, logits, samplings, noise, i):
        return drawn(self.head, logits, samplings, noise, i, self.station.target.vocab_size, self.workspaces)


class ModelLane(DrawingLane):
    """A smaller model with a cache of its own; its first pass reads the last two ids."""

    def __init__(self, drafter, station):
        super().__init__(drafter, station)
        self.fused = FusedModel(drafter.cached.model)
        self.cache = self.fused.new_cache(station.batch, station.capacity)
        self.known = self.fused.config.vocab_size

    def first(self, gamma) -> int:
        """Two: all drafts accepted, the last of them is not read yet. Args: gamma: not used."""
        return 2

    def catch_up(self, stride):
        """Read missing ids. Args: stride: how many a row."""
        last = (self.station.lengths - 2).clamp_min(0)
        starts = torch.minimum(self.read, last)
        self._states(gathered(self.station.tokens, starts, stride), starts)
        self.read.copy_(torch.minimum(starts + stride, last))

    def _logits(self, i, ids, gamma):
        s = self.station
        if i:
            states = self._states(ids[:, None], s.lengths - 1 + i)[:, 0]
        else:  # the last two ids: the one before the last was drafted and not read, where all stood
            starts = (s.lengths - 2).clamp_min(0)
            states = gathered(self._states(gathered(s.tokens, starts, 2), starts), s.lengths - 1 - starts, 1)[:, 0]
        return self.fused.logits(states)[:, : s.target.vocab_size].contiguous()

    def _states(self, ids, starts):
        return self.fused.states(torch.where(ids < self.known, ids, 0), starts, self.cache)[0]  # unknown: as id 0

    def after(self, before, lengths):
        """Its own drafts that stand are read. Args: before, lengths: [batch] committed ids."""
        self.read.copy_(lengths - 2)


class MedusaLane(HeadLane):
    """Medusa's blocks on the last state that the target has put out, all depths at once."""

    def _logits(self, i, ids, gamma):
        if not i:
            (layer,) = self.head.config.layers
            last = gathered(self.station.states[layer], self.station.lengths - 2, 1)[:, 0]
            self._every = self.head(last, min(gamma, self.most))
        return self._every[:, i].contiguous()


class EagleLane(HeadLane):
    """EAGLE's layer; its first pass reads the target's states of what the last step committed."""

    def __init__(self, drafter, station):
        super().__init__(drafter, station)
        config = self.head.config
        self.places = Places(config.num_heads, config.num_kv_heads, self.head.head_dim)
        self.qkv, self.out, self.gate_up, self.down = (
            product(getattr(self.head, name)) for name in ("qkv", "out", "gate_up", "down")
        )
        angles = torch.arange(station.capacity, device=station.lengths.device)[:, None] * self.head.frequencies
        self.places.set_angles(angles.cos().to(self.head.rows.dtype), angles.sin().to(self.head.rows.dtype))
        shape = station.batch, config.num_kv_heads, station.capacity, self.head.head_dim
        self.keys, self.values = (self.head.rows.new_zeros(shape) for _ in range(2))

    def first(self, gamma) -> int:
        """As many as a step of gamma commits. Args: gamma: drafted tokens."""
        return gamma + 1

    def catch_up(self, stride):
        """Read missing entries. Args: stride: how many a row."""
        starts = torch.minimum(self.read, (self.station.lengths - 2).clamp_min(0))
        self._read(starts, stride)
        self.read.copy_(torch.minimum(starts + stride, self.station.lengths - 1))

    def _logits(self, i, ids, gamma):
        lengths = self.station.lengths
        if i:
            self._own = self._pass(ids[:, None], self._own, lengths - 2 + i)
        else:
            starts = (lengths - 2 - gamma).clamp_min(0)
            self._own = gathered(self._read(starts, gamma + 1), lengths - 2 - starts, 1)  # an id alone: it guesses
        _, normed = norm(self._own[:, 0], None, self.head.last_norm.weight, self.head.config.eps)
        return by_weight(normed, self.head.rows)

    def after(self, before, lengths):
        """Entries of own output are made anew. Args: before, lengths: [batch] committed ids."""
        self.read.copy_(before - 1)

    def _read(self, starts, width):
        kept = [gathered(self.station.states[layer], starts, width) for layer in self.head.config.layers]
        ids = gathered(self.station.tokens, starts + 1, width)
        return self._pass(ids, self.head.reduce(torch.cat(kept, -1)), starts)

    def _pass(self, ids, features, starts):
        head, eps = self.head, self.head.config.eps
        x = head.start(ids, features)
        shape, x = x.shape, x.flatten(0, 1)
        _, normed = norm(x, None, head.attention_norm.weight, eps)
        attended = self.places.attend(self.qkv(normed), starts, self.keys, self.values, shape[1])
        x, normed = norm(x, self.out(attended), head.mlp_norm.weight, eps)
        return (x + self.down(gate(self.gate_up(normed)))).view(shape)


LANES = {
    NGramDrafter: NGramLane,
    ModelDrafter: ModelLane,
    EarlyExitDrafter: ModelLane,
    MedusaDrafter: MedusaLane,
    EagleDrafter: EagleLane,
}


def lane_kind(drafter, target) -> type | str:
    """The lane of a drafter. Args: drafter: any; target: a Target. Returns: a class, or why there is none."""
    kind = LANES.get(type(drafter), f"drafter {drafter.name!r} drafts on the host")
    reason = None
    if kind is ModelLane:
        model = drafter.cached.model
        reason = why_not(model) or (f"it is on {model.device}" if model.device != target.device else None)
    elif kind is EagleLane and drafter.head.head_dim not in DIMS:
        reason = f"its heads are {drafter.head.head_dim} wide and not 16, 32, 64 or 128"
    return f"drafter {drafter.name!r}: {reason}" if reason else kind
