"""The specification against a slow serial oracle, its output law by enumeration, and its law by sampling many rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from test_logits import coarse_logits, samplings, serial_law

import flashspec_core as fs
from flashspec_core.lab.fit import chi_square_p
from flashspec_core.noise import COUPLED, DRAFT, RECOVER, gumbels, log_uniforms, step_seeds
from flashspec_core.verify import METHODS
from flashspec_core.verify.logits import draw, logprobs, residual_logprobs, warp
from flashspec_core.verify.reference import block_chances, laws

INF = math.inf
SOFT = fs.Sampling(temperature=1.0)
ROWS = 20_000
NEAR = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small tensors: on a busy machine two threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def log(value):
    return math.log(value) if value > 0 else -INF


def serial_verify(target_laws, draft_laws, ids, log_u, noise, method="token", choices=()):
    """One row by the book: `ids` without padding, laws as {id: probability}, `noise` one Gumbel an id.

    Returns the emitted ids, and how near the row came to another outcome: below NEAR rounding decides.
    """
    if method == "coupled":  # `choices`: Gumbels of each position
        races = [race(law, gumbel) for law, gumbel in zip(target_laws, choices, strict=True)]
        n = next((i for i, x in enumerate(ids) if races[i][0] != x), len(ids))
        return [id_ for id_, _ in races[: n + 1]], min(gap for _, gap in races)
    g, margin, w = len(ids), INF, [1.0]
    ratios = [(target_laws[i].get(x, 0.0), draft_laws[i].get(x, 0.0)) for i, x in enumerate(ids)]
    for p, q in ratios:
        w.append(min(1.0, w[-1] * (p / q if q else INF if p and w[-1] else 0.0)))
    if method == "token":
        chances = [min(1.0, p / q if q else INF if p else 0.0) for p, q in ratios]
        w = [1.0] * (g + 1)
    else:
        chances = []
        for i in range(1, g):
            over = sum(max(0.0, w[i] * p - draft_laws[i].get(v, 0.0)) for v, p in target_laws[i].items())
            chances.append(1.0 if w[i] == 1 else over / (over + 1 - w[i]))
        chances += w[g:] if g else []
    passed = [log_u[i] <= log(c) and c > 0 for i, c in enumerate(chances)]
    margin = min((abs(log_u[i] - log(c)) for i, c in enumerate(chances) if c > 0), default=INF)
    if method == "token":
        n = next((i for i, good in enumerate(passed) if not good), g)
    else:
        n = max((i + 1 for i, good in enumerate(passed) if good), default=0)
    law = target_laws[n]
    if n < g:
        over = {v: w[n] * mass - draft_laws[n].get(v, 0.0) for v, mass in law.items()}
        law = {v: mass for v, mass in over.items() if mass > 1e-9} or law
    last, gap = race(law, noise)
    return [*ids[:n], last], min(margin, gap)


def race(law, noise):
    """The winner of a Gumbel race, and its lead."""
    scores = sorted(((log(mass) + noise[v], v) for v, mass in law.items()), reverse=True)
    return scores[0][1], scores[0][0] - scores[1][0] if len(scores) > 1 else INF


def one_hot_logits(ids, vocab):
    """0 at the id, -inf elsewhere: a deterministic draft's logits."""
    return torch.full((*ids.shape, vocab), -INF).scatter_(-1, ids.clamp_min(0)[..., None], 0.0)


def call(target, ids, draft=None, sampling=SOFT, seeds=None, log_u=None, **options):
    """fs.verify with the noise that the engine would give it."""
    seeds = torch.arange(len(ids)) if seeds is None else seeds
    log_u = log_uniforms(seeds, ids.shape[1]) if log_u is None else log_u
    return fs.verify(target, ids, draft, sampling=sampling, log_uniforms=log_u, seeds=seeds, **options)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=200)
