"""Steps on one model, one at a time, whatever thread asks: they hook into it, and drafters have caches of their own."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from weakref import WeakKeyDictionary

_TURNS = WeakKeyDictionary()  # a lock for each model, and a mark for each step that is under way


@contextmanager
def turn(model, wait: bool = True):
    """Within it no other thread is in a step on this model; what a step calls may begin another.

    Args: model: a torch module; wait: for others' steps.
    Yields: Whether it is so. Without `wait` False where a step is under way, in this thread too.
    """
    lock, marks = _TURNS.setdefault(model, (threading.RLock(), []))
    if not lock.acquire(blocking=wait):
        yield False
        return
    marks.append(None)
    try:
        yield wait or len(marks) == 1
    finally:
        marks.pop()
        lock.release()
