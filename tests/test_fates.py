"""lab/fates.py: readable without colour, pieces that add up, numbers on hover."""

import re

import pytest

import flashspec_core as fs
from flashspec_core.lab import fates


@pytest.fixture(scope="module")
def copied(smollm2):
    prompt = smollm2.tokenizer("1 2 3 4 5 <b> é 1 2 3 4 5 <b> é 1 2 3").input_ids
    return fs.generate(smollm2, fs.Arm(fs.NGramDrafter(), 4), prompt, max_new_tokens=24)


def test_pieces_concatenate_to_the_text_and_carry_each_tokens_fate(copied, smollm2):
    pieces = fates.token_pieces(copied.steps, smollm2.tokenizer)
    assert "".join(piece for piece, _, _ in pieces) == copied.text
    assert [fate for _, fate, _ in pieces] == [fate for step in copied.steps for fate in step.fates]
    assert "accepted" in {fate for _, fate, _ in pieces}


def test_html_is_escaped_and_marks_what_colour_says(copied, smollm2):
    page = fates.fate_html(copied.steps, smollm2.tokenizer, "a <title>")
    assert "<b>a &lt;title&gt;</b>" in page and "<b>é" not in page
    for fate in {fate for step in copied.steps for fate in step.fates} - {"accepted"}:
        assert fates.FATES[fate][1] in page and fates.FATES[fate][2] in page
    shown = re.sub(r"<sup.*?</sup>|<[^>]+>", "", page.split("<pre")[1].split(">", 1)[1].split("</pre>")[0])
    assert shown.replace("\u21b5", "").replace("&lt;", "<").replace("&gt;", ">") == copied.text


def test_marks_differ_without_colour():
    marks = [(bool(colour), mark) for colour, mark, _ in fates.FATES.values()]  # underlined or not, and the sign
    assert len(set(marks)) == len(marks)


def test_hovering_shows_the_numbers_of_a_traced_token(smollm2):
    prompt = smollm2.tokenizer("1 2 3 4 5 6 1 2 3 4").input_ids
    out = fs.generate(smollm2, fs.Arm(fs.NGramDrafter(), 3), prompt, max_new_tokens=6, trace=True)
    pieces = fates.token_pieces(out.steps, None)
    numbers = [n for _, fate, n in pieces if fate == "accepted"]
    assert numbers and all(re.fullmatch(r" \(p [01]\.\d{3}, q [01]\.\d{3}, u [01]\.\d{3}\)", n) for n in numbers)
    assert [piece for piece, _, _ in pieces] == [f"{token_id} " for token_id in out.token_ids]
    assert fates.fate_html(out.steps, None).count(numbers[0]) >= 1
