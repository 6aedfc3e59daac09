"""Prompts by domain, written for this suite (Apache-2.0, like everything here)."""

from __future__ import annotations

_PROSE = (
    "The lighthouse keeper wrote one line in his book every evening. On calm days he noted the wind and the colour of "
    "the sea. On stormy days he noted only that the lamp was lit. After forty years the book was full, and the last "
    "line said that the lamp was lit."
)
_LIST = (
    "Monday: water the tomatoes, sweep the yard. Tuesday: mend the fence, feed the hens. Wednesday: water the "
    "tomatoes, collect the eggs. Thursday: clean the shed, feed the hens. Friday: water the tomatoes, rest."
)

PROMPTS = {
    "chat": (
        "Explain to a curious child why the sky is blue.",
        "What should I see on a rainy afternoon in Lisbon?",
        "Give me three tips for sleeping better.",
    ),
    "code": (
        "Write a Python function that checks whether a number is prime, with a short test.",
        "Write a Python function that reverses the words of a sentence.",
        "Write a Python class for a stack with push, pop and peek.",
    ),
    "copy-edit": (
        f"Copy this text, and change nothing:\n\n{_PROSE}",
        f"Fix the spelling in this text and print the whole text again:\n\n{_PROSE.replace('evening', 'evning')}",
        f"Repeat this list exactly:\n\n{_LIST}",
    ),
}


def chat_messages(text: str) -> list[dict[str, str]]:
    """A prompt as chat messages.

    Args:
        text: what the user says.

    Returns:
        One message of the user's.

    >>> chat_messages("Hello")
    [{'role': 'user', 'content': 'Hello'}]
    """
    return [{"role": "user", "content": text}]


def first_prompts() -> dict[str, list[dict[str, str]]]:
    """The first prompt of each domain, as chat messages."""
    return {domain: chat_messages(texts[0]) for domain, texts in PROMPTS.items()}
