"""lab/claims.py: one rule from measurements to verdicts, and verdicts that come with their rows."""

import math
from collections import Counter
from types import SimpleNamespace

import nbformat
import pytest
from test_architecture import ROOT

import flashspec_core as fs
from flashspec_core.lab import bench, bench_adaptive, bench_engine, claims, notebooks, workloads
from flashspec_core.lab.claims import FAILS, HOLDS, NOT_HERE, NOT_YET, PARTLY, Claim


@pytest.mark.parametrize(
    "cases, options, verdict, condition",
    [
        ({"a": 2.0, "b": 3.0}, {}, HOLDS, ""),
        ({"a": 1.9, "b": 3.0}, {}, PARTLY, "only: b"),
        ({"a": 1.9, "b": 3.0, "c": 4.0}, {}, PARTLY, "not: a"),
        ({"a": 1.9, "b": 3.0, "c": 4.0}, {"at_most": True}, PARTLY, "only: a"),
        ({"a": 1.0, "b": 1.9}, {}, FAILS, ""),
        ({"a": math.nan}, {}, FAILS, ""),
        ({"a": 2.0}, {"proviso": "synthetic"}, PARTLY, "synthetic"),
        ({"a": 2.0, "b": 1.0}, {"proviso": "synthetic"}, PARTLY, "only: a; synthetic"),
        ({"a": 1.0}, {"proviso": "synthetic"}, FAILS, "synthetic"),
        ({str(i): i for i in range(8)}, {}, PARTLY, "not: 0; 1"),
        ({str(i): i - 2.0 for i in range(8)}, {}, PARTLY, "in 4 of 8 cases"),
        ({}, {}, NOT_YET, ""),
        ({}, {"absent": NOT_HERE, "proviso": "synthetic"}, NOT_HERE, ""),
    ],
)
def test_the_rule(cases, options, verdict, condition):
    claim = Claim("twice", "times", 2, cases, **options)
    assert (claim.verdict, claim.condition) == (verdict, condition)


def test_a_margin_is_one_where_a_case_just_meets_its_claim():
    assert Claim("", "", 2).margin(3) == 1.5 and Claim("", "", 2, at_most=True).margin(4) == 0.5
    for claim in (Claim("", "", 2), Claim("", "", 2, at_most=True)):
        assert claim.margin(2) == 1
    assert Claim("", "", 0, at_most=True).margin(0) == math.inf and Claim("", "", 0, at_most=True).margin(3) == 0


def row(provider, value, batch=1, **cells):
    cells = dict(device="X", dtype="bfloat16", commit="c1") | cells
    return bench.row("verify", provider, "time", "us", [value], batch=str(batch), **cells)


def test_ratios_are_of_rows_of_one_run():
    above = [row("torch", 30.0), row("torch", 60.0, 8), row("torch", 99.0), row("torch", 50.0, 32)]
    below = [row("ours", 10.0), row("ours", 20.0, 8), row("ours", 5.0, 32, commit="c2"), row("ours", 1.0, 64)]
    assert claims.ratios(above, below, ("batch",)) == {"batch 1": 3.0, "batch 8": 3.0}
    assert claims.ratios(above, [], ("batch",)) == claims.ratios([], below, ("batch",)) == {}
    assert claims.values(above[:2], ("provider", "batch")) == {"torch, batch 1": 30.0, "torch, batch 8": 60.0}
    assert claims.where(above + [row("torch", 1.0, device="Y", dtype="")]) == "X, bfloat16; Y"


def test_a_table_has_a_line_a_claim():
    many = {str(i): float(i) for i in range(9)}
    made = [Claim("twice", "times", 2, {"batch 8": 1234.5}, "X", beside="said"), Claim("few", "of them", 3, many, "Y")]
    lines = claims.table([*made, Claim("later", "ms", 22.1, at_most=True)]).splitlines()
    assert lines[2] == "| twice | at least 2 times | batch 8: 1,234; said | X | ● **holds** |"
    assert "0 to 8 in 9 cases" in lines[3] and "◐ **holds with a condition** (not: 0; 1; 2)" in lines[3]
    assert lines[4] == "| later | at most 22.1 ms | – | – | – **not measured yet** |" and len(lines) == 5


