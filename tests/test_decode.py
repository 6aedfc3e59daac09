"""The loop: greedy text is plain greedy text, sampled text has the target's law, and every ending is exact."""

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch
from conftest import OwnDrafter, greedy_ids, make_target, plain_logits, random_ids, scripted
from hypothesis import given, settings
from hypothesis import strategies as st

import flashspec_core as fs
from flashspec_core.engine.decode import RowError
from flashspec_core.lab.exactness import true_law
from flashspec_core.lab.fit import chi_square_p

WARM = fs.Sampling(temperature=1.0)
PROMPTS = [random_ids(n, seed=n) for n in (1, 3, 7, 30)] + [[5, 6, 7, 8, 9, 5, 6, 7], [2, 2, 2, 2]]
REPEATING = [5, 6, 7, 5, 6]  # an n-gram drafter has something to say from the first step on


def ids_of(generations):
    return [g.token_ids for g in generations]


@pytest.mark.parametrize("kind", ["n-gram", "model", "early exit", "itself", "wrong", "own", "off"])
def test_greedy_equals_transformers(tiny, tiny_draft, family, kind):
    target, count = tiny[family], 14
    reference = cache(lambda i: greedy_ids(target, PROMPTS[i], count))
    drafter = {
        "n-gram": lambda i: fs.NGramDrafter(min_ngram=1),
        "model": lambda i: fs.ModelDrafter(tiny_draft[family]),
        "early exit": lambda i: fs.EarlyExitDrafter(target, 2),
        "itself": lambda i: fs.ModelDrafter(target),
        "wrong": lambda i: scripted(PROMPTS[i] + reference(i), wrong_every=1),
        "own": lambda i: scripted(PROMPTS[i] + reference(i), wrong_every=4),
        "off": lambda i: None,
    }[kind]

    @settings(max_examples=5)
    @given(st.integers(1, 8), st.integers(0, len(PROMPTS) - 1), st.lists(st.integers(0, 5), min_size=2, max_size=3))
    def check(gamma, one, several):
        out = fs.generate(target, fs.Arm(drafter(one), gamma), PROMPTS[one], max_new_tokens=count)
        assert out.token_ids == reference(one) and out.finish_reason == "length"
        if kind == "itself":
            assert out.acceptance_rate == 1 and len(out.steps) == math.ceil(count / (gamma + 1))
        if kind == "wrong":
            assert out.acceptance_rate == 0 and len(out.steps) == count
        arm = fs.Arm(drafter(one), gamma)
        batch = fs.generate(target, arm, [PROMPTS[i] for i in several], max_new_tokens=count)
        assert ids_of(batch) == [reference(i) for i in several]

    check()


COPY = "Repeat this list exactly: alpha, beta, gamma, delta.\nalpha, beta, gamma, delta.\nalpha, beta,"
CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
REAL_PROMPTS = [
    [{"role": "user", "content": "Name three colours of the rainbow."}],
    [{"role": "user", "content": "Wie heißt die Hauptstadt von Österreich? 🙂"}],
    CODE,
    "import numpy as np\n\nx = np.array([1, 2, 3])\nprint(x",
    COPY,
    "one two three four five one two three four five one two",
    "The quick brown fox",
    "Once upon a time there was a small naïve robot who",
]


def test_greedy_equals_transformers_on_the_real_model(smollm2):
    batch = fs.generate(smollm2, fs.NGramDrafter(), REAL_PROMPTS, gamma=7, max_new_tokens=32)
    for out in batch:
        assert out.token_ids == greedy_ids(smollm2, out.prompt_token_ids, 32)
        assert out.text == smollm2.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert max(out.tokens_per_step for out in batch) > 2
    for i in (1, 2, 5):
        alone = fs.generate(smollm2, fs.NGramDrafter(), REAL_PROMPTS[i], gamma=7, max_new_tokens=32)
        assert alone.token_ids == batch[i].token_ids


