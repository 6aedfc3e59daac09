"""verify/kernels.py: equal to the reference in Triton's interpreter, and on a GPU."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_logits import samplings

import flashspec_core as fs
from flashspec_core.lab import gates
from flashspec_core.noise import DRAFT, DraftNoise, gumbels, log_uniforms, step_seeds
from flashspec_core.verify import METHODS, decide, draw_draft, kernels, reference
from flashspec_core.verify.logits import draw, logprobs, warp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy: log 0 warns there
SOFT = fs.Sampling(temperature=1.0)
INTERPRETER = pytest.mark.skipif(not kernels.INTERPRETED, reason="with a GPU the kernels run on it: make test-gpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def case(rng, batch, gamma, vocab, dtype, kind, rows, device="cpu"):
    """A call as the engine makes it: ragged drafts, drawn from the very logits that are handed over."""
    target = torch.from_numpy(rng.normal(0, 2, (batch, gamma + 1, vocab)).astype(np.float32)).to(device, dtype)
    size = max(1, vocab // 2) if kind == "trimmed" else vocab
    vocab_ids = torch.from_numpy(np.sort(rng.permutation(vocab)[:size])).to(device) if kind == "trimmed" else None
    noise = torch.from_numpy(rng.normal(0, 1, (batch, gamma, size)).astype(np.float32)).to(device)
    base = target[:, :gamma].float() if vocab_ids is None else target[:, :gamma].float()[..., vocab_ids]
    logits = (base + noise).to(dtype)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, batch)).to(device)
    ids = torch.empty(batch, 0, dtype=torch.int64, device=device)
    for i in range(gamma):
        x = draw(logprobs(logits[:, i], rows), gumbels(seeds, size, DRAFT, i))
        ids = torch.cat([ids, (x if vocab_ids is None else vocab_ids[x])[:, None]], dim=1)
    lengths = torch.from_numpy(rng.integers(0, gamma + 1, batch)).to(device)
    ids = torch.where(torch.arange(gamma, device=device) < lengths[:, None], ids, -1)
    kept = warp(logits, rows).logsumexp(-1) if kind == "kept" and gamma else None
    draft = fs.Draft(ids) if kind == "none" or not gamma else fs.Draft(ids, logits, kept, vocab_ids)
    return target, draft, rows, log_uniforms(seeds, gamma), seeds


def assert_equal(call, method="token", workspaces=None):
    """Counts, tokens and flags equal; log-probabilities of the tested ids near."""
    rows, positions = call[2], torch.arange(len(call[2]), device=call[0].device) * 1000
    want = decide(*call, positions, method, "reference")
    got = kernels.verify(*call, positions, method, workspaces)
    assert got.impl == "triton" and want.impl == "reference"
    for name in ("num_accepted", "token_ids", "next_token_ids", "invalid"):
        assert torch.equal(getattr(want, name), getattr(got, name)), name
    tested = (call[1].token_ids >= 0) & (want.target_logprobs > -math.inf)
    torch.testing.assert_close(got.target_logprobs[tested], want.target_logprobs[tested], atol=1e-4, rtol=1e-5)
    warm = tested & torch.tensor([not s.greedy for s in rows], device=tested.device)[:, None]
    torch.testing.assert_close(got.draft_logprobs[warm], want.draft_logprobs[warm], atol=1e-4, rtol=1e-5)
    return got


@INTERPRETER
@settings(max_examples=40)  # two seconds each in the interpreter; make test-gpu has larger ones
@given(st.data())
def test_the_kernel_equals_the_reference(data):
    batch, gamma, vocab = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6)), data.draw(st.integers(2, 1500))
    rows = data.draw(st.lists(samplings(vocab), min_size=batch, max_size=batch))
    kind = data.draw(st.sampled_from(["none", "full", "kept", "trimmed"]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    with pytest.MonkeyPatch.context() as patch:  # races by bounds too, which small parts do without
        patch.setattr(kernels, "WHOLE", data.draw(st.sampled_from([0, kernels.WHOLE])))
        assert_equal(case(rng, batch, gamma, vocab, dtype, kind, rows), data.draw(st.sampled_from(METHODS)))


@INTERPRETER
@pytest.mark.parametrize(
    "kind, method", [("kept", "token"), ("trimmed", "block"), ("none", "coupled"), ("full", "token")]
)
def test_many_runs_equal_the_reference(kind, method):
    rows = [SOFT, fs.Sampling(0.7, top_p=0.95), fs.Sampling()]
    assert_equal(case(np.random.default_rng(2), 3, 2, 24_576, torch.bfloat16, kind, rows), method)


@INTERPRETER
@pytest.mark.parametrize("vocab", [8193, 10_000, 40_961])
def test_vocabulary_tails(vocab):
    # THEORY: no id of V or more may ever come out; parts and tiles that end inside the vocabulary
    target = torch.full((2, 2, vocab), -math.inf)
    target[..., -1] = 0.0
    ids = torch.full((2, 1), vocab - 1)
    result = kernels.verify(target, fs.Draft(ids), [SOFT, fs.Sampling()], torch.zeros(2, 1), torch.arange(2))
    assert result.token_ids.tolist() == [[vocab - 1] * 2] * 2


@INTERPRETER
def test_inputs_may_be_views():
    # seeds and positions were read as if they lay side by side, behind an expanded one's end
    target, ids = torch.randn(3, 2, 200), torch.randint(0, 200, (3, 1))
    room = torch.arange(12) * 10
    for seeds, positions in ((room[1:2].expand(3), room[:3]), (room[::4], room[1::4])):
        options = dict(sampling=SOFT, log_uniforms=log_uniforms(seeds, 1), seeds=seeds, positions=positions)
        for method in METHODS:
            both = [fs.verify(target, ids, method=method, impl=impl, **options) for impl in ("reference", "triton")]
            assert torch.equal(both[0].token_ids, both[1].token_ids), method
    seeds, bits = kernels.step_noise(room[::4], torch.tensor([3]), 2)
    assert torch.equal(seeds, kernels.step_noise(room[::4].clone(), torch.tensor([3]), 2)[0])


@INTERPRETER
@pytest.mark.parametrize("shift", [1, 2, 8])
def test_rows_may_begin_anywhere(shift, monkeypatch):
    # a bfloat16 row is read as words where it begins at 16 bytes, and only there; a GPU would fault, numpy does not
    class Spy:
        def __getitem__(self, grid):
            return lambda *tensors, ALIGNED, **rest: (
                seen.append(ALIGNED) or real[grid](*tensors, ALIGNED=ALIGNED, **rest)
            )

    seen, real = [], kernels._verify_kernel
    monkeypatch.setattr(kernels, "_verify_kernel", Spy())
    target, draft, *rest = case(np.random.default_rng(5), 2, 1, 4096, torch.bfloat16, "full", [SOFT, SOFT])
    moved = torch.empty(target.numel() + shift, dtype=target.dtype)[shift:].view_as(target).copy_(target)
    assert_equal((moved, draft, *rest))
    assert seen and set(seen) == {shift == 8}


@INTERPRETER
def test_a_draft_that_stood_whole_is_followed_by_a_race_of_all_parts():
    # its own law has no row there: log q of +inf made every id of every part weigh nothing, and one program did it all
    target = torch.randn(1, 3, 5000)
    ids = target[:, :2].argmax(-1)
    logits = torch.full_like(target[:, :2], -30.0).scatter(2, ids[..., None], -31.0)  # q below p: accepted
    workspaces: dict = {}
    call = (target, fs.Draft(ids, logits), [SOFT], torch.full((1, 2), -9.0), torch.tensor([4]))
    assert assert_equal(call, workspaces=workspaces).num_accepted.tolist() == [2]
    (ws,) = workspaces.values()
    assert ws.splits > 1 and (ws.parts[0, 2, -1] > 0).all()


@INTERPRETER
@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e50])
def test_hot_rows_are_not_greedy(temperature):
    call = case(np.random.default_rng(3), 2, 2, 300, torch.float32, "none", [fs.Sampling(temperature)] * 2)
    assert_equal(call)


def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match="expected the current CUDA device, 0, got cuda:1: torch.cuda.set_device"):
        kernels.Workspace(1, 1, 50, torch.device("cuda:1"))


@INTERPRETER
def test_the_certificates_edges_hold_on_the_kernel():
    def door(*arguments, **options):  # the interpreter takes .3 s for a row that filters: 10 of its 200 rows go there
        result = fs.verify(*arguments, **options)
        few = 10 if result.token_ids.shape[0] > 64 else None
        target, ids, draft = (a if a is None else a[:few] for a in (*arguments, None)[:3])
        tensors = {k: v[:few] if k in ("log_uniforms", "seeds", "positions") else v for k, v in options.items()}
        result.token_ids[:few] = fs.verify(target, ids, draft, impl="triton", **tensors).token_ids
        return result

    findings = gates.edge_findings("token", door)
    assert not any(found.red for found in findings), [f.setting for f in findings if f.red]


@INTERPRETER
def test_an_empty_residual_draws_from_the_target():
    # p = q up to rounding and a draft that falls: nothing is left over
    target = torch.tensor([[[0.3, 0.1, 0.2], [0.0, 0.0, 0.0]]])
    call = (target, fs.Draft(torch.tensor([[1]]), target[:, :1].clone()), [SOFT], torch.tensor([[1.0]]))
    seeds = torch.arange(40)
    seen = {int(kernels.verify(*call, seeds[i : i + 1]).next_token_ids) for i in range(40)}
    wanted = {int(reference.verify_token(*call, seeds[i : i + 1]).next_token_ids) for i in range(40)}
    assert seen == wanted == {0, 1, 2}


@INTERPRETER
@pytest.mark.parametrize("bad", [[math.nan, 0.0, 1.0], [-math.inf] * 3, [math.inf, 0.0, 0.0]])
@pytest.mark.parametrize("sampling", [SOFT, fs.Sampling()], ids=["soft", "greedy"])
def test_a_row_without_a_law_is_flagged_where_it_is_read(bad, sampling):
    # BUGS 10: rows of drafts (2, 0, 2) with the bad logits at position 1, 1 and 2: read, behind the row's end, read
    target = torch.zeros(3, 3, 3)
    target[[0, 1, 2], [1, 1, 2]] = torch.tensor(bad)
    ids = torch.tensor([[0, 0], [-1, -1], [0, 0]])
    result = kernels.verify(target, fs.Draft(ids), [sampling] * 3, torch.zeros(3, 2), torch.arange(3))
    assert result.invalid.tolist() == [1, -1, 2]
    assert 0 <= int(result.next_token_ids.min()) and int(result.next_token_ids.max()) < 3


@INTERPRETER
def test_a_workspace_is_used_again():
    rng, rows = np.random.default_rng(0), [SOFT, fs.Sampling(temperature=0.7)]
    workspaces = {}
    for kind in ("full", "trimmed", "none", "full"):
        call = case(rng, 2, 3, 50, torch.float32, kind, rows)
        for method in METHODS:
            got = assert_equal(call, method, workspaces)
            (workspace,) = workspaces.values()
            assert got is workspace.result and not workspace.state.any()


@INTERPRETER
@pytest.mark.parametrize("positions", [None, torch.tensor([7, 900])], ids=["fresh", "coupled"])
def test_a_draft_is_drawn_and_summed_in_one_pass(positions):
    # a greedy row, a filtered one, and V beyond a part; the drafter's law is kept as verification needs it
    rows = [fs.Sampling(), fs.Sampling(0.7, top_p=0.9, top_k=50)]
    logits = torch.randn(2, 2100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    noise = DraftNoise(torch.tensor([3, -5]), positions)
    ids, sums = kernels.draw(logits, rows, noise, 2)
    wanted, wanted_sums = draw_draft(logits, rows, noise, 2)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(sums, wanted_sums, atol=1e-5, rtol=1e-5)


def test_the_door_says_where_triton_can_be_had(monkeypatch):
    options = dict(sampling=SOFT, log_uniforms=torch.zeros(1, 0), seeds=torch.arange(1), impl="triton")
    ids = torch.empty(1, 0, dtype=torch.int64)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="expected CUDA tensors for impl 'triton'.*got cpu"):
        fs.verify(torch.zeros(1, 1, 3), ids, **options)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("trial", range(30))
def test_gpu_parity(trial):
    rng = np.random.default_rng(trial)
    batch, gamma = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    vocab = int(rng.choice([2, 80, 8193, 32_000, 49_152, 128_256, 262_144]))
    choice = [fs.Sampling(), fs.Sampling(0.7), fs.Sampling(1.3, top_p=0.9), fs.Sampling(0.5, top_k=20), SOFT]
    rows = [choice[int(rng.integers(0, 5))] for _ in range(batch)] if trial % 2 else [fs.Sampling(0.8)] * batch
    dtype = (torch.float32, torch.float16, torch.bfloat16)[trial % 3]
    kind = ("none", "full", "kept", "trimmed")[int(rng.integers(0, 4))]
    assert_equal(case(rng, batch, gamma, vocab, dtype, kind, rows, "cuda"))


@GPU
@pytest.mark.gpu
def test_gpu_no_host_wait_and_capture_in_a_graph():
    call = case(np.random.default_rng(0), 8, 4, 32_000, torch.bfloat16, "kept", [SOFT] * 8, "cuda")
    workspaces = {}
    want = kernels.verify(*call, workspaces=workspaces).token_ids.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode says of itself, once, that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.verify(*call, workspaces=workspaces)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.verify(*call, workspaces=workspaces)
    for _ in range(100):
        result.token_ids.zero_()
        graph.replay()
        assert torch.equal(result.token_ids, want)


@GPU
@pytest.mark.gpu
def test_gpu_more_than_two_to_the_31_logits():
    batch, gamma, vocab = 1100, 7, 262_144
    target = torch.randn(batch, gamma + 1, vocab, device="cuda", dtype=torch.bfloat16)
    ids = target[:, :gamma].argmax(-1)
    seeds = torch.arange(batch, device="cuda")
    few = slice(batch - 4, batch)
    whole = kernels.verify(target, fs.Draft(ids), [SOFT] * batch, log_uniforms(seeds, gamma), seeds)
    part = reference.verify_token(
        target[few], fs.Draft(ids[few]), [SOFT] * 4, log_uniforms(seeds[few], gamma), seeds[few]
    )
    assert torch.equal(whole.token_ids[few], part.token_ids) and int(whole.token_ids.max()) < vocab


@GPU
@pytest.mark.gpu
def test_gpu_a_million_rows_name_ids_of_the_vocabulary():
    # THEORY: no id of V or more may ever come out. Whole laws, and laws of three ids alone that drafts mostly miss
    rows, workspaces = 1024, {}
    extremes = []
    for vocab in (7, 8193, 32_000, 50_257):
        target = torch.randn(rows, 2, vocab, device="cuda", dtype=torch.bfloat16)
        for i in range(256):
            if i == 128:
                target[:, :, 3:] = -math.inf
            seeds = torch.arange(i * rows, (i + 1) * rows, device="cuda")
            draft = fs.Draft(seeds[:, None] % vocab, None if i % 2 else target[:, :1])
            result = kernels.verify(target, draft, [SOFT] * rows, log_uniforms(seeds, 1), seeds, workspaces=workspaces)
            room = 3 if i >= 128 else vocab
            extremes.append(torch.stack([result.next_token_ids.min(), result.next_token_ids.max() - room]))
    least, most = torch.stack(extremes).T.tolist()
    assert len(least) * rows > 1_000_000 and min(least) == 0 and max(most) < 0


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "full", "kept", "trimmed"])
@pytest.mark.parametrize("cores", [2, 132], ids=["bounded", "whole"])
def test_gpu_parts_of_few_rows(cores, kind, monkeypatch):
    # what the sanitizers run: parts that are raced by their bounds and parts that are read whole, rows at any address
    shares, rows = kernels.shares, [SOFT, fs.Sampling(0.7, top_p=0.95), fs.Sampling(), SOFT]
    monkeypatch.setattr(kernels, "shares", lambda batch, vocab, _: shares(batch, vocab, cores))
    for vocab, chosen in ((24_576, rows), (24_577, rows), (24_584, [SOFT] * 4)):
        for method in METHODS:
            call = case(np.random.default_rng(vocab), 4, 2, vocab, torch.bfloat16, kind, chosen, "cuda")
            workspaces: dict = {}
            assert_equal(call, method, workspaces)
            (ws,) = workspaces.values()
            assert bool(ws.bounded) == (cores == 2)


@GPU
@pytest.mark.gpu
def test_gpu_certificate():
    def door(target, ids, draft=None, **options):
        moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        result = fs.verify(target.cuda(), ids.cuda(), None if draft is None else draft.cuda(), **moved)
        assert result.impl == "triton"
        return fs.VerifyResult(result.num_accepted.cpu(), result.next_token_ids.cpu(), result.token_ids.cpu())

    report = gates.certify(door, methods=["token"])
    assert report.passed, str(report)


@GPU
@pytest.mark.gpu
def test_gpu_the_engine_decides_by_the_kernel():
    target, *models = gates.tiny_models()
    options = dict(gamma=3, max_new_tokens=24, seed=4)
    for sampling in (fs.Sampling(), fs.Sampling(0.9)):
        texts = []
        for device in ("cpu", "cuda"):
            arms = [fs.ModelDrafter(m.model.to(device)) for m in models] + [fs.NGramDrafter(1)]
            moved = fs.Target(target.model.to(device))
            rows = fs.generate(
                moved, arms, [[1, 2, 0], [3], [2, 2]], sampling=sampling, policy=fs.FixedArm(0), **options
            )
            texts.append([row.token_ids for row in rows])
        assert texts[0] == texts[1]
    for model in (target, *models):
        model.model.to("cpu")


def test_what_a_captured_step_reads_stays_where_it_is():
    workspace = kernels.Workspace(2, 1, 50, torch.device("cpu"))
    workspace.prepare([fs.Sampling(0.5), fs.Sampling()])
    where = workspace.laws.data_ptr()
    assert workspace.laws[:, 0].tolist() == [2.0, 0.0] and not workspace.filtered
    workspace.prepare([fs.Sampling(4.0), fs.Sampling(0.25, top_k=60)])  # beyond V, and still a filter: of q it is one
    assert workspace.laws.data_ptr() == where and workspace.laws[:, 0].tolist() == [0.25, 4.0] and workspace.filtered
    some, others = torch.tensor([3, 7]), torch.tensor([0, 7, 49])  # two drafters' vocabularies
    first = workspace.inverse(some)
    second = workspace.inverse(others)
    assert workspace.inverse(some) is first and first[[3, 7, 0]].tolist() == [0, 1, -1]
    assert second[[0, 7, 49, 3]].tolist() == [0, 1, 2, -1] and (first >= 0).sum() == 2
    for _ in range(100):
        workspace.inverse(torch.tensor([1]))
    assert len(workspace.inverses) <= kernels.VOCABULARIES


@INTERPRETER
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_a_steps_noise_is_the_one_noise(gamma):
    seeds, step = torch.tensor([7, -3, 2**62]), torch.tensor([11])
    got, log_u = kernels.step_noise(seeds, step, gamma)
    assert torch.equal(got, step_seeds(seeds, 11)) and torch.equal(log_u, log_uniforms(got, gamma))