def adaptive_rows(device, name, seconds):
    arms = [fs.Arm(None), fs.Arm(fs.NGramDrafter(), 3)]
    ways = [bench_adaptive.Way("off", arms[:1]), bench_adaptive.Way("n-gram", arms[1:])]
    ways += [bench_adaptive.Way(policy, arms, lambda: fs.UCB1(2)) for policy in ("quick", "slow")]
    for way, each in zip(ways, seconds, strict=True):
        times = (1.0, 1.0, 1.0) if way.policy is None else (1.0, 1.01, 1.02)
        way.seconds, way.chosen = [[each * time] for time in times], [[Counter(off=1)]] * 3
    target = SimpleNamespace(device=SimpleNamespace(type="cuda"), name="smollm2-135m", dtype="torch.bfloat16")
    rows = bench_adaptive.rows_of(target, ways, [workloads.Stream((("chat", "Hi."),), ())] * 3, 0.0, name)
    return [row | {"device": device} for row in rows]


def engine_rows(model, device, note, own, plain, metric="tokens_per_second", **cells):
    cells = dict(model=model, device=device, batch="1", temperature="0.0", note=note) | cells
    ways = {"flashspec_core": (own, dict(gamma=4, method="token")), "transformers": (plain, dict(method="plain"))}
    return [bench.row("decode", who, metric, "1/s", [v], **cells, **more) for who, (v, more) in ways.items() if v]


def verdicts(path):
    found = {}
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            for line in output.get("data", {}).get("text/markdown", "").splitlines()[2:]:
                claimed, *_, verdict = (part.strip() for part in line.strip("|").split(" | "))
                found[claimed] = verdict
    return found


def test_a_verdict_comes_with_its_rows_and_goes_without_them(tmp_path):
    committed = verdicts(ROOT / "notebooks" / "08_claims.ipynb")
    assert len(committed) == 37 and committed["Theorem 1: the law stays the target's"] == "● **holds**"
    note, nvidia = bench_engine.NOTE, "NVIDIA H200"
    engine = engine_rows("llama-3-8b-shape", nvidia, note, 300.0, 200.0)
    engine += engine_rows("llama-3-70b-shape-nf4", nvidia, note, 30.0, 40.0)
    engine += engine_rows("smollm2-135m", nvidia, "medusa-mixed", 300.0, 250.0, domain="chat")
    engine += engine_rows("smollm2-135m", nvidia, "medusa-mixed", 200.0, 250.0, domain="code")
    for metric, value in (("tokens_per_second", 40.0), ("step_p50", 20.0), ("tokens_per_step", 2.0)):
        engine += engine_rows("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Tesla T4", "n-gram", value, None, metric)
    bench.append_rows(engine, tmp_path / "engine.csv")
    streams = adaptive_rows(nvidia, "changing", (2.0, 3.0, 1.5, 2.2))
    streams += adaptive_rows("X, 2 cores", "stationary chat", (2.0, 3.0, 2.02, 2.2))
    bench.append_rows(streams, tmp_path / "adaptive.csv")
    source, out = ROOT / "notebooks" / "08_claims.ipynb", tmp_path / "08_claims.ipynb"
    small = {"results": str(tmp_path), "num_seeds": 4, "repeats": 20}
    notebooks.run_notebook(source, out, small, progress=False)
    found = verdicts(out)
    assert found.keys() == committed.keys()
    for claimed, verdict in {
        "drafting pays: llama-3-8b-shape": f"◐ **holds with a condition** ({note})",
        "drafting pays: llama-3-70b-shape-nf4": f"○ **does not hold** ({note})",
        "drafting pays: Medusa, H100 class": "◐ **holds with a condition** (only: chat, temperature 0.0)",
        "drafting pays: EAGLE, CPU": "– **not measured yet**",
        "choosing beats any fixed drafter (H100 class)": "◐ **holds with a condition** (only: quick)",
        "choosing beats any fixed drafter (CPU)": "– **not measured yet**",
        "costs little where nothing changes": "◐ **holds with a condition** (only: quick)",
        "TinyLlama NF4 on a T4: 44.2 tokens/s": "○ **does not hold**",
        "TinyLlama NF4 on a T4: acceptance .75": "– **not measurable here**",
        "TinyLlama NF4 on a T4: p50 22.1 ms": "● **holds**",
        "gains grow with bandwidth (H100)": "– **not measured yet**",
        "UCB1's regret is 100.2": "● **holds**",
    }.items():
        assert found[claimed] == verdict, claimed
