"""Noise: the cipher's known answers, its values at the edges, its law, and that no two uses share a stream."""

import dataclasses
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats

from flashspec_core import noise
from flashspec_core.noise import ACCEPT, COUPLED, DRAFT, RECOVER, STEP, DraftNoise, gumbels, log_uniforms, philox

ONES = 0xFFFFFFFF
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


def signed(word0, word1):
    """A Philox key's two words as the int64 seed that holds them."""
    value = word0 | word1 << 32
    return torch.tensor(value - 2**64 if value >= 2**63 else value)


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key, counter, words):
    assert tuple(int(w) for w in philox(signed(*key), counter)) == words


def test_philox_broadcasts_and_equals_itself_one_by_one():
    seeds = torch.tensor([[0], [-1], [MIN_INT64], [MAX_INT64]])
    counters = torch.tensor([0, 1, ONES])
    words = torch.stack(philox(seeds, (counters, 5, 0, 2)))
    assert words.shape == (4, 4, 3) and int(words.min()) >= 0 and int(words.max()) <= ONES
    for i, seed in enumerate(seeds[:, 0]):
        for j, counter in enumerate(counters):
            assert words[:, i, j].tolist() == [int(w) for w in philox(seed, (int(counter), 5, 0, 2))]


def test_all_64_bits_of_a_seed_count():
    seeds = torch.tensor([0, 1, -1, 2**32, -(2**32), MIN_INT64, MAX_INT64, 2**31, -(2**31)])
    for values in (noise.step_seeds(seeds, 0), log_uniforms(seeds, 2)[:, 0], gumbels(seeds, 4, DRAFT)[:, 0]):
        assert values.unique().numel() == len(seeds)


def test_step_seeds_use_both_halves_and_accept_a_step_a_row():
    rows = torch.arange(2000)
    seeds = noise.step_seeds(rows, 3)
    assert seeds.dtype == torch.int64 and seeds.unique().numel() == 2000
    for half in (seeds & ONES, (seeds >> 32) & ONES):
        assert stats.kstest(half.numpy() / 2**32, "uniform").pvalue > 1e-3
    assert torch.equal(noise.step_seeds(rows, torch.full_like(rows, 3)), seeds)
    assert not bool((noise.step_seeds(rows, 4) == seeds).any())


def test_fresh_seeds_are_nonnegative_int64_and_differ():
    seeds = [noise.fresh_seed() for _ in range(50)]
    assert len(set(seeds)) == 50 and all(0 <= s <= MAX_INT64 for s in seeds)


@pytest.mark.parametrize("word, u", [(0, 2.0**-24), (255, 2.0**-24), (256, 2.0**-23), (ONES, 1.0)])
def test_log_uniform_at_a_words_edges(monkeypatch, word, u):
    # u is never 0: log 0 accepts what the target forbids
    monkeypatch.setattr(noise, "philox", lambda seeds, counter: (torch.full((1, 1), word),) * 4)
    value = log_uniforms(torch.tensor([0]), 1)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(math.log(u), rel=1e-6)
    assert value.item() <= 0


@pytest.mark.parametrize("word", [0, 1, 2**31, ONES - 300, ONES - 128, ONES - 1, ONES])
def test_gumbel_at_a_words_edges(monkeypatch, word):
    monkeypatch.setattr(noise, "philox", lambda seeds, counter: (torch.full((1, 1), word),) * 4)
    value = gumbels(torch.tensor([0]), 4, DRAFT)
    v = min((word + 0.5) / 2**32, 1 - 2.0**-24)
    assert bool(value.isfinite().all())
    assert value[0, 0].item() == pytest.approx(-math.log(-math.log1p(-v)), abs=2e-2 if word > 2**31 else 2e-6)


def test_large_gumbels_are_fine_grained():
    # taken near v = 0, so ids of tiny probability are neither impossible nor lumped together
    value = gumbels(torch.arange(20_000), 100, RECOVER).flatten()
    top = value.sort(descending=True).values[:2000]
    assert top.unique().numel() > 1900 and float(top[0]) > 12.0


def test_uniforms_and_gumbels_have_their_laws():
    u = log_uniforms(torch.arange(25_000), 4).double().exp().flatten().numpy()
    assert 0 < u.min() and u.max() <= 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    for purpose, position in ((DRAFT, 0), (RECOVER, 0), (COUPLED, 10_000)):
        g = gumbels(torch.arange(2500), 41, purpose, position).double().flatten().numpy()
        assert np.isfinite(g).all()
        assert stats.kstest(g, stats.gumbel_r.cdf).pvalue > 1e-3
        assert g.mean() == pytest.approx(np.euler_gamma, abs=0.02)
        assert g.var() == pytest.approx(math.pi**2 / 6, rel=0.03)