@given(st.data())
def test_verify_equals_the_serial_oracle(method, data):
    # BUGS 3, 4, 11, 19, 22: every kind of draft, ragged rows, filters of each row's own
    batch, gamma, vocab = (data.draw(st.integers(*ends)) for ends in ((1, 4), (1, 8), (2, 40)))
    rows = data.draw(st.lists(samplings(vocab + 3), min_size=batch, max_size=batch))
    if data.draw(st.booleans()):
        rows = [rows[0]] * batch
    kind = data.draw(st.sampled_from(["none", "full", "smaller", "trimmed"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = rng.integers(0, gamma + 1, batch)
    size = {"none": vocab, "full": vocab}.get(kind, int(rng.integers(1, vocab + 1)))
    vocab_ids = np.sort(rng.permutation(vocab)[:size]) if kind == "trimmed" else np.arange(size)
    target, draft = coarse_logits(rng, batch, gamma + 1, vocab), coarse_logits(rng, batch, gamma, size)
    ids, laws = torch.full((batch, gamma), -1), []
    for row in range(batch):
        laws.append([])
        for i in range(lengths[row]):
            law = serial_law(draft[row, i].tolist(), rows[row])
            x = int(vocab_ids[rng.choice(list(law), p=list(law.values()))])
            if kind == "none" or rng.random() < 0.1:  # THEORY: q = 0 at a drafted id
                x = int(rng.integers(vocab))
            ids[row, i] = x
            laws[-1].append({x: 1.0} if kind == "none" else {int(vocab_ids[v]): mass for v, mass in law.items()})
        target[row, lengths[row] + 1 :] = draft[row, lengths[row] :] = math.nan  # BUGS 19: never read
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, batch))
    log_u, noise = log_uniforms(seeds, gamma), gumbels(seeds, vocab, RECOVER)
    positions = torch.from_numpy(rng.integers(0, 1000, batch))
    options = {"method": method, "positions": positions}
    choices = torch.stack([gumbels(seeds, vocab, COUPLED, positions + i) for i in range(gamma + 1)], dim=1)
    if kind != "none" and data.draw(st.booleans()):
        options["draft_logsumexp"] = warp(draft, rows).logsumexp(-1)
    if kind == "trimmed":
        options["draft_vocab_ids"] = torch.from_numpy(vocab_ids)
    result = call(target, ids, None if kind == "none" else draft, rows, seeds, log_u, **options)
    for row in range(batch):
        p = [serial_law(target[row, i].tolist(), rows[row]) for i in range(lengths[row] + 1)]
        drafted = ids[row, : lengths[row]].tolist()
        own = (log_u[row].tolist(), noise[row].tolist(), method, choices[row, : len(drafted) + 1].tolist())
        want, margin = serial_verify(p, laws[row], drafted, *own)
        if margin <= NEAR:
            continue
        assert result.token_ids[row].tolist() == want + [-1] * (gamma + 1 - len(want))
        assert (int(result.num_accepted[row]), int(result.next_token_ids[row])) == (len(want) - 1, want[-1])
        for i, x in enumerate(drafted):
            assert float(result.target_logprobs[row, i]) == pytest.approx(log(p[i].get(x, 0.0)), abs=1e-4)
        if method != "coupled" and not all(s.greedy for s in rows):
            got = result.draft_logprobs[row, : lengths[row]].tolist()
            assert got == pytest.approx([log(q.get(x, 0.0)) for q, x in zip(laws[row], drafted, strict=True)], abs=1e-4)


def test_a_large_vocabulary_with_several_drafts_equals_the_oracle_over_1000_seeds():
    # BUGS 11: past a tile of 1,024 ids
    rng, vocab, gamma = np.random.default_rng(0), 1100, 3
    target = torch.from_numpy(rng.normal(0, 3, (1, gamma + 1, vocab))).float()
    draft = target[:, :gamma] + torch.from_numpy(rng.normal(0, 1, (1, gamma, vocab))).float()
    seeds, law = torch.arange(1000), logprobs(draft, SOFT)[0]
    ids = torch.stack([draw(law[i], gumbels(seeds, vocab, DRAFT, i)) for i in range(gamma)], dim=1)
    p, q = ([serial_law(row.tolist(), SOFT) for row in x[0]] for x in (target, draft))
    result = call(target.expand(1000, -1, -1), ids, draft.expand(1000, -1, -1))
    log_u, noise = log_uniforms(seeds, gamma).tolist(), gumbels(seeds, vocab, RECOVER)
    compared = 0
    for row, seen in enumerate(result.token_ids.tolist()):
        want, margin = serial_verify(p, q, ids[row].tolist(), log_u[row], noise[row].tolist())
        if margin > NEAR:
            compared += 1
            assert seen[: len(want)] == want and set(seen[len(want) :]) <= {-1}
    assert compared > 990 and set(result.num_accepted.tolist()) == {0, 1, 2, 3}


def enumerated_law(p, q):
    """Law of one position: sum over drafts x of q(x) [stands: x; falls: the residual], from verify's own numbers."""
    vocab = len(p)
    ids = torch.arange(vocab)[:, None]
    rows = {"target": p.log().expand(vocab, 2, vocab), "ids": ids, "draft": q.log().expand(vocab, 1, vocab)}
    result = call(**rows)
    stands = (result.target_logprobs - result.draft_logprobs).double()[:, 0].exp().clamp(max=1)
    log_u = torch.where((stands > 0) & (stands < 1), stands.log(), -8.0).float()[:, None]
    below, above = (call(**rows, log_u=(log_u + by).clamp(max=0)).num_accepted for by in (-1e-3, 1e-3))
    assert bool((below[(stands > 0) & (q > 0)] == 1).all()) and bool((above[(stands < 1) & (q > 0)] == 0).all())
    residual = residual_logprobs(p.double().log(), q.double().log()).exp()
    return torch.where(q > 0, q * stands, 0).double() + (q * (1 - stands).nan_to_num())[q > 0].sum() * residual


@pytest.mark.parametrize("seed", range(12))
def test_output_law_of_one_position_by_enumeration(seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, 2 + seed % 4, generator=generator) * 1.5).softmax(-1)
    if seed % 3 == 1:  # zeros in p, in q, and in both
        p[0] = q[-1] = 0
    if seed % 6 == 5:
        p[0] = q[0] = 0
    p, q = p / p.sum(), q / q.sum()
    torch.testing.assert_close(enumerated_law(p, q), p.double(), atol=1e-6, rtol=0)


