"""Figures of adaptive drafting: what each arm gets where, seconds lost as a stream goes on, and which arm when.

They take style and canvas from plots.py. It measures nothing.
"""

from __future__ import annotations

import numpy as np

from flashspec_core.lab.plots import MARKERS, PALETTE, Figure, style


def arms_figure(speeds: dict) -> Figure:
    """Tokens a second of each arm in each domain, the best of a domain with an edge.

    Args: speeds: {domain: {arm: tokens a second}}, the same arms everywhere.
    """
    arms = list(next(iter(speeds.values())))
    with style():
        figure = Figure(figsize=(8, 3), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(arms)
        for i, arm in enumerate(arms):
            for x, own in enumerate(speeds.values()):
                best = own[arm] == max(own.values())
                look = dict(color=PALETTE[i % len(PALETTE)], edgecolor="black", linewidth=1.5 * best)
                axes.bar(x + (i - (len(arms) - 1) / 2) * width, own[arm], width, label=None if x else arm, **look)
        axes.set_xticks(range(len(speeds)), list(speeds))
        axes.set(ylabel="tokens a second")
        axes.legend(frameon=False, fontsize=8, ncols=len(arms), loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def lost_figure(lost: dict, changes=()) -> Figure:
    """Seconds lost to the oracle, added up answer by answer.

    Args: lost: {name: seconds lost in each answer}; changes: answers in front of which the domain changes.
    """
    with style():
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for at in changes:
            axes.axvline(at, color="#bbbbbb", lw=0.8, ls=":")
        for i, (name, seconds) in enumerate(lost.items()):
            look = dict(color=PALETTE[i % len(PALETTE)], marker=MARKERS[i % 8], ms=3.5, lw=1.3)
            axes.plot(np.arange(len(seconds) + 1), np.concatenate([[0], np.cumsum(seconds)]), label=name, **look)
        axes.axhline(0, color="#333333", lw=0.8)
        axes.set(xlabel="answers", ylabel="seconds lost to the oracle")
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def choices_figure(arms, chosen, changes=()) -> Figure:
    """The share of each arm among the steps of each answer.

    Args: arms: names; chosen: a list an answer, the arm's index of each step; changes: see lost_figure.
    """
    with style():
        figure = Figure(figsize=(7.5, 2.4), layout="constrained")
        axes = figure.subplots()
        below = np.zeros(len(chosen))
        for i, arm in enumerate(arms):
            share = np.array([np.mean(np.asarray(steps) == i) for steps in chosen])
            axes.bar(np.arange(len(chosen)) + 0.5, share, 1, below, color=PALETTE[i % len(PALETTE)], label=arm)
            below += share
        for at in changes:
            axes.axvline(at, color="black", lw=0.8)
        axes.set(xlabel="answers", ylabel="share of steps", xlim=(0, len(chosen)), ylim=(0, 1))
        axes.legend(frameon=False, fontsize=8, ncols=len(arms), loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def gains_figure(measured: dict) -> Figure:
    """Mean gains over the best fixed arm with their bands, a panel a device.

    Args: measured: {device: {name: {"gain_low", "gain_high"}}}, shares of its speed.
    """
    with style():
        most = max(map(len, measured.values()))
        figure = Figure(figsize=(8, (0.6 + 0.28 * most) * len(measured)), layout="constrained")
        for axes, (device, ways) in zip(
            figure.subplots(len(measured), squeeze=False)[:, 0], measured.items(), strict=True
        ):
            for y, one in enumerate(reversed(ways.values())):
                color = PALETTE[0] if one["gain_low"] > 0 else "#888888"
                axes.plot([100 * one["gain_low"], 100 * one["gain_high"]], [y, y], color=color, lw=2)
                axes.plot(50 * (one["gain_low"] + one["gain_high"]), y, marker="o", color=color, ms=5)
            axes.set_yticks(range(len(ways)), list(ways)[::-1], fontsize=8)
            axes.axvline(0, color="#333333", lw=0.8)
            axes.set_title(device, fontsize=9, loc="left")
        axes.set(xlabel="gain over the best single drafter, %")
    return figure
