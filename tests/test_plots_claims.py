"""lab/plots_claims.py: the figures say what the claims and rows say."""

import pytest

from flashspec_core.lab import plots_claims
from flashspec_core.lab.claims import Claim


def test_each_case_stands_at_its_margin_and_each_claim_has_its_verdict():
    parts = {"one": [Claim("twice", "", 2, {"a": 3.0, "b": 1.0, "c": 900.0})], "two": [Claim("later", "", 1)]}
    figure = plots_claims.margins_figure(parts)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    points = [(line.get_xdata()[0], line.get_marker()) for line in axes.lines if len(line.get_xdata()) == 1]
    assert points == [(pytest.approx(1.5), "o"), (0.5, "X"), (plots_claims.FARTHEST, "o")]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "twice", "two", "later"]
    assert [text.get_text() for text in axes.texts] == ["◐ holds with a condition", "– not measured yet"]


@pytest.mark.parametrize("points", [{}, {"a model": [(2.0, 1000.0, 2.5), (1.0, 900.0, 1.0)]}])
def test_filled_marks_are_speed_times_step_and_hollow_ones_tokens_a_step(points):
    reported = {"tokens_per_second": 50.0, "acceptance_rate": 0.5, "step_p50": 20.0}
    figure = plots_claims.reported_figure(reported, points, 2)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
    hollow = [mark.get_ydata()[0] for mark in marks if mark.get_markerfacecolor() == "white"]
    filled = [mark.get_ydata()[0] for mark in marks if mark.get_markerfacecolor() != "white"]
    assert filled == pytest.approx([x * 1e-3 * y for each in points.values() for x, y, _ in each] + [1.0])
    assert hollow == pytest.approx([tokens for each in points.values() for _, _, tokens in each] + [1.75])
    assert "1.75: a rate of 0.5" in [text.get_text() for text in axes.texts]
