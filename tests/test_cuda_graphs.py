"""Steps on the device give what the loop gives: the same ids from the same noise, whatever drafts and whoever ends.

The layer's kernels have their own tests (test_fused.py); here their rules stand in, written out, as they take no time.
"""

import functools

import pytest
import torch
from conftest import make_target, random_ids
from test_heads import make_head
from test_kernels import GPU, INTERPRETER
from torch.nn import functional as F

import flashspec_core as fs
from flashspec_core.engine import cuda_graphs, fused, lanes, layer_kernels
from flashspec_core.lab import bench, workloads

SAMPLED = [fs.Sampling(0.8), fs.Sampling(), fs.Sampling(1.1, top_k=20, top_p=0.9)]
TEXTS = [random_ids(9, seed=1), random_ids(20, seed=2) * 2, random_ids(3, seed=3)]


def norm_by_rule(x, more, weight, eps):
    x = x if more is None else x + more
    return x, F.rms_norm(x, x.shape[-1:], weight, eps)


def attend_by_rule(self, qkv, starts, keys, values, width, q_norm=None, k_norm=None, eps=1e-6):
    batch, capacity = len(starts), keys.shape[2]
    parts = qkv.view(batch, width, -1, self.dim).transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], 1)
    at = (starts[:, None] + torch.arange(width)).clamp_max(len(self.cos) - 1)
    cos, sin = self.cos[at][:, None], self.sin[at][:, None]

    def turned(x, weight):
        x = x if weight is None else F.rms_norm(x, (self.dim,), weight, eps)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = turned(parts[0], q_norm), turned(parts[1], k_norm), parts[2]
    for row, start in enumerate(starts.tolist()):
        end = min(start + width, capacity)
        keys[row, :, start:end], values[row, :, start:end] = k[row, :, : end - start], v[row, :, : end - start]
    seen = torch.arange(capacity) <= (starts[:, None] + torch.arange(width))[:, None, :, None]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch * width, -1)


