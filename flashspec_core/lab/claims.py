"""The seed's claims, each judged by one rule: what was measured in each case against what the claim asks for.

A claim without a measurement says so by itself, and is judged as soon as its rows are stored. It measures nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from flashspec_core.lab.bench import RESULTS, read_rows

HOLDS, PARTLY, FAILS = "holds", "holds with a condition", "does not hold"
NOT_HERE, NOT_YET = "not measurable here", "not measured yet"
MARKS = {HOLDS: "●", PARTLY: "◐", FAILS: "○", NOT_HERE: "–", NOT_YET: "–"}
ONE_RUN = ("model", "device", "dtype", "commit")  # a ratio is of two rows that share these
BARE = ("domain", "model", "note", "provider", "dtype")  # columns whose cells need no name


@dataclass(frozen=True)
class Claim:
    """One claim and what was measured of it.

    Args:
        claimed: what the seed says, in few words.
        asks, need: what each case measures, in words that go behind a number; and the number that it must reach.
        cases: {case: measured}; empty: nothing was.
        on: the device, or "computed here".
        at_most: whether the need must not be exceeded, instead of reached.
        proviso: what goes with any verdict, and makes even a full success conditional; "": nothing.
        beside: said beside the measurement and not judged.
        absent: the verdict where nothing was measured.

    >>> Claim("twice as fast", "times PyTorch's speed", 2, {"batch 1": 0.5, "batch 8": 3.0}).verdict
    'holds with a condition'
    """

    claimed: str
    asks: str
    need: float
    cases: dict[str, float] = field(default_factory=dict)
    on: str = ""
    at_most: bool = False
    proviso: str = ""
    beside: str = ""
    absent: str = NOT_YET

    def meets(self, value: float) -> bool:
        """Whether one case is what the claim asks for. Args: value: measured."""
        return value <= self.need if self.at_most else value >= self.need

    @property
    def verdict(self) -> str:
        """Holds where every case meets the need and there is no proviso; does not hold where none meets it."""
        met = [self.meets(value) for value in self.cases.values()]
        if not met:
            return self.absent
        if not any(met):
            return FAILS
        return HOLDS if all(met) and not self.proviso else PARTLY

    @property
    def condition(self) -> str:
        """What a verdict hangs on: the cases that meet the need, or do not, where they differ; and the proviso."""
        good = [case for case, value in self.cases.items() if self.meets(value)]
        bad = [case for case in self.cases if case not in good]
        word, few = min(("only", good), ("not", bad), key=lambda each: len(each[1]))
        named = f"{word}: {'; '.join(few)}" if len(few) <= 3 else f"in {len(good)} of {len(self.cases)} cases"
        return "; ".join(filter(None, [named if good and bad else "", self.proviso if self.cases else ""]))

    def margin(self, value: float) -> float:
        """Measured over needed, or needed over measured where less is asked: 1 or more meets. Args: value: measured."""
        above, below = (self.need, value) if self.at_most else (value, self.need)
        return above / below if below else math.inf


def stored(name: str, folder=RESULTS) -> list[dict]:
    """The rows of a CSV; none where it is not there yet. Args: name: without ".csv"; folder: that holds it."""
    path = Path(folder) / f"{name}.csv"
    return read_rows(path) if path.exists() else []


def where(rows) -> str:
    """The devices of rows, each with its dtype. Args: rows: of a CSV."""
    return "; ".join(dict.fromkeys(", ".join(filter(None, (row["device"], row["dtype"]))) for row in rows))


def values(rows, by) -> dict[str, float]:
    """The medians of rows, named by what tells them apart; of equals the first counts, as in bench.median.

    Args: rows: of a CSV; by: columns.

    >>> values([{"domain": "code", "batch": "8", "p50": "2.5"}], ("domain", "batch"))
    {'code, batch 8': 2.5}
    >>> values([{"temperature": "0.7", "dtype": "float32", "p50": "2.5"}], ("temperature", "dtype"))
    {'temperature 0.7, float32': 2.5}
    """
    return {_name(row, by): float(row["p50"]) for row in reversed(rows)}


def ratios(above, below, by) -> dict[str, float]:
    """Medians of some rows over those of others, each pair of one run.

    Args: above, below: rows; by: columns in which the rows of a pair agree.
    Returns: {case: ratio}; what one side lacks is left out.
    """
    base = {tuple(row[c] for c in (*ONE_RUN, *by)): float(row["p50"]) for row in reversed(below)}
    pairs = [(row, base.get(tuple(row[c] for c in (*ONE_RUN, *by)))) for row in reversed(above)]
    return {_name(row, by): float(row["p50"]) / other for row, other in pairs if other}


def _name(row, by) -> str:
    return ", ".join(row[c] if c in BARE else f"{c} {row[c]}" for c in by if row[c])


def number(value: float) -> str:
    """Three digits, or all of a large number. Args: value.

    >>> number(0.9768), number(100.16), number(9216000)
    ('0.977', '100.2', '9,216,000')
    """
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(claims) -> str:
    """A line a claim, as Markdown: claimed, asked for, measured, on what, verdict. Args: claims: Claims."""
    lines = ["| claimed | judged by | measured | on | verdict |", "|:--|:--|:--|:--|:--|"]
    for c in claims:
        asked = f"{'at most' if c.at_most else 'at least'} {number(c.need)} {c.asks}"
        told = "; ".join(f"{case}: {number(value)}" for case, value in c.cases.items())
        if len(c.cases) > 4:
            told = f"{number(min(c.cases.values()))} to {number(max(c.cases.values()))} in {len(c.cases)} cases"
        told = "; ".join(filter(None, [told, c.beside])) or "–"
        verdict = f"{MARKS[c.verdict]} **{c.verdict}**" + (f" ({c.condition})" if c.condition else "")
        lines.append(f"| {c.claimed} | {asked} | {told} | {c.on or '–'} | {verdict} |")
    return "\n".join(lines)
