"""Checks for the notebooks' exercises; a hint where an answer is wrong, and no solutions in the notebooks.

An exercise is a rule that an answer must fulfil. The exercises' texts stand in the notebooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Exercise:
    """What is right, and what helps.

    Args:
        solution: the answer; numbers are compared to 1 %.
        hint: shown for a wrong answer.
        why: shown for a right one.
    """

    solution: Any
    hint: str
    why: str


EXERCISES = {
    "00-a": Exercise(
        3.05,
        "Add up the chances that 0, 1, 2, ... drafted tokens stand: 1 + a + a^2 + a^3 + a^4 with a = 0.75.",
        "(1 - a^5) / (1 - a) = 3.05: a pass emits one token more than it accepts.",
    ),
    "00-b": Exercise(
        "n-gram",
        "Which drafter costs no model pass at all, and where does its text already stand?",
        "Copied text stands in the prompt, so looking it up is free and nearly always right.",
    ),
    "01-a": Exercise(
        0.5,
        "At each id the smaller of the two probabilities is what both laws share; add these up.",
        ".1 + .3 + .1: what both laws share is accepted, and that is 1 - TV.",
    ),
    "01-b": Exercise(
        0.75,
        "Id 0 is drafted always, stands with chance p/q = .6/.8, and the residual (p - q)+ holds nothing of it.",
        "Id 0 comes out .75 of the time instead of .6: what is drawn by argmax must be verified as certain, q = 1.",
    ),
    "01-c": Exercise(
        "joint",
        "Each token by itself has the right law; what the shared number ties together are neighbours.",
        "Only the joint law of several tokens can show that two of them share their chance.",
    ),
    "02-a": Exercise(
        4096,
        "A drafted token needs an int32 id, two float32 log-probabilities and a log-uniform; there are B times gamma.",
        "32 x 8 x 16 bytes: it does not know V.",
    ),
    "02-b": Exercise(
        1.8,
        "Without it, gamma + 1 target rows and gamma draft rows are read; with it, the target's alone.",
        "(2 gamma + 1) / (gamma + 1) = 9 / 5: the drafter summed its row when it drew from it.",
    ),
    "02-c": Exercise(
        "look",
        "Compare p / u, the bound, with the best score: a bound can rule an id out, but never make it the winner.",
        "Its bound is 10, above 2, so it may win; its E is at least u, and only E itself decides.",
    ),
    "03-a": Exercise(
        3,
        "Tests go from left to right and end at the first token that falls; that one was tested too.",
        "Two stood and the third fell: the fourth was never looked at.",
    ),
    "03-b": Exercise(
        "speed",
        "What does the target's argmax depend on: on the words so far, or on who proposed the next one?",
        "The target decides every token; drafters decide only how many it settles in a pass.",
    ),
    "03-c": Exercise(
        "stand",
        "Compare u with p / q.",
        "p / q = .8, and .75 lies below it.",
    ),
    "04-a": Exercise(
        1.207,
        "The mean plus sqrt(2 ln t / n), with t = 100 rounds and n = 25 pulls; ln is the natural logarithm.",
        ".6 + sqrt(2 x 4.605 / 25): a quarter of the rounds still leaves a wide bound.",
    ),
    "04-b": Exercise(
        "UCB1",
        "Whose belief has become so narrow that it hardly ever tries what it thinks is worse?",
        "UCB1's bound grows with ln t for arms that are not played, so it comes back to them.",
    ),
    "04-c": Exercise(
        "asymptotic",
        "Does the theorem speak of a finite run, or of the limit of many rounds?",
        "It gives the rate as T goes to infinity; a finite run may lie below rate times ln T.",
    ),
    "05-a": Exercise(
        2.05,
        "Tokens a step over its cost in plain passes: (1 - a^5) / (1 - a) over 1.1 + 4 x 0.05.",
        "2.67 tokens for 1.3 passes.",
    ),
    "05-b": Exercise(
        "nothing",
        "Where q is zero the head drafts no such id; who draws the token behind the accepted ones?",
        "The residual and the bonus are the target's: what the head cannot say, the target says itself.",
    ),
    "05-c": Exercise(
        "law that it was drawn from",
        "What must the q in min(1, p / q) be?",
        "q may ignore the tokens before it, p may not; exactness asks only that the token was drawn from that q.",
    ),
    "06-a": Exercise(
        138,
        "First the tokens a step: 1 + a + a^2 + a^3 + a^4 with a = 0.75; then how many steps fit into a second.",
        "3.05 tokens every 22.1 ms: three times what was reported beside these two figures.",
    ),
    "06-b": Exercise(
        0.38,
        "A step costs 1.2 + 4 x 0.1 plain passes; find a so that 1 + a + a^2 + a^3 + a^4 is as much.",
        "1 + .38 + .144 + .055 + .021 = 1.6: below it the step costs more than it emits.",
    ),
    "07-a": Exercise(
        0.78,
        "Speeds are one over seconds: compare 20 / 18 - 1 with 20 / 17.5 - 1.",
        ".111 of .143: what is won in speed, over what could have been.",
    ),
    "07-b": Exercise(
        "draft",
        "Which of them is random given the committed text, and would tie the arm to what it has drawn?",
        "An arm chosen by its own draw would no longer be drawn from q; text and past steps are fixed by then.",
    ),
    "08-a": Exercise(
        0.795,
        "Each drafter's speed is its tokens a step, 1 + a + a^2 + a^3 + a^4, over the passes that its step costs.",
        "3.36 tokens for 2.2 passes against 2.31 for 1.2: what is accepted more often may still be slower.",
    ),
    "08-b": Exercise(
        0.65,
        "Neighbours cancel, so no sum runs further than one id's deviation: that is 2 TV / 80.",
        ".01626 x 40; with the gaining ids in front, a fortieth of that would reach the limit.",
    ),
}


def check(name: str, answer) -> str:
    """Say whether an answer is right.

    Args:
        name: of the exercise, as the notebook gives it.
        answer: the reader's; None: not tried yet.

    Returns:
        A sentence to show.

    Raises:
        KeyError: no such exercise.

    >>> check("00-a", None)
    'Exercise 00-a: not tried yet.'
    """
    if name not in EXERCISES:
        raise KeyError(f"expected one of {sorted(EXERCISES)}, got {name!r}")
    exercise = EXERCISES[name]
    if answer is None:
        return f"Exercise {name}: not tried yet."
    if is_right(answer, exercise.solution):
        return f"Exercise {name}: right. {exercise.why}"
    return f"Exercise {name}: not yet. Hint: {exercise.hint}"


def is_right(answer, solution) -> bool:
    """Numbers to 1 %, words without regard to case.

    Args:
        answer, solution: of the same kind.
    """
    if isinstance(solution, str):
        return isinstance(answer, str) and answer.strip().lower() == solution.lower()
    try:
        return math.isclose(float(answer), solution, rel_tol=0.01)
    except (TypeError, ValueError):
        return False
