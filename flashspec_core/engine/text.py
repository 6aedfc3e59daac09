"""From prompts to ids and from ids back to text: chat templates, characters of several bytes, stop strings.

Pieces that are shown concatenate to the whole text. It decodes no model output: decode.py does.
"""

from __future__ import annotations


def encode_prompts(target, prompt) -> tuple[list[list[int]], bool]:
    """Prompts of any accepted form as lists of ids.

    Args:
        target: has `tokenizer` (or None), `vocab_size` and `max_length`.
        prompt: text (tokenised as it is), chat messages (get the chat template), ids, or a list of these.
    Returns: The id lists, and whether a list of prompts was given.
    Raises:
        ValueError: no prompt, an empty one, one longer than the model's context, or an id outside the vocabulary.
        TypeError: neither text, messages nor ids.
    """
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, str | list | tuple):
        raise TypeError(f"a prompt is text, chat messages, ids, or a list of these; got {type(prompt).__name__}")
    single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | dict))
    prompts = [prompt] if single else list(prompt)
    if not prompts:
        raise ValueError("expected at least one prompt, got an empty list")
    return [_encode(target, p, i) for i, p in enumerate(prompts)], not single


def _encode(target, prompt, row) -> list[int]:
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
        if target.tokenizer is None:
            raise ValueError("expected ids, for the target has no tokenizer; got text")
        if isinstance(prompt, str):
            ids = target.tokenizer(prompt).input_ids if prompt else []
        else:
            ids = target.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True).input_ids
    else:
        ids = list(prompt)
    if not ids:
        raise ValueError(f"expected a prompt of at least one token, got an empty one (row {row})")
    outside = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < target.vocab_size]
    if outside:
        raise ValueError(f"expected ids in 0..{target.vocab_size - 1}, got {outside[0]!r} (row {row})")
    if len(ids) >= target.max_length:
        wanted = f"a prompt shorter than the model's context of {target.max_length} tokens"
        raise ValueError(f"expected {wanted}, got {len(ids)} (row {row})")
    return ids


class TextStream:
    """The text of one row as its ids arrive.

    Args:
        tokenizer: or None: the text stays empty.
        stop: strings that end the text; they are left out of it.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text, self.stopped = "", False
        self._ids: list[int] = []
        self._begin = self._done = 0  # ids before _done are in the text; decoding starts at _begin, for spaces
        self._shown = 0

    def push(self, token_id: int) -> bool:
        """Take one id.

        Args: token_id: the next emitted id.
        Returns: Whether a stop string is complete; the text then ends before it.
        """
        if self.tokenizer is None:
            return False
        self._ids.append(token_id)
        self._take(self._new_text())
        return self.stopped

    def piece(self, final: bool = False) -> str:
        """The characters that may be shown and have not been.

        Args: final: nothing more comes: show also what a stop string or a split character held back.
        Returns: Text, maybe empty.
        """
        if final and not self.stopped and self.tokenizer is not None:
            self._take(self._new_text(final=True))
        held = 0 if final else self._held()
        piece = self.text[self._shown : len(self.text) - held]
        self._shown += len(piece)
        return piece

    def _new_text(self, final=False) -> str:
        before, now = self._decode(self._ids[self._begin : self._done]), self._decode(self._ids[self._begin :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):  # a character still lacks bytes
            return ""
        self._begin, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""

    def _take(self, new: str):
        start = max(0, len(self.text) - max(map(len, self.stop), default=0))
        self.text += new
        found = [at for s in self.stop if (at := self.text.find(s, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self.text[-n:]) for s in self.stop)), 0)