def test_rejected_mass_times_residual_fills_what_is_missing_exactly():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(2, 500, 6, generator=generator, dtype=torch.float64) * 2).softmax(-1)
    kept = torch.minimum(p, q)
    filled = kept + (1 - kept.sum(-1, keepdim=True)) * residual_logprobs(p.log(), q.log()).exp()
    torch.testing.assert_close(filled, p, atol=1e-12, rtol=0)


def first_two(target_table, draft_table, vocab_ids, sampling, gamma, kind):
    """First two tokens of ROWS rows that follow bigram tables from id 0, stepping as the engine does."""
    seeds, last = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)
    tokens = None
    for step in range(2):
        noise, drafted = step_seeds(seeds, step), [last]
        for i in range(gamma):
            law = logprobs(draft_table[drafted[-1]], sampling)
            x = law.argmax(-1) if kind == "argmax" else draw(law, gumbels(noise, law.shape[-1], DRAFT, i))
            drafted.append(vocab_ids[x])
        context, ids = torch.stack(drafted, 1), torch.stack(drafted[1:], 1)
        options = {"draft_vocab_ids": vocab_ids} if kind == "trimmed" else {}
        draft = None if kind == "argmax" else draft_table[context[:, :-1]]
        emitted = call(target_table[context], ids, draft, sampling, noise, **options).token_ids
        if step == 0:
            tokens, last = emitted[:, :2].clone(), emitted[:, 0]
    return torch.where(tokens[:, 1] < 0, torch.stack([tokens[:, 0], emitted[:, 0]], 1).T, tokens.T).T


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize(
    "kind, sampling",
    [
        ("full", SOFT),
        ("trimmed", fs.Sampling(temperature=0.7, top_p=0.9)),
        ("argmax", fs.Sampling(temperature=1.5, min_p=0.05)),
        ("bfloat16", fs.Sampling(temperature=0.6, top_k=4)),
    ],
)
def test_joint_law_of_the_first_two_tokens(kind, sampling, gamma):
    # BUGS 1 (argmax drafts are deterministic), 6, 8: the pair sees what the first token alone cannot
    rng = np.random.default_rng(gamma + 10)
    vocab_ids = torch.tensor([0, 2, 3]) if kind == "trimmed" else torch.arange(5)
    target = torch.from_numpy(rng.normal(0, 1.2, (5, 5))).float()
    draft = (target + torch.from_numpy(rng.normal(0, 1.0, (5, 5))).float())[:, vocab_ids]
    if kind == "bfloat16":
        target, draft = (target + 8).bfloat16(), (draft + 8).bfloat16()
    pairs = first_two(target, draft, vocab_ids, sampling, gamma, kind)
    bigram = logprobs(target, sampling).exp()
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25)
    law = (bigram[0][:, None] * bigram).flatten()
    assert int((law > 0.01).sum()) >= 6 and chi_square_p(counts, law) > 1e-3


