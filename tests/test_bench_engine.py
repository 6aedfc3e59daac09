"""lab/bench_engine.py on a CPU: a pair that agrees as it should, and rows that say what was done."""

import pytest
import torch

import flashspec_core as fs
from flashspec_core.lab import bench, bench_engine

TINY = bench_engine.Shape(64, 128, 6, 4, 2, 500, 0.05)


def test_first_layers_and_all_of_them_mostly_agree():
    target = bench_engine.synthetic_target(TINY, "cpu", torch.float32)
    again = bench_engine.synthetic_target(TINY, "cpu", torch.float32)
    ids = torch.randint(500, (1, 40))
    assert target.model(ids).logits.equal(again.model(ids).logits)
    drafter = fs.EarlyExitDrafter(target, 4)
    out = fs.generate(target, fs.Arm(drafter, 4), ids[0].tolist(), max_new_tokens=60)
    assert out.acceptance_rate > 0.8  # the two later layers add a twentieth
    loose = bench_engine.synthetic_target(bench_engine.Shape(64, 128, 6, 4, 2, 500, 30.0), "cpu", torch.float32)
    out = fs.generate(loose, fs.Arm(fs.EarlyExitDrafter(loose, 4), 4), ids[0].tolist(), max_new_tokens=60)
    assert out.acceptance_rate < 0.3
    assert not any(p.is_meta for p in [*target.model.parameters(), *target.model.buffers()])


@pytest.mark.filterwarnings("ignore")
def test_rows_say_what_was_done(tmp_path):
    rows = bench_engine.shape_rows("tiny", TINY, "cpu", lambda line: None, num_tokens=20, repeat=2, batches=(1, 2))
    assert {r["provider"] for r in rows} >= {"flashspec_core", "transformers", "transformers-assisted"}
    own = bench.pick(rows, provider="flashspec_core", metric="tokens_per_second")
    assert len(own) == 2 * (1 + 3) * 2 and {(r["gamma"], r["batch"]) for r in own} >= {("", 1), (6, 2)}
    assert {r["model"] for r in rows} == {"tiny"}
    assert {r["note"] for r in rows} == {bench_engine.NOTE} and {r["mode"] for r in own} == {"eager"}
    assert {r["metric"] for r in rows} == {
        *("first_call tokens_per_second step_p50 step_p95 step_p99 tokens_per_step acceptance_rate bandwidth".split())
    }
    bench.append_rows(rows, tmp_path / "engine.csv")


def test_rows_are_stored_as_they_come(monkeypatch, tmp_path):
    def domains(device, num_tokens, num_prompts):
        assert (device, num_tokens, num_prompts) == ("cpu", 128, 2)
        yield [bench.row("decode", "flashspec_core", "tokens_per_second", "1/s", [1.0], model=bench_engine.REAL)]
        raise TimeoutError("the second domain")

    monkeypatch.setattr(bench_engine, "real_rows", domains)
    path = tmp_path / "engine.csv"
    with pytest.raises(TimeoutError):
        bench_engine.main([str(path), "--shapes", bench_engine.REAL, "--device", "cpu", "--prompts", "2"])
    assert [row["model"] for row in bench.read_rows(path)] == [bench_engine.REAL]


def test_bytes_of_a_pass_leave_out_the_embeddings():
    target = bench_engine.synthetic_target(TINY, "cpu", torch.float32)
    layers = 6 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    assert bench_engine.weight_bytes(target) == 4 * (layers + 64 + 500 * 64)
