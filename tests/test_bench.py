"""lab/bench.py: what is timed, how it is summed up, and rows that say what they depend on."""

import csv
import time

import pytest
import torch

from flashspec_core.engine.drafters import NGramDrafter
from flashspec_core.engine.models import Target
from flashspec_core.lab import bench


def test_measure_counts_only_what_follows_the_warm_up():
    calls = []
    seconds = bench.measure(lambda: calls.append(time.sleep(0.002)), warmup=2, repeat=3)
    assert len(calls) == 5 and len(seconds) == 3
    assert min(seconds) >= 0.002


@pytest.mark.parametrize(
    ("values", "p20", "p50", "p80"), [([5.0], 5.0, 5.0, 5.0), ([4.0, 2.0], 2.4, 3.0, 3.6), (range(11), 2, 5, 8)]
)
def test_quantiles(values, p20, p50, p80):
    got = bench.quantiles(values)
    assert [got["p20"], got["p50"], got["p80"]] == pytest.approx([p20, p50, p80])
    assert got["num_repeats"] == len(list(values))


def test_a_row_says_what_it_depends_on():
    row = bench.row("decode", "floor", "time", "us", [1.0, 2.0, 3.0], batch=8, note="x")
    assert tuple(row) == bench.COLUMNS
    assert row["p50"] == 2.0 and row["batch"] == 8 and row["gamma"] == ""
    assert row["torch"] == torch.__version__ and row["python"].startswith("3.") and "cores" in row["device"]
    with pytest.raises(ValueError, match=r"expected columns among .* got \['speed'\]"):
        bench.row("decode", "floor", "time", "us", [1.0], speed=3)


def test_rows_are_added_whole(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    first = bench.row("decode", "floor", "time", "us", [1.0])
    bench.append_rows([first], path)
    bench.append_rows([{**first, "note": 'with "quotes", commas'}], path)
    rows = bench.read_rows(path)
    assert [r["note"] for r in rows] == ["", 'with "quotes", commas']
    assert list(path.parent.iterdir()) == [path], "nothing half-written stays"
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["other", "columns"])
    with pytest.raises(ValueError, match="expected the columns"):
        bench.read_rows(path)


def test_compare_decode_takes_each_way_in_turn(smollm2):
    prompts = {"copy-edit": [{"role": "user", "content": "Repeat: one two three, one two three, one two three."}]}
    rows, outputs = bench.compare_decode(smollm2, NGramDrafter(), prompts, max_new_tokens=8, repeat=2)
    assert [r["provider"] for r in rows] == ["transformers", "transformers-prompt-lookup", "flashspec_core"]
    assert all(r["num_repeats"] == 2 and r["p50"] > 0 and r["dtype"] == "float32" for r in rows)
    assert {r["mode"] for r in rows} == {"eager"}
    texts = outputs["copy-edit"]
    assert texts["transformers"] == texts["transformers-prompt-lookup"] == texts["flashspec_core"].token_ids


class _Words:
    def decode(self, ids):
        return " ".join(map(str, ids))


def test_first_divergence_gives_the_place_and_the_targets_margin(llama):
    target = Target(llama.model, _Words())
    prompt = [5, 6, 7]
    assert bench.first_divergence(target, prompt, [1, 2], [1, 2]) is None
    got = bench.first_divergence(target, prompt, [1, 2, 3], [1, 9, 3])
    with torch.inference_mode():
        best = target.model(input_ids=torch.tensor([[5, 6, 7, 1]])).logits[0, -1].topk(2).values
    assert got["position"] == 1 and (got["plain"], got["fast"]) == ("2", "9")
    assert got["margin"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)
