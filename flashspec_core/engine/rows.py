"""One row of a call: its ids, its text, its steps, and why it ended.

It leaves out the loop (decode.py) and the text itself (text.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashspec_core.engine.text import TextStream
from flashspec_core.records import DecodeStep, Generation, Sampling


@dataclass
class Row:
    """What a call keeps of a row.

    Args:
        index: its name in the call.
        ids: prompt and new ids; num_prompt: how many of them were given.
        sampling, seed: its law and noise.
        end: ids that it may hold; max_new_tokens: new ones that were asked for.
        text: of the new ids.
        steps, finish_reason, error, seconds: see Generation.
    """

    index: int
    ids: list[int]
    num_prompt: int
    sampling: Sampling
    seed: int
    end: int
    max_new_tokens: int
    text: TextStream
    steps: list[DecodeStep] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0

    def generation(self, mode: str) -> Generation:
        """What came of it. Args: mode: see Generation."""
        new, prompt = self.ids[self.num_prompt :], self.ids[: self.num_prompt]
        reason = self.finish_reason or "cancelled"
        return Generation(self.text.text, new, prompt, self.steps, self.seed, reason, self.seconds, self.error, mode)

    def commit(self, emitted: list[int], eos: set[int]) -> list[int]:
        """Append what the row keeps of the emitted ids, and say why it ends where it does.

        Args: emitted: ids of a step, -1 behind them; eos: ids that end a text.
        Returns: The kept ids.
        """
        new = []
        for token_id in emitted:
            if token_id < 0 or self.finish_reason:
                break
            new.append(token_id)
            self.ids.append(token_id)
            stopped = self.text.push(token_id)
            if token_id in eos:
                self.finish_reason = "eos"
            elif stopped:
                self.finish_reason = "stop"
            elif len(self.ids) >= self.end:
                reached = len(self.ids) - self.num_prompt >= self.max_new_tokens
                self.finish_reason = "length" if reached else "context"
        return new
