"""engine/decode.py, what callers ask for beside text: processors, log-probabilities, clocks, replay, traces, memory."""

import gc
import os
import time
import weakref

import pytest
import torch
import transformers
from conftest import OwnDrafter, greedy_ids, make_target, plain_logits, random_ids, scripted

import flashspec_core as fs
from flashspec_core.lab.workloads import PROMPTS
from flashspec_core.records import Draft, Generation

SAMPLED = fs.Sampling(temperature=1.0, top_p=0.9)


def test_a_processor_sees_each_verified_position_with_its_own_prefix(llama):
    prompt, seen = random_ids(6), []

    def watch(ids, logits):
        assert ids.shape[0] == 1 and logits.shape == (1, 101)
        seen.append(ids[0].tolist())
        return logits

    truth = prompt + greedy_ids(llama, prompt, 9)
    out = fs.generate(llama, scripted(truth), prompt, gamma=3, max_new_tokens=8, logits_processor=watch)
    assert seen[:4] == [truth[:n] for n in range(6, 10)]
    assert [truth[:n] for n in range(6, 14)] == seen and out.token_ids == truth[6:14]


@pytest.mark.parametrize("penalty", [1.5, 5.0])
def test_repetition_penalty_equals_transformers(tiny, tiny_draft, family, penalty):
    target = tiny[family]
    processor = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(penalty)])
    prompts = [random_ids(5, 1), random_ids(9, 2)]
    drafters = [fs.ModelDrafter(tiny_draft[family]), fs.ModelDrafter(target)]
    for drafter in drafters:
        outs = fs.generate(target, drafter, prompts, gamma=4, max_new_tokens=16, logits_processor=processor)
        for out, prompt in zip(outs, prompts, strict=True):
            assert out.token_ids == greedy_ids(target, prompt, 16, repetition_penalty=penalty)


def test_a_banned_id_never_appears_in_its_row(llama):  # BUGS 21
    ban = 7

    def processor(ids, logits):
        if ids[0, 0] == 2:  # the second row's prompt begins so
            logits = logits.clone()
            logits[0, ban] = -torch.inf
        return logits

    stubborn = OwnDrafter(lambda ids, gamma, vocab: [ban] * gamma)
    outs = fs.generate(
        llama,
        stubborn,
        [[1, ban], [2, ban]] * 20,
        gamma=2,
        max_new_tokens=12,
        sampling=fs.Sampling(temperature=30.0),
        logits_processor=processor,
    )
    assert any(ban in out.token_ids for out in outs[::2])
    assert not any(ban in out.token_ids for out in outs[1::2])


