"""Laws of small worlds: plain decoding by the book, speculation by adding up every path, and both by sampling.

It takes no verdict: gates.py compares, mutants.py plants faults.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from flashspec_core.engine.models import Target
from flashspec_core.noise import DraftNoise, log_uniforms, step_seeds
from flashspec_core.records import PLACEHOLDER_TOKEN_ID, Draft, Sampling
from flashspec_core.verify import reference, verify
from flashspec_core.verify.logits import logprobs


@dataclass(frozen=True, eq=False)
class Case:
    """A world so small that everything can be added up: logits hang on the last token alone.

    Args:
        target: [contexts, vocab] float64 logits; the row of a text is its last id modulo contexts. Texts begin at id 0.
        drafts: one such table for each arm.
        gamma: drafted tokens a step.
        sampling: of target and drafts.
        deterministic: the drafts propose their argmax and hand over no logits.
    """

    target: torch.Tensor
    drafts: tuple[torch.Tensor, ...]
    gamma: int = 2
    sampling: Sampling = Sampling(temperature=1.0)
    deterministic: bool = False

    @property
    def vocab(self) -> int:
        """V."""
        return self.target.shape[1]

    def draft(self, ids, context, arm=0) -> Draft:
        """What an arm hands over: ids [rows, gamma] drafted behind context [rows, gamma]."""
        return Draft(ids, None if self.deterministic else self.drafts[arm][context % len(self.target)])


def random_case(vocab, gamma=2, seed=0, num_arms=1, contexts=None, spread=1.0, **options) -> Case:
    """Target logits N(0, 1.2); each draft is the target plus N(0, spread).

    Args:
        vocab, gamma: sizes.
        seed: of numpy's generator.
        num_arms: draft tables.
        contexts: rows of each table; None: vocab.
        spread: how far the drafts are from the target.
        options: of Case.
    Returns: Case.
    """
    rng = np.random.default_rng(seed)
    shape = (contexts or vocab, vocab)
    target = rng.normal(0, 1.2, shape)
    drafts = tuple(torch.from_numpy(target + rng.normal(0, spread, shape)) for _ in range(num_arms))
    return Case(torch.from_numpy(target), drafts, gamma, **options)


def true_law(logits, sampling):
    """The law by the book, in float64 numpy and apart from the package: what everything is compared with.

    Args:
        logits: [..., vocab]; of ids that tie with the last one kept, the first stays.
        sampling: a Sampling with a temperature above 0.
    Returns: [..., vocab] probabilities.
    """
    x = np.asarray(logits, dtype=np.float64) / sampling.temperature
    order = np.argsort(-x, axis=-1, kind="stable")
    x = np.take_along_axis(x, order, -1)
    probs = np.exp(x - x[..., :1])
    probs[..., sampling.top_k :] = 0 if sampling.top_k else probs[..., sampling.top_k :]
    probs /= probs.sum(-1, keepdims=True)
    if sampling.top_p:
        probs = np.where(probs.cumsum(-1) - probs < sampling.top_p, probs, 0)
        probs /= probs.sum(-1, keepdims=True)
    probs = np.where(probs >= (sampling.min_p or 0) * probs[..., :1], probs, 0)
    law = np.empty_like(probs)
    np.put_along_axis(law, order, probs / probs.sum(-1, keepdims=True), -1)
    return law


def chain_law(case: Case, num_tokens: int):
    """Law of the first tokens under plain decoding.

    Args: case, num_tokens: the world, and how many tokens.
    Returns: [vocab] * num_tokens probabilities, numpy.
    """
    rows = true_law(case.target, case.sampling)
    law = rows[0]
    for _ in range(num_tokens - 1):
        law = law[..., None] * rows[np.arange(case.vocab) % len(rows)]
    return law


def step_law(case: Case, method: str, last: int = 0, arm: int = 0) -> list:
    """Law of one step, summed over every drafted block, in float64.

    Chances, weights and laws of the next token are the specification's own functions; the sum over fates stands here.

    Rule: the chance of a block, times the chance to stop behind n of it, times the law of the next token. "coupled":
    one noise decides both sides, so a token v is drafted and stands with 1 / sum over w of max(p_w / p_v, q_w / q_v).

    Args:
        case: the world.
        method: "token", "block" or "coupled".
        last: the id that the text ends with.
        arm: which draft.
    Returns: For n = 0..gamma the probabilities [vocab] * (n + 1) of accepting n and emitting these n + 1 tokens.
    """
    vocab, gamma = case.vocab, case.gamma
    ids = torch.cartesian_prod(*[torch.arange(vocab)] * gamma).view(-1, gamma)
    context = torch.cat([torch.full((len(ids), 1), last), ids], dim=1) % len(case.target)
    samplings = [case.sampling] * len(ids)
    p, q, p_drafted, q_drafted = reference.laws(case.target[context], case.draft(ids, context[:, :-1], arm), samplings)
    if case.deterministic:
        best = case.drafts[arm][context[:, :-1]].argmax(-1)
        chance = (ids == best).all(1).double()
        q = torch.full_like(q, -math.inf).scatter_(-1, best[..., None], 0.0)
    else:  # by the book: what is drawn, and not what the verifier takes it for
        drawn = torch.from_numpy(true_law(case.drafts[arm][context[:, :-1]], case.sampling))
        chance = drawn.gather(-1, ids[..., None])[..., 0].prod(1)
    count = torch.full((len(ids),), gamma)
    if method == "coupled":
        p, q = p.exp(), q.exp()
        inner = p[:, :-1]
        stands = 1 / torch.maximum(inner[..., None, :] / inner[..., None], q[..., None, :] / q[..., None]).sum(-1)
        stands = torch.where((inner > 0) & (q > 0), stands, 0.0)
        reach = torch.cat([torch.ones(len(ids), 1), stands.gather(-1, ids[..., None])[..., 0].cumprod(1)], dim=1)
        falls = torch.cat([(inner - stands).where(inner - stands > 1e-15, 0), p[:, -1:]], dim=1)
        joints = [reach[:, n, None] * falls[:, n] / vocab ** (gamma - n) for n in range(gamma + 1)]
    else:
        log_weights = torch.zeros(len(ids), gamma + 1)
        if method == "token":
            c = reference.token_chances(p_drafted, q_drafted).exp().nan_to_num(0).clamp(max=1)
            reach = torch.cat([torch.ones(len(ids), 1), c.cumprod(1)], dim=1)
            stop = reach * torch.cat([1 - c, torch.ones(len(ids), 1)], dim=1)
        else:
            log_h, log_weights = reference.block_chances(p, q, p_drafted, q_drafted, count)
            h = torch.cat([torch.ones(len(ids), 1), log_h.exp().clamp(max=1)], dim=1)
            stop = h * torch.cat([(1 - h[:, 1:]).flip(1).cumprod(1).flip(1), torch.ones(len(ids), 1)], dim=1)
        joints = []
        for n in range(gamma + 1):
            law = reference.next_law(p, q, torch.full_like(count, n), count, log_weights[:, n]).softmax(-1)
            mass = torch.where(chance > 0, chance * stop[:, n], 0.0)[:, None]
            joints.append(torch.where(mass > 0, mass * law, 0.0))
    shaped = [joint.view(*[vocab] * (gamma + 1)) for joint in joints]
    return [x.sum(tuple(range(n, gamma))).numpy() if n < gamma else x.numpy() for n, x in enumerate(shaped)]


def output_law(case: Case, method: str, num_tokens: int, policy=None):
    """Law of the first tokens under speculation, added up; a policy may choose the arm from all that is past.

    Args:
        case: the world; its arms are its drafts.
        method: "token", "block" or "coupled".
        num_tokens: how many tokens.
        policy: makes a fresh bandits.Policy, replayed on each past; None: always the first arm.
    Returns: [vocab] * num_tokens probabilities, numpy.
    """
    step = functools.cache(lambda last, arm: step_law(case, method, last, arm))
    law = np.zeros((case.vocab,) * num_tokens)
    open_paths = {((), ()): 1.0}  # (tokens, past rounds) -> probability
    while open_paths:
        grown = defaultdict(float)
        for (tokens, past), mass in open_paths.items():
            arm = _next_arm(policy, past, case.gamma)
            for n, joint in enumerate(step(tokens[-1] if tokens else 0, arm)):
                for emitted in np.argwhere(joint > 0):
                    whole = (*tokens, *map(int, emitted))
                    if len(whole) >= num_tokens:
                        law[whole[:num_tokens]] += mass * joint[tuple(emitted)]
                    else:
                        grown[whole, (*past, (arm, n))] += mass * joint[tuple(emitted)]
        open_paths = grown
    return law


def _next_arm(policy, past, gamma) -> int:
    if policy is None:
        return 0
    replayed = policy()
    for arm, n in past:
        replayed.select_arm()
        replayed.update(arm, n / gamma)
    return int(replayed.select_arm())


def total_variation(a, b) -> float:
    """Half the sum of absolute differences. Args: a, b: probabilities of the same shape."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).sum() / 2)