@pytest.mark.parametrize(
    "p, drafted, q, sampling, law",
    [
        ([0.6, 0.4], 0, None, SOFT, [0.6, 0.4]),  # BUGS 1: .75 with q taken from a softmax
        ([0.1, 0.6, 0.3], None, [0.6, 0.3, 0.1], SOFT, [0.1, 0.6, 0.3]),  # BUGS 2: (.240, .489, .271)
        # BUGS 3: logits (2, 1, 0) and (0, 1, 2) at T .5
        ([0.665, 0.245, 0.09], None, [0.09, 0.245, 0.665], fs.Sampling(temperature=0.5), [0.8668, 0.1173, 0.0159]),
        ([0.55, 0.4, 0.05], 2, None, fs.Sampling(temperature=1.0, top_p=0.9), [0.5789, 0.4211, 0]),  # BUGS 4
        ([0.0, 0.5, 0.5], 0, [1.0, 0.0, 0.0], SOFT, [0.0, 0.5, 0.5]),  # BUGS 7
        ([0.125] * 8, 3, None, SOFT, [0.125] * 8),  # BUGS 9: no fall-back to greedy
    ],
)
def test_law_of_the_first_token_of_known_faults(p, drafted, q, sampling, law):
    seeds, vocab = torch.arange(ROWS), len(p)
    target = torch.tensor(p).log().expand(ROWS, 2, vocab)
    draft = None if q is None else torch.tensor(q).log().expand(ROWS, 1, vocab)
    ids = torch.full((ROWS, 1), drafted or 0)
    if drafted is None:
        ids = draw(logprobs(draft, sampling), gumbels(seeds, vocab, DRAFT)[:, None])
    counts = torch.bincount(call(target, ids, draft, sampling).token_ids[:, 0], minlength=vocab)
    assert chi_square_p(counts, law) > 1e-3


def test_a_tail_id_under_top_p_never_comes_out_of_any_position():
    # BUGS 4: filters reach all verified positions, deterministic and drawn drafts alike
    target = torch.tensor([0.55, 0.4, 0.05]).log().expand(4000, 4, 3)
    ids = torch.randint(3, (4000, 3), generator=torch.Generator().manual_seed(0))
    for draft in (None, torch.zeros(4000, 3, 3)):
        result = call(target, ids, draft, fs.Sampling(temperature=1.0, top_p=0.9))
        assert int(result.token_ids.max()) == 1 and result.num_accepted.unique().numel() == 4


@pytest.mark.parametrize("log_u", [0.0, -1e-9, math.log(2.0**-24)])
def test_uniforms_at_their_ends(log_u):
    # BUGS 7: p (1, 0), q (0, 1) must never emit id 1; p = q stands at the largest u; q = 0 at a drafted id
    laws = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]).log()
    drafts = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]).log()
    ids = torch.tensor([[1], [1], [0], [1]])
    result = call(laws[:, None].expand(4, 2, 2), ids, drafts[:, None], log_u=torch.full((4, 1), log_u))
    assert result.num_accepted.tolist() == [0, 1, 1, 0]
    assert result.token_ids[0].tolist() == [0, -1] and result.token_ids[3].tolist() == [0, -1]


def test_a_uniform_stuck_at_zero_does_not_accept_what_the_target_forbids():
    # BUGS 7
    target, draft = torch.tensor([[[0.0, -INF]] * 2]), torch.tensor([[[-INF, 0.0]]])
    assert call(target, torch.tensor([[1]]), draft, log_u=torch.tensor([[-INF]])).num_accepted.item() == 0


def test_acceptance_counts_are_binomial():
    # BUGS 8: 200 batches of 1,000 rows of equal p and q, each position passing with probability 1/2
    size, gamma = 200 * 1000, 3
    target = torch.zeros(size, gamma + 1, 2)
    accepted = call(target, torch.zeros(size, gamma, dtype=torch.int64)).num_accepted
    assert chi_square_p(torch.bincount(accepted), [0.5, 0.25, 0.125, 0.125]) > 1e-3
    for reached in (1, 2, 3):
        counts = (accepted >= reached).view(200, 1000).sum(1).double()
        spread = float(counts.var()) / (1000 * 0.5**reached * (1 - 0.5**reached))
        assert stats.chi2.ppf(5e-4, 199) < spread * 199 < stats.chi2.ppf(1 - 5e-4, 199)


