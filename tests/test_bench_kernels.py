"""lab/bench_kernels.py: the case that is timed is a step as an engine meets it, and the stored rows are whole."""

import itertools

import pytest
import torch
from compiled import in_a_child

from flashspec_core.lab import bench, bench_kernels
from flashspec_core.verify import kernels, reference
from flashspec_core.verify.logits import warp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy: log 0 warns there


@pytest.mark.skipif(not kernels.INTERPRETED, reason="with a GPU the kernels run on it: make test-gpu")
def test_the_timed_case_is_drawn_from_its_own_laws():
    c = bench_kernels.case(3, 1100, 2, device="cpu")
    target, draft, samplings, log_uniforms, seeds = c.call
    assert target.shape == (3, 3, 1100) and target.dtype == torch.bfloat16 and log_uniforms.shape == (3, 2)
    assert draft.token_ids.shape == (3, 2) and 0 <= int(draft.token_ids.min()) and int(draft.token_ids.max()) < 1100
    torch.testing.assert_close(draft.logsumexp, warp(draft.logits, samplings).logsumexp(-1), atol=1e-4, rtol=0)
    both = [rule(*c.call).token_ids for rule in (reference.verify_token, kernels.verify)]
    assert torch.equal(*both)


def test_peers_and_counters_that_are_not_there_are_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert bench_kernels.counted_bytes(1, 32_000, 1) is None


def test_shared_memory_is_what_the_compiler_says_and_does_not_hang_on_the_vocabulary(tmp_path):
    code = (
        "from flashspec_core.lab.bench_kernels import shared_bytes\nout = [shared_bytes(v) for v in (32_000, 128_256)]"
    )
    small, large = in_a_child(code, tmp_path)
    assert 0 < small == large <= 8192


def test_stored_rows_hold_every_shape_and_say_where_they_come_from():
    rows = bench.read_rows(bench.RESULTS / "kernels.csv")
    assert all(row["device"] and row["commit"] and "+" not in row["commit"] for row in rows)
    shapes = itertools.product(bench_kernels.BATCHES, bench_kernels.VOCABS, bench_kernels.GAMMAS)
    for batch, vocab, gamma in shapes:
        here = bench.pick(rows, batch=batch, vocab=vocab, gamma=gamma, method="token")
        for provider, mode in (
            ("flashspec_core", "graph"),
            ("flashspec_core", "eager"),
            ("vllm-0.32", "graph"),
            ("torch", "eager"),
        ):
            assert bench.median(here, benchmark="verify", provider=provider, mode=mode) > 0
