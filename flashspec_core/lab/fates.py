"""A decoded text as HTML, each token marked by its fate: coloured, and readable without colour.

No script and no widget is needed to show it. Figures stand in plots.py.
"""

from __future__ import annotations

import html
import math

from flashspec_core.engine.text import TextStream
from flashspec_core.lab.svg import COLORS

FATES = {  # colour, mark in front of the token, and words; plain text stays bare, all others are underlined
    "accepted": (COLORS[2], "", "accepted: drafted, and the target agreed"),
    "recovered": (COLORS[1], "\u25be", "recovered: the target's own token where a draft fell"),
    "bonus": (COLORS[0], "+", "bonus: one more from the target where all drafts stood"),
    "plain": ("", "", "plain: nothing was drafted"),
}


def token_pieces(steps, tokenizer) -> list[tuple[str, str, str]]:
    """What each token added to the text, its fate, and its numbers where a trace was kept.

    Args:
        steps: DecodeSteps of one row, in order.
        tokenizer: that made its ids; None: the ids themselves are shown.
    Returns: (piece, fate, numbers) a token; the pieces concatenate to the text.
    """
    stream, pieces = TextStream(tokenizer), []
    for step in steps:
        for i, (token_id, fate) in enumerate(zip(step.token_ids, step.fates, strict=True)):
            stream.push(token_id)
            numbers = ""
            if fate == "accepted" and step.target_logprobs:
                p, q, u = (math.exp(v[i]) for v in (step.target_logprobs, step.draft_logprobs, step.log_uniforms))
                numbers = f" (p {p:.3f}, q {q:.3f}, u {u:.3f})"
            pieces.append((stream.piece() if tokenizer is not None else f"{token_id} ", fate, numbers))
    return pieces


def fate_html(steps, tokenizer, title: str = "") -> str:
    """The text, each token coloured and marked by its fate; hovering shows what happened.

    Args:
        steps: DecodeSteps of one row, in order.
        tokenizer: that made its ids, or None.
        title: a line above.
    Returns: HTML that needs no script; `data-n` is the number of tokens.
    """
    spans, pieces = [], token_pieces(steps, tokenizer)
    for piece, fate, numbers in pieces:
        colour, mark, words = FATES[fate]
        sup = f"<sup aria-hidden='true'>{mark}</sup>" if mark else ""
        weight = "normal" if fate in ("accepted", "plain") else "bold"
        shown = html.escape(piece).replace("\n", "\u21b5\n")
        line = f"background:{colour}22;border-bottom:2px solid {colour};" if colour else ""
        spans.append(
            f"<span class='fs-{fate}' title='{html.escape(words + numbers, quote=True)}' "
            f"style='{line}font-weight:{weight}'>{sup}{shown}</span>"
        )
    used = [f for f in FATES if any(f == fate for _, fate, _ in pieces)]
    legend = " &nbsp; ".join(
        f"<span style='border-bottom:2px solid {FATES[f][0] or 'transparent'}'>{FATES[f][1]} {FATES[f][2]}</span>"
        for f in used
    )
    return (
        f"<div class='flashspec-fates' data-n='{len(pieces)}'><b>{html.escape(title)}</b>"
        f"<pre style='white-space:pre-wrap;line-height:1.7'>{''.join(spans)}</pre><small>{legend}</small></div>"
    )