# ends


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ends", ["none", "one", "several"])
def test_eos_inside_a_block_ends_there(llama, gamma, ends):
    prompt = REPEATING
    plain = greedy_ids(llama, prompt, 12)
    llama.model.generation_config.eos_token_id = {"none": None, "one": plain[5], "several": [100, plain[5]]}[ends]
    wanted = plain if ends == "none" else plain[: plain.index(plain[5]) + 1]
    assert llama.eos_token_ids == {"none": set(), "one": {plain[5]}, "several": {100, plain[5]}}[ends]
    for drafter in (scripted(prompt + plain), fs.ModelDrafter(llama)):
        out, other = fs.generate(llama, drafter, [prompt, prompt[1:]], gamma=gamma, max_new_tokens=12)
        assert out.token_ids == wanted == [i for step in out.steps for i in step.token_ids]
        assert out.finish_reason == ("length" if ends == "none" else "eos")
        assert all(len(step.fates) == len(step.token_ids) for step in out.steps)
        assert other.token_ids == fs.generate(llama, fs.Arm(None), prompt[1:], max_new_tokens=12).token_ids


def test_eos_of_the_config_counts_where_the_generation_config_has_none():
    target = make_target(layers=1)
    plain = greedy_ids(target, [1, 2], 9)
    target.model.config.eos_token_id = [plain[3]]
    out = fs.generate(target, fs.ModelDrafter(target), [1, 2], max_new_tokens=9)
    assert out.token_ids == plain[: plain.index(plain[3]) + 1] and out.finish_reason == "eos"


def test_max_new_tokens_is_never_overshot(llama):
    drafters = [fs.ModelDrafter(llama), fs.NGramDrafter(1), OwnDrafter(lambda ids, gamma, vocab: [1] * gamma)]

    @given(st.integers(1, 8), st.integers(1, 9), st.sampled_from(drafters), st.sampled_from([0.0, 1.0]))
    def check(gamma, count, drafter, temperature):
        sampling = fs.Sampling(temperature)
        for out in fs.generate(llama, drafter, [REPEATING, [3]], gamma=gamma, max_new_tokens=count, sampling=sampling):
            assert len(out.token_ids) == count and out.finish_reason == "length"
            emitted = 0
            for step in out.steps:
                assert step.num_accepted <= step.num_draft_tokens < count - emitted  # none is drafted in vain
                emitted += len(step.token_ids)
            assert emitted == count

    check()


def test_a_full_context_ends_the_row():
    target = make_target(max_position_embeddings=16)
    long, short = fs.generate(target, fs.ModelDrafter(target), [[1] * 10, [2] * 3], gamma=4, max_new_tokens=10)
    assert (len(long.token_ids), long.finish_reason) == (6, "context")
    assert (len(short.token_ids), short.finish_reason) == (10, "length")
    exact = fs.generate(target, fs.ModelDrafter(target), [1] * 10, max_new_tokens=6)
    assert (exact.token_ids, exact.finish_reason) == (long.token_ids, "length")


def test_a_stop_string_inside_a_block_ends_ids_text_and_pieces_together(smollm2):
    plain = fs.generate(smollm2, fs.Arm(None), COPY, max_new_tokens=10)
    drafter = scripted(plain.prompt_token_ids + plain.token_ids)
    for stop in (" delta", "amma, de"):
        steps = list(fs.stream(smollm2, drafter, COPY, gamma=8, max_new_tokens=10, stop=stop))
        ids = [i for step in steps for i in step.token_ids]
        assert ids == plain.token_ids[: len(ids)] and steps[0].num_accepted > len(steps[0].token_ids) - 1
        assert "".join(step.text for step in steps) == plain.text[: plain.text.index(stop)]
        out = fs.generate(smollm2, drafter, COPY, gamma=8, max_new_tokens=10, stop=(stop, "zzz"))
        assert (out.token_ids, out.finish_reason) == (ids, "stop")
        assert out.text == plain.text[: plain.text.index(stop)]


# streams


