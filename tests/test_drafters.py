"""What drafters propose, and that the logits they hand over are those they drew from."""

import copy

import pytest
import torch
import transformers
from conftest import make_target, plain_logits, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st

import flashspec_core as fs
from flashspec_core.engine.drafters import DraftContext
from flashspec_core.lab.fit import chi_square_p
from flashspec_core.noise import DraftNoise
from flashspec_core.verify.logits import logprobs

WARM = fs.Sampling(temperature=1.0)


def propose(drafter, *texts, gamma=4, row_ids=None):
    context = DraftContext(list(texts), row_ids or list(range(len(texts))), 101)
    return drafter.draft(context, gamma, [fs.Sampling()] * len(texts), None).token_ids.tolist()


def draft(drafter, texts, gamma=3, sampling=WARM, seeds=None, row_ids=None, vocab=101):
    context = DraftContext(texts, row_ids or list(range(len(texts))), vocab)
    seeds = torch.arange(len(texts)) if seeds is None else seeds
    return drafter.draft(context, gamma, [sampling] * len(texts), DraftNoise(seeds))


def looked_up(ids, gamma, min_ngram, max_ngram, trust):
    """The rule by brute force: longest match, then the latest, read on periodically."""
    matches = [
        (n, end)
        for n in range(min_ngram, max_ngram + 1)
        for end in range(n, len(ids))
        if ids[end - n : end] == ids[len(ids) - n :]
    ]
    length, end = max(matches, default=(0, 0))
    text = list(ids)
    for i in range(min(gamma, trust * length)):
        text.append(text[end + i])
    return text[len(ids) :]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 4),
)
def test_ngram_equals_brute_force(ids, gamma, min_ngram, more, trust):
    drafter = fs.NGramDrafter(min_ngram, min_ngram + more, trust)
    assert propose(drafter, ids, gamma=gamma)[0] == looked_up(ids, gamma, min_ngram, min_ngram + more, trust)


@pytest.mark.parametrize(
    "ids, proposed",
    [
        ([1, 2, 3, 9, 9, 2, 3, 8, 8, 1, 2, 3], [9, 9, 2, 3]),  # the longer match, though earlier
        ([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], [8, 8, 1, 2]),  # the later one of two equals
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),  # the match runs into the end: go on periodically
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 1], []),  # one id is too short a match
        ([1, 2], []),
        ([1], []),
    ],
)
def test_ngram_examples(ids, proposed):
    assert propose(fs.NGramDrafter(), ids)[0] == proposed


def test_ngram_trusts_a_longer_match_more():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for match in (1, 2, 3):
        assert propose(fs.NGramDrafter(1, trust=2), [*text, *text[:match]], gamma=9)[0] == (text * 2)[match : 3 * match]


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 2), max_size=5)), min_size=1, max_size=10))
def test_ngram_index_equals_a_fresh_one_whatever_came_before(changes):
    drafter, texts = fs.NGramDrafter(), {3: [], 8: [1, 2, 1, 2]}
    for step, (back, new) in enumerate(changes):
        row = (3, 8)[step % 2]
        texts[row] = texts[row][: max(0, len(texts[row]) - back)] + new
        together = propose(drafter, *texts.values(), row_ids=list(texts))
        alone = [propose(fs.NGramDrafter(), ids)[0] for ids in texts.values()]
        assert [[i for i in ids if i >= 0] for ids in together] == alone


def test_ngram_rows_are_apart_and_short_ones_are_filled():
    texts = [[1, 2, 3, 4, 1, 2], [5, 6], [7, 8, 9, 7, 8]]
    assert propose(fs.NGramDrafter(), *texts) == [[3, 4, 1, 2], [-1] * 4, [9, 7, 8, 9]]
    assert propose(fs.NGramDrafter(), [1, 2], [3]) == [[], []]
    result = fs.NGramDrafter().draft(DraftContext([[1], [1, 2, 1, 2]], [0, 1], 9), 2, [WARM] * 2, None)
    assert result.logits is None and result.token_ids.dtype == torch.int64


def test_ngram_reset_forgets():
    drafter = fs.NGramDrafter()
    propose(drafter, [1, 2, 3, 1, 2])
    drafter.reset()
    assert drafter._seen == {}


