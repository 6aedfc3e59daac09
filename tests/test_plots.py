"""lab/plots.py: fates readable without colour, pieces that add up, figures with words."""

import re

import pytest

import flashspec_core as fs
from flashspec_core.lab import bench, plots


@pytest.fixture(scope="module")
def copied(smollm2):
    prompt = smollm2.tokenizer("1 2 3 4 5 <b> é 1 2 3 4 5 <b> é 1 2 3").input_ids
    return fs.generate(smollm2, fs.Arm(fs.NGramDrafter(), 4), prompt, max_new_tokens=24)


def test_pieces_concatenate_to_the_text_and_carry_each_tokens_fate(copied, smollm2):
    pieces = plots.token_pieces(copied, smollm2.tokenizer)
    assert "".join(piece for piece, _ in pieces) == copied.text
    assert [fate for _, fate in pieces] == [fate for step in copied.steps for fate in step.fates]
    assert "accepted" in {fate for _, fate in pieces}


def test_html_is_escaped_and_marks_what_colour_says(copied, smollm2):
    page = plots.fate_html(copied, smollm2.tokenizer, "a <title>")
    assert "<b>a &lt;title&gt;</b>" in page and "<b>é" not in page
    for fate in {fate for step in copied.steps for fate in step.fates} - {"accepted"}:
        assert plots.FATES[fate][1] in page and plots.FATES[fate][2] in page
    shown = re.sub(r"<sup.*?</sup>|<[^>]+>", "", page.split("<pre")[1].split(">", 1)[1].split("</pre>")[0])
    assert shown.replace("\u21b5", "").replace("&lt;", "<").replace("&gt;", ">") == copied.text


def test_marks_differ_without_colour():
    marks = [(bool(colour), mark) for colour, mark, _ in plots.FATES.values()]  # underlined or not, and the sign
    assert len(set(marks)) == len(marks)


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