def test_a_stream_equals_generate(smollm2):
    options = {"gamma": 3, "max_new_tokens": 10, "sampling": fs.Sampling(0.8), "seed": 5}
    prompts = ["Zoë said: 🙂🙂🙂", CODE]
    whole = fs.generate(smollm2, fs.NGramDrafter(1), prompts, **options)
    steps = list(fs.stream(smollm2, fs.NGramDrafter(1), prompts, **options))
    for row, out in enumerate(whole):
        own = [step for step in steps if step.row == row]
        assert [i for step in own for i in step.token_ids] == out.token_ids
        assert "".join(step.text for step in own) == out.text
        assert [step.step for step in own] == list(range(len(own))) == [step.step for step in out.steps]


def test_closing_a_stream_early_frees_the_caches(llama):
    drafter = fs.ModelDrafter(llama)
    steps = fs.stream(llama, drafter, REPEATING, max_new_tokens=50)
    next(steps)
    run = steps.gi_frame.f_locals["self"]
    assert run.cached.cache.keys and drafter.cached.cache.keys
    steps.close()
    assert run.cached.cache.keys == [] and drafter.cached.cache.keys == []
    assert run.generations[0].finish_reason == "cancelled" and run.generations[0].token_ids


def test_a_stream_checks_its_arguments_at_the_call(llama):
    with pytest.raises(TypeError, match="expected options among .*gamma.*; got gama"):
        fs.stream(llama, fs.NGramDrafter(), REPEATING, gama=3)
    with pytest.raises(ValueError, match="gamma must be"):
        fs.stream(llama, fs.NGramDrafter(), REPEATING, gamma=0)


def test_an_own_drafter_is_told_of_every_step(llama):
    drafter = scripted(REPEATING + greedy_ids(llama, REPEATING, 5), wrong_every=1)
    out = fs.generate(llama, drafter, REPEATING, max_new_tokens=5, gamma=2)
    assert out.steps[0].drafter == "own"  # the last of the five steps has room for no draft
    assert drafter.calls == {"draft": 4, "commit": 5, "reset": 2}


# seeds


def test_seeds(llama):
    def run(prompt, seed, **options):
        return fs.generate(llama, fs.NGramDrafter(1), prompt, sampling=WARM, seed=seed, max_new_tokens=8, **options)

    texts = {seed: run(REPEATING, seed).token_ids for seed in (0, 1, 2, -1, 2**62)}
    assert len(set(map(tuple, texts.values()))) == 5
    assert all(run(REPEATING, seed).token_ids == ids for seed, ids in texts.items())
    assert ids_of(run([REPEATING] * 3, 0)) == [texts[0], texts[1], texts[2]]
    assert [out.seed for out in run([REPEATING] * 2, 7)] == [7, 8]
    drawn, other = run(REPEATING, None), run(REPEATING, None)
    assert drawn.token_ids != other.token_ids and run(REPEATING, drawn.seed).token_ids == drawn.token_ids
    first, second, third = run([REPEATING] * 3, [1, None, 2])
    assert (first.token_ids, third.token_ids) == (texts[1], texts[2])
    assert run(REPEATING, second.seed).token_ids == second.token_ids


@pytest.mark.parametrize("kind", ["n-gram", "model", "near"])
def test_a_sampled_row_does_not_depend_on_its_batch(tiny, tiny_draft, family, kind):
    target, near = tiny[family], copy.deepcopy(tiny[family].model)
    near.lm_head.weight.data *= 1.5  # so often right that rows come to their ends apart
    drafter = {"n-gram": fs.NGramDrafter(1), "model": fs.ModelDrafter(tiny_draft[family])}.get(kind)
    drafter = drafter or fs.ModelDrafter(near)
    samplings = [WARM, fs.Sampling(1.5, top_p=0.9), fs.Sampling()]
    prompts, seeds = [REPEATING, random_ids(17), [4, 4, 4]], [3, 0, 9]
    options = {"gamma": 3, "max_new_tokens": 12}
    batch = fs.generate(target, drafter, prompts, sampling=samplings, seed=seeds, **options)
    for prompt, sampling, seed, out in zip(prompts, samplings, seeds, batch, strict=True):
        alone = fs.generate(target, drafter, prompt, sampling=sampling, seed=seed, **options)
        assert alone.token_ids == out.token_ids
    assert len({len(out.steps) for out in batch}) > 1 or kind != "near"
    assert batch[2].token_ids == greedy_ids(target, prompts[2], 12)