class ImpossibleResult(ValueError):
    """A verifier that returned what no verification can."""


@torch.no_grad()
def sample(case: Case, method: str, num_rows: int, num_tokens: int, seed: int = 0, verifier=verify, first_row: int = 0):
    """Texts from a verifier, drafted, verified and committed as the engine does; everything lies on the CPU.

    A row does not depend on its batch, but for a case of one law over more than 4,096 ids.

    Args:
        case, method: the world and the rule.
        num_rows, num_tokens: texts, and tokens of each.
        seed, first_row: row i takes the seed seed * 2^32 + first_row + i.
        verifier: a callable of the door's signature.
    Returns: tokens [num_rows, num_tokens], and of the first step num_accepted [num_rows] and token_ids
        [num_rows, gamma + 1].
    """
    seeds = torch.arange(first_row, first_row + num_rows) + (seed << 32)
    target, length = case.target.float(), torch.ones(num_rows, dtype=torch.int64)
    small = Case(target, tuple(d.float() for d in case.drafts), case.gamma, case.sampling, case.deterministic)
    text = torch.zeros(num_rows, num_tokens + case.gamma + 2, dtype=torch.int64)
    first, step, generator = None, 0, torch.Generator().manual_seed(int(seeds[0]))
    large = case.vocab > 4096 and len(target) == 1 and method != "coupled" and not case.deterministic
    while bool((length <= num_tokens).any()):
        active = (length <= num_tokens).nonzero()[:, 0]
        here = length[active]
        noise, positions = step_seeds(seeds[active], step), None
        if method == "coupled":
            noise, positions = seeds[active], here
        context = [text[active, here - 1]]
        for i in range(case.gamma):
            if large:  # one law for all rows, drawn at once: a race over all ids in each would take as long again
                law = logprobs(small.drafts[0], case.sampling)[0].exp()
                context.append(torch.multinomial(law, len(active), True, generator=generator))
                continue
            logits = small.drafts[0][context[-1] % len(target)]
            gumbels = DraftNoise(noise, positions).gumbels(i, case.vocab)
            law = logits if case.deterministic else logprobs(logits, case.sampling) + gumbels
            context.append(law.argmax(-1))
        context = torch.stack(context, dim=1)
        draft = small.draft(context[:, 1:], context[:, :-1])
        options = dict(sampling=case.sampling, log_uniforms=log_uniforms(noise, case.gamma), seeds=noise)
        rows = target[context % len(target)]
        result = verifier(rows, draft.token_ids, draft.logits, positions=positions, method=method, **options)
        emitted = result.token_ids
        at = torch.arange(case.gamma + 1)
        shown = emitted != PLACEHOLDER_TOKEN_ID
        known = (emitted[shown] >= 0) & (emitted[shown] < case.vocab)
        fits = torch.equal(shown, at <= result.num_accepted[:, None]) and int(result.num_accepted.max()) <= case.gamma
        if not fits or not bool(known.all()):
            raise ImpossibleResult("expected num_accepted + 1 ids of the vocabulary in each row, then -1")
        text[active[:, None].expand_as(shown)[shown], (here[:, None] + at)[shown]] = emitted[shown]
        length[active] = here + (emitted >= 0).sum(1)
        first, step = first or (result.num_accepted, emitted), step + 1
    return text[:, 1 : num_tokens + 1], *first


