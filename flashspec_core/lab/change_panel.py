"""A world of three arms under sliders: their means before and after a change, and the regret of several policies.

The simulation is regret.py's; nothing is measured here. Its static twin is plots.regret_figure.
"""

from __future__ import annotations

import html

import ipywidgets as widgets
import numpy as np

from flashspec_core.bandits import UCB1, DiscountedThompson, DiscountedUCB, SlidingWindowUCB, ThompsonSampling
from flashspec_core.lab import regret
from flashspec_core.lab.svg import COLORS, words

POLICIES = {
    "UCB1": UCB1,
    "Thompson": ThompsonSampling,
    "sliding window": lambda n, seed, shape: SlidingWindowUCB(n, seed, shape, window=400),
    "discounted UCB": DiscountedUCB,
    "discounted Thompson": DiscountedThompson,
}


def curves(before, after, change: int, policies, horizon: int = 2000, num_seeds: int = 20) -> dict:
    """Mean regret of each policy in a world that changes once.

    Args: before, after, change, policies, horizon, num_seeds: means of the arms; the round of the change; names among
        `POLICIES`; rounds; runs.
    Returns: name -> [horizon] mean regret so far.
    """
    means = np.where(np.arange(horizon)[:, None] < change, before, after)
    world = regret.Environment(means, changes=(change,))
    runs = {name: POLICIES[name](len(before), 1, (num_seeds,)) for name in policies}
    return {name: regret.simulate(p, world, np.random.default_rng(2)).regret.mean(1) for name, p in runs.items()}


def curves_svg(found: dict, change: int) -> str:
    """Curves of regret with the change marked.

    Args: found, change: from `curves`; the round of the change.
    Returns: SVG with a text alternative that names each final value.
    """
    top = max([float(curve[-1]) for curve in found.values()] + [1.0])
    horizon = max([len(curve) for curve in found.values()] + [2])
    parts = ["<path d='M10 150H510M10 10V150' stroke='#bbb'/>"]
    x = 10 + 500 * change / horizon
    parts.append(
        f"<path d='M{x:.1f} 10V150' stroke='#888' stroke-dasharray='4 3'/>" + words(x + 3, 20, "change", size=9)
    )
    for i, (name, curve) in enumerate(found.items()):
        every = max(1, len(curve) // 200)
        points = " ".join(
            f"{10 + 500 * t / horizon:.1f},{150 - 135 * curve[t] / top:.1f}" for t in range(0, len(curve), every)
        )
        dash = ("", "6 3", "2 2", "8 3 2 3", "1 3")[i % 5]
        line = f"fill='none' stroke='{COLORS[i % 6]}' stroke-width='1.5' stroke-dasharray='{dash}'"
        parts.append(f"<polyline points='{points}' {line}/>")
        parts.append(f"<path d='M525 {24 + 20 * i}H555' {line}/>" + words(560, 28 + 20 * i, f"{name}: {curve[-1]:.0f}"))
    label = html.escape("regret: " + ", ".join(f"{name} {curve[-1]:.0f}" for name, curve in found.items()), quote=True)
    size = "viewBox='0 0 740 160' width='100%' style='max-width:860px'"
    return f"<svg class='fs-world' role='img' aria-label='{label}' {size}>{''.join(parts)}</svg>"


def explorer(before=(0.3, 0.7, 0.5), after=(0.7, 0.3, 0.5), change: int = 1000, horizon: int = 2000):
    """Sliders for the arms before and after, the round of the change, and which policies play.

    Args: before, after, change, horizon: see `curves`.
    Returns: A widget; its last child shows `curves_svg`.
    """
    options = dict(min=0.0, max=1.0, step=0.05, continuous_update=False)
    sliders = [
        [widgets.FloatSlider(value=m, description=f"{when} {i + 1}", **options) for i, m in enumerate(means)]
        for when, means in (("before", before), ("after", after))
    ]
    at = widgets.IntSlider(value=change, min=0, max=horizon, step=50, description="change", continuous_update=False)
    names = widgets.SelectMultiple(options=tuple(POLICIES), value=("UCB1", "Thompson"), description="policies")
    view = widgets.HTML()

    def draw(_=None):
        now = [[slider.value for slider in group] for group in sliders]
        view.value = curves_svg(curves(*now, at.value, names.value, horizon), at.value)

    for control in (*sliders[0], *sliders[1], at, names):
        control.observe(draw, "value")
    draw()
    columns = [widgets.VBox(group) for group in sliders] + [widgets.VBox([at, names])]
    return widgets.VBox([widgets.HBox(columns), view])