# the law


@pytest.mark.parametrize("sampling", [WARM, fs.Sampling(0.8, top_k=7, top_p=0.9)], ids=["plain", "filtered"])
@pytest.mark.parametrize("kind", ["n-gram", "model", "smaller vocabulary", "larger vocabulary"])
def test_the_joint_law_of_two_tokens(kind, sampling):
    vocab, batch, prompt = 12, 2048, [3, 4, 5, 3, 4]
    target = make_target(vocab=vocab, layers=2, hidden=16, seed=14)  # it gives 5, 3 behind the prompt some of its mass
    draft_vocab = {"smaller vocabulary": 10, "larger vocabulary": 14}.get(kind, vocab)
    drafter = fs.NGramDrafter()
    if kind != "n-gram":
        drafter = fs.ModelDrafter(make_target(vocab=draft_vocab, layers=1, hidden=16, seed=1))
    out = fs.generate(target, drafter, [prompt] * batch, gamma=2, max_new_tokens=3, sampling=sampling, seed=11)
    counts = torch.zeros(vocab, vocab)
    for row in out:
        counts[row.token_ids[0], row.token_ids[1]] += 1

    def law(ids):
        return torch.from_numpy(true_law(plain_logits(target.model, ids)[0], sampling))

    first = law(prompt)
    joint = torch.stack([first[a] * law([*prompt, a]) for a in range(vocab)])
    assert counts[joint == 0].sum() == 0
    assert chi_square_p(counts.flatten(), joint.flatten()) > 1e-3
    assert 0 < sum(row.steps[0].num_accepted for row in out) < 2 * batch


# policies


@pytest.mark.parametrize("policy", [fs.UCB1(3), fs.ThompsonSampling(3, seed=1), fs.FixedArm(1, 3), None])
def test_policies_choose_and_the_text_stays(llama, policy):
    plain = greedy_ids(llama, REPEATING, 16)
    arms = [fs.Arm(scripted(REPEATING + plain), 3), fs.NGramDrafter(), fs.Arm(None)]
    out = fs.generate(llama, arms, REPEATING, policy=policy, max_new_tokens=16)
    assert out.token_ids == plain
    assert set(out.arms) == {1} if isinstance(policy, fs.FixedArm) else {0, 1, 2} if policy is None else out.arms
    for step in out.steps:
        assert (step.drafter, step.gamma) == [("own", 3), ("n-gram", 4), ("off", 0)][step.arm]


def test_no_policy_means_the_only_arm(llama):
    assert set(fs.generate(llama, fs.NGramDrafter(), REPEATING, max_new_tokens=5).arms) == {0}


@pytest.mark.parametrize("policy", [fs.UCB1(2), fs.ThompsonSampling(4), fs.FixedArm(0, 1)])
def test_a_policy_of_another_number_of_arms_is_refused(llama, policy):
    with pytest.raises(ValueError, match=f"policy chooses among {policy.num_arms} arms, but 3 were given"):
        fs.generate(llama, [fs.NGramDrafter()] * 3, REPEATING, policy=policy)