def ngrams_by_rule(tokens, lengths, gamma, *settings):
    rows = [ids[:n] for ids, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    found = [fs.NGramDrafter(*settings)._lookup(0, ids, gamma) for ids in rows]
    return torch.tensor([ids + [-1] * (gamma - len(ids)) for ids in found])


@pytest.fixture
def by_rule(monkeypatch):
    for module in (fused, lanes):
        monkeypatch.setattr(module, "norm", norm_by_rule)
        monkeypatch.setattr(module, "gate", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    monkeypatch.setattr(layer_kernels.Places, "attend", attend_by_rule)
    monkeypatch.setattr(lanes, "ngrams", ngrams_by_rule)


def arms_for(target, *names):
    head = lambda kind: make_head(target, kind)  # noqa: E731
    made = {
        "off": lambda: fs.Arm(None),
        "model": lambda: fs.Arm(fs.ModelDrafter(make_target(layers=1, seed=1, hidden=64)), 3),
        "small vocabulary": lambda: fs.Arm(fs.ModelDrafter(make_target(layers=1, seed=1, vocab=60, hidden=64)), 2),
        "n-gram": lambda: fs.Arm(fs.NGramDrafter(), 4),
        "early exit": lambda: fs.Arm(fs.EarlyExitDrafter(target, 1), 2),
        "medusa": lambda: fs.Arm(fs.MedusaDrafter(head("medusa")), 3),
        "eagle": lambda: fs.Arm(fs.EagleDrafter(head("eagle")), 3),
    }
    return [made[name]() for name in names]


class FirstOff:
    """Arm 0 first, then arm 1: the loop's heads cannot draft before the target has read, the device's can."""

    def __init__(self):
        self.sent = 0

    def select_arm(self, context=None):
        self.sent += 1
        return min(self.sent - 1, 1)

    def update(self, arm, reward, feedback=None):
        pass


class InTurn:
    """Plays arms in blocks, so that each is idle for a while."""

    def __init__(self, block=3, num_arms=None):
        self.block, self.sent, self.learnt, self.arms = block, 0, [], num_arms

    def select_arm(self, context=None):
        self.sent += 1
        return (self.sent - 1) // self.block % self.arms

    def update(self, arm, reward, feedback=None):
        self.learnt.append((arm, feedback.step))


def both(target, arms, texts=TEXTS, policy=lambda: None, capture_loop=None, **options):
    """The loop's generations and the device's; a step at a row's end may draft further there, so noise may differ."""
    options = dict(max_new_tokens=24, seed=5, sampling=SAMPLED[: len(texts)]) | options
    loop = fs.generate(target, arms, texts, policy=policy(), capture=capture_loop, **options)
    return loop, fs.generate(target, arms, texts, policy=policy(), capture=True, **options)


def assert_same(loop, ours, but_last=6, mode="eager: no CUDA device"):
    for a, b in zip(loop, ours, strict=True):
        assert b.mode == "captured" and a.mode == mode
        count = max(1, min(len(a.token_ids), len(b.token_ids)) - but_last)
        assert b.token_ids[:count] == a.token_ids[:count]
        steps = [(s.step, s.arm, s.num_draft_tokens, s.num_accepted, s.token_ids) for s in a.steps][: -but_last or None]
        assert [(s.step, s.arm, s.num_draft_tokens, s.num_accepted, s.token_ids) for s in b.steps][
            : len(steps)
        ] == steps
        assert sum((s.token_ids for s in b.steps), []) == b.token_ids and b.finish_reason == a.finish_reason


@INTERPRETER
@pytest.mark.parametrize("method", ["token", "block", "coupled"])
@pytest.mark.parametrize("arm", ["off", "model", "small vocabulary", "n-gram", "early exit", "medusa", "eagle"])
def test_the_same_ids_as_the_loop(arm, method, by_rule):
    target = make_target(hidden=64)
    assert_same(*both(target, arms_for(target, "off", arm), method=method, policy=FirstOff))


def target_with_ends(*ids):
    target = make_target(hidden=64)
    target.model.generation_config.eos_token_id = list(ids)
    return target


@INTERPRETER
def test_rows_end_where_they_do_and_the_rest_goes_on_with_fewer(by_rule, monkeypatch):
    batches = []
    made = cuda_graphs.station_for
    monkeypatch.setattr(cuda_graphs, "LONG", 1)
    monkeypatch.setattr(cuda_graphs, "station_for", lambda run, rows: batches.append(len(rows)) or made(run, rows))
    target, texts = target_with_ends(5, 6, 7, 8), [random_ids(6 + i, seed=i) for i in range(7)]
    law = [fs.Sampling(1.0)] * 7
    for arms in (arms_for(target, "model"), arms_for(target, "n-gram", "eagle")):
        policy = functools.partial(InTurn, 2, len(arms))
        loop, ours = both(target, arms, texts, sampling=law, max_new_tokens=80, policy=policy)
        ended = [a.finish_reason for a in loop]
        assert ended.count("eos") >= 5 and [b.finish_reason for b in ours] == ended
        assert_same(loop, ours)
        for a, b in zip(loop, ours, strict=True):
            assert a.finish_reason != "eos" or a.token_ids == b.token_ids
    assert batches[0] >= 6 and min(batches) <= 3 and len(target.stations) == len(set(batches)) * 2


@INTERPRETER
def test_what_is_drafted_beyond_the_end_is_dropped(by_rule):
    target = make_target(hidden=64, max_position_embeddings=60)
    (arm,) = arms_for(target, "model")
    for count in (1, 2, 3, 7):
        for out in fs.generate(target, arm, TEXTS, max_new_tokens=count, capture=True):
            assert len(out.token_ids) == count and out.finish_reason == "length"
    out = fs.generate(target, arm, random_ids(40), max_new_tokens=99, capture=True)
    assert len(out.token_ids) == 20 and out.finish_reason == "context"
    assert out.token_ids == fs.generate(target, fs.Arm(None), random_ids(40), max_new_tokens=99).token_ids


@INTERPRETER
def test_a_station_serves_other_calls_and_laws(by_rule):
    target = make_target(hidden=64)
    (arm,) = arms_for(target, "model")
    for sampling in (fs.Sampling(), fs.Sampling(0.7), fs.Sampling(1.4), fs.Sampling(0.9, top_k=5)):
        assert_same(*both(target, arm, sampling=[sampling] * 3))
    assert len(target.stations) == 1 and len(next(iter(target.stations.values())).lanes) == 1


@INTERPRETER
def test_a_stream_yields_the_same_steps_and_can_be_closed(by_rule):
    target = make_target(hidden=64)
    (arm,) = arms_for(target, "model")
    options = dict(max_new_tokens=20, seed=1, capture=True)
    whole = fs.generate(target, arm, TEXTS[0], **options)
    steps = list(fs.stream(target, arm, TEXTS[0], **options))
    assert [s.token_ids for s in steps] == [s.token_ids for s in whole.steps]
    stream = fs.stream(target, arm, TEXTS[0], **options)
    next(stream), next(stream)
    stream.close()
    assert fs.generate(target, arm, TEXTS[0], **options).token_ids == whole.token_ids


@INTERPRETER
def test_rows_without_a_law_end_alone(by_rule, monkeypatch):
    target, calls = make_target(hidden=64), []
    whole = fs.generate(target, fs.Arm(None), TEXTS[1], max_new_tokens=30)
    logits = fused.FusedModel.logits

    def spoiled(self, states):
        calls.append(logits(self, states).clone())
        if len(calls) > 5 and len(states) == 2:
            calls[-1][0] = torch.nan
        return calls[-1]

    monkeypatch.setattr(fused.FusedModel, "logits", spoiled)
    with pytest.raises(fs.RowError) as caught:
        fs.generate(target, fs.Arm(None), TEXTS[:2], max_new_tokens=30, capture=True)
    lost, kept = caught.value.generations
    assert lost.finish_reason == "error" and "no law" in lost.error and len(lost.token_ids) == 5
    assert kept.token_ids == whole.token_ids and kept.finish_reason == "length"


@INTERPRETER
def test_what_cannot_be_captured_says_why(by_rule, smollm2):
    target = make_target(hidden=64)

    wide = arms_for(target, "eagle")[0]
    wide.drafter.head.head_dim = 12

    class Own:
        name = "own"
        draft = commit = reset = None

    for arms, options, why in (
        (fs.Arm(None), dict(trace=True, logprobs=True), "logprobs and trace asked for"),
        (Own(), {}, "drafter 'own' drafts on the host"),
        (fs.ModelDrafter(make_target(), name="thin"), {}, "drafter 'thin': its heads are 8 wide"),
        (fs.CascadeDrafter(*arms_for(target, "n-gram", "model")), {}, "drafts on the host"),
        (wide, {}, "drafter 'eagle': its heads are 12 wide"),
    ):
        with pytest.raises(ValueError, match=why):
            fs.generate(target, arms, [1, 2], capture=True, **options)
    assert fs.generate(target, fs.Arm(None), [1, 2], max_new_tokens=2).mode == "eager: no CUDA device"
    assert fs.generate(target, fs.Arm(None), [1, 2], max_new_tokens=2, capture=False).mode == "eager: capture=False"
    chat = fs.Chat(smollm2, fs.Arm(None), capture=True)
    with pytest.raises(ValueError, match="a chat keeps its cache"):
        chat.say("Hello")


def on_the_device(*names):
    """A target on CUDA, and these arms with what they hold moved there."""
    target = make_target(hidden=64)
    target.model.cuda()
    arms = arms_for(target, *names)
    for arm in arms:
        if type(arm.drafter) is fs.ModelDrafter:
            arm.drafter.cached.model.cuda()
    return target, arms


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["token", "block", "coupled"])
@pytest.mark.parametrize("arm", ["off", "model", "small vocabulary", "n-gram", "early exit", "medusa", "eagle"])
def test_captured_steps_give_the_same_ids_as_the_loop(arm, method):
    target, arms = on_the_device("off", arm)
    for _ in range(2):  # captured, then replayed from the start
        loop, ours = both(target, arms, method=method, policy=FirstOff, capture_loop=False)
        assert_same(loop, ours, mode="eager: capture=False")


@GPU
@pytest.mark.gpu
def test_the_host_waits_for_nothing_in_a_steady_step():
    target, (arm,) = on_the_device("model")
    options = dict(max_new_tokens=200, sampling=fs.Sampling(0.8), seed=1, capture=True)
    fs.generate(target, arm, TEXTS, **options)  # captured
    stream = fs.stream(target, arm, TEXTS, **options)
    for _ in range(20):
        next(stream)
    with torch.profiler.profile(activities=torch.profiler.supported_activities(), acc_events=True) as profile:
        for _ in range(60):
            next(stream)
    stream.close()
    called = {event.key: event.count for event in profile.key_averages()}
    assert called["cudaGraphLaunch"] >= 15
    waits = {name: n for name, n in called.items() if "Synchronize" in name or name in ("cudaMemcpy", "cudaMalloc")}
    assert set(waits) <= {"cudaDeviceSynchronize"} and sum(waits.values()) <= 1, waits  # one is the profiler's own


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype, margin", [("float32", 0.0), ("bfloat16", 0.25)])
def test_smollm2_answers_as_without_drafts(dtype, margin):
    target = fs.load_target(dtype=dtype, device="cuda", progress=False)
    arms = [
        fs.Arm(fs.NGramDrafter(), 7),
        *(fs.Arm(fs.load_drafter(n, target), 3) for n in ("eagle-mixed", "medusa-mixed")),
    ]
    texts = [text for domain in workloads.MEASURED.values() for text in domain[:7]][:20]
    prompts, parted = [workloads.chat_messages(text) for text in texts], []
    for prompt in prompts:
        plain = fs.generate(target, fs.Arm(None), prompt, max_new_tokens=64, capture=False)
        for arm in arms:
            fast = fs.generate(target, arm, prompt, max_new_tokens=64, capture=True)
            parts = bench.first_divergence(target, plain.prompt_token_ids, plain.token_ids, fast.token_ids)
            parted += [(arm.name, parts["margin"])] if parts else []
    print(f"{dtype}: {len(parted)} of {len(prompts) * len(arms)} answers part, at margins {parted}")
    assert all(at <= margin for _, at in parted)  # two steps of bfloat16 between 16 and 32, where the logits lie


@INTERPRETER
def test_calls_at_the_same_time_do_not_share_a_station(by_rule):
    target = make_target(hidden=64)
    arms = arms_for(target, "off", "model")
    options = dict(max_new_tokens=20, capture=True, seed=2, sampling=fs.Sampling(0.9))
    alone = [fs.generate(target, arm, text, **options).token_ids for arm, text in zip(arms, TEXTS, strict=False)]
    streams = [fs.stream(target, arm, text, **options) for arm, text in zip(arms, TEXTS, strict=False)]
    told = [[], []]
    while streams[0] or streams[1]:
        for i, stream in enumerate(streams):
            step = next(stream, None) if stream else None
            streams[i] = stream if step else None
            told[i] += step.token_ids if step else []
    assert told == alone and len(target.stations) == 1  # of the same shape one is kept


@INTERPRETER
def test_a_runs_arms_repeat_it(by_rule):
    target = make_target(hidden=64)
    arms = arms_for(target, "model", "n-gram")
    options = dict(max_new_tokens=30, capture=True, seed=4, sampling=fs.Sampling(0.9))
    first = fs.generate(target, arms, TEXTS[1], policy=fs.UCB1(2), **options)
    again = fs.generate(target, arms, TEXTS[1], policy=fs.Replay(first.arms), **options)
    assert again.token_ids == first.token_ids and again.arms == first.arms
    with pytest.raises(ValueError, match="one more step was asked for"):
        fs.generate(target, arms, TEXTS[1], policy=fs.Replay(first.arms[:3]), **options)


@INTERPRETER
def test_old_drafters_and_stations_are_let_go(by_rule, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "LANES", 2)
    monkeypatch.setattr(cuda_graphs, "STATIONS", 2)
    target = make_target(hidden=64)
    for layers in (1, 2, 1, 2):
        fs.generate(target, fs.EarlyExitDrafter(target, layers), TEXTS[0], max_new_tokens=6, capture=True)
    (station,) = target.stations.values()
    assert len(station.lanes) == 2
    for count in (1, 2, 3):
        fs.generate(target, fs.Arm(None), TEXTS[:count], max_new_tokens=3, capture=True)
    assert [key[0] for key in target.stations] == [2, 3] and not station.lanes


@INTERPRETER
def test_what_a_caller_has_switched_off_hurts_no_later_call(by_rule):
    target = make_target(hidden=64)
    (arm,) = arms_for(target, "model")
    with torch.inference_mode():
        first = fs.generate(target, arm, TEXTS[0], max_new_tokens=9, capture=True)
    assert fs.generate(target, arm, TEXTS[0], max_new_tokens=9, capture=True).token_ids == first.token_ids