@pytest.mark.parametrize("sampling", [fs.Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_equal_a_plain_forward(tiny, tiny_draft, sampling):
    target, prompts = tiny["llama"], [random_ids(4, 3), random_ids(11, 4)]
    arms = [fs.ModelDrafter(tiny_draft["llama"]), fs.NGramDrafter(1), fs.Arm(None)]
    outs = fs.generate(target, arms, prompts, gamma=3, max_new_tokens=14, sampling=sampling, logprobs=True)
    for out, prompt in zip(outs, prompts, strict=True):
        logits = plain_logits(target.model, prompt + out.token_ids, len(out.token_ids) + 1)[:-1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(out.logprobs), wanted, atol=1e-4, rtol=0)
        assert [len(s.logprobs) for s in out.steps] == [len(s.token_ids) for s in out.steps]
    assert fs.generate(target, arms, prompts[0], max_new_tokens=2).logprobs is None


def test_logprobs_end_where_the_ids_end(llama):
    prompt = random_ids(6)
    truth = greedy_ids(llama, prompt, 12)
    llama.model.generation_config.eos_token_id = truth[4]
    out = fs.generate(llama, scripted(prompt + truth), prompt, gamma=8, max_new_tokens=12, logprobs=True)
    assert out.token_ids == truth[: truth.index(truth[4]) + 1] and len(out.logprobs) == len(out.token_ids)


def test_max_seconds_ends_all_rows_and_keeps_what_they_have(llama):
    outs = fs.generate(llama, fs.Arm(None), [[1, 2], [3]], max_new_tokens=400, max_seconds=1e-6)
    assert [(len(o.token_ids), o.finish_reason) for o in outs] == [(1, "time")] * 2
    out = fs.generate(llama, fs.Arm(None), [1, 2], max_new_tokens=3, max_seconds=600)
    assert out.finish_reason == "length"
    with pytest.raises(ValueError, match="max_seconds must be a number > 0 or None, got 0"):
        fs.generate(llama, fs.Arm(None), [1], max_seconds=0)


@pytest.mark.parametrize("prompts", [[5, 6, 7], [[5, 6, 7], [8], [9, 9]]], ids=["one", "batch"])
def test_replay_repeats_a_run(tiny, tiny_draft, prompts):
    target = tiny["llama"]
    arms = [fs.Arm(fs.ModelDrafter(tiny_draft["llama"]), 3), fs.Arm(fs.NGramDrafter(1), 5), fs.Arm(None)]
    options = dict(max_new_tokens=20, sampling=SAMPLED, seed=11)
    policy = fs.ThompsonSampling(num_arms=3, seed=4)
    first = fs.generate(target, arms, prompts, policy=policy, **options)
    rows = first if isinstance(first, list) else [first]
    chosen = max((row.arms for row in rows), key=len)
    assert len(set(chosen)) > 1
    again = fs.generate(target, arms, prompts, policy=fs.Replay(chosen), **options)
    for a, b in zip(rows, again if isinstance(again, list) else [again], strict=True):
        assert (a.token_ids, a.arms) == (b.token_ids, b.arms)
        alone = fs.generate(target, arms, a.prompt_token_ids, policy=fs.Replay(a.arms), **{**options, "seed": a.seed})
        assert alone.token_ids == a.token_ids
    with pytest.raises(ValueError, match="Replay holds 1 arms"):
        fs.generate(target, arms, prompts, policy=fs.Replay([2]), **options)


def test_a_trace_survives_json(tiny, tiny_draft, tmp_path):
    drafter = fs.ModelDrafter(tiny_draft["llama"])
    for sampling in (fs.Sampling(), SAMPLED):  # greedy rows hold log-probabilities of -inf
        out = fs.generate(
            tiny["llama"], drafter, [1, 2, 3], max_new_tokens=12, sampling=sampling, trace=True, logprobs=True
        )
        out.save(tmp_path / "trace.json")
        assert Generation.load(tmp_path / "trace.json") == out
    (tmp_path / "trace.json").write_text('{"format": 99, "steps": []}')
    with pytest.raises(ValueError, match="expected a trace of format 1 .* got: format 99"):
        Generation.load(tmp_path / "trace.json")
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a trace"):
        Generation.load(tmp_path / "trace.json")


def test_a_trace_replays_every_decision(tiny, tiny_draft):
    drafter = fs.ModelDrafter(tiny_draft["llama"])
    out = fs.generate(tiny["llama"], drafter, [1, 2, 3], max_new_tokens=30, sampling=SAMPLED, trace=True)
    for step in out.steps:
        tests = zip(step.log_uniforms, step.target_logprobs, step.draft_logprobs, strict=True)
        stands = [u <= p - q for u, p, q in tests]
        assert step.num_accepted == (stands + [False]).index(False)
        assert step.token_ids[: step.num_accepted] == step.draft_token_ids[: step.num_accepted]
        assert all(u <= 0 for u in step.log_uniforms)
    assert 0 < sum(s.num_accepted for s in out.steps) < sum(s.num_draft_tokens for s in out.steps)


def bad_drafts():
    ids = torch.tensor([[1, 2]])
    logits = torch.zeros(1, 2, 101)
    yield "a list", [[1, 2]], "expected draft_token_ids as"
    yield "no draft", None, "has no attribute"
    yield "wrong rows", Draft(ids.repeat(2, 1)), r"expected draft_token_ids as \[1, 2\]"
    yield (
        "too many",
        Draft(torch.tensor([[1, 2, 3]])),
        r"asked for at most 2 tokens: expected draft_token_ids as \[1, 2\]",
    )
    yield "floats", Draft(ids.float()), "int64, got"
    yield "outside", Draft(torch.tensor([[1, 101]])), r"draft_token_ids in -1..100, got 1..101"
    yield "a hole", Draft(torch.tensor([[-1, 1]])), "-1 in draft_token_ids only at the end"
    yield "short logits", Draft(ids, logits[:, :1]), "expected draft_logits as"
    yield "wide logits", Draft(ids, torch.zeros(1, 2, 102)), "expected draft_vocab <= 101"
    yield "not normalised", Draft(ids, logits, torch.zeros(1, 2)), "draft law q that sums to 1, got 101 in row 0"
    yield "unsorted ids", Draft(ids, logits[..., :2], None, torch.tensor([2, 1])), "sorted, unique"


@pytest.mark.parametrize(("draft", "message"), [case[1:] for case in bad_drafts()], ids=[c[0] for c in bad_drafts()])
def test_a_drafter_that_returns_nonsense_is_named(llama, draft, message):
    own = OwnDrafter(None)
    own.draft = lambda *_: Draft(draft) if isinstance(draft, list) else draft
    with pytest.raises(ValueError, match=f"drafter 'own', .*{message}"):
        fs.generate(llama, own, [1, 2], gamma=2, sampling=fs.Sampling(temperature=1.0))


def test_too_little_memory_says_what_to_lower(llama, monkeypatch):
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(llama.model, "forward", fail, raising=True)
        drafter = fs.NGramDrafter()
        with pytest.raises(MemoryError, match="too little memory for 2 rows of up to 3 tokens; lower the number of"):
            fs.generate(llama, drafter, [[1], [1, 2, 3]])
        assert drafter._seen == {}


def test_other_runtime_errors_stay_what_they_are(llama, monkeypatch):
    monkeypatch.setattr(llama.model, "forward", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        fs.generate(llama, fs.Arm(None), [1])


def test_a_draft_model_of_a_smaller_vocabulary_reads_what_it_can():  # BUGS 22
    target = make_target(vocab=40)
    small = fs.ModelDrafter(make_target(vocab=30, layers=2, seed=1))
    prompt = [35, 39, 3, 38]
    out = fs.generate(target, small, prompt, gamma=3, max_new_tokens=30)
    assert out.token_ids == greedy_ids(target, prompt, 30)
    assert max(out.token_ids) >= 30, "the case is met"
    sampled = fs.generate(target, small, [prompt] * 8, max_new_tokens=30, sampling=fs.Sampling(temperature=2.0))
    assert max(max(o.token_ids) for o in sampled) >= 30


def test_a_text_beyond_the_sliding_window_is_refused_before_it_begins():  # BUGS 14
    target = make_target("mistral", sliding_window=8)
    with pytest.raises(ValueError, match="sliding window of 8 tokens .* got 21 .row 0."):
        fs.stream(target, fs.NGramDrafter(), [[1], [1, 2, 3, 4]], max_new_tokens=20)
    out = fs.generate(target, fs.NGramDrafter(1), [1, 2, 1, 2], max_new_tokens=4)
    assert out.token_ids == greedy_ids(target, [1, 2, 1, 2], 4)


def test_a_closed_stream_leaves_nothing_behind(llama):
    drafter = fs.ModelDrafter(llama)
    steps = fs.stream(llama, drafter, [1, 2, 3], max_new_tokens=50)
    next(steps)
    caches = [weakref.ref(drafter.cached.cache), weakref.ref(steps.gi_frame.f_locals["self"].cached.cache)]
    assert all(ref() is not None for ref in caches)
    steps.close()
    gc.collect()
    assert all(ref() is None for ref in caches)


def test_a_batch_of_real_prompts_equals_each_alone(smollm2):
    words = smollm2.tokenizer(" ".join(text for prompts in PROMPTS.values() for text in prompts)).input_ids
    prompts = [words[i * 11 : i * 11 + count] for i, count in enumerate((3, 8, 21, 45, 90, 150, 220, 300))]
    arm = fs.Arm(fs.NGramDrafter(), 4)
    together = fs.generate(smollm2, arm, prompts, max_new_tokens=16)
    for out, prompt in zip(together, prompts, strict=True):
        assert out.prompt_token_ids == prompt
        assert out.token_ids == fs.generate(smollm2, arm, prompt, max_new_tokens=16).token_ids


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_soak(tiny, tiny_draft):
    """Many short generations of mixed settings: no exception, no growth. FLASHSPEC_SOAK sets how many (make soak)."""
    rounds = int(os.environ.get("FLASHSPEC_SOAK", 60))
    random = torch.Generator().manual_seed(0)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=random))]

    sizes = []
    for i in range(rounds):
        family = pick(*tiny)
        target = tiny[family]
        drafters = [fs.ModelDrafter(tiny_draft[family]), fs.NGramDrafter(1), fs.EarlyExitDrafter(target, 1), None]
        arms = [fs.Arm(pick(*drafters), pick(1, 2, 5, 8)) for _ in range(pick(1, 2, 3))]
        rows = pick(1, 1, 2, 5)
        prompts = [random_ids(pick(1, 2, 7, 30), seed=i + r) for r in range(rows)]
        samplings = [
            fs.Sampling(pick(0.0, 0.7, 1.5), pick(None, 0.8, 1.0), pick(None, 1, 20), pick(None, 0.05)) for _ in prompts
        ]
        policy = pick(None, fs.UCB1(len(arms)), fs.ThompsonSampling(len(arms)), fs.FixedArm(len(arms) - 1))
        options = dict(max_new_tokens=pick(1, 3, 12), seed=pick(None, 0, i), trace=pick(True, False), policy=policy)
        outs = fs.generate(target, arms, prompts, sampling=samplings, logprobs=pick(True, False), **options)
        assert [out.finish_reason for out in outs] == ["length"] * rows
        assert all(len(out.token_ids) == options["max_new_tokens"] for out in outs)
        if i % max(1, rounds // 10) == 0:
            gc.collect()
            sizes.append(resident_mib())
    assert sizes[-1] - sizes[len(sizes) // 2] < 40, f"resident MiB over time: {sizes}"


class Listener(fs.UCB1):
    """Plays its arms in turn and keeps what it is told."""

    def __init__(self, num_arms):
        super().__init__(num_arms)
        self.heard = []

    def select_arm(self, context=None):
        return len(self.heard) % self.num_arms

    def update(self, arm, reward, feedback=None):
        self.heard.append((arm, reward, feedback.step))
        super().update(arm, reward, feedback)


def test_a_policy_learns_the_accepted_fraction_unless_told_otherwise(llama):
    truth = greedy_ids(llama, [5, 6], 24)
    right = scripted([5, 6, *truth])
    policy = Listener(2)
    outs = fs.generate(llama, [right, fs.Arm(None)], [[5, 6], [5, 6]], policy=policy, gamma=3, max_new_tokens=12)
    for step in outs[0].steps:
        assert step.reward == step.accepted_fraction == (1.0 if step.arm == 0 and step.num_draft_tokens else 0.0)
    assert [reward for _, reward, _ in policy.heard] == [step.reward for step in outs[0].steps]


def test_tokens_per_second_as_reward_is_scaled_and_leaves_out_the_prompts_step(llama):
    # the same texts, and the arm that waits pays less although it accepts just as much
    truth = greedy_ids(llama, [5, 6], 40)
    fast, slow = scripted([5, 6, *truth]), scripted([5, 6, *truth])
    quick = slow.draft
    slow.draft = lambda *arguments: (time.sleep(0.1), quick(*arguments))[1]
    policy = Listener(2)
    out = fs.generate(
        llama, [fast, slow], [5, 6], policy=policy, gamma=2, max_new_tokens=30, reward="tokens_per_second"
    )
    assert [step for _, _, step in policy.heard] == list(range(1, len(out.steps)))
    rewards = {arm: [r for a, r, _ in policy.heard if a == arm] for arm in (0, 1)}
    assert max(rewards[1]) < min(1.0, max(rewards[0])) and all(0 < r <= 1 for r in rewards[0] + rewards[1])
    assert max(rewards[0]) == 1.0 and {step.accepted_fraction for step in out.steps[:-1]} == {1.0}
    assert policy.fastest > 0  # kept, so that a second text is measured by the same scale
    policy.fastest, policy.heard = 1e9, []
    fs.generate(llama, [fast, slow], [5, 6], policy=policy, gamma=2, max_new_tokens=9, reward="tokens_per_second")
    assert policy.fastest == 1e9 and all(reward < 1e-3 for _, reward, _ in policy.heard)
    policy.fastest = 0.0
    stream = fs.stream(
        llama, [fast, slow], [5, 6], policy=policy, gamma=2, max_new_tokens=9, reward="tokens_per_second"
    )
    next(stream)
    policy.fastest = 1e9  # seen by another call meanwhile
    assert len(list(stream)) > 1 and policy.fastest == 1e9
    with pytest.raises(ValueError, match="reward must be one of .*, got 'speed'"):
        fs.generate(llama, fast, [5, 6], reward="speed")
