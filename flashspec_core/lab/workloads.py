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

_LETTER = (
    "Dear Ms Moreau, thank you for the tour of the mill on Saturday. The children still talk about the big wheel. We "
    "would like to come again in spring with the whole class, twenty-two pupils and two teachers. Could you tell us "
    "which mornings are free in April? With kind regards, Ines Duarte."
)
_RECIPE = (
    "Boil the potatoes for twenty minutes and let them cool. Fry the onions in two spoons of oil until they are brown. "
    "Cut the potatoes into thick slices and add them to the pan. Season with salt, pepper and a little paprika. Turn "
    "the slices once, so that both sides are crisp, and serve them hot."
)
_NOTICE = (
    "The library is closed from the third to the ninth of August, while the floor of the reading room is mended. Books "
    "that are due in this week may be returned until the sixteenth. The box beside the entrance stays open day and "
    "night. The children's hour on Wednesday moves to the town hall."
)
_CODE = (
    "def total(items):\n    result = 0\n    for item in items:\n        result = result + item.price * item.count\n"
    "    return result\n\n\ndef average(items):\n    result = 0\n    for item in items:\n"
    "        result = result + item.price\n    return result / len(items)\n"
)
_TABLE = (
    "name,city,year\nAlma,Porto,2019\nBoris,Lyon,2020\nChiara,Turin,2020\nDaniel,Ghent,2021\nElin,Bergen,2022\n"
    "Farid,Porto,2022\nGreta,Lyon,2023\n"
)

PROMPTS = {
    "chat": (
        "Explain to a curious child why the sky is blue.",
        "What should I see on a rainy afternoon in Lisbon?",
        "Give me three tips for sleeping better.",
        "How can I start running when I have never done any sport?",
        "What is the difference between weather and climate?",
        "Write a short, friendly message to a neighbour whose dog barks at night.",
        "Why do leaves change their colour in autumn?",
        "I have an interview tomorrow. How should I prepare for it this evening?",
        "Describe a market in a small town on a Saturday morning.",
        "What are good and bad sides of working from home?",
    ),
    "code": (
        "Write a Python function that checks whether a number is prime, with a short test.",
        "Write a Python function that reverses the words of a sentence.",
        "Write a Python class for a stack with push, pop and peek.",
        "Write a Python function that counts how often each word occurs in a text.",
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python script that reads a CSV file and prints the sum of its second column.",
        "Write a Python function that computes the n-th Fibonacci number without recursion.",
        "Write a Python function that checks whether the brackets of a string are balanced.",
        "Write a Python class for a bank account with deposit and withdraw, and show how it is used.",
        "Write a JavaScript function that removes duplicates from an array.",
    ),
    "copy-edit": (
        f"Copy this text, and change nothing:\n\n{_PROSE}",
        f"Fix the spelling in this text and print the whole text again:\n\n{_PROSE.replace('evening', 'evning')}",
        f"Repeat this list exactly:\n\n{_LIST}",
        f"Copy this letter, and change nothing:\n\n{_LETTER}",
        f"Print this recipe again, word for word:\n\n{_RECIPE}",
        f"Fix the spelling in this notice and print the whole notice again:\n\n{_NOTICE.replace('mended', 'mendet')}",
        f"Copy this Python code exactly:\n\n```python\n{_CODE}```",
        f"Print this table again, line by line, and change nothing:\n\n{_TABLE}",
        f"Copy this letter, but sign it with the name Clara Duarte:\n\n{_LETTER}",
        f"Rename the function total to order_total and print the whole code:\n\n```python\n{_CODE}```",
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