@pytest.mark.parametrize("bad", [(0, 3), (4, 3), (-1, 3), (2, 16, 0), (2, 16, -1), (2, 0)])
def test_ngram_bad_arguments(bad):
    with pytest.raises(ValueError, match="1 <= min_ngram <= max_ngram and trust >= 1, got"):
        fs.NGramDrafter(*bad)


@pytest.mark.parametrize("sampling", [WARM, fs.Sampling(temperature=0.6, top_p=0.8), fs.Sampling(2.0, top_k=5)])
def test_model_draws_are_distributed_by_the_returned_logits(tiny_draft, sampling):
    model, ids, batch = tiny_draft["qwen2"].model, random_ids(5), 2048
    result = draft(fs.ModelDrafter(model), [ids] * batch, 2, sampling)
    torch.testing.assert_close(result.logits[7, 0], plain_logits(model, ids)[0], atol=1e-4, rtol=1e-4)
    law = logprobs(result.logits[:1, 0], sampling).exp()[0]
    counts = torch.bincount(result.token_ids[:, 0], minlength=101)
    assert chi_square_p(counts, law) > 1e-3 and counts[law == 0].sum() == 0
    noise = DraftNoise(torch.arange(batch))
    for i in range(2):
        law = logprobs(result.logits[:, i], sampling)
        assert result.token_ids[:, i].equal((law + noise.gumbels(i, 101)).argmax(-1))


def test_model_drafter_reads_what_it_drew(tiny_draft, family):
    model, ids = tiny_draft[family].model, [random_ids(4), random_ids(9, seed=1)]
    result = draft(fs.ModelDrafter(model), ids, 4)
    for row in range(2):
        wanted = plain_logits(model, ids[row] + result.token_ids[row, :3].tolist(), 4)
        torch.testing.assert_close(result.logits[row], wanted, atol=1e-4, rtol=1e-4)


def test_model_drafter_after_full_acceptances_equals_a_fresh_prefill(tiny_draft, family):
    """The bonus token's keys and values reach the drafter too."""
    model, texts = tiny_draft[family].model, [random_ids(6), random_ids(3, seed=1)]
    drafter = fs.ModelDrafter(model)
    for step in range(3):
        result = draft(drafter, texts, 2)
        for ids, row in zip(texts, result.logits, strict=True):
            torch.testing.assert_close(row[0], plain_logits(model, ids)[0], atol=1e-3, rtol=1e-3)
        texts = [[*ids, *row, 40 + step] for ids, row in zip(texts, result.token_ids.tolist(), strict=True)]


def test_model_drafter_after_rejections_rows_that_left_and_an_idle_time(tiny_draft, family):
    model, texts = tiny_draft[family].model, [random_ids(6), random_ids(30, seed=1), random_ids(11, seed=2)]
    drafter = fs.ModelDrafter(model)
    draft(drafter, texts, 3)
    histories = [[ids + [7] for ids in texts], [ids + [7, 8] + random_ids(25, seed=len(ids)) for ids in texts]]
    for row_ids in ([0, 1, 2], [2, 0]):
        history = histories.pop(0)
        read = drafter.cached.num_read
        result = draft(drafter, [history[i] for i in row_ids], 1, row_ids=row_ids)
        for i, row in zip(row_ids, result.logits, strict=True):
            torch.testing.assert_close(row[0], plain_logits(model, history[i])[0], atol=1e-4, rtol=1e-4)
        assert drafter.cached.num_read - read <= (3 if len(row_ids) == 3 else 2 * 27)  # no text is read twice


def test_model_drafter_greedy(tiny_draft, family):
    model, ids = tiny_draft[family].model, random_ids(8)
    result = draft(fs.ModelDrafter(model), [ids], 3, fs.Sampling())
    assert result.logits is None
    wanted = list(ids)
    for _ in range(3):
        wanted.append(plain_logits(model, wanted)[0].argmax().item())
    assert result.token_ids[0].tolist() == wanted[8:]


