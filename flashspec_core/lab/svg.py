"""Pieces of the pictures that widgets show: bars, words, and the colour-blind palette that plots.py uses too.

Plain text, no script: a frame costs well under a millisecond. Whole pictures stand with what they show.
"""

from __future__ import annotations

import html

COLORS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#949494")  # seaborn's "colorblind", as hex


def bar(x: float, base: float, width: float, height: float, colour: str) -> str:
    """A rectangle that stands on `base`. Args: x, base, width, height, colour: pixels, and a CSS colour."""
    return f"<rect x='{x:.1f}' y='{base - height:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'/>"


def words(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    """A line of text, escaped. Args: x, y, text, anchor, size: pixels; start, middle or end."""
    place = f"x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'"
    return f"<text {place} fill='currentColor'>{html.escape(text)}</text>"
