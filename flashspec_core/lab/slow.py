"""One verification in slow motion, and a step's expected tokens as sliders move; each has a static face.

The stages come from the specification's own functions on a real model's logits. The running panel is live.py.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

import ipywidgets as widgets
import torch

from flashspec_core.engine.drafters import DraftContext
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.engine.text import encode_prompts
from flashspec_core.lab.svg import COLORS, bar, words
from flashspec_core.noise import DraftNoise, log_uniforms, step_seeds
from flashspec_core.verify import reference

NUM_BARS = 8


@dataclass
class Stage:
    """One thing that happens in a verification.

    Args:
        title: what happens, with its numbers.
        tokens: the ids' texts that are drawn.
        laws: name -> probabilities of these ids.
        chosen: index of the token that the stage is about.
    """

    title: str
    tokens: list[str]
    laws: dict[str, list[float]]
    chosen: int | None


def stages(target, drafter, prompt, gamma: int, sampling, seed: int = 0) -> tuple[list[Stage], object]:
    """One step of speculative decoding ("token"), taken apart: each test, then the draw behind it.

    Args:
        target, drafter, prompt: as `generate` takes them; the drafter hands over logits.
        gamma: drafted tokens.
        sampling: a Sampling that is not greedy.
        seed: of the row.
    Returns: The stages in order, and the VerifyResult that they add up to.
    """
    (ids,), _ = encode_prompts(target, prompt)
    seeds = step_seeds(torch.tensor([seed]), 0)
    draft = drafter.draft(DraftContext([ids], [0], target.vocab_size), gamma, [sampling], DraftNoise(seeds))
    cached = CachedModel(target.model)
    logits = cached.logits([ids + draft.token_ids[0].tolist()], gamma + 1, [0])
    cached.clear()
    drafter.reset()
    uniforms = log_uniforms(seeds, gamma)
    result = reference.verify_token(logits, draft, [sampling], uniforms, seeds)
    log_p, log_q, p_drafted, q_drafted = reference.laws(logits, draft, [sampling])
    found, accepted = [], int(result.num_accepted)
    for i in range(min(accepted + 1, gamma)):
        p, q, u = (float(v[0, i].exp()) for v in (p_drafted, q_drafted, uniforms))
        chance, stands = min(1.0, p / q), i < accepted
        word = _text(target, int(draft.token_ids[0, i]))
        title = (
            f"test {i + 1}: {word!r} was drawn from q = {q:.3f}; p = {p:.3f}, so it stands with chance {chance:.2f}; "
        )
        title += f"u = {u:.2f}: it {'stands' if stands else 'falls'}"
        found.append(
            _stage(target, title, {"draft q": log_q[0, i], "target p": log_p[0, i]}, int(draft.token_ids[0, i]))
        )
    law = log_p[0, accepted]
    name = "bonus: all stood, so one more comes from the target's own law"
    laws = {"target p": law}
    if accepted < gamma:
        law = reference.residual_logprobs(law, log_q[0, accepted])
        name, laws["residual"] = "recovered: drawn from (p - q)+, what the target has over the draft", law
    drawn = int(result.next_token_ids)
    found.append(_stage(target, f"{name}: {_text(target, drawn)!r}", laws, drawn))
    return found, result


def _text(target, token_id):
    return target.tokenizer.decode([token_id]) if target.tokenizer else str(token_id)


def _stage(target, title, laws, chosen):
    weight = sum(law.exp() for law in laws.values())
    weight[chosen] = math.inf
    ids = weight.topk(min(NUM_BARS, len(weight))).indices.tolist()
    shown = {name: [float(law[i].exp()) for i in ids] for name, law in laws.items()}
    return Stage(title, [_text(target, i) for i in ids], shown, ids.index(chosen))


def stage_svg(stage: Stage) -> str:
    """A stage as an SVG of bars, the token that it is about underlined.

    Args: stage: from `stages`.
    """
    parts, base, top = [], 150, max(max(law) for law in stage.laws.values()) or 1.0
    for i, (name, law) in enumerate(stage.laws.items()):
        parts.append(
            f"<rect x='{10 + 150 * i}' y='6' width='10' height='10' fill='{COLORS[i]}'/>"
            + words(24 + 150 * i, 15, name)
        )
        parts += [bar(12 + j * 88 + i * 34, base, 30, 110 * v / top, COLORS[i]) for j, v in enumerate(law)]
        parts += [
            words(27 + j * 88 + i * 34, base - 110 * v / top - 3, f"{v:.2f}", "middle", 9) for j, v in enumerate(law)
        ]
    for j, word in enumerate(stage.tokens):
        mark = f"{word!r}"[:14]
        parts.append(words(45 + j * 88, base + 16, f"▸{mark}◂" if j == stage.chosen else mark, "middle", 10))
    label = html.escape(stage.title, quote=True)
    size = "viewBox='0 0 720 175' width='100%' style='max-width:860px'"
    return f"<svg class='fs-stage' role='img' aria-label='{label}' {size}>{''.join(parts)}</svg>"


def stage_html(found, number: int) -> str:
    """A stage's words above its bars. Args: found, number: from `stages`; which, from 0."""
    title = f"<b>{number + 1} of {len(found)}.</b> {html.escape(found[number].title)}"
    return f"<div class='fs-slow' data-stage='{number}'>{title}{stage_svg(found[number])}</div>"


def slow_motion(found):
    """A slider over the stages of one verification.

    Args: found: from `stages`.
    Returns: A widget; its picture is `stage_html`.
    """
    slider = widgets.IntSlider(value=0, min=0, max=len(found) - 1, description="stage")
    view = widgets.HTML(stage_html(found, 0))
    slider.observe(lambda change: setattr(view, "value", stage_html(found, change["new"])), "value")
    return widgets.VBox([slider, view])


def expected_html(rate: float, gamma: int, cost: float, measured: float | None = None) -> str:
    """Expected tokens a step and speed-up at a constant rate.

    Rule: (1 - a^(g + 1)) / (1 - a) tokens; that over (1 + cost g) is the speed against plain decoding.

    Args: rate, gamma, cost, measured: acceptance rate; drafted tokens; a drafted token's time in target passes; tokens
        a step that were seen, or None.
    """
    tokens = sum(rate**i for i in range(gamma + 1))
    seen = "" if measured is None else f"; measured here: {measured:.2f}"
    return (
        f"<div class='fs-expected'>expected {tokens:.2f} tokens a step{seen}; "
        f"speed-up {tokens / (1 + cost * gamma):.2f}x (accepted fraction {(tokens - 1) / gamma:.2f})</div>"
    )


def explorer(rate: float, gamma: int, cost: float, measured: float | None = None):
    """Sliders for acceptance rate, gamma and cost above the closed form.

    Args: rate, gamma, cost, measured: see `expected_html`.
    Returns: A widget.
    """
    sliders = [
        widgets.FloatSlider(value=rate, min=0, max=0.99, step=0.01, description="rate"),
        widgets.IntSlider(value=gamma, min=1, max=12, description="gamma"),
        widgets.FloatSlider(value=cost, min=0, max=0.5, step=0.01, description="cost"),
    ]
    view = widgets.HTML(expected_html(rate, gamma, cost, measured))
    for slider in sliders:
        slider.observe(lambda _: setattr(view, "value", expected_html(*(s.value for s in sliders), measured)), "value")
    return widgets.VBox([*sliders, view])
