"""engine/rows.py: what a row keeps of a step's ids, and why it ends."""

import pytest

import flashspec_core as fs
from flashspec_core.engine.rows import Row
from flashspec_core.engine.text import TextStream


def row(end=9, wanted=4):
    return Row(0, [1, 2, 3], 3, fs.Sampling(), 5, end, wanted, TextStream(None))


@pytest.mark.parametrize(
    ("end", "wanted", "emitted", "kept", "reason"),
    [
        (9, 6, [7, 8, -1], [7, 8], None),
        (9, 6, [7, 4, 8], [7, 4], "eos"),
        (5, 2, [7, 8, 9], [7, 8], "length"),
        (5, 6, [7, 8, 9], [7, 8], "context"),
        (4, 1, [4, 8], [4], "eos"),  # the last id that was asked for, and an end
    ],
)
def test_ids_are_kept_up_to_the_end(end, wanted, emitted, kept, reason):
    one = row(end, wanted)
    assert one.commit(emitted, {4}) == kept and one.finish_reason == reason
    out = one.generation("eager")
    assert out.token_ids == kept and out.prompt_token_ids == [1, 2, 3] and out.seed == 5
    assert out.finish_reason == (reason or "cancelled") and out.mode == "eager"


def test_a_row_that_has_ended_takes_no_more():
    one = row(4, 1)
    one.commit([7], set())
    assert one.commit([8], set()) == [] and one.ids == [1, 2, 3, 7]
