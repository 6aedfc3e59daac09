"""Watch a text being decoded: a panel of widgets with Run, Step, Pause and Stop, drawn as SVG from a history of steps.

The history (`AcceptanceMonitor`) knows no widget, and every view has a static twin in plots.py. It measures nothing.
"""

from __future__ import annotations

import html
import math
import threading
import time
from dataclasses import dataclass, field

import ipywidgets as widgets

from flashspec_core.bandits import UCB1, DiscountedThompson, ThompsonSampling
from flashspec_core.engine.decode import Run
from flashspec_core.lab.fates import fate_html
from flashspec_core.lab.svg import COLORS, bar, words
from flashspec_core.lab.workloads import MEASURED
from flashspec_core.policies import FixedArm
from flashspec_core.records import Arm, DecodeStep, Sampling
from flashspec_core.verify import METHODS

FRAME_SECONDS, SHARE = 0.05, 0.02  # at most 20 frames a second, and this share of the time
POLICIES = {
    "UCB1": UCB1,
    "Thompson": ThompsonSampling,
    "discounted Thompson": lambda n: DiscountedThompson(n, discount=0.9),
    "first arm only": lambda n: FixedArm(0, n),
}


@dataclass
class AcceptanceMonitor:
    """The history of one text, and what it says about its drafters; no widget in it.

    Args:
        arms: names of the arms.
        plain_tokens_per_second: of plain decoding, to compare with, or None.
        steps: DecodeSteps, in order.
        beliefs: after each step what the policy held: {arm: (mean, upper end)}, empty where it holds nothing.

    >>> monitor = AcceptanceMonitor(["n-gram"])
    >>> monitor.add(DecodeStep(0, 0, 0, "n-gram", 4, 4, 2, [5, 6, 7], "abc", 0.5, 0.1))
    >>> monitor.rates, monitor.by_position
    ([0.6666666666666666], [(1, 1), (1, 1), (0, 1), (0, 0)])
    """

    arms: list[str]
    plain_tokens_per_second: float | None = None
    steps: list[DecodeStep] = field(default_factory=list)
    beliefs: list = field(default_factory=list)

    def add(self, step: DecodeStep, belief=None) -> None:
        """Take a step in. Args: step: the newest; belief: what the policy then holds, see `belief_of`, or None."""
        self.steps.append(step)
        self.beliefs.append(belief or {})

    def upto(self, count: int) -> AcceptanceMonitor:
        """The history as it stood after so many steps. Args: count: at least 0."""
        return AcceptanceMonitor(self.arms, self.plain_tokens_per_second, self.steps[:count], self.beliefs[:count])

    @property
    def rates(self) -> list[float]:
        """Acceptance rate after each step: accepted over tested tokens so far (NaN before the first test)."""
        accepted = tested = 0
        rates = []
        for step in self.steps:
            accepted += step.num_accepted
            tested += step.num_tested
            rates.append(accepted / tested if tested else math.nan)
        return rates

    @property
    def by_position(self) -> list[tuple[int, int]]:
        """(accepted, tested) at each position of a block."""
        width = max((step.num_draft_tokens for step in self.steps), default=0)
        tested = [sum(s.num_draft_tokens > i and s.num_accepted >= i for s in self.steps) for i in range(width)]
        return [(sum(s.num_accepted > i for s in self.steps), tested[i]) for i in range(width)]

    @property
    def pulls(self) -> list[int]:
        """How often each arm was played; by name, for the arms offered may change between steps."""
        return [sum(step.drafter == name for step in self.steps) for name in self.arms]

    @property
    def arm_rates(self) -> list[float]:
        """Acceptance rate of each arm (NaN where none of its tokens was tested)."""
        own = [[step for step in self.steps if step.drafter == name] for name in self.arms]
        return [([math.nan] + AcceptanceMonitor([], None, steps).rates)[-1] for steps in own]

    @property
    def tokens_per_second(self) -> float:
        """New tokens over time; the first step, which reads the prompt, left out."""
        later = self.steps[1:]
        seconds = sum(step.step_seconds for step in later)
        return sum(len(step.token_ids) for step in later) / seconds if seconds else math.nan

    @property
    def tokens_per_step(self) -> float:
        """New tokens a pass of the target."""
        return sum(len(step.token_ids) for step in self.steps) / len(self.steps) if self.steps else math.nan


