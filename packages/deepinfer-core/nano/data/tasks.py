"""All tasks: what draws an example of each, and its share of the training tokens."""

from __future__ import annotations

from nano.data import (
    arithmetic,
    conversion,
    copying,
    corpus,
    extraction,
    facts,
    greetings,
    lists,
    refusal,
    tool_turns,
    tools,
)
from nano.data.example import Draw

__all__ = ["TASKS"]

# The shares need not sum to one.
TASKS: dict[str, tuple[Draw, float]] = {
    **arithmetic.TASKS,
    **lists.TASKS,
    **conversion.TASKS,
    **facts.TASKS,
    **greetings.TASKS,
    **copying.TASKS,
    **corpus.TASKS,
    **tools.TASKS,
    **tool_turns.TASKS,
    **refusal.TASKS,
    **extraction.TASKS,
}