def streams():
    """name -> 10,000 uniforms, one a row seed: every use of noise that must be independent of every other."""
    rows = torch.arange(10_000)
    first, second = noise.step_seeds(rows, 0), noise.step_seeds(rows, 1)

    def uniform(g):
        return torch.exp(-torch.exp(-g.double()))

    return {
        "accept, position 0": log_uniforms(first, 2)[:, 0].double().exp(),
        "accept, position 1": log_uniforms(first, 2)[:, 1].double().exp(),
        "accept, next step": log_uniforms(second, 2)[:, 0].double().exp(),
        "draft, id 0": uniform(gumbels(first, 9, DRAFT)[:, 0]),
        "draft, id 1": uniform(gumbels(first, 9, DRAFT)[:, 1]),
        "draft, id 4": uniform(gumbels(first, 9, DRAFT)[:, 4]),
        "draft, position 1": uniform(gumbels(first, 9, DRAFT, 1)[:, 0]),
        "draft, next step": uniform(gumbels(second, 9, DRAFT)[:, 0]),
        "recover": uniform(gumbels(first, 9, RECOVER)[:, 0]),
        "coupled": uniform(gumbels(first, 9, COUPLED)[:, 0]),
        "next row's draft": uniform(gumbels(first, 9, DRAFT)[:, 0].roll(1)),
    }


def test_every_pair_of_streams_is_independent():
    # BUGS 8: uniforms shared by rows, positions, steps or purposes
    values = {name: v.numpy() for name, v in streams().items()}
    for one, other in combinations(values, 2):
        cells = np.histogram2d(values[one], values[other], bins=4, range=[[0, 1]] * 2)[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-5, (one, other)


def test_purposes_are_different_words_of_the_counter():
    assert sorted({STEP, DRAFT, ACCEPT, RECOVER, COUPLED}) == [0, 1, 2, 3, 4]
    for purpose in (DRAFT, ACCEPT, RECOVER, COUPLED):  # step seeds share no words with what row seeds are used for
        low, high, _, _ = philox(torch.arange(9), (3, 0, 0, purpose))
        assert not bool(torch.isin(noise.step_seeds(torch.arange(9), 3), low | high << 32).any())


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 10, 8193])
def test_an_ids_noise_depends_on_neither_vocabulary_nor_batch(vocab):
    # BUGS 18: a seeded row changes when batched with others
    seeds = torch.tensor([5, -7, MIN_INT64, 5])
    batched = gumbels(seeds, vocab, DRAFT, 2)
    assert batched.shape == (4, vocab) and batched.dtype == torch.float32
    assert torch.equal(batched[0], batched[3])  # equal seeds, equal noise: rows share nothing else
    for row in range(4):
        alone = gumbels(seeds[row : row + 1], 8193, DRAFT, 2)[0, :vocab]
        assert torch.equal(batched[row], alone)
    assert torch.equal(log_uniforms(seeds, 5)[1:2, :3], log_uniforms(seeds[1:2], 3))


def test_a_position_a_row():
    seeds = torch.tensor([3, 3, 3])
    values = gumbels(seeds, 6, COUPLED, torch.tensor([7, 0, 2**31]))
    for row, position in enumerate((7, 0, 2**31)):
        assert torch.equal(values[row : row + 1], gumbels(seeds[:1], 6, COUPLED, position))
    assert values.unique().numel() == 18


def test_draft_noise_is_keyed_by_block_or_by_sequence():
    seeds = torch.tensor([11, 12])
    assert torch.equal(DraftNoise(seeds).gumbels(2, 5), gumbels(seeds, 5, DRAFT, 2))
    coupled = DraftNoise(seeds, positions=torch.tensor([40, 50]))
    assert torch.equal(coupled.gumbels(2, 5), gumbels(seeds, 5, COUPLED, torch.tensor([42, 52])))
    # a position that is drafted again sees the same noise only under "coupled"
    later = DraftNoise(seeds, positions=torch.tensor([41, 51]))
    assert torch.equal(later.gumbels(1, 5), coupled.gumbels(2, 5))
    for base in (DraftNoise(seeds), coupled):  # made for some positions at once it is the same
        wide = dataclasses.replace(base, gamma=3)
        assert all(torch.equal(wide.gumbels(i, 7), base.gumbels(i, 7)) for i in (4, 0, 1, 2, 5))
        assert wide.on("cpu").gamma == 3
    moved = coupled.on("cpu")
    assert torch.equal(moved.gumbels(0, 5), coupled.gumbels(0, 5)) and DraftNoise(seeds).on("cpu").positions is None