def test_recovered_token_is_independent_of_the_uniform_that_failed():
    # THEORY: the u that failed, used again for the residual, gives (.1, .56, .34)
    p, q = torch.tensor([0.1, 0.45, 0.45]), torch.tensor([0.8, 0.1, 0.1])
    ids = torch.zeros(ROWS, 1, dtype=torch.int64)
    result = call(p.log().expand(ROWS, 2, 3), ids, q.log().expand(ROWS, 1, 3))
    fell = result.num_accepted == 0
    u = log_uniforms(torch.arange(ROWS), 1)[fell, 0]
    upper, first = u > u.median(), result.next_token_ids[fell] == 1
    table = [[int((a & b).sum()) for a in (upper, ~upper)] for b in (first, ~first)]
    assert stats.chi2_contingency(table).pvalue > 1e-3 and int(fell.sum()) > 10_000


def test_a_deterministic_draft_equals_one_hot_logits_bit_for_bit():
    # BUGS 1
    rng = np.random.default_rng(3)
    target = torch.from_numpy(rng.normal(0, 1, (500, 4, 6))).float()
    ids = torch.from_numpy(rng.integers(0, 6, (500, 3)))
    target[..., 0] += 2
    ids[:250] = 0
    ids[100:200, 2] = -1
    for sampling in (SOFT, fs.Sampling(temperature=0.8, top_k=3)):
        bare, dense = call(target, ids, None, sampling), call(target, ids, one_hot_logits(ids, 6), sampling)
        assert torch.equal(bare.token_ids, dense.token_ids) and bare.num_accepted.unique().numel() == 4


@pytest.mark.parametrize("sampling", [SOFT, fs.Sampling()])
def test_tokens_stop_behind_the_first_rejection_and_the_bonus_stands_behind_the_last(sampling):
    # in other suites: tokens kept after a rejection, the bonus token over the last accepted one
    sure = torch.tensor([1, 2, 3, 4])
    target = torch.full((3, 4, 6), -INF).scatter_(-1, sure.expand(3, 4)[..., None], 0.0)
    ids = torch.tensor([[1, 2, 3], [1, 5, 3], [0, 2, 3]])
    result = call(target, ids, None, sampling)
    assert result.token_ids.tolist() == [[1, 2, 3, 4], [1, 2, -1, -1], [1, -1, -1, -1]]
    assert result.num_accepted.tolist() == [3, 1, 0] and result.next_token_ids.tolist() == [4, 2, 1]


@pytest.mark.parametrize("sampling", [SOFT, fs.Sampling(), [SOFT, fs.Sampling(), SOFT]])
def test_padding_is_not_an_id(sampling):
    # BUGS 19: rows of 1, 3 and 0 drafts emit at most one id more; the bonus comes from target row g
    target = torch.zeros(3, 4, 6)
    target[..., 5] = 40.0  # where padding would be read as the last id
    target[2, 0] = torch.tensor([-INF, -INF, 9.0, -INF, -INF, -INF])
    ids = torch.tensor([[5, -1, -1], [5, 5, 5], [-1, -1, -1]])
    for draft in (None, one_hot_logits(ids, 6)):
        result = call(target, ids, draft, sampling)
        assert result.token_ids.tolist() == [[5, 5, -1, -1], [5, 5, 5, 5], [2, -1, -1, -1]]


def test_a_bias_on_one_rows_drafted_id_reaches_that_row():
    # BUGS 21: drafts (0, 2), -inf on the drafted id of row 1
    target = torch.zeros(2000, 3, 4)
    target[1::2, :, 3] = -INF
    ids = torch.tensor([[-1, -1], [3, 3]]).repeat(1000, 1)
    emitted = call(target, ids, torch.zeros(2000, 2, 4)).token_ids
    assert not bool((emitted[1::2] == 3).any()) and bool((emitted[::2, 0] == 3).any())