def test_a_larger_draft_vocabulary_is_masked_and_renormalised():
    model = make_target(vocab=12, layers=1).model
    with torch.no_grad():
        model.lm_head.weight[10:] *= 10  # much of the mass stands where the target has no id
    result = draft(fs.ModelDrafter(model), [[1, 2]] * 1024, 3, vocab=10)
    assert result.logits.shape == (1024, 3, 10) and result.token_ids.max() < 10
    law = plain_logits(model, [1, 2])[0, :10].softmax(-1)
    assert chi_square_p(torch.bincount(result.token_ids[:, 0], minlength=10), law) > 1e-3
    assert draft(fs.ModelDrafter(model), [[1, 2]] * 9, 3, fs.Sampling(), vocab=10).token_ids.max() < 10


def test_a_smaller_draft_vocabulary_drafts_its_own_ids():
    result = draft(fs.ModelDrafter(make_target(vocab=10, layers=1)), [[1, 2], [3, 9]], 3, vocab=12)
    assert result.logits.shape == (2, 3, 10) and result.token_ids.max() < 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_smaller_draft_vocabulary_meets_ids_that_it_lacks(temperature):
    target = make_target(vocab=12, layers=1)
    drafter = fs.ModelDrafter(make_target(vocab=10, layers=1, seed=1))
    options = {"sampling": fs.Sampling(temperature), "max_new_tokens": 20}
    out = fs.generate(target, drafter, [1, 11, 2], **options)
    assert len(out.token_ids) == 20 and not {10, 11}.isdisjoint(out.token_ids)
    assert temperature or out.token_ids == fs.generate(target, fs.Arm(None), [1, 11, 2], **options).token_ids


def test_a_model_drafter_takes_model_or_target_and_its_tokenizer(llama):
    bare, named = fs.ModelDrafter(llama.model), fs.ModelDrafter(llama, name="mine")
    assert bare.cached.model is named.cached.model is llama.model
    assert (bare.tokenizer, bare.name, named.name) == (None, "model:LlamaForCausalLM", "mine")
    tokenizer = object()
    assert fs.ModelDrafter(llama.model, tokenizer).tokenizer is tokenizer
    assert fs.ModelDrafter(fs.Target(llama.model, tokenizer)).tokenizer is tokenizer


def test_reset_frees_the_cache(llama):
    drafter = fs.ModelDrafter(llama)
    draft(drafter, [[1, 2]])
    assert drafter.cached.cache.keys
    drafter.reset()
    assert drafter.cached.cache.keys == [] and drafter.cached.ids == []


@pytest.mark.parametrize("num_layers", [1, 2])
def test_early_exit_equals_the_first_layers(tiny, family, num_layers):
    target, ids = tiny[family], random_ids(9)
    result = draft(fs.EarlyExitDrafter(target, num_layers), [ids, ids[:4]], 2)
    model = target.model
    for row, text in enumerate((ids, ids[:4])):
        text = text + result.token_ids[row, :1].tolist()
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[num_layers]
            wanted = model.lm_head(model.model.norm(hidden))[0, -2:]
        torch.testing.assert_close(result.logits[row], wanted, atol=1e-4, rtol=1e-4)


def test_early_exit_leaves_the_target_untouched_and_shares_its_weights():
    target, ids = make_target("qwen2"), random_ids(9)
    config, before = copy.deepcopy(target.model.config.to_dict()), plain_logits(target.model, ids, 9)
    names = [name for name, _ in target.model.named_modules()]
    drafter = fs.EarlyExitDrafter(target, 1)
    draft(drafter, [ids])
    assert target.model.config.to_dict() == config and len(target.model.model.layers) == 3
    assert [name for name, _ in target.model.named_modules()] == names
    assert plain_logits(target.model, ids, 9).equal(before)
    assert drafter.cached.model.lm_head.weight is target.model.lm_head.weight
    assert drafter.name == "early-exit:1"


@pytest.mark.parametrize("num_layers", [-1, 0, 3, 4])
def test_early_exit_bad_num_layers(llama, num_layers):
    with pytest.raises(ValueError, match=f"num_layers in 1..2, got LlamaForCausalLM, {num_layers}"):
        fs.EarlyExitDrafter(llama, num_layers)


def test_early_exit_needs_layers():
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9, bos_token_id=0, eos_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="a model with `model.layers`, got GPT2LMHeadModel"):
        fs.EarlyExitDrafter(model, 1)