@functools.cache
def tiny_models(vocab: int = 4) -> tuple:
    """A random target and two models that draft for it; their logits are far from flat.

    Args: vocab: V.
    Returns: Three engine.models.Target.
    """
    made = []
    for seed, layers in ((3, 2), (5, 1), (8, 1)):
        torch.manual_seed(seed)
        made.append(_llama(vocab, 16, layers))
    return tuple(made)


def table_model(table) -> Target:
    """A Llama without layers, whose logits are the row of a table that the last id names.

    Args: table: [vocab, vocab] logits.
    """
    vocab = len(table)
    target = _llama(vocab, vocab, 0)
    with torch.no_grad():
        target.model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        target.model.lm_head.weight.copy_(table.T / math.sqrt(vocab))  # the norm makes sqrt(V) of the 1
    return target


def _llama(vocab, hidden, layers) -> Target:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=16, max_position_embeddings=128)
    sizes = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=32, num_hidden_layers=layers, rms_norm_eps=0.0)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, initializer_range=0.3))
    return Target(model.eval(), name=f"tiny-{vocab}-{layers}")


@torch.no_grad()
def plain_law(target, prompt, sampling, num_tokens: int):
    """Law of the first tokens behind a prompt, by one plain pass over every continuation.

    Args: target, prompt, sampling, num_tokens: an engine target, ids, a Sampling, and how many tokens.
    Returns: [vocab] * num_tokens probabilities, numpy.
    """
    vocab = target.vocab_size
    tails = torch.cartesian_prod(*[torch.arange(vocab)] * num_tokens).view(-1, num_tokens)
    ids = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails[:, :-1]], dim=1)
    laws = true_law(target.model(input_ids=ids).logits[:, -num_tokens:].double(), sampling)
    return np.take_along_axis(laws, tails.numpy()[..., None], -1)[..., 0].prod(1).reshape((vocab,) * num_tokens)


CASES = {
    "V 5": random_case(5, seed=1),
    "V 6, T .7, top-p .9": random_case(6, gamma=3, seed=2, sampling=Sampling(temperature=0.7, top_p=0.9)),
    "V 4, deterministic": random_case(4, seed=3, deterministic=True),
}
KS_CASES = {
    vocab: random_case(vocab, gamma=1, seed=vocab, contexts=1, sampling=Sampling(temperature=0.7))
    for vocab in (2, 80, 49_152)
}
ENUMERATED = {
    "V 3, UCB1": random_case(3, seed=4, num_arms=2),
    "V 3, T .5, top-k 2": random_case(3, seed=5, sampling=Sampling(temperature=0.5, top_k=2)),
    "V 4, deterministic": CASES["V 4, deterministic"],
}
