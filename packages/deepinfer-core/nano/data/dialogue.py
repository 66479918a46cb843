"""A conversation with tools in the making: questions, calls, results, answers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from deepseek_recipe.conversation import Conversation, Message, Tool
from nano.data.catalogue import Arguments, Call, Intent, Offer, Result, joined, offer
from nano.data.encoding import spelled
from nano.data.example import Draw, Example
from nano.data.intents_daily import DAILY
from nano.data.intents_home import HOME
from nano.data.intents_work import WORK
from nano.data.question import SYSTEM_TEXTS

__all__ = [
    "INTENTS",
    "MAX_CHARS",
    "Dialogue",
    "draw_offers",
    "fitting",
    "intent_named",
    "single_question",
    "varied",
]

INTENTS: tuple[Intent, ...] = (*DAILY, *HOME, *WORK)
_BY_KEY = {each.key: each for each in INTENTS}
# Of an example, markup included. At 3.2 characters a token or more this fits a row of 1024 tokens.
MAX_CHARS = 3200
_SYSTEM_SHARE = 0.2


def intent_named(key: str) -> Intent:
    """Return an intent of the catalogue."""
    return _BY_KEY[key]


class Dialogue:
    """Messages so far.

    Attributes:
        offers: the tools at hand.
        thinking: whether replies think; drawn.
        keys: what each call so far was about.
    """

    def __init__(self, random: Random, offers: Sequence[Offer]) -> None:
        """Begin a conversation, now and then with a system message."""
        self.random = random
        self.offers = tuple(offers)
        self.thinking = random.random() < 0.5
        self._messages: list[Message] = []
        self.keys: list[str] = []
        self._num_calls = 0
        if random.random() < _SYSTEM_SHARE:
            self._messages.append(Message("system", (random.choice(SYSTEM_TEXTS),)))

    def ask(self, text: str) -> None:
        """Add a question."""
        self._messages.append(Message("user", (text,)))

    def call(self, calls: Sequence[Call], reason: str, content: str = "") -> None:
        """Add the calls of one reply; `reason` stands in front of the plan of the calls."""
        plan = ", then ".join(call.plan for call in calls)
        made = []
        for call in calls:
            self._num_calls += 1
            made.append(call.message_call(self._num_calls))
            self.keys.append(call.key)
        self._messages.append(
            Message(
                "assistant",
                (content,) if content else (),
                reasoning=self._thought(f"{reason} I call {plan}."),
                tool_calls=tuple(made),
            )
        )

    def results(self, calls: Sequence[Call]) -> list[Result]:
        """Run the calls of the last reply and add what they gave."""
        results = [call.run(self.random) for call in calls]
        first = self._num_calls - len(calls) + 1
        for number, result in enumerate(results, first):
            message = Message("tool", (result.text,), tool_call_id=f"call_{number}")
            self._messages.append(message)
        return results

    def answer(self, results: Sequence[Result]) -> None:
        """Add the reply that says what the results are."""
        noun = "result" if len(results) == 1 else "results"
        self.say(" ".join(result.answer for result in results), f"I have the {noun}. I answer.")

    def say(self, text: str, reasoning: str) -> None:
        """Add a reply of text."""
        self._messages.append(Message("assistant", (text,), reasoning=self._thought(reasoning)))

    def exchange(self, text: str, calls: Sequence[Call]) -> list[Result]:
        """Add a question, its calls, their results and the answer."""
        self.ask(text)
        self.call(calls, self.wanted(calls))
        results = self.results(calls)
        self.answer(results)
        return results

    def wanted(self, calls: Sequence[Call]) -> str:
        """Return the sentence that says what the user wants."""
        return f"The user wants {joined([call.goal for call in calls])}."

    def example(self, task: str, key: str = "", *, required: bool = False) -> Example:
        """Return the example; its key is that of the calls, and what is given."""
        tools: tuple[Tool, ...] = tuple(each.tool for each in self.offers)
        conversation = Conversation(
            tuple(self._messages),
            thinking=self.thinking,
            reasoning_effort=self._effort() if self.thinking else None,
            tools=tools,
            tool_choice="required" if required else "auto",
        )
        keys = [*self.keys, key] if key else self.keys
        return Example(task, " ".join(keys), conversation)

    def _effort(self) -> str:
        return "high" if self.random.random() < 0.8 else self.random.choice(("low", "max"))

    def _thought(self, reasoning: str) -> str | None:
        return reasoning if self.thinking else None


def fitting(draw: Draw) -> Draw:
    """Return the draw of what `draw` gives, with too long ones drawn again."""

    def draw_fitting(random: Random) -> Example:
        example = draw(random)
        while len(spelled(example.conversation)) > MAX_CHARS:
            example = draw(random)
        return example

    return draw_fitting


def draw_offers(random: Random, intents: Sequence[Intent], count: int) -> list[Offer]:
    """Declare these intents and others, `count` in all, in random order."""
    chosen = list(intents)
    while len(chosen) < count:
        other = random.choice(INTENTS)
        if other not in chosen:
            chosen.append(other)
    random.shuffle(chosen)
    return offer(random, chosen)


def single_question(random: Random, offered: Offer) -> tuple[str, Call]:
    """Return a question that calls for one call, and the call."""
    intent = offered.intent
    arguments = intent.draw(random)
    text = random.choice(intent.asks).format(**intent.words(random, arguments))
    return text, Call(offered, arguments)


def varied(random: Random, intent: Intent, arguments: Arguments) -> Arguments:
    """Return the arguments with a new value of the slot that follow-ups change."""
    slot = intent.slot(intent.vary)
    value = slot.make(random)
    while value in arguments.values():
        value = slot.make(random)
    return {**arguments, slot.key: value}
