"""FlashSpec: speculative decoding that is proved, measured and shown.

Public names, found when first used, so that importing this costs nothing and needs neither torch nor transformers.
"""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_HOME = {
    "records": "Arm Draft DecodeStep Feedback Generation PLACEHOLDER_TOKEN_ID Sampling VerifyResult",
    "verify": "verify",
    "bandits": "DiscountedThompson DiscountedUCB FullInformation SlidingWindowUCB ThompsonSampling UCB1",
    "policies": "Contextual FixedArm Oracle Preferring Replay Restarting policy_from_json policy_to_json",
    "engine.chat": "Chat",
    "engine.decode": "RowError generate stream",
    "engine.drafters": "CascadeDrafter EarlyExitDrafter ModelDrafter NGramDrafter",
    "engine.head_drafters": "EagleDrafter MedusaDrafter load_drafter",
    "engine.models": "Target load_target",
}
_ROOM = {name: room for room, names in _HOME.items() for name in names.split()}
__all__ = sorted(_ROOM)


def __getattr__(name):
    if name not in _ROOM:
        raise AttributeError(f"module 'flashspec_core' has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    def __setattr__(self, name, value):  # importing the room `verify` must not hide the function `verify`
        if not (name in _ROOM and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