def belief_of(policy, names) -> dict:
    """What a policy holds of its arms.

    Args: policy, names: a policy, and its arms in order.
    Returns: {name: (mean, upper end)} in [0, 1]; empty for a policy that learns nothing.
    """
    if not hasattr(policy, "pulls"):
        return {}
    if isinstance(policy, ThompsonSampling):
        a, b = 1 + policy.reward_sums, 1 + policy.pulls - policy.reward_sums
        mean = a / (a + b)
        upper = mean + 1.64 * (mean * (1 - mean) / (a + b + 1)) ** 0.5
    else:
        mean = policy.reward_sums / policy.pulls.clip(1e-9)
        upper = policy.index()
    return {n: (min(float(m), 1.0), min(float(u), 1.0)) for n, m, u in zip(names, mean, upper, strict=True)}


def monitor_svg(monitor: AcceptanceMonitor) -> str:
    """The history as one SVG: acceptance over time, by position, arms with the policy's belief, and tokens a second.

    Args: monitor: an AcceptanceMonitor.
    Returns: SVG with a text alternative; `data-n` is the number of steps.
    """
    steps, rates, height, base = monitor.steps, monitor.rates, 90, 120
    drawn = [(i, r) for i, r in enumerate(rates) if not math.isnan(r)]
    latest = f"{drawn[-1][1]:.2f}" if drawn else "none yet"
    parts = [
        words(10, 16, f"acceptance rate: {latest}"),
        f"<path d='M10 {base}H230M10 {base - height}H230' stroke='#bbb'/>",
    ]
    every = max(1, len(drawn) // 300)
    scale = 220 / max(1, len(steps) - 1)
    color = dict(zip(monitor.arms, COLORS, strict=False))
    points = [(10 + i * scale, base - r * height, color.get(steps[i].drafter, "gray")) for i, r in drawn[::every]]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    parts.append(f"<polyline points='{line}' fill='none' stroke='{COLORS[0]}' stroke-width='1.5'/>")
    parts += [f"<circle class='fs-point' cx='{x:.1f}' cy='{y:.1f}' r='2' fill='{c}'/>" for x, y, c in points]
    parts += [words(10, base + 14, "step 1", size=9), words(230, base + 14, f"{len(steps)}", "end", 9)]
    parts.append(words(260, 16, "stood, by position"))
    for i, (accepted, tested) in enumerate(monitor.by_position[:12]):
        share = accepted / tested if tested else 0.0
        parts += [
            bar(260 + i * 16, base, 12, share * height, COLORS[2]),
            words(266 + i * 16, base + 14, f"{i + 1}", "middle", 9),
        ]
    parts.append(words(470, 16, "arms: pulls, rate, belief"))
    beliefs = monitor.beliefs[-1] if monitor.beliefs else {}
    for i, (name, pulls, rate) in enumerate(zip(monitor.arms, monitor.pulls, monitor.arm_rates, strict=True)):
        y, tint = 36 + i * 30, color.get(name, "gray")
        parts.append(words(470, y, f"{name}: {pulls}" + ("" if math.isnan(rate) else f", {rate:.2f}"), size=10))
        if name in beliefs:
            mean, upper = (470 + 140 * value for value in beliefs[name])
            parts.append(f"<path d='M{mean:.1f} {y + 8}H{upper:.1f}' stroke='{tint}' stroke-width='2'/>")
            parts.append(f"<circle cx='{mean:.1f}' cy='{y + 8}' r='3' fill='{tint}'/>")
    speed, plain = monitor.tokens_per_second, monitor.plain_tokens_per_second
    parts.append(words(640, 16, "tokens/s"))
    shown = [(name, v) for name, v in (("here", speed), ("plain", plain)) if v is not None and not math.isnan(v)]
    for i, (name, value) in enumerate(shown):
        top = max(v for _, v in shown)
        parts += [bar(640 + 45 * i, base, 32, value / top * (height - 12), COLORS[(0, 5)[name == "plain"]])]
        parts += [words(656 + 45 * i, base - value / top * (height - 12) - 3, f"{value:.1f}", "middle", 9)]
        parts += [words(656 + 45 * i, base + 14, name, "middle", 9)]
    label = f"acceptance rate {latest} after {len(steps)} steps, {monitor.tokens_per_step:.2f} tokens a step"
    return (
        f"<svg class='fs-live' role='img' aria-label='{label}' data-n='{len(steps)}' viewBox='0 0 740 140' "
        f"width='100%' style='max-width:900px'>{''.join(parts)}</svg>"
    )


def bundle(widget, text: str, fallback: str) -> dict:
    """A widget for `display(..., raw=True)` that shows a picture and a caption where widgets cannot be drawn.

    Args: widget, text, fallback: the widget; a caption; HTML.
    """
    if hasattr(widget, "_repr_mimebundle_"):
        data = widget._repr_mimebundle_()
        data = dict(data[0] if isinstance(data, tuple) else data)
    else:  # ipywidgets 7
        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        data = {"application/vnd.jupyter.widget-view+json": view}
    return {**data, "text/plain": text, "text/html": f"<figure>{fallback}<figcaption>{text}</figcaption></figure>"}


class TraceView:
    """A slider over the steps of a history, the history's picture, and the text so far: back and forth.

    Args:
        monitor: an AcceptanceMonitor.
        tokenizer: of the text, or None: ids are shown.
    """

    def __init__(self, monitor: AcceptanceMonitor, tokenizer):
        self.monitor, self.tokenizer = monitor, tokenizer
        self.history, self.text = widgets.HTML(), widgets.HTML()
        wide = widgets.Layout(width="540px")
        self.position = widgets.IntSlider(value=0, min=0, max=0, description="step", layout=wide)
        self.position.observe(lambda change: self._show(change["new"]), "value")
        self.widget = widgets.VBox([self.history, self.text, self.position])
        self.update(monitor)

    def update(self, monitor: AcceptanceMonitor) -> None:
        """Show a history as it stands at its end. Args: monitor: the history."""
        self.monitor, count = monitor, len(monitor.steps)
        self.position.max = count
        if self.position.value == count:
            self._show(count)
        else:
            self.position.value = count

    def _show(self, count):
        seen = self.monitor.upto(count)
        self.history.value = monitor_svg(seen)
        self.text.value = fate_html(seen.steps, self.tokenizer)


def trace_view(generation, tokenizer) -> TraceView:
    """A saved text, to be scrubbed step by step; its noise shows on hover where it was traced.

    Args: generation, tokenizer: a Generation, as `Generation.load` gives it back; of its ids, or None.
    """
    names = list(dict.fromkeys(step.drafter for step in generation.steps))
    return TraceView(AcceptanceMonitor(names, None, generation.steps), tokenizer)


class LivePanel:
    """Controls above, history below: Run, Step, Pause and Stop one text, and scrub through its steps afterwards.

    A changed control takes effect at the next step; prompt and seed at the next text. The loop runs in a thread of its
    own, so the buttons are heard while it runs; `play` does the same without a thread.

    Args:
        target: what `load_target` returns.
        drafters: offered as arms; "off" (plain decoding) is one of them.
        plain_tokens_per_second: of plain decoding, drawn beside.
        max_new_tokens: the text's length.
    """

    def __init__(self, target, drafters, plain_tokens_per_second: float | None = None, max_new_tokens: int = 64):
        self.target, self.max_new_tokens, self.plain = target, max_new_tokens, plain_tokens_per_second
        self.drafters = {drafter.name: drafter for drafter in drafters} | {"off": None}
        look = dict(layout=widgets.Layout(width="270px"), style={"description_width": "82px"})
        names, domains = tuple(self.drafters), tuple(MEASURED)
        self.controls = {
            "domain": widgets.Dropdown(options=domains, description="domain", **look),
            "prompt": widgets.Textarea(value=MEASURED[domains[0]][0], description="prompt", **look),
            "arms": widgets.SelectMultiple(
                options=names, value=names, rows=min(5, len(names)), description="arms", **look
            ),
            "policy": widgets.Dropdown(options=tuple(POLICIES), description="policy", **look),
            "method": widgets.Dropdown(options=METHODS, description="method", **look),
            "gamma": widgets.IntSlider(value=4, min=1, max=12, description="gamma", **look),
            "temperature": widgets.FloatSlider(
                value=0.0, min=0.0, max=2.0, step=0.1, description="temperature", **look
            ),
            "top_p": widgets.FloatSlider(value=1.0, min=0.05, max=1.0, step=0.05, description="top-p", **look),
            "seed": widgets.IntText(value=0, description="seed", **look),
        }
        self.buttons = {name: widgets.Button(description=name) for name in ("Run", "Step", "Pause", "Stop")}
        self.message = widgets.HTML()
        self.view = TraceView(AcceptanceMonitor(list(names), plain_tokens_per_second), target.tokenizer)
        c, box = self.controls, widgets.VBox
        rows = [box([c["domain"], c["prompt"], c["arms"]]), box([c["policy"], c["method"], c["gamma"]])]
        rows.append(box([c["temperature"], c["top_p"], c["seed"]]))
        bar = widgets.HBox(list(self.buttons.values()))
        self.widget = box([widgets.HBox(rows), bar, self.message, self.view.widget])
        for name, button in self.buttons.items():
            button.on_click(getattr(self, "_" + name.lower()))
        c["domain"].observe(self._choose_prompt, "value")
        self.monitor, self.run, self._steps, self._thread = self.view.monitor, None, None, None
        self._paused, self._stopped, self._next_frame = threading.Event(), threading.Event(), 0.0
        self._say("ready")

    def play(self, num_steps: int | None = None) -> AcceptanceMonitor:
        """Decode without a thread: a text to its end, or some steps of it.

        Args: num_steps: None: to the end.
        Returns: The history.
        """
        self._paused.clear()
        self._stopped.clear()
        self._loop(num_steps)
        return self.monitor

    def _run(self, _=None):
        self._paused.clear()
        self._stopped.clear()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._loop, daemon=True)
            self._thread.start()

    def _step(self, _=None):
        if self._thread is not None and self._thread.is_alive():
            self._paused.set()
            self._thread.join(10)
        self._stopped.clear()
        self._paused.clear()
        self._loop(1)

    def _pause(self, _=None):
        self._paused.set()

    def _stop(self, _=None):
        self._stopped.set()
        if self._thread is None or not self._thread.is_alive():
            self._end("stopped")

    def _loop(self, num_steps=None):
        """Steps until the text ends, or somebody says Pause or Stop; whatever goes wrong becomes a message."""
        self._say("running")
        try:
            while num_steps is None or num_steps > 0:
                if self._stopped.is_set():
                    return self._end("stopped")
                if self._paused.is_set():
                    break
                if not self._advance():
                    return self._end("done: " + str(self.run.rows[0].finish_reason))
                num_steps = None if num_steps is None else num_steps - 1
            self._say("paused")
            self._draw()
        except Exception as error:  # noqa: BLE001 - the panel is where its reader looks
            self._end(f"{type(error).__name__}: {error}", bad=True)

    def _advance(self) -> bool:
        if self._steps is None:
            self._begin()
        self._apply()
        step = next(self._steps, None)
        if step is None:
            return False
        self.monitor.add(step, belief_of(self.run.policy, self._names()))
        if time.perf_counter() > self._next_frame:
            self._draw()
        return True

    def _begin(self):
        c, text = self.controls, self.controls["prompt"].value
        prompt = [{"role": "user", "content": text}] if self.target.tokenizer else [int(word) for word in text.split()]
        options = dict(max_new_tokens=self.max_new_tokens, seed=c["seed"].value, trace=True)
        self.run, self._settings = Run(self.target, self._arms(), prompt, **options), None
        self.monitor = AcceptanceMonitor(list(self.drafters), self.plain)
        self._steps = self.run.steps()

    def _names(self):
        return [name for name in self.drafters if name in self.controls["arms"].value] or ["off"]

    def _arms(self):
        return [Arm(self.drafters[name], self.controls["gamma"].value) for name in self._names()]

    def _apply(self):
        """What the controls say now, for the next step; the step's arm is chosen behind it."""
        c, run, top_p = self.controls, self.run, self.controls["top_p"].value
        run.rows[0].sampling = Sampling(c["temperature"].value, top_p=None if top_p >= 1 else top_p)
        run.options.method, run.arms = c["method"].value, self._arms()
        if (settings := (c["policy"].value, self._names())) != self._settings:  # other arms: a policy that knows none
            self._settings, run.policy = settings, POLICIES[settings[0]](len(run.arms))

    def _end(self, message, bad=False):
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._say(message, bad)
        self._draw()

    def _say(self, message, bad=False):
        style = "color:#b00020;font-weight:bold" if bad else ""
        role = "alert" if bad else "status"
        self.message.value = f"<span class='fs-message' role='{role}' style='{style}'>{html.escape(message)}</span>"

    def _draw(self):
        start = time.perf_counter()
        self.view.update(self.monitor)
        end = time.perf_counter()
        self._next_frame = end + max(FRAME_SECONDS, (end - start) / SHARE)

    def _choose_prompt(self, change):
        self.controls["prompt"].value = MEASURED[change["new"]][0]