def test_the_policy_never_sees_the_draft(llama):
    log = []

    class Recorder:
        num_arms = 2

        def select_arm(self, *args, **kwargs):
            log.append(("select", args, kwargs))
            return len(log) % 2

        def update(self, *args, **kwargs):
            log.append(("update", args, kwargs))

    def propose(ids, gamma, vocab):
        log.append(("draft", (), {}))
        return [1] * gamma

    drafter = OwnDrafter(propose)
    out = fs.generate(llama, [drafter, fs.Arm(drafter, 2)], [REPEATING] * 2, policy=Recorder(), max_new_tokens=9)
    assert [name for name, *_ in log][:4] == ["select", "draft", "draft", "update"]
    updates = [args for name, args, kwargs in log if name == "update"]
    assert all(not args and not kwargs for name, args, kwargs in log if name == "select")
    for (arm, reward, feedback), *records in zip(updates, *(g.steps for g in out), strict=True):
        assert arm == records[0].arm and reward == pytest.approx(np.mean([r.reward for r in records]))
        assert vars(feedback) == {
            "step": records[0].step,
            "num_draft_tokens": sum(r.num_draft_tokens for r in records),
            "num_accepted": sum(r.num_accepted for r in records),
            "num_rejected": sum(r.num_accepted < r.num_draft_tokens for r in records),
            "rewards": None,
            "context": None,
        }


# bad input


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gamma": 0}, "gamma must be a whole number >= 1"),
        ({"gamma": -1}, "gamma must be"),
        ({"gamma": 1.5}, "gamma must be"),
        ({"gamma": True}, "gamma must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be"),
        ({"max_new_tokens": True}, "max_new_tokens must be"),
        ({"prompt": []}, "at least one prompt"),
        ({"prompt": [[1], []]}, "at least one token"),
        ({"prompt": [1] * 512}, "shorter than the model's context of 512"),
        ({"prompt": [101]}, "ids in 0..100"),
        ({"arms": []}, "at least one arm"),
        ({"method": "magic"}, "method must be one of"),
        ({"sampling": [WARM]}, r"one a row \(2\)"),
        ({"sampling": 0.7}, "sampling must be"),
        ({"seed": [1]}, r"one a row \(2\), got 1"),
        ({"seed": [1, 0.5]}, "whole 64-bit seeds"),
        ({"seed": 2**63}, "whole 64-bit seeds"),
        ({"stop": "x"}, "stop must be non-empty strings, and needs a tokenizer"),
    ],
)
def test_bad_input_is_refused_with_a_clear_message(llama, options, message):
    arms, prompt = options.pop("arms", fs.NGramDrafter()), options.pop("prompt", [REPEATING] * 2)
    if options.get("sampling") == 0.7:
        with pytest.raises((TypeError, ValueError)):
            fs.generate(llama, arms, prompt, **options)
    else:
        with pytest.raises(ValueError, match=message):
            fs.generate(llama, arms, prompt, **options)


@pytest.mark.parametrize("temperature", [-1, -1e-9, math.nan, math.inf, "warm", None, True])
def test_bad_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number >= 0"):
        fs.Sampling(temperature)


@pytest.mark.parametrize("arms", ["n-gram", [fs.NGramDrafter(), 3], None, [object()]])
def test_what_is_no_arm_is_refused(llama, arms):
    with pytest.raises(TypeError, match="an arm is an fs.Arm or a drafter"):
        fs.generate(llama, arms, REPEATING)


def test_an_empty_stop_string_is_refused(smollm2):
    for stop in ("", ("a", ""), (3,)):
        with pytest.raises(ValueError, match="stop must be non-empty strings"):
            fs.generate(smollm2, fs.Arm(None), "x", stop=stop)


def test_another_tokenizer_is_refused(smollm2, llama):
    other = copy.deepcopy(smollm2.tokenizer)
    other.add_tokens(["<new>"])
    drafter = fs.ModelDrafter(llama.model, other)
    with pytest.raises(ValueError, match="has another tokenizer: '<new>' is id None in the target's and 49152 in"):
        fs.generate(smollm2, drafter, "x")
    equal = fs.ModelDrafter(smollm2.model, copy.deepcopy(smollm2.tokenizer))
    assert len(fs.generate(smollm2, [equal, fs.Arm(None)], "x", max_new_tokens=1).token_ids) == 1


# logits without a law


@pytest.fixture(scope="module")
def poisoned():
    """The logits behind id 13 are NaN."""
    target = make_target(layers=2)

    def poison(module, args, kwargs, output):
        output.logits[kwargs["input_ids"][:, -output.logits.shape[1] :] == 13] = math.nan

    target.model.register_forward_hook(poison, with_kwargs=True)
    return target


