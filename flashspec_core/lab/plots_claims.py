"""Figures of the seed's claims: how far each is from what it asks, and reported speeds beside measured ones.

They take style and canvas from plots.py. It measures nothing.
"""

from __future__ import annotations

import numpy as np

from flashspec_core.lab.claims import MARKS
from flashspec_core.lab.plots import MARKERS, PALETTE, Figure, style

FARTHEST = 30.0  # margins beyond it are drawn at the edge


def margins_figure(parts: dict) -> Figure:
    """Each case of each claim by its margin: right of the line it meets what is asked. Verdicts stand at the right.

    Args: parts: {name: Claims}.
    """
    lines = [line for name, claims in parts.items() for line in (name, *claims)]
    with style():
        figure = Figure(figsize=(9.5, 0.6 + 0.215 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for y, claim in enumerate(lines):
            if isinstance(claim, str):
                axes.axhspan(y - 0.5, y + 0.5, color="0.93")
                continue
            for value in claim.cases.values():
                x, good = float(np.clip(claim.margin(value), 1 / FARTHEST, FARTHEST)), claim.meets(value)
                color = PALETTE[0] if good else PALETTE[3]
                axes.plot(x, y, "o" if good else "X", color=color, ms=6, alpha=0.75, markeredgecolor="white")
            axes.axhline(y, color="0.9", lw=0.6, zorder=0)
            axes.text(FARTHEST * 1.35, y, f"{MARKS[claim.verdict]} {claim.verdict}", va="center", fontsize=8)
        axes.axvline(1, color="0.3", lw=1, zorder=1)
        names = [line if isinstance(line, str) else line.claimed for line in lines]
        axes.set_yticks(range(len(lines)), names, fontsize=8)
        for label, line in zip(axes.get_yticklabels(), lines, strict=True):
            label.set_fontweight("bold" if isinstance(line, str) else "normal")
        axes.set(xscale="log", xlim=(1 / FARTHEST / 1.2, FARTHEST * 1.2), ylim=(len(lines) - 0.5, -0.5))
        words = "times what the claim asks for; right of the line a case meets it (at the edges: {:.0f} times or more)"
        axes.set_xlabel(words.format(FARTHEST), fontsize=9)
        ticks = (1 / 30, 1 / 10, 1 / 3, 1, 3, 10, 30)
        axes.set_xticks(ticks, ["1/30", "1/10", "1/3", "1", "3", "10", "30"], fontsize=8)
        axes.minorticks_off()
        axes.grid(axis="y", visible=False)
    return figure


def reported_figure(reported: dict, points: dict, gamma: int) -> Figure:
    """What speed and median step leave for a step (filled), and the tokens that a step emitted or should have (hollow).

    Args:
        reported: {"tokens_per_second", "acceptance_rate", "step_p50"}, milliseconds.
        points: {label: list of (step_p50, tokens_per_second, tokens_per_step)}, measured.
        gamma: drafted tokens of the reported run.
    """
    ms, speed, rate = (reported[name] for name in ("step_p50", "tokens_per_second", "acceptance_rate"))
    least = sum(rate**k for k in range(gamma + 1))
    lines = {
        1: "1: no step emits less",
        least: f"{least:.2f}: a rate of {rate}",
        1 + gamma * rate: f"{1 + gamma * rate:.2f}: a fraction of {rate}",
    }
    every = {**points, "reported, and what its acceptance asks for": [(ms, speed, least)]}
    with style():
        figure = Figure(figsize=(8.5, 3.8), layout="constrained")
        axes = figure.subplots()
        for i, (label, found) in enumerate(every.items()):
            color = PALETTE[i % 8] if label in points else PALETTE[3]
            for x, a_second, a_step in found:
                axes.plot([x, x], [x * 1e-3 * a_second, a_step], color=color, lw=1)
                axes.plot(x, a_step, MARKERS[i % 8], color=color, ms=7, markerfacecolor="white")
                axes.plot(x, x * 1e-3 * a_second, MARKERS[i % 8], color=color, ms=7, label=label)
                label = None
        for tokens, words in lines.items():
            axes.axhline(tokens, color="0.4", lw=0.8, linestyle="--", zorder=0)
            axes.text(1.01, tokens, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.set(xscale="log", xlabel="median step, ms", ylabel="tokens a step (filled: speed x step)", ylim=(0, None))
        low, high = axes.get_xlim()
        ticks = [ms for ms in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= ms <= high]
        axes.set_xticks(ticks, [f"{ms:g}" for ms in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
