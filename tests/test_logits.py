"""Logits to laws: filters against a sort-based oracle, the residual's edges, and draws that stay inside the law."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from scipy import stats

import flashspec_core as fs
from flashspec_core.noise import DRAFT, gumbels
from flashspec_core.verify import logits as module
from flashspec_core.verify.logits import draw, greedy_ids, log1mexp, logprobs, residual_logprobs, row_samplings, warp

INF = math.inf
NEAR = 1e-5  # a filter's border nearer than this is a matter of rounding: the example is put aside


def serial_law(logits, sampling):
    """The law of one row by plain sorting, in Python floats: {id: probability} of the ids that stay."""
    best = max(logits)
    if sampling.temperature < 1e-5:
        return {logits.index(best): 1.0}
    x = {v: (value - best) / sampling.temperature for v, value in enumerate(logits) if value > -INF}

    def normalised(kept):
        total = math.fsum(math.exp(value) for value in kept.values())
        return {v: math.exp(value) / total for v, value in kept.items()}

    if sampling.top_k is not None:
        least = sorted(x.values(), reverse=True)[: sampling.top_k][-1]
        x = {v: value for v, value in x.items() if value >= least}
    if sampling.top_p is not None and sampling.top_p < 1:
        law, mass = normalised(x), 0.0
        for v in sorted(x, key=x.get, reverse=True):
            mass += law[v]
            if abs(mass - sampling.top_p) < NEAR:
                reject()
            if mass >= sampling.top_p:
                break
        x = {w: value for w, value in x.items() if value >= x[v]}
    if sampling.min_p:
        floor = math.log(sampling.min_p)
        if floor and any(abs(value - floor) < NEAR for value in x.values()):
            reject()
        x = {v: value for v, value in x.items() if value >= floor}
    return normalised(x)


def samplings(max_vocab=45):
    """Settings from greedy to hot, with any filters."""
    return st.builds(
        fs.Sampling,
        temperature=st.sampled_from([0.0, 9e-6, 0.5, 1.0, 1.0]) | st.floats(0.05, 4),
        top_p=st.none() | st.floats(0.01, 1),
        top_k=st.none() | st.integers(1, max_vocab),
        min_p=st.none() | st.sampled_from([0.0, 1.0]) | st.floats(0.001, 0.9),
    )


def coarse_logits(rng, *shape):
    """Logits on a grid of quarters, so that ties are common; some ids masked, never a whole row."""
    values = torch.from_numpy(rng.integers(-14, 14, shape) / 4).float()
    values[torch.from_numpy(rng.random(shape) < 0.1)] = -INF
    return torch.where(values.amax(-1, keepdim=True) > -INF, values, 0.0)


@settings(max_examples=120)
@given(st.data())
def test_filters_equal_the_sorting_oracle_and_each_row_alone(data):
    batch, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    rows = data.draw(st.lists(samplings(), min_size=batch, max_size=batch))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = coarse_logits(rng, batch, 2, vocab).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    with pytest.MonkeyPatch.context() as patch:  # small: the full sort of laws too flat for the candidates is reached
        patch.setattr(module, "NUCLEUS_CANDIDATES", data.draw(st.sampled_from([1, 3, 1024])))
        law, warped = logprobs(logits, rows), warp(logits, rows)
        for row, sampling in enumerate(rows):
            assert torch.equal(warped[row], warp(logits[row : row + 1], sampling)[0])
    for row, sampling in enumerate(rows):
        for position in range(2):
            want = serial_law(logits[row, position].tolist(), sampling)
            got = law[row, position].tolist()
            assert {v for v, value in enumerate(got) if value > -INF} == set(want)
            assert all(got[v] == pytest.approx(math.log(value), abs=1e-4) for v, value in want.items())


@pytest.mark.parametrize(
    "fields, law",
    [
        ({"temperature": 1.0}, [0.665, 0.245, 0.090]),
        ({"temperature": 0.5}, [0.867, 0.117, 0.016]),  # BUGS 3: before the softmax
        ({"temperature": 2.0, "top_p": 0.6}, [0.622, 0.378, 0]),  # before the filters: .506 does not reach .6
        ({"temperature": 0.5, "top_p": 0.85}, [1, 0, 0]),
        ({"temperature": 1.0, "min_p": 0.14}, [0.731, 0.269, 0]),  # the last id has e^-2 = .135 of the largest
        ({"temperature": 1.0, "min_p": 0.13}, [0.665, 0.245, 0.090]),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [1, 0, 0]),  # top-k first: .731 of what it left
        ({"temperature": 1.0, "top_k": 1}, [1, 0, 0]),
        ({"temperature": 1.0, "top_k": 99, "top_p": 1.0, "min_p": 0.0}, [0.665, 0.245, 0.090]),
        ({"temperature": 1.0, "top_p": 1e-9}, [1, 0, 0]),
    ],
)
def test_laws_by_hand(fields, law):
    got = logprobs(torch.tensor([[2.0, 1.0, 0.0]]), fs.Sampling(**fields)).exp()[0]
    assert got.tolist() == pytest.approx(law, abs=6e-4)


def test_a_law_flatter_than_the_candidates_keeps_the_right_ids():
    vocab = 5000
    logits = torch.linspace(0, 0.01, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    law = logits.double().softmax(-1).sort(descending=True).values.cumsum(0)
    for top_p in (0.1, 0.5, 0.97):  # the first of them is within 1,024 candidates
        kept = warp(logits[None], fs.Sampling(temperature=1.0, top_p=top_p))[0] > -INF
        assert abs(int(kept.sum()) - int((law < top_p).sum()) - 1) <= 2
        assert float(logits[kept].min()) > float(logits[~kept].max())


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 9.99e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_below_the_threshold_greedy_is_one_hot_at_the_lowest_best_id(temperature, dtype):
    logits = torch.tensor([[1.0, 5.0, 5.0, -2.0], [0.0, 0.0, 0.0, 0.0], [-INF, -INF, -3.0, -INF]]).to(dtype)
    law = logprobs(logits, fs.Sampling(temperature=temperature, top_k=2, top_p=0.5, min_p=0.1)).exp()
    assert law.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert greedy_ids(logits).tolist() == [1, 0, 2]


def test_at_the_threshold_the_law_is_a_softmax():
    law = logprobs(torch.tensor([[0.0, 0.0, -1.0]]), fs.Sampling(temperature=1e-5)).exp()
    assert law.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_before_anything_else(dtype):
    # BUGS 6: logits closer than 16 bits can tell after the division
    logits = torch.tensor([[20.0, 20.125, 19.875, 3.0]]).to(dtype)
    for sampling in (fs.Sampling(temperature=0.7), fs.Sampling(temperature=1.7, top_p=0.6, top_k=3, min_p=0.01)):
        assert warp(logits, sampling).dtype == torch.float32
        assert torch.equal(warp(logits, sampling), warp(logits.float(), sampling))
    assert warp(logits, fs.Sampling(temperature=0.7))[0].unique().numel() == 4


@pytest.mark.parametrize("d, value", [(-1e-8, -18.4207), (-1e-7, -16.1181), (-1.0, -0.4587), (-INF, 0.0), (0.0, -INF)])
def test_log1mexp_at_its_edges(d, value):
    # BUGS 5: 1 - e^d cancels near 0
    got = log1mexp(torch.tensor(d))
    assert got.dtype == torch.float32 and got.item() == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize("dtype, rel", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_log1mexp_is_right_at_both_ends(dtype, rel):
    # BUGS 5: at q/p = 1e-8 log(1 - x) gives 0
    d = -torch.logspace(-12, 1.9, 400, dtype=dtype)
    want = [math.log(-math.expm1(v)) if v > -math.log(2) else math.log1p(-math.exp(v)) for v in d.tolist()]
    assert log1mexp(d).tolist() == pytest.approx(want, rel=rel)
    assert log1mexp(torch.tensor(math.log(1e-8))).item() == pytest.approx(-1e-8, rel=1e-5)
    assert log1mexp(torch.tensor([1e-9, 5.0])).tolist() == [-INF, -INF]


@pytest.mark.parametrize(
    "p, q, residual",
    [
        ([0.1, 0.6, 0.3], [0.6, 0.3, 0.1], [0, 0.6, 0.4]),  # BUGS 2: divided by its sum, not soft-maxed
        ([0.1, 0.6, 0.3], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3]),  # empty: p
        ([0.1, 0.6, 0.3], [0.1001, 0.6001, 0.3001], [0.1, 0.6, 0.3]),  # empty by rounding: p
        ([0.2, 0.8, 0.0], [0.0, 0.0, 0.0], [0.2, 0.8, 0]),
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0, 1, 0]),  # p = 0; -inf minus -inf at the last id
        ([0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [1, 0, 0]),
        ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1, 0, 0]),
    ],
)
def test_residual_edges(p, q, residual):
    got = residual_logprobs(torch.tensor([p]).log(), torch.tensor([q]).log())
    assert not bool(got.isnan().any())
    assert got.exp()[0].tolist() == pytest.approx(residual, abs=1e-6)


def test_residual_of_laws_that_nearly_agree():
    # BUGS 5: p over q by one part in 1e7 and 1e8 in logs; 1 - q/p would see 0
    p = torch.tensor([-1.0, -1.0, -0.5], dtype=torch.float64)
    q = p - torch.tensor([1e-8, 3e-8, -1.0], dtype=torch.float64)
    assert residual_logprobs(p, q).exp().tolist() == pytest.approx([0.25, 0.75, 0], rel=1e-6)
    p32 = torch.tensor([-1.0, -0.5])
    q32 = torch.tensor([float(np.nextafter(np.float32(-1.0), np.float32(-2.0))), 0.0])
    assert residual_logprobs(p32, q32).tolist() == [0.0, -INF]


def test_residual_equals_the_formula():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, 200, 9, generator=generator, dtype=torch.float64) * 2).softmax(-1)
    p[:50, 3], q[25:75, 5] = 0, 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    over = (p - q).clamp_min(0)
    torch.testing.assert_close(residual_logprobs(p.log(), q.log()).exp(), over / over.sum(-1, keepdim=True))
    ids = torch.tensor([0, 3, 7])  # of a trimmed vocabulary: q is 0 elsewhere
    q = torch.zeros_like(q).index_copy(-1, ids, q[:, ids] / q[:, ids].sum(-1, keepdim=True)).log()
    torch.testing.assert_close(residual_logprobs(p.log(), q, ids), residual_logprobs(p.log(), q))


def test_a_draw_has_the_law():
    law = torch.tensor([0.05, 0.5, 0.0, 0.2, 0.25])
    ids = draw(law.log().expand(20_000, 5), gumbels(torch.arange(20_000), 5, DRAFT))
    counts = np.bincount(ids, minlength=5)
    assert counts[2] == 0
    assert stats.chisquare(counts[[0, 1, 3, 4]], 20_000 * law[[0, 1, 3, 4]].double().numpy()).pvalue > 1e-3


def test_an_id_of_probability_zero_never_comes_out():
    noise = torch.tensor([[22.9, -2.8, 22.9, 22.9], [22.9, 22.9, -2.8, 22.9]])  # the largest and smallest Gumbels
    law = torch.tensor([[-INF, -100.0, -INF, -INF], [-INF, -INF, -3e38, -INF]])
    assert draw(law, noise).tolist() == [1, 2]


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 8193, 10_000, 151_936])
def test_no_id_beyond_the_vocabulary(vocab):
    seeds = torch.arange(12)
    noise = gumbels(seeds, vocab, DRAFT)
    flat = draw(torch.zeros(12, vocab), noise)
    assert noise.shape == (12, vocab) and 0 <= int(flat.min()) and int(flat.max()) < vocab
    last = torch.full((12, vocab), -INF)
    last[:, -1] = 0
    assert draw(last, noise).tolist() == [vocab - 1] * 12
    assert greedy_ids(last).tolist() == [vocab - 1] * 12
    kept = warp(noise, fs.Sampling(temperature=1.0, top_k=3, top_p=0.99, min_p=1e-6)) > -INF
    assert kept.shape == (12, vocab) and 1 <= int(kept.sum(-1).min()) and int(kept.sum(-1).max()) <= 3


def test_one_setting_a_row_or_one_for_all():
    one, other = fs.Sampling(), fs.Sampling(temperature=1.0)
    assert row_samplings(one, 2) == [one, one] and row_samplings((one, other), 2) == [one, other]
    for wrong in ([one], [one, one, one], [one, 0.7], [one, None]):
        with pytest.raises(ValueError, match=r"one fs\.Sampling or one a row \(2\), got"):
            row_samplings(wrong, 2)


@pytest.mark.parametrize("wrong", [0.7, None])
def test_what_is_no_setting_is_refused(wrong):
    with pytest.raises(ValueError, match="fs.Sampling"):
        row_samplings(wrong, 2)


def test_a_whole_top_k_of_another_type_works():
    assert torch.equal(
        warp(torch.arange(4.0)[None], fs.Sampling(temperature=1.0, top_k=2.0)),
        warp(torch.arange(4.0)[None], fs.Sampling(temperature=1.0, top_k=2)),
    )
