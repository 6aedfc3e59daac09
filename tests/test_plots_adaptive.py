"""lab/plots_adaptive.py: the figures show what they were given."""

import pytest

from flashspec_core.lab import plots_adaptive


def test_the_best_arm_of_a_domain_has_an_edge():
    figure = plots_adaptive.arms_figure({"chat": {"off": 1.0, "head": 2.0}, "copy": {"off": 3.0, "head": 2.5}})
    figure.draw_without_rendering()
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [1.0, 3.0, 2.0, 2.5]
    assert [bar.get_linewidth() > 0 for bar in bars] == [False, True, True, False]


def test_what_is_lost_adds_up_from_nothing():
    figure = plots_adaptive.lost_figure({"a": [1.0, 0.5], "b": [0.0, -0.25]}, changes=[1])
    figure.draw_without_rendering()
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["a"] == [0, 1.0, 1.5] and lines["b"] == [0, 0, -0.25]


def test_shares_of_an_answer_add_up_to_one():
    figure = plots_adaptive.choices_figure(["x", "y"], [[0, 0, 1, 1], [1, 1, 1, 1]], changes=[1])
    figure.draw_without_rendering()
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [0.5, 0.0, 0.5, 1.0] and heights[0] + heights[2] == pytest.approx(1)


def test_a_gain_stands_within_its_band():
    one = {"gain_low": 0.05, "gain_high": 0.15}
    figure = plots_adaptive.gains_figure({"a CPU": {"x": one, "y": one}, "a GPU": {"x": one}})
    figure.draw_without_rendering()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a CPU", "a GPU"]
    first = figure.axes[0]
    assert [pytest.approx(list(line.get_xdata())) for line in first.lines[:2]] == [[5, 15], [10]]
    assert [label.get_text() for label in first.get_yticklabels()] == ["y", "x"]
