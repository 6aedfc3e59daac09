"""lab/plots.py: figures with words, and the numbers that they are given."""

import numpy as np
import pytest

from flashspec_core.lab import bench, fit, live, plots
from flashspec_core.records import DecodeStep


def test_speed_figure_has_units_ratios_and_the_device():
    cells = dict(model="m", dtype="float32", device="a CPU")
    rows = [
        {**bench.row("decode", provider, "tokens_per_second", "1/s", [speed], domain=domain), **cells}
        for domain in ("chat", "code")
        for provider, speed in (("transformers", 10), ("transformers-prompt-lookup", 15), ("flashspec_core", 25))
    ]
    axes = plots.speed_figure(rows).axes[0]
    assert axes.get_ylabel() == "tokens per second" and "a CPU" in axes.get_title()
    assert [t.get_text() for t in axes.texts] == ["1.00x"] * 2 + ["1.50x"] * 2 + ["2.50x"] * 2
    assert [t.get_text() for t in axes.get_xticklabels()] == ["chat", "code"]


def test_show_wants_a_caption(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **more: shown.append((data, more)))
    figure = plots.Figure()
    with pytest.raises(ValueError, match="at least 20 characters"):
        plots.show(figure, "short")
    plots.show(figure, "A figure with nothing in it.")
    assert shown[0][0]["text/plain"] == shown[0][1]["metadata"]["image/png"]["alt"] == "A figure with nothing in it."


def test_overlap_figure_says_what_is_shared():
    axes = plots.overlap_figure([0.1, 0.6, 0.3], [0.6, 0.3, 0.1]).axes[0]
    assert axes.get_title() == "total variation 0.50"
    heights = [[bar.get_height() for bar in group] for group in axes.containers]
    assert heights[0] == pytest.approx([0.1, 0.3, 0.1])
    assert sum(heights[1]) == pytest.approx(0.5) == sum(heights[2])


def test_verdict_figure_shows_gap_and_limits():
    law = [0.5, 0.3, 0.2]
    ks, chi_square = (fit.judge(name, "", [600, 300, 100], law) for name in ("KS", "chi-square"))
    left, right = plots.verdict_figure(ks, chi_square).axes
    assert left.lines[0].get_ydata() == pytest.approx([0.1, 0.1, 0.0]) and "red" in left.get_title()
    assert sorted(line.get_ydata()[0] for line in left.lines[1:]) == pytest.approx([-ks.limit, ks.limit])
    assert [bar.get_height() for bar in right.patches] == pytest.approx([100 / 500**0.5, 0, -100 / 200**0.5])


def test_gate_matrix_marks_red_gates_and_leaves_out_what_did_not_run():
    axes = plots.gate_matrix({"true": {"KS": False, "joint": False}, "faulty": {"joint": True}}).axes[0]
    marks = {(line.get_xdata()[0], line.get_ydata()[0]): line.get_markerfacecolor() for line in axes.lines}
    assert set(marks) == {(0, 0), (1, 0), (1, 1)} and marks[1, 1] != "none" == marks[0, 0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["true", "faulty"]


def test_power_and_token_figures_draw_what_they_are_given():
    axes = plots.power_figure({"KS": [0.1, 0.9], "joint": [0.5, 1.0]}, [10, 100], 50).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[0.1, 0.9], [0.5, 1.0]]
    left, right = plots.tokens_figure([0.75], [1, 4], {"run": [(4, 3.1, 0.52)]}).axes
    assert left.lines[0].get_ydata() == pytest.approx([1.75, 3.0508], abs=1e-4)  # (1 - a^(g + 1)) / (1 - a)
    assert right.lines[0].get_ydata() == pytest.approx([0.75, 0.5127], abs=1e-4)
    assert list(left.lines[1].get_ydata()) == [3.1] and list(right.lines[2].get_ydata()) == [0.52]


def labels(figure):
    """Every text of a figure."""
    texts = [t.get_text() for axes in figure.axes for t in (*axes.texts, axes.title, *axes.get_xticklabels())]
    legends = [legend for owner in (figure, *figure.axes) for legend in [getattr(owner, "legend_", None)] if legend]
    legends += figure.legends
    return " ".join(texts + [t.get_text() for legend in legends for t in legend.get_texts()])


def test_kernel_figures_show_what_is_stored():
    rows = bench.read_rows(bench.RESULTS / "kernels.csv")
    shown = labels(plots.step_figure(rows))
    for word in ("V = 32,000", "V = 128,256", "vllm-0.32", "flashspec_core", "torch-compiled", "logits once"):
        assert word in shown
    assert "accept and recover" in labels(plots.parts_figure(rows, gamma=8))
    panels = plots.parts_figure(bench.read_rows(bench.RESULTS / "kernels.csv")).axes
    seen = [(axes.get_ylim()[0], y) for axes in panels for line in axes.lines for y in line.get_ydata()]
    assert len(seen) > 27 and all(lowest <= y for lowest, y in seen)  # net times below zero are shown too
    few = plots.skip_figure(np.array([0.5, 2.0, 0.1]), np.array([0.4, 1.5, 0.1]), 1.5)
    assert "cannot win: 2 ids" in labels(few) and "looked at: 1 ids" in labels(few)


def test_regret_figures_name_every_policy_and_ring_the_best():
    curves = {"UCB1": np.cumsum(np.ones((50, 4)), axis=0), "Thompson": np.ones((50, 4))}
    shown = labels(plots.regret_figure(curves, {"proven": 40.0}, change=25))
    assert "UCB1" in shown and "Thompson" in shown and "proven" in shown
    matrix = plots.world_matrix({"UCB1": {"still": 100.0, "swap": 150.0}, "Thompson": {"still": 19.0, "swap": 899.0}})
    ringed = {t.get_text() for t in matrix.axes[0].texts if t.get_bbox_patch()}
    assert ringed == {"19", "150"}
    assert "UCB1" in labels(plots.best_arm_figure({"UCB1": np.ones(500)}, 250))


def test_the_live_panels_twin_draws_its_history():
    monitor = live.AcceptanceMonitor(["n-gram", "off"])
    monitor.add(DecodeStep(0, 0, 0, "n-gram", 4, 4, 2, [1, 2, 3], "", 0.5, 0.1))
    left, middle, right = plots.monitor_figure(monitor).axes
    assert list(left.lines[0].get_ydata()) == [2 / 3]
    assert [bar.get_height() for bar in middle.patches] == [1, 1, 0, 0]
    assert [bar.get_width() for bar in right.patches] == [1, 0]
