"""What `generate` asks of its arguments: arms, seeds and tokenizers that fit the target.

Each refusal says what was expected and what came. Prompts are read in text.py, drafts are checked in verify.
"""

from __future__ import annotations

from flashspec_core.noise import fresh_seed
from flashspec_core.records import Arm


def as_arms(arms, gamma: int) -> list[Arm]:
    """A drafter, an Arm or a list of them as Arms that all have a gamma.

    Args:
        arms: see generate.
        gamma: for those that do not say.
    Returns: At least one Arm.
    Raises:
        ValueError: none was given.
        TypeError: neither an Arm nor a drafter.
    """
    arms = list(arms) if isinstance(arms, list | tuple) else [arms]
    if not arms:
        raise ValueError("expected at least one arm, got none; fs.Arm(None) is plain decoding")
    for arm in arms:
        if not isinstance(arm, Arm) and not (hasattr(arm, "draft") and hasattr(arm, "name")):
            raise TypeError(f"an arm is an fs.Arm or a drafter with `name` and `draft`, got {arm!r}")
    arms = [arm if isinstance(arm, Arm) else Arm(arm) for arm in arms]
    return [arm if arm.gamma is not None else Arm(arm.drafter, gamma) for arm in arms]


def row_seeds(seed, batch: int) -> list[int]:
    """One seed a row.

    Args:
        seed: an int (row i takes seed + i), None (drawn), or a sequence of these, one a row.
        batch: number of rows.
    Returns: A list of ints, each the 64-bit seed that repeats its row alone.
    Raises: ValueError: another number of seeds than rows, or not whole numbers.

    >>> row_seeds(7, 2), row_seeds([3, 3], 2)
    ([7, 8], [3, 3])
    """
    given = [seed] * batch if seed is None or isinstance(seed, int) else list(seed)
    if len(given) != batch:
        raise ValueError(f"expected one seed or one a row ({batch}), got {len(given)}")
    if not all(s is None or (isinstance(s, int) and -(2**63) <= s < 2**63 - batch) for s in given):
        raise ValueError(f"expected whole 64-bit seeds or None, got {seed!r}")
    spread = isinstance(seed, int)
    return [fresh_seed() if s is None else s + i * spread for i, s in enumerate(given)]


def check_same_tokenizer(target, drafter) -> None:
    """Refuse a drafter whose ids mean other text.

    Args:
        target: with `tokenizer` or None.
        drafter: with `tokenizer` or without.
    Raises: ValueError: an id stands for another token there.
    """
    theirs, ours = getattr(drafter, "tokenizer", None), target.tokenizer
    if theirs is None or ours is None or theirs is ours:
        return
    a, b = ours.get_vocab(), theirs.get_vocab()
    if a != b:
        token = next(t for t in [*a, *b] if a.get(t) != b.get(t))
        raise ValueError(
            f"drafter {drafter.name!r} has another tokenizer: {token!r} is id {a.get(token)} in the target's and "
            f"{b.get(token)} in the drafter's; a draft must be in the target's ids"
        )


def check_same_target(target, drafter) -> None:
    """Refuse a draft head that was made for another model.

    Args:
        target: with `model`.
        drafter: with `head` or without.
    Raises: ValueError: it reads other embeddings than the target's.
    """
    shared = getattr(getattr(drafter, "head", None), "shared", None)
    if shared is not None and shared["embed"] is not target.model.get_input_embeddings():
        raise ValueError(f"expected a head made for this very target, got drafter {drafter.name!r}; see load_drafter")
