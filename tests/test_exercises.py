"""lab/exercises.py: right and wrong answers, and the notebooks ask for what exists."""

import re
from pathlib import Path

import pytest

from flashspec_core.lab import exercises

ANSWERS = {
    "00-a": (3.05, "3.0513", 4, "four"),
    "00-b": ("N-gram ", "n-gram", "early exit", 3),
    "01-a": (0.5, "0.5", 1.0, "half"),
    "01-b": (3 / 4, "0.75", 0.6, "a"),
    "01-c": ("joint", " Joint", "KS", 2),
    "02-a": (4096, "4096", 512, "many"),
    "02-b": (1.8, 9 / 5, 2.0, "half"),
    "02-c": ("look", " Look", "yes", 2),
    "03-a": (3, "3", 4, "all"),
    "03-b": ("speed", " Speed", "text", 1),
    "03-c": ("stand", "stand ", "fall", 0),
    "04-a": (1.207, "1.2070", 0.6, "wide"),
    "04-b": ("UCB1", " ucb1", "Thompson", 1),
    "04-c": ("asymptotic", "Asymptotic ", "violated", 2),
    "05-a": (2.05, 2.0543, 2.67, "2.05 times"),
    "05-b": ("nothing", "Nothing ", "that id", 0),
    "05-c": ("law that it was drawn from", "Law that it was drawn from", "greedy", 3),
    "06-a": (138, 138.1, 44.2, "138 tokens"),
    "06-b": (0.38, 0.3799, 0.25, [0.38]),
    "07-a": (0.78, 0.7778, 0.8, "most"),
    "07-b": ("draft", " Draft", "last token", 2),
    "08-a": (0.8, 0.7953, 1.26, "A"),
    "08-b": (0.65, "0.6504", 0.01626, "never"),
}


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_right_and_wrong_answers(name):
    right, also_right, wrong, of_another_kind = ANSWERS[name]
    assert exercises.check(name, None) == f"Exercise {name}: not tried yet."
    for answer in (right, also_right):
        assert exercises.check(name, answer).startswith(f"Exercise {name}: right.")
    for answer in (wrong, of_another_kind, float("nan"), []):
        assert "Hint:" in exercises.check(name, answer)
    assert str(exercises.EXERCISES[name].solution) not in exercises.EXERCISES[name].hint


def test_an_unknown_exercise_is_named():
    with pytest.raises(KeyError, match="expected one of"):
        exercises.check("99-z", 1)


def test_notebooks_and_checks_agree():
    texts = [p.read_text(encoding="utf-8") for p in Path(__file__).parents[1].glob("notebooks/*.ipynb")]
    asked = set(re.findall(r'exercises\.check\(\\"([^"\\]+)\\"', "".join(texts)))
    assert asked == set(exercises.EXERCISES)
