"""An example: a conversation that ends with the reply to be learned, and what tells it apart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from deepseek_recipe.conversation import Conversation

__all__ = ["HELD_OUT_SHARE", "Draw", "Example", "is_for_calibration", "is_held_out"]

# One example of this many is never trained on.
HELD_OUT_SHARE = 16

# Of those, one of this many calibrates the drafter, and the others test it.
_CALIBRATION_SHARE = 4


@dataclass(frozen=True)
class Example:
    """One example of a task.

    Attributes:
        task: which table row of the evaluation it counts for.
        key: what must not be both trained on and asked in the evaluation: the content of the
            question without its wording, e.g. `27+58`.
        conversation: its last message is the assistant's. All assistant messages are trained, but
            where the format drops the reasoning of earlier ones only the last one is.
    """

    task: str
    key: str
    conversation: Conversation


# A task draws its next example; it leaves it to the caller to reject keys of the other side.
Draw = Callable[[Random], Example]


def is_held_out(example: Example) -> bool:
    """Return whether the example belongs to the evaluation; by its task and key alone."""
    return _number(example) % HELD_OUT_SHARE == 0


def is_for_calibration(example: Example) -> bool:
    """Return whether a held-out example is for calibration, and so in no evaluation."""
    return _number(example) // HELD_OUT_SHARE % _CALIBRATION_SHARE == 0


def _number(example: Example) -> int:
    digest = hashlib.blake2b(f"{example.task}\n{example.key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest)
