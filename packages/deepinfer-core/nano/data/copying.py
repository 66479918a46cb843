"""Copying what was never seen before: identifiers, numbers, sentences, values far above."""

from __future__ import annotations

from random import Random

from nano.data.example import Draw, Example
from nano.data.question import ask
from nano.data.words import WORDS, made_up_word, word

__all__ = ["TASKS", "identifier"]

_DIGITS = "0123456789"
_HEX = "0123456789abcdef"
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
_UPPER = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_PREFIXES = ("usr", "id", "ord", "tx", "key", "req", "job", "item", "ref", "node", "acc", "doc")
_REPEAT = (
    "Repeat: {text}",
    "Repeat this: {text}",
    "Repeat after me: {text}",
    "Say {text}",
    "Copy this exactly: {text}",
    "Echo: {text}",
    "Write exactly this: {text}",
    "Print {text}",
)
_REPEAT_QUOTED = (
    'Repeat the sentence "{text}"',
    'Say "{text}"',
    'Copy the text "{text}"',
    'Write "{text}"',
    'Repeat verbatim: "{text}"',
)
_TWICE = ("Say {text} twice.", "Repeat {text} two times.", "Write {text} twice.")
_SPELL = (
    "Spell {text}.",
    'Spell the word "{text}".',
    "Spell {text} letter by letter.",
    "How is {text} spelled?",
)
_STARTS = ("The", "A", "This", "That", "One", "My", "Your", "Our")
_VERBS = (
    "sees",
    "likes",
    "finds",
    "follows",
    "holds",
    "needs",
    "brings",
    "opens",
    "draws",
    "wants",
)
_LOOK_UP = (
    "What is the value of {name}?",
    "What is {name}?",
    "Give me the value of {name}.",
    "Which value does {name} have?",
    "Look up {name}.",
    "{name}?",
)
_LOOK_UP_BACK = ("Which name has the value {value}?", "Which entry is {value}?")
_HEADS = ("", "Here is a list:\n", "Settings:\n", "Remember these values:\n", "Data:\n")
_LONGEST_LIST = 40


def _some(random: Random, letters: str, low: int, high: int) -> str:
    return "".join(random.choices(letters, k=random.randint(low, high)))


def identifier(random: Random) -> str:
    """Return an identifier, number or code that means nothing."""
    kind = random.randrange(9)
    if kind == 0:
        return f"{random.choice(_PREFIXES)}_{_some(random, _BASE36, 4, 8)}"
    if kind == 1:
        return f"{random.choice(_PREFIXES)}-{_some(random, _DIGITS, 3, 8)}"
    if kind == 2:
        return "-".join(_some(random, _HEX, n, n) for n in (8, 4, 4, 4, 12))
    if kind == 3:
        area = f"+{random.randint(1, 99)} {random.randint(100, 999)}"
        return f"{area} {_some(random, _DIGITS, 6, 7)}"
    if kind == 4:
        return f"0x{_some(random, _HEX, 2, 10)}"
    if kind == 5:
        return _some(random, "0123456789", 1, 12)
    if kind == 6:
        number = random.randint(10, 9999)
        return f"{_some(random, _UPPER, 2, 3)}-{number}-{_some(random, _UPPER, 1, 2)}"
    if kind == 7:
        return f"{made_up_word(random)}.{made_up_word(random)}@{made_up_word(random)}.com"
    return f"{random.randint(0, 9)}.{random.randint(0, 20)}.{random.randint(0, 99)}"


def _sentence(random: Random) -> str:
    """Return a grammatical sentence without sense."""
    parts = [random.choice(_STARTS), word(random), random.choice(_VERBS), "the", word(random)]
    if random.random() < 0.5:
        parts += ["and", "the", word(random)]
    if random.random() < 0.3:
        parts += ["near", identifier(random)]
    return f"{' '.join(parts)}."


def _repeated(random: Random) -> Example:
    kind = random.random()
    if kind < 0.5:
        text = identifier(random)
        question = random.choice(_REPEAT).format(text=text)
    elif kind < 0.65:
        text = " ".join(word(random) for _ in range(random.randint(2, 7)))
        question = random.choice(_REPEAT).format(text=text)
    else:
        text = _sentence(random)
        question = random.choice(_REPEAT_QUOTED).format(text=text)
    return ask(random, "copying", text, question, text, hint="I copy it.")


def _twice(random: Random) -> Example:
    text = identifier(random) if random.random() < 0.5 else word(random)
    question = random.choice(_TWICE).format(text=text)
    return ask(
        random, "copying", f"twice {text}", question, f"{text} {text}", hint="I copy it twice."
    )


def _spelled(random: Random) -> Example:
    text = word(random) if random.random() < 0.7 else _some(random, _BASE36, 3, 8)
    question = random.choice(_SPELL).format(text=text)
    return ask(
        random, "copying", f"spell {text}", question, "-".join(text), hint="Letter by letter."
    )


def _name(random: Random) -> str:
    kind = random.random()
    if kind < 0.4:
        return random.choice(WORDS)
    if kind < 0.7:
        return made_up_word(random)
    return f"{random.choice(WORDS)}_{random.choice(WORDS)}"


def _looked_up(random: Random) -> Example:
    count = random.randint(2, random.choice((8, 20, _LONGEST_LIST)))
    names = tuple(dict.fromkeys(_name(random) for _ in range(count)))
    # all values differ, so that a value has one name
    values: dict[str, str] = {}
    for name in names:
        value = ""
        while not value or value in values.values():
            value = word(random) if random.random() < 0.3 else identifier(random)
            if len(value) > 30:
                value = ""  # forty of those would not fit a row
        values[name] = value
    lines = "\n".join(f"{name}: {value}" for name, value in values.items())
    name = random.choice(names)
    if random.random() < 0.85:
        wording, answer = random.choice(_LOOK_UP).format(name=name), values[name]
    else:
        wording, answer = random.choice(_LOOK_UP_BACK).format(value=values[name]), name
    question = (
        f"{wording}\n\n{lines}"
        if random.random() < 0.15
        else f"{random.choice(_HEADS)}{lines}\n\n{wording}"
    )
    return ask(random, "copying", f"{lines}\n{answer}", question, answer, hint="I look it up.")


def _copying(random: Random) -> Example:
    kinds = (_repeated, _twice, _spelled, _looked_up)
    draw = random.choices(kinds, (50, 10, 15, 25))[0]
    return draw(random)


TASKS: dict[str, tuple[Draw, float]] = {"copying": (_copying, 0.08)}
