"""One question and its answer as an example."""

from __future__ import annotations

from random import Random

from deepseek_recipe.conversation import Conversation, Message
from nano.data.example import Example

__all__ = ["SYSTEM_TEXTS", "ask"]

# What a system message may say; the answers do not depend on it.
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are deepinfer-nano.",
    "Answer briefly.",
)
_SYSTEM_SHARE = 0.15
# Of questions that need no thinking, those asked with thinking on; and the other way round.
_UNUSUAL_SHARE = 0.15


def ask(
    random: Random,
    task: str,
    key: str,
    question: str,
    answer: str,
    *,
    steps: str | None = None,
    hint: str | None = None,
    is_easy: bool = False,
) -> Example:
    """Return an example of one question, now and then below a system message.

    Args:
        steps: what leads to the answer; thinking is on.
        hint: without steps, what is thought where thinking happens to be on; None keeps it off.
        is_easy: the answer can also be given without the steps.
    """
    reasoning = steps
    if (hint is not None or is_easy) and random.random() < _UNUSUAL_SHARE:
        reasoning = hint
    messages = [
        Message("user", (question,)),
        Message("assistant", (answer,), reasoning=reasoning),
    ]
    if random.random() < _SYSTEM_SHARE:
        messages.insert(0, Message("system", (random.choice(SYSTEM_TEXTS),)))
    thinking = reasoning is not None
    conversation = Conversation(
        tuple(messages), thinking=thinking, reasoning_effort="high" if thinking else None
    )
    return Example(task, key, conversation)