def test_a_row_does_not_depend_on_its_batch():
    # BUGS 18
    rng, seeds = np.random.default_rng(0), torch.tensor([0, -5, 0, 2**62])
    target, draft = coarse_logits(rng, 4, 5, 30), coarse_logits(rng, 4, 4, 30)
    target[2], draft[2] = target[0], draft[0]
    ids = draft.argmax(-1)
    rows = [fs.Sampling(temperature=0.8, top_p=0.9), SOFT, fs.Sampling(temperature=0.8, top_p=0.9), fs.Sampling()]
    together = call(target, ids, draft, rows, seeds)
    assert torch.equal(together.token_ids[0], together.token_ids[2])
    for row in range(4):
        alone = call(*(x[row : row + 1] for x in (target, ids, draft)), [rows[row]], seeds[row : row + 1])
        assert torch.equal(alone.token_ids[0], together.token_ids[row])


@pytest.mark.parametrize("vocab", [8193, 10_000, 151_936])
def test_vocabulary_tails(vocab):
    target = torch.zeros(4, 2, vocab)
    target[2:, :, :-1] = -INF  # only the last id
    for sampling in (SOFT, fs.Sampling(), fs.Sampling(temperature=1.0, top_p=0.9)):
        result = call(target, torch.full((4, 1), vocab - 1), None, sampling)
        assert int(result.next_token_ids.max()) < vocab and result.next_token_ids[2:].tolist() == [vocab - 1] * 2


def test_greedy_logprobs_are_zero_or_minus_infinity():
    target, ids = torch.tensor([[[0.0, 1.0]] * 3] * 2), torch.tensor([[1, 1], [1, 0]])
    assert call(target, ids, sampling=fs.Sampling()).target_logprobs.tolist() == [[0, 0], [0, -INF]]


def test_greedy_draft_logprobs_are_numbers_wherever_the_row_is_decided():
    target, ids = torch.tensor([[[0.0, 1.0]] * 2]), torch.tensor([[0]])
    assert call(target, ids, sampling=fs.Sampling()).draft_logprobs.tolist() == [[0.0]]


def test_zero_gamma_draws_from_the_target():
    ids, target = torch.empty(ROWS, 0, dtype=torch.int64), torch.tensor([0.2, 0.8]).log().expand(ROWS, 1, 2)
    result = call(target, ids)
    assert chi_square_p(torch.bincount(result.token_ids[:, 0]), [0.2, 0.8]) > 1e-3
    assert call(target, ids, sampling=fs.Sampling()).token_ids.unique().tolist() == [1]


# "block" and "coupled"


def test_block_by_hand():
    # THEORY: p = (1/3, 2/3), q = (2/3, 1/3) after every prefix, gamma 2
    p, q = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    blocks = [[0, 0], [0, 1], [1, 0], [1, 1]]
    h = [[0, 1 / 4], [0, 1], [1, 1 / 2], [1, 1]]
    ids = torch.tensor(blocks)
    target, draft = p.expand(4, 3, 2), q.expand(4, 2, 2)
    log_h, log_w = block_chances(*laws(target, fs.Draft(ids, draft), [SOFT] * 4), torch.tensor([2] * 4))
    assert log_h.exp().tolist() == [pytest.approx(row, abs=1e-6) for row in h]
    w = [[1, 1 / 2, 1 / 4], [1, 1 / 2, 1], [1, 1, 1 / 2], [1, 1, 1]]
    assert log_w.exp().tolist() == [pytest.approx(row, abs=1e-6) for row in w]
    # P(n): 0 0: (3/4, 0, 1/4); 0 1: (0, 0, 1); 1 0: (0, 1/2, 1/2); 1 1: (0, 0, 1), by uniforms on a fine grid
    grid = (torch.arange(200) + 0.5) / 200
    u = torch.cartesian_prod(grid, grid).log()
    for block, wanted in zip(blocks, [(0.75, 0, 0.25), (0, 0, 1), (0, 0.5, 0.5), (0, 0, 1)], strict=True):
        rows = torch.tensor(block).expand(len(u), 2)
        options = {"seeds": torch.arange(len(u)), "log_u": u, "method": "block"}
        result = call(p.expand(len(u), 3, 2), rows, q.expand(len(u), 2, 2), **options)
        assert (result.num_accepted.bincount(minlength=3) / len(u)).tolist() == pytest.approx(wanted, abs=1e-6)
        recovered = result.next_token_ids[result.num_accepted < 2]
        assert set(recovered.tolist()) <= {1}  # the residual holds id 1 alone


