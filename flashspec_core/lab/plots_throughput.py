"""Figures of whole answers: where a step's time goes, and from which acceptance rate on drafting pays.

They take style and canvas from plots.py. It measures nothing.
"""

from __future__ import annotations

import numpy as np

from flashspec_core.lab.plots import MARKERS, PALETTE, Figure, style
from flashspec_core.lab.throughput import break_even


def timeline_figure(found, num_steps: int = 10) -> Figure:
    """The first steps of one answer a way, behind the prompt's: drafting, pass and verification, the rest.

    Args: found: throughput.Measured of one domain; num_steps: of each.
    """
    parts = {"draft": PALETTE[0], "pass and verify": PALETTE[1], "commit": PALETTE[2]}
    with style():
        figure = Figure(figsize=(8, 0.9 + 0.5 * len(found)), layout="constrained")
        axes = figure.subplots()
        for y, one in enumerate(found):
            now = 0.0
            for step in one.outs[0].steps[1 : 1 + num_steps]:
                known = step.draft_seconds is not None  # a captured step is not told apart
                draft, verify = (step.draft_seconds, step.verify_seconds) if known else (0.0, step.step_seconds)
                lengths = draft, verify, step.step_seconds - draft - verify
                for length, color in zip(lengths, parts.values(), strict=True):
                    axes.barh(y, length * 1e3, 0.55, now * 1e3, color=color, edgecolor="white", linewidth=0.3)
                    now += length
                axes.text(now * 1e3, y - 0.3, f"+{len(step.token_ids)}", ha="right", va="bottom", fontsize=7)
        for label, color in parts.items():
            axes.barh(0, 0, color=color, label=label)
        axes.set_yticks(range(len(found)), [one.drafter for one in found])
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds; +n: ids that the step emitted")
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.25))
    return figure


def break_even_figure(costs: dict, found) -> Figure:
    """What a pass costs by its width; and by gamma the acceptance rate that pays, with the measured drafters as points.

    Args: costs: from throughput.pass_seconds; found: throughput.Measured, plain decoding aside.
    """
    gammas = np.arange(1, max(costs))
    with style():
        figure = Figure(figsize=(9, 3.3), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(list(costs), [cost / costs[1] for cost in costs.values()], "o-", color="#555555", ms=4)
        left.set(xlabel="tokens a pass", ylabel="cost, in passes over one token", ylim=(0, None))
        for i, name in enumerate(dict.fromkeys(one.drafter for one in found)):
            own = [one for one in found if one.drafter == name]
            spent = sum(step.draft_seconds or 0.0 for one in own for step in one.steps)
            price = spent / max(1, sum(step.num_draft_tokens for one in own for step in one.steps))
            right.plot(gammas, [break_even(costs, price, g) for g in gammas], "-", color=PALETTE[i], lw=1.3)
            look = dict(marker=MARKERS[i % 8], color=PALETTE[i], ms=6, linestyle="", markeredgecolor="white")
            places: dict = {}  # domains whose points lie on one another share a label
            for one in own:
                places.setdefault((one.gamma, round(one.acceptance_rate, 2)), []).append(one.domain)
            for place, domains in places.items():
                right.plot(*place, **look)
                right.annotate(", ".join(domains), place, (6, -3), textcoords="offset points", fontsize=7)
            right.plot([], [], label=f"{name}, {1e3 * price:.2f} ms a token", **look)
        right.set(
            xlabel="gamma, drafted tokens a step", ylabel="acceptance rate; above its line it pays", ylim=(-0.03, 1.03)
        )
        right.legend(frameon=False, fontsize=7, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return figure
