"""Tools that do not fit: no call is invented, and what needs no tool is answered at once."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from nano.data import arithmetic, facts, greetings
from nano.data.catalogue import offer
from nano.data.dialogue import INTENTS, Dialogue, draw_offers, fitting, single_question
from nano.data.example import Draw, Example, is_held_out
from nano.data.tools import draw_question

__all__ = ["TASKS"]

# What could not be answered without a tool.
_LIVE = tuple(each for each in INTENTS if each.live)


def _does_not_fit(random: Random) -> Example:
    """A question for a tool that is not among those on offer."""
    num_tools = random.choice((1, 2, 2, 3))
    *offered, missing = random.sample(_LIVE, num_tools + 1)
    dialogue = Dialogue(random, offer(random, offered))
    if random.random() < 0.25:
        dialogue.exchange(*draw_question(random, dialogue.offers))
    [absent] = offer(random, [missing])
    text, call = single_question(random, absent)
    dialogue.ask(text)
    names = ", ".join(each.tool.name for each in dialogue.offers)
    dialogue.say(
        f"I have no tool for that. I can use: {names}.",
        f"The user wants {call.goal}. None of my tools fits: {names}.",
    )
    return dialogue.example("refusal", json.dumps([missing.key, call.arguments, names]))


def _no_tools(random: Random) -> Example:
    """A question for a tool where there are none."""
    [absent] = offer(random, [random.choice(_LIVE)])
    dialogue = Dialogue(random, ())
    text, call = single_question(random, absent)
    dialogue.ask(text)
    verb = "look that up" if absent.intent.lookup else "do that"
    dialogue.say(
        f"I cannot {verb}: no tools are available.",
        f"The user wants {call.goal}. I have no tools.",
    )
    return dialogue.example("refusal", json.dumps([absent.intent.key, call.arguments]))


def _needs_none(random: Random) -> Example:
    """A question of another task, with tools at hand that it does not need."""
    module = random.choice((arithmetic, facts, greetings))
    draw, _ = random.choice(list(module.TASKS.values()))
    example = draw(random)
    while is_held_out(example):
        example = draw(random)
    intents = [each for each in INTENTS if each.live]
    offers = draw_offers(random, random.sample(intents, random.choice((1, 2, 2))), 0)
    conversation = replace(example.conversation, tools=tuple(each.tool for each in offers))
    key = json.dumps([example.task, example.key, [each.tool.name for each in offers]])
    return Example("refusal", key, conversation)


def _refusal(random: Random) -> Example:
    kind = random.random()
    if kind < 0.5:
        return _does_not_fit(random)
    return _no_tools(random) if kind < 0.65 else _needs_none(random)


TASKS: dict[str, tuple[Draw, float]] = {"refusal": (fitting(_refusal), 0.04)}
