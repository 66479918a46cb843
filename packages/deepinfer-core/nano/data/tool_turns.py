"""Use of tools over several turns: later calls need what earlier ones were given or gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from deepseek_recipe.conversation import JsonValue
from nano.data.catalogue import Call, Offer, Result
from nano.data.dialogue import (
    INTENTS,
    Dialogue,
    draw_offers,
    fitting,
    intent_named,
    single_question,
    varied,
)
from nano.data.example import Draw, Example
from nano.data.tools import draw_question

__all__ = ["LINKS", "TASKS", "Link"]


@dataclass(frozen=True)
class Link:
    """How a call leads to another one.

    Attributes:
        carried: slots of the target -> the argument or result field of the source it comes from.
        follow: what the user says after the answer to the source.
        chain: questions that need both calls at once.
        goal: what such a question wants; completes `The user wants`.
    """

    source: str
    target: str
    carried: Mapping[str, str]
    follow: tuple[str, ...]
    chain: tuple[str, ...] = ()
    goal: str = ""


LINKS: tuple[Link, ...] = (
    Link(
        "find_user",
        "list_orders",
        {"user_id": "user_id"},
        ("Which orders does this user have?", "List their orders.", "And the orders?"),
        (
            "Which orders does {name} have?",
            "Show me the orders of {name}.",
            "List what {name} has ordered.",
            "I need all orders of the user {name}.",
        ),
        "the orders of {name}",
    ),
    Link(
        "find_user",
        "send_email",
        {"to": "email"},
        (
            'Send them an e-mail with the subject "{subject}".',
            'Write to this user, subject "{subject}".',
        ),
        (
            'Send {name} an e-mail with the subject "{subject}".',
            'Write an e-mail to {name}, subject "{subject}".',
            'Look up {name} and mail them. The subject is "{subject}".',
        ),
        "to send an e-mail to {name}",
    ),
    Link(
        "list_orders",
        "get_order",
        {"order_id": "last_order"},
        (
            "What about the last one?",
            "Check that order.",
            "And how is that order doing?",
        ),
        (
            "What is the status of the last order of user {user_id}?",
            "Check the last order of user {user_id}.",
            "How is the last order of customer {user_id} doing?",
        ),
        "the status of the last order of user {user_id}",
    ),
    Link(
        "list_orders",
        "cancel_order",
        {"order_id": "last_order"},
        ("Cancel the last one.", "Please cancel that order."),
        ("Cancel the last order of user {user_id}.", "User {user_id} takes back the last order."),
        "to cancel the last order of user {user_id}",
    ),
    Link(
        "get_order",
        "track_parcel",
        {"tracking": "tracking"},
        ("Where is the parcel now?", "Where is it?", "Track the parcel, please."),
        (
            "Where is the parcel of order {order_id}?",
            "Track the parcel of order {order_id}.",
            "In which city is the parcel of my order {order_id}?",
        ),
        "the place of the parcel of order {order_id}",
    ),
    Link(
        "get_order",
        "cancel_order",
        {"order_id": "order_id"},
        ("Cancel it.", "Please cancel that order.", "I do not want it any more."),
    ),
    Link(
        "create_ticket",
        "assign_ticket",
        {"ticket_id": "ticket_id"},
        ("Assign it to {assignee}.", "Give it to {assignee}.", "{assignee} takes it."),
        (
            'Open a ticket "{title}", priority {priority}, and assign it to {assignee}.',
            'Report "{title}" with {priority} priority. {assignee} takes the ticket.',
        ),
        "a ticket of {priority} priority for {assignee}",
    ),
    Link(
        "search_products",
        "add_to_cart",
        {"product": "product"},
        (
            "Put {quantity} of them into the cart.",
            "I take {quantity}.",
            "Add {quantity} of it.",
        ),
        (
            "Find a {query} and put {quantity} of the first hit into the cart.",
            "Search for a {query} and add {quantity} to my cart.",
        ),
        "{quantity} of a {query} in the cart",
    ),
    Link(
        "search_flights",
        "book_flight",
        {"flight": "flight"},
        ("Book it for {passenger}.", "Reserve it for {passenger}.", "{passenger} takes it."),
        (
            "Find a flight from {origin} to {destination} on {date} and book it for {passenger}.",
            "{passenger} must fly from {origin} to {destination} on {date}. Find a flight and "
            "book it.",
        ),
        "a flight from {origin} to {destination} for {passenger}",
    ),
    Link(
        "search_flights",
        "get_weather",
        {"city": "destination"},
        ("And the weather at the destination?", "How is the weather where I land?"),
    ),
    Link(
        "find_hotel",
        "book_hotel",
        {"hotel": "hotel"},
        (
            "Book it for {guest} from {date} for {nights} nights.",
            "{guest} takes it for {nights} nights from {date}.",
        ),
        (
            "Find a hotel in {city} and book it for {guest} from {date} for {nights} nights.",
            "{guest} needs a hotel in {city} for {nights} nights from {date}. Find and book it.",
        ),
        "a hotel in {city} for {guest}",
    ),
    Link(
        "find_hotel",
        "get_weather",
        {"city": "city"},
        ("How is the weather there?", "And the weather in that city?"),
    ),
    Link(
        "get_weather",
        "get_time",
        {"city": "city"},
        ("And what time is it there?", "How late is it there?", "What is the time there?"),
    ),
    Link(
        "get_time",
        "get_weather",
        {"city": "city"},
        ("How is the weather there?", "And the weather there?", "What is the weather like there?"),
    ),
    Link(
        "track_parcel",
        "get_weather",
        {"city": "location"},
        ("How is the weather there?", "And the weather at that place?"),
        ("How is the weather where parcel {tracking} is?",),
        "the weather where parcel {tracking} is",
    ),
    Link(
        "read_file",
        "delete_file",
        {"path": "path"},
        ("Delete it.", "Delete that file.", "I do not need the file any more, remove it."),
    ),
    Link(
        "read_file",
        "create_note",
        {"text": "content"},
        ("Save that as a note.", "Note that down.", "Make a note of it."),
        ("Save what {path} says as a note.", "Make a note of the content of {path}."),
        "a note of what {path} says",
    ),
    Link(
        "create_event",
        "cancel_event",
        {"event_id": "id"},
        ("Cancel it again.", "Sorry, remove it.", "No, take that event out again."),
    ),
    Link(
        "current_user",
        "find_user",
        {"name": "user"},
        ("What is the id of that user?", "Look up that user."),
        ("What is the user id of whoever is logged in?", "Look up the user who is logged in."),
        "the id of the current user",
    ),
    Link(
        "set_temperature",
        "switch_light",
        {"room": "room"},
        ("And turn the light {on} there.", "Switch the light {on} there, too."),
    ),
    Link(
        "read_sensor",
        "set_temperature",
        {"degrees": "value"},
        ("Set the {room} to that value.", "The {room} should have as many degrees."),
        ("Set the {room} to the degrees that sensor {sensor} says.",),
        "the value of sensor {sensor} in the {room}",
    ),
    Link(
        "stock_price",
        "convert_currency",
        {"amount": "price"},
        (
            "The price is in {source}. How much is it in {target}?",
            "Convert the price from {source} to {target}.",
        ),
    ),
)


class _Turns:
    """A dialogue that may stop at its last call instead of the answer to it."""

    def __init__(self, random: Random, offers: list[Offer]) -> None:
        self.random = random
        self.dialogue = Dialogue(random, offers)
        self._offers = {each.intent.key: each for each in offers}
        self._ends_with_call = random.random() < 0.4

    def offered(self, key: str) -> Offer:
        return self._offers[key]

    def exchange(self, text: str, call: Call, *, last: bool) -> Result | None:
        """Add one question, and its answer; return None where the dialogue is over."""
        self.dialogue.ask(text)
        return self._carry_out(call, self.dialogue.wanted([call]), last=last)

    def follow(self, link: Link, call: Call, result: Result, *, last: bool) -> _Made | None:
        """Add what follows from an exchange."""
        after = self._linked(link, call, result)
        words = {**_words(call), **_words(after)}
        text = self.random.choice(link.follow).format(**words)
        following = self.exchange(text, after, last=last)
        return None if following is None else _Made(after, following)

    def chain(self, link: Link, *, last: bool) -> _Made | None:
        """Add a question that needs two calls, one after the other."""
        source, target = self.offered(link.source), self.offered(link.target)
        first = Call(source, source.intent.draw(self.random, {}))
        fresh = target.intent.draw(self.random, dict.fromkeys(link.carried, ""))
        fresh = {key: value for key, value in fresh.items() if key not in link.carried}
        words = {**_words(first), **_words(Call(target, fresh))}
        self.dialogue.ask(self.random.choice(link.chain).format(**words))
        self.dialogue.call([first], f"The user wants {link.goal.format(**words)}.")
        [result] = self.dialogue.results([first])
        if not result.values:
            self.dialogue.answer([result])
            return None
        call = self._linked(link, first, result, fresh)
        [(_, key)] = link.carried.items()
        reason = f"The {result.names[key]} is {result.values[key]}."
        if target.intent.slot(next(iter(link.carried))).long:
            reason = f"I have the {result.names[key]}."
        following = self._carry_out(call, reason, last=last)
        return None if following is None else _Made(call, following)

    def _linked(
        self,
        link: Link,
        call: Call,
        result: Result,
        fresh: Mapping[str, JsonValue] | None = None,
    ) -> Call:
        known = {**call.arguments, **result.values}
        carried = {slot: known[key] for slot, key in link.carried.items()}
        target = self.offered(link.target)
        return Call(target, target.intent.draw(self.random, {**carried, **(fresh or {})}))

    def _carry_out(self, call: Call, reason: str, *, last: bool) -> Result | None:
        self.dialogue.call([call], reason)
        if last and self._ends_with_call:
            return None
        [result] = self.dialogue.results([call])
        self.dialogue.answer([result])
        return result if result.values else None


@dataclass(frozen=True)
class _Made:
    """A call and what it gave."""

    call: Call
    result: Result


def _words(call: Call) -> dict[str, str]:
    intent = call.offer.intent
    return {
        slot.key: slot.say(call.arguments[slot.key])
        for slot in intent.slots
        if slot.key in call.arguments
    }


def _repeated(random: Random) -> Example:
    """The same again, once or twice, with one value changed."""
    intent = random.choice([each for each in INTENTS if each.again])
    turns = _Turns(random, draw_offers(random, (intent,), random.choice((1, 2, 2, 3))))
    offered = turns.offered(intent.key)
    if intent.several and random.random() < 0.2:
        text, calls = draw_question(random, [offered])
        turns.dialogue.exchange(text, calls)
        call = calls[-1]
    else:
        text, call = single_question(random, offered)
        turns.exchange(text, call, last=False)
    num_repeats = random.choice((1, 1, 2))
    for number in range(num_repeats):
        call = Call(offered, varied(random, intent, call.arguments))
        text = random.choice(intent.again).format(**_words(call))
        turns.exchange(text, call, last=number == num_repeats - 1)
    return turns.dialogue.example("tool_turns")


def _linked_turns(random: Random) -> Example:
    """A call that follows from another one, and perhaps a third one."""
    link = random.choice(LINKS)
    more = [each for each in LINKS if each.source == link.target and each.target != link.source]
    after = random.choice(more) if more and random.random() < 0.4 else None
    keys = dict.fromkeys((link.source, link.target, *([after.target] if after else [])))
    intents = [intent_named(key) for key in keys]
    count = len(intents) + (len(intents) < 3 and random.random() < 0.5)
    turns = _Turns(random, draw_offers(random, intents, count))
    made: _Made | None
    if link.chain and random.random() < 0.5:
        made = turns.chain(link, last=after is None)
    else:
        text, call = single_question(random, turns.offered(link.source))
        result = turns.exchange(text, call, last=False)
        made = turns.follow(link, call, result, last=after is None) if result else None
    if made and after:
        turns.follow(after, made.call, made.result, last=True)
    return turns.dialogue.example("tool_turns")


def _tool_turns(random: Random) -> Example:
    return _repeated(random) if random.random() < 0.3 else _linked_turns(random)


TASKS: dict[str, tuple[Draw, float]] = {"tool_turns": (fitting(_tool_turns), 0.12)}
