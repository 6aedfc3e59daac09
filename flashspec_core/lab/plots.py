"""Every figure and coloured text; the only file that imports matplotlib and seaborn.

Colours are seaborn's colour-blind palette, and nothing is told by colour alone. It measures nothing.
"""

from __future__ import annotations

import base64
import html
import io

import matplotlib

matplotlib.use("agg", force=False)
import seaborn as sns  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from flashspec_core.engine.text import TextStream  # noqa: E402

PALETTE = sns.color_palette("colorblind").as_hex()
FATES = {  # colour, mark in front of the token, and words for the legend; plain text stays bare, all others underlined
    "accepted": (PALETTE[2], "", "accepted: drafted, and the target agreed"),
    "recovered": (PALETTE[1], "\u25be", "recovered: the target's own token where a draft fell"),
    "bonus": (PALETTE[0], "+", "bonus: one more from the target where all drafts stood"),
    "plain": ("", "", "plain: nothing was drafted"),
}


def style():
    """The one style of all figures, as a context manager."""
    return sns.axes_style("whitegrid", {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10})


def token_pieces(generation, tokenizer) -> list[tuple[str, str]]:
    """What each token added to the text, and its fate.

    Args:
        generation: a Generation.
        tokenizer: that made its ids.

    Returns:
        (piece, fate) a token; the pieces concatenate to the text.
    """
    stream = TextStream(tokenizer)
    pieces = []
    for step in generation.steps:
        for token_id, fate in zip(step.token_ids, step.fates, strict=True):
            stream.push(token_id)
            pieces.append((stream.piece(), fate))
    return pieces


def fate_html(generation, tokenizer, title: str = "") -> str:
    """The text, each token coloured and marked by its fate: readable without colour.

    Args:
        generation: a Generation.
        tokenizer: that made its ids.
        title: a line above.

    Returns:
        HTML that needs no script.
    """
    spans = []
    for piece, fate in token_pieces(generation, tokenizer):
        colour, mark, words = FATES[fate]
        sup = f"<sup aria-hidden='true'>{mark}</sup>" if mark else ""
        weight = "normal" if fate in ("accepted", "plain") else "bold"
        shown = html.escape(piece).replace("\n", "\u21b5\n")
        line = f"background:{colour}22;border-bottom:2px solid {colour};" if colour else ""
        spans.append(f"<span title='{words}' style='{line}font-weight:{weight}'>{sup}{shown}</span>")
    used = [f for f in FATES if any(f == fate for _, fate in token_pieces(generation, tokenizer))]
    legend = " &nbsp; ".join(
        f"<span style='border-bottom:2px solid {FATES[f][0] or 'transparent'}'>{FATES[f][1]} {FATES[f][2]}</span>"
        for f in used
    )
    return (
        f"<div class='flashspec-fates'><b>{html.escape(title)}</b>"
        f"<pre style='white-space:pre-wrap;line-height:1.7'>{''.join(spans)}</pre><small>{legend}</small></div>"
    )


def speed_figure(rows) -> Figure:
    """Tokens per second of each provider, a group of bars a domain, with the ratio to plain decoding above.

    Args:
        rows: from `bench.compare_decode`.

    Returns:
        A matplotlib Figure.
    """
    speed = {(r["domain"], r["provider"]): float(r["p50"]) for r in rows if r["metric"] == "tokens_per_second"}
    domains, providers = (list(dict.fromkeys(key[i] for key in speed)) for i in (0, 1))
    labels = {"transformers": "transformers, plain", "transformers-prompt-lookup": "transformers, prompt lookup"}
    with style():
        figure = Figure(figsize=(7.5, 3.4), layout="constrained")
        axes = figure.subplots()
        for i, provider in enumerate(providers):
            xs = [x + (i - 1) * 0.27 for x in range(len(domains))]
            heights = [speed[d, provider] for d in domains]
            hatch = ("", "//", "")[i % 3]
            color = ("#b0b0b0", PALETTE[1], PALETTE[0])[i % 3]
            axes.bar(xs, heights, 0.25, label=labels.get(provider, provider), color=color, hatch=hatch, edgecolor="w")
            for x, domain, height in zip(xs, domains, heights, strict=True):
                ratio = height / speed[domain, providers[0]]
                axes.annotate(f"{ratio:.2f}x", (x, height), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(domains)), domains)
        axes.set_ylabel("tokens per second")
        axes.set_title(f"{rows[0]['model']}, {rows[0]['dtype']}, greedy, {rows[0]['device']}", fontsize=9)
        axes.grid(axis="x", visible=False)
        axes.legend(frameon=False, fontsize=8)
        axes.set_ylim(0, max(speed.values()) * 1.15)
    return figure


def show(figure: Figure, caption: str) -> None:
    """Display a figure as PNG with a caption that is also its alternative text.

    Args:
        figure: a matplotlib Figure.
        caption: what it shows, at least 20 characters.

    Raises:
        ValueError: a shorter caption.
    """
    from IPython.display import display

    if len(caption) < 20:
        raise ValueError(f"expected a caption of at least 20 characters, got {caption!r}")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100, metadata={"Software": None})
    data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": caption}
    display(data, raw=True, metadata={"image/png": {"alt": caption}})
