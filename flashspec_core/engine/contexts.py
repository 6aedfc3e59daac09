"""What a policy may know of a text when it chooses: looked up in committed tokens only, so that the text keeps its law.

Each is a function of the rows that gives a short, hashable answer, for `generate(context=...)` and policies.Contextual.
It leaves out the policies.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashspec_core.engine.drafters import DraftContext, NGramDrafter


@dataclass
class Committed:
    """One row as a context sees it.

    Args:
        token_ids: prompt and new ids.
        text: the new text so far.
        steps: its DecodeSteps so far.
    """

    token_ids: list[int]
    text: str
    steps: list


class InCode:
    """Whether the text stands inside a fenced code block: True if most rows do.

    >>> InCode()([Committed([], "Try this:\\n```python\\nx = 1", [])])
    True
    """

    def __call__(self, rows: list[Committed]) -> bool:
        """Look. Args: rows: one Committed a row."""
        return 2 * sum(row.text.count("```") % 2 for row in rows) > len(rows)


class Repeats:
    """Whether the last ids stood before, so that looking them up will find something: True if for most rows.

    Args: num_ids: how many; fewer match by chance.
    """

    def __init__(self, num_ids: int = 3):
        self.finder = NGramDrafter(num_ids, num_ids, 1)

    def __call__(self, rows: list[Committed]) -> bool:
        """Look. Args: rows: one Committed a row."""
        context = DraftContext([row.token_ids for row in rows], list(range(len(rows))), 0)
        found = self.finder.draft(context, 1, None, None).token_ids
        return 2 * int((found >= 0).sum()) > len(rows)


class RecentAcceptance:
    """How well the last drafts stood: the accepted share of them in a few grades, None before there were any.

    Args: num_steps: of each row, how many are looked at; grades: into how many parts [0, 1] is cut.
    """

    def __init__(self, num_steps: int = 8, grades: int = 3):
        self.num_steps, self.grades = num_steps, grades

    def __call__(self, rows: list[Committed]) -> int | None:
        """Look. Args: rows: one Committed a row."""
        steps = [step for row in rows for step in row.steps[-self.num_steps :]]
        drafted = sum(step.num_draft_tokens for step in steps)
        if not drafted:
            return None
        share = sum(step.num_accepted for step in steps) / drafted
        return min(self.grades - 1, int(share * self.grades))


class Together:
    """Several contexts as one.

    Args: contexts: functions of the rows.
    """

    def __init__(self, *contexts):
        self.contexts = contexts

    def __call__(self, rows: list[Committed]) -> tuple:
        """Ask each. Args: rows: one Committed a row."""
        return tuple(context(rows) for context in self.contexts)
