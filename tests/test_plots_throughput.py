"""lab/plots_throughput.py: the figures show what was measured."""

import pytest
from conftest import make_target, random_ids

import flashspec_core as fs
from flashspec_core.lab import plots_throughput, throughput


@pytest.fixture(scope="module")
def found():
    target = make_target()
    drafters = {"n-gram": fs.NGramDrafter(), "model": fs.ModelDrafter(target)}
    return throughput.measure(target, drafters, {"a": [random_ids(7) * 3]}, 3, 0.0, 12, repeat=1)


def test_a_timeline_has_every_step_of_every_way(found):
    figure = plots_throughput.timeline_figure(found, num_steps=2)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["off", "n-gram", "model"]
    steps = [step for one in found for step in one.outs[0].steps[1:3]]
    told = [text.get_text() for text in axes.texts]
    assert told == [f"+{len(step.token_ids)}" for step in steps]
    bars = [p.get_width() for p in axes.patches[: 3 * len(steps)]]
    assert sum(bars) == pytest.approx(1e3 * sum(step.step_seconds for step in steps))


def test_a_point_stands_at_its_drafters_rate(found):
    costs = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}
    figure = plots_throughput.break_even_figure(costs, found[2:])
    figure.draw_without_rendering()
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == [1.0, 1.1, 1.2, 1.3]
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in right.lines if len(line.get_xdata()) == 1]
    assert points == [(3, 1.0)]  # the target drafts for itself: all stands
