"""lab/plots_heads.py: figures say what the numbers say."""

import pytest

from flashspec_core.engine.heads import HeadConfig
from flashspec_core.lab import plots_heads


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_wiring_names_the_widths():
    config = HeadConfig("eagle", 576, 49_152, 30, (10, 20, 30), num_heads=9, num_kv_heads=3, intermediate_size=1152)
    shown = " ".join(words(plots_heads.wiring_figure(config, 8192)))
    assert all(
        part in shown for part in ("10, 20, 30", "1728 to 576", "1152 to 576", "9 heads, 3 of keys", "8,192 ids")
    )


def test_learning_draws_each_depth_of_each_head():
    curve = [{"tokens": n, "acceptance_rate": [0.1 * n, 0.05 * n]} for n in (1, 2, 3)]
    figure = plots_heads.learning_figure({"a": curve, "b": curve})
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    for axes in figure.axes:
        assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([0.3, 0.15])


def test_drafters_are_drawn_as_ratios_to_plain():
    def row(provider, note, domain, temperature, speed):
        cells = dict(provider=provider, note=note, domain=domain, temperature=temperature, metric="tokens_per_second")
        return {**cells, "p50": speed}

    rows = [row("transformers", "", "chat", t, 10.0 + t) for t in (0.0, 1.0)]
    rows += [row("flashspec_core", "n-gram", "chat", t, 20.0) for t in (0.0, 1.0)]
    rows += [row("transformers-prompt-lookup", "", "chat", t, 5.0) for t in (0.0, 1.0)]
    (axes,) = plots_heads.drafters_figure(rows).axes
    points = [line.get_xdata()[0] for line in axes.lines[:4]]
    assert points == pytest.approx([2.0, 20 / 11, 0.5, 5 / 11])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["n-gram", "transformers-prompt-lookup"]