def test_block_of_one_token_is_the_token_test():
    rng = np.random.default_rng(5)
    target, draft = coarse_logits(rng, 500, 2, 9), coarse_logits(rng, 500, 1, 9)
    ids = torch.from_numpy(rng.integers(0, 9, (500, 1)))
    token, block = (call(target, ids, draft, method=method) for method in ("token", "block"))
    assert torch.equal(token.token_ids, block.token_ids) and token.num_accepted.unique().tolist() == [0, 1]


def test_block_looks_behind_a_failed_uniform():
    # a failed test does not end the block: u_1 = 1 fails wherever h_1 < 1, and the last one may still stand
    p, q = torch.tensor([0.25, 0.75]).log(), torch.tensor([0.75, 0.25]).log()
    rows = dict(target=p.expand(1, 3, 2), ids=torch.tensor([[0, 1]]), draft=q.expand(1, 2, 2))
    log_u = torch.tensor([[0.0, math.log(0.5)]])
    assert call(**rows, log_u=log_u, method="block").num_accepted.item() == 2
    assert call(**rows, log_u=log_u, method="token").num_accepted.item() == 0


def test_block_chances_are_one_where_draft_and_target_agree():
    # THEORY: w_i = 1 means h_i = 1, 0/0 too (nothing is over at the next position)
    law = torch.tensor([0.2, 0.3, 0.5]).log()
    draft = fs.Draft(torch.tensor([[0, 2, 1]]), law.expand(1, 3, 3))
    log_h, log_w = block_chances(*laws(law.expand(1, 4, 3), draft, [SOFT]), torch.tensor([3]))
    assert log_h.tolist() == [[0.0] * 3] and log_w.tolist() == [[0.0] * 4]


def test_block_weight_stays_zero():
    # THEORY: once 0, w stays 0: the target forbids the first draft, and whatever follows falls with it
    p = torch.tensor([0.0, 1.0]).log()
    draft, ids = torch.tensor([0.5, 0.5]).log().expand(1, 3, 2), torch.tensor([[0, 1, 1]])
    result = call(p.expand(1, 4, 2), ids, draft, log_u=torch.full((1, 3), math.log(2.0**-24)), method="block")
    assert result.token_ids.tolist() == [[1, -1, -1, -1]]


@pytest.mark.parametrize("size", [1, 3])
def test_coupled_text_is_plain_sampling_with_its_noise_whatever_was_drafted(size):
    rng, vocab, gamma = np.random.default_rng(1), 7, 3
    table = torch.from_numpy(rng.normal(0, 2, (vocab, vocab))).float()
    seeds = torch.arange(48)
    plain = [torch.zeros(48, dtype=torch.int64)]
    for position in range(12):
        law = logprobs(table[plain[-1]], SOFT)
        plain.append(draw(law, gumbels(seeds, vocab, COUPLED, torch.full((48,), position))))
    plain = torch.stack(plain[1:], dim=1)
    for row in range(0, 48, size):
        last, position, text = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64), [[]] * size
        while min(map(len, text)) < 12:
            ids = torch.from_numpy(rng.integers(0, vocab, (size, gamma)))  # drafted blindly: most fall
            known = plain[row : row + size]
            for i in range(size):
                at = int(position[i])
                good = int(rng.integers(0, gamma + 1))
                ids[i, :good] = torch.tensor((known[i].tolist() + [0] * 100)[at : at + good], dtype=torch.int64)
            rows = table[torch.cat([last[:, None], ids], dim=1)]
            options = {"seeds": seeds[row : row + size], "positions": position, "method": "coupled"}
            emitted = call(rows, ids, None, log_u=torch.zeros(size, gamma), **options).token_ids.tolist()
            new = [[x for x in ids_ if x >= 0] for ids_ in emitted]
            text = [a + b for a, b in zip(text, new, strict=True)]
            last, position = torch.tensor([t[-1] for t in text]), torch.tensor([len(t) for t in text])
        for i in range(size):
            assert text[i][:12] == plain[row + i].tolist()


def test_coupled_needs_positions():
    ids = torch.tensor([[1]])
    with pytest.raises(ValueError, match=r"expected positions as \[1\] int64, got NoneType"):
        call(torch.zeros(1, 2, 3), ids, method="coupled")
