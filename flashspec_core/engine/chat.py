"""A conversation that keeps the target's cache: a turn reads only what the turns before it did not.

The common prefix is found by comparing ids, so an edited history is right too. It leaves out the loop.
"""

from __future__ import annotations

from flashspec_core.engine.checks import as_arms
from flashspec_core.engine.decode import Run
from flashspec_core.engine.drafters import feature_layers, reset_drafters
from flashspec_core.engine.kv_cache import CachedModel
from flashspec_core.engine.turns import turn


class Chat:
    """Turns of a conversation with one target.

    Args:
        target, arms: see generate.
        messages: the conversation so far; yours to read and to edit between turns.
        options: what else `generate` takes, for every turn.
    Cost: a turn's first step reads the new ids (`steps[0].num_prefilled`), not the history.
    """

    def __init__(self, target, arms, messages=(), **options):
        self.target, self.arms, self.messages, self.options = target, arms, list(messages), options
        self._cached = CachedModel(target.model, feature_layers(as_arms(arms, gamma=1)))

    def say(self, text: str, **options):
        """Say something and get the answer; both join `messages`, unless the turn fails.

        Args:
            text: the user's.
            options: of `generate`, for this turn.
        Returns: A Generation.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        options = {**self.options, **options}
        out = Run(self.target, self.arms, messages, cached=self._cached, **options).finish()
        self.messages = [*messages, {"role": "assistant", "content": out.text}]
        return out

    def close(self):
        """Free the caches; the conversation can go on and reads all of it again."""
        with turn(self.target.model):
            self._cached.clear()
            reset_drafters(as_arms(self.arms, gamma=1))
