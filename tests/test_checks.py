"""engine/checks.py: seeds, arms and tokenizers (what generate says of them is in test_decode.py)."""

import pytest

import flashspec_core as fs
from flashspec_core.engine.checks import as_arms, check_same_tokenizer, row_seeds


@pytest.mark.parametrize(
    ("seed", "batch", "wanted"), [(0, 1, [0]), (7, 3, [7, 8, 9]), ([5, 5], 2, [5, 5]), ((0, -1), 2, [0, -1])]
)
def test_row_seeds(seed, batch, wanted):
    assert row_seeds(seed, batch) == wanted


def test_none_draws_a_seed_a_row():
    drawn = row_seeds(None, 2) + row_seeds([None, 3], 2)
    assert drawn[3] == 3 and len(set(drawn)) == 4 and all(0 <= s < 2**63 for s in drawn)


@pytest.mark.parametrize(
    ("seed", "message"), [([1], "one a row .2., got 1"), ([1, 2, 3], "got 3"), (2**63, "64-bit"), ([1.5, 2], "whole")]
)
def test_bad_seeds(seed, message):
    with pytest.raises(ValueError, match=message):
        row_seeds(seed, 2)


def test_arms_get_gammas():
    drafter = fs.NGramDrafter()
    arms = as_arms([drafter, fs.Arm(drafter, 2), fs.Arm(None)], 5)
    assert [(a.name, a.gamma) for a in arms] == [("n-gram", 5), ("n-gram", 2), ("off", 5)]
    assert as_arms(drafter, 3) == [fs.Arm(drafter, 3)]


class Words:
    def __init__(self, words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def test_another_tokenizer_is_refused_with_the_first_difference():
    target = fs.Target(None, Words(["a", "b", "c"]))
    drafter = fs.NGramDrafter()
    drafter.tokenizer = Words(["a", "b", "c"])
    assert check_same_tokenizer(target, drafter) is None
    drafter.tokenizer = Words(["a", "c", "b"])
    with pytest.raises(ValueError, match="'n-gram' has another tokenizer: 'b' is id 1 in the target's and 2 in the"):
        check_same_tokenizer(target, drafter)