@pytest.mark.parametrize(
    "sampling",
    [fs.Sampling(), WARM, [fs.Sampling(), fs.Sampling(), WARM], [WARM, WARM, fs.Sampling()]],
    ids=["greedy", "sampled", "greedy among others", "sampled among others"],
)
def test_nan_logits_name_their_row_and_the_others_end_unharmed(poisoned, sampling):
    prompts = [[1, 2, 3], [4, 5, 13], [6, 7]]
    options = {"sampling": sampling, "max_new_tokens": 6}
    with pytest.raises(RowError, match="hold no law .* in row 1 at position 2") as caught:
        fs.generate(poisoned, fs.Arm(None), prompts, **options)
    good, bad, other = caught.value.generations
    assert (bad.finish_reason, bad.token_ids) == ("error", []) and "row 1 at position 2" in bad.error
    assert good.finish_reason == other.finish_reason == "length" and good.error is other.error is None
    healthy = fs.generate(poisoned, fs.Arm(None), [[1, 2, 3], [4, 5], [6, 7]], **options)
    assert (good.token_ids, other.token_ids) == (healthy[0].token_ids, healthy[2].token_ids)


def test_nan_later_on_keeps_what_was_emitted(poisoned):
    """The first NaN is the one behind a drafted 13; the tokens of earlier steps stay."""
    plain = greedy_ids(poisoned, [1, 2, 3], 4)
    drafter = OwnDrafter(lambda ids, gamma, vocab: [13] if len(ids) >= 5 else [])
    with pytest.raises(RowError, match="in row 0 at position 5") as caught:
        list(fs.stream(poisoned, drafter, [1, 2, 3], max_new_tokens=9))
    assert caught.value.generations[0].token_ids == plain[:2]


# records


def test_trace_records_one_value_a_drafted_token(llama):
    drafter = OwnDrafter(lambda ids, gamma, vocab: [1, 2, 3][: min(gamma, len(ids) % 4)])
    prompts, options = [REPEATING, [1, 2]], {"sampling": WARM, "max_new_tokens": 12, "gamma": 3}
    out = fs.generate(llama, drafter, prompts, trace=True, **options)
    names = ("draft_token_ids", "target_logprobs", "draft_logprobs", "log_uniforms")
    for g in out:
        text = list(g.prompt_token_ids)
        for step in g.steps:
            assert [len(getattr(step, name)) for name in names] == [step.num_draft_tokens] * 4
            assert step.draft_token_ids[: step.num_accepted] == step.token_ids[: step.num_accepted]
            assert step.draft_logprobs == [0.0] * step.num_draft_tokens and all(u <= 0 for u in step.log_uniforms)
            for i, (token_id, got) in enumerate(zip(step.draft_token_ids, step.target_logprobs, strict=True)):
                logits = plain_logits(llama.model, text + step.draft_token_ids[:i])[0]
                assert got == pytest.approx(logits.log_softmax(-1)[token_id].item(), abs=1e-3)
            text += step.token_ids
        assert text == g.prompt_token_ids + g.token_ids
    for g in fs.generate(llama, drafter, prompts, **options):
        assert all(getattr(step, name) is None for step in g.steps for name in names)


def test_records_agree_with_each_other(llama):
    out = fs.generate(llama, fs.ModelDrafter(llama), [REPEATING, random_ids(9)], gamma=3, max_new_tokens=10)
    for row, g in enumerate(out):
        assert [s.num_draft_tokens for s in g.steps] == [3, 3, 1] and g.accepted_fraction == 1
        assert all(s.row == row and s.reward == s.num_accepted / s.num_draft_tokens for s in g.steps)
        assert [s.fates[-1] for s in g.steps] == ["bonus"] * 3 and sum(s.num_prefilled for s in g.steps[1:]) == 0
        assert g.seconds == pytest.approx(sum(s.step_seconds for s in g.steps)) and g.tokens_per_step == 10 / 3
    assert out[0].steps[0].num_prefilled > 0
