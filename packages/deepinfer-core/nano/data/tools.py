"""Questions that call for one to three calls of the tools at hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from nano.data.catalogue import Call, Offer, joined
from nano.data.dialogue import Dialogue, draw_offers, fitting, single_question, varied
from nano.data.example import Draw, Example

__all__ = ["TASKS", "draw_question"]

# Two or three questions in one message.
_JOINTS = (
    "{0} {1}",
    "{0} Also: {1}",
    "{0} And one more thing: {1}",
    "Two things: {0} {1}",
    "{0}\n{1}",
    "1. {0}\n2. {1}",
    "First: {0} Then: {1}",
)
_ANNOUNCE = (
    " Say what you do first.",
    " Tell me what you are going to do.",
    " Announce the call.",
)


def draw_question(random: Random, offers: Sequence[Offer]) -> tuple[str, list[Call]]:
    """Return a question for the tools on offer, and its calls in the order of the question."""
    kind = random.random()
    if kind < 0.25:
        open_ended = [each for each in offers if each.intent.several]
        if open_ended:
            return _several(random, random.choice(open_ended))
    elif kind < 0.4:
        pairs = [single_question(random, random.choice(offers)) for _ in range(2)]
        if pairs[0][1] != pairs[1][1]:
            text = random.choice(_JOINTS).format(pairs[0][0], pairs[1][0])
            return text, [call for _, call in pairs]
    elif kind < 0.45 and len(offers) > 2:
        triple = [single_question(random, each) for each in random.sample(list(offers), 3)]
        numbered = random.random() < 0.5
        texts = [
            f"{number}. {text}" if numbered else text
            for number, (text, _) in enumerate(triple, start=1)
        ]
        return ("\n" if numbered else " ").join(texts), [call for _, call in triple]
    text, call = single_question(random, random.choice(offers))
    return text, [call]


def _several(random: Random, offered: Offer) -> tuple[str, list[Call]]:
    intent = offered.intent
    slot = intent.slot(intent.vary)
    template = random.choice(intent.several)
    # what a question has no place for is not given
    rounds = [intent.draw(random, None if "{more}" in template else {})]
    for _ in range(1 if random.random() < 0.7 else 2):
        # neither the values so far nor what else is in the call
        taken = {**rounds[0], **{str(n): each[slot.key] for n, each in enumerate(rounds)}}
        value = varied(random, intent, taken)[slot.key]
        rounds.append({**rounds[0], slot.key: value})
    words = intent.words(random, rounds[0])
    words["items"] = joined([slot.say(each[slot.key]) for each in rounds])
    return template.format(**words), [Call(offered, each) for each in rounds]


def _new_question(random: Random, dialogue: Dialogue) -> tuple[str, list[Call]]:
    # What was asked before could be answered without a call.
    text, calls = draw_question(random, dialogue.offers)
    while any(call.key in dialogue.keys for call in calls):
        text, calls = draw_question(random, dialogue.offers)
    return text, calls


def _tool_call(random: Random) -> Example:
    num_tools = random.choices((1, 2, 3), (2, 4, 4))[0]
    dialogue = Dialogue(random, draw_offers(random, (), num_tools))
    num_before = random.choices((0, 1, 2), (5, 3, 2))[0]
    if not any(each.intent.slots for each in dialogue.offers):
        num_before = 0  # tools without parameters have nothing new to say
    for _ in range(num_before):
        dialogue.exchange(*_new_question(random, dialogue))
    text, calls = _new_question(random, dialogue)
    content = ""
    if random.random() < 0.08:
        text += random.choice(_ANNOUNCE)
        names = dict.fromkeys(call.offer.tool.name for call in calls)
        content = f"I call {joined(list(names))}."
    dialogue.ask(text)
    dialogue.call(calls, dialogue.wanted(calls), content)
    # A call that the request demands begins in the prompt: no room for thinking or a sentence.
    required = not dialogue.thinking and not content and random.random() < 0.08
    return dialogue.example("tool_call", required=required)


TASKS: dict[str, tuple[Draw, float]] = {"tool_call": (fitting(_tool_call), 0.15)}
