"""Lists of numbers and words, and words letter by letter."""

from __future__ import annotations

from collections import Counter
from random import Random

from nano.data.example import Draw, Example
from nano.data.question import ask
from nano.data.words import WORDS, word

__all__ = ["TASKS"]

# What is thought where thinking is on: what to do.
_HINTS = {
    "ascending": "Sort, smallest first.",
    "descending": "Sort, largest first.",
    "maximum": "Find the largest.",
    "minimum": "Find the smallest.",
    "reverse": "From the last to the first.",
    "count": "Count the items.",
    "first": "Take the first.",
    "last": "Take the last.",
    "unique": "Keep each item once.",
}
_NUMBER_QUESTIONS = {
    "ascending": (
        "Sort these numbers: {items}",
        "Sort in ascending order: {items}",
        "Sort {items} from smallest to largest.",
        "Put these numbers in ascending order: {items}",
        "Order {items} from low to high.",
    ),
    "descending": (
        "Sort these numbers in descending order: {items}",
        "Sort in descending order: {items}",
        "Sort {items} from largest to smallest.",
        "Order {items} from high to low.",
    ),
    "maximum": (
        "What is the largest of {items}?",
        "What is the maximum of {items}?",
        "Find the largest number: {items}",
        "Maximum of {items}",
    ),
    "minimum": (
        "What is the smallest of {items}?",
        "What is the minimum of {items}?",
        "Find the smallest number: {items}",
        "Minimum of {items}",
    ),
    "sum": (
        "What is the sum of {items}?",
        "Add up these numbers: {items}",
        "Sum of {items}",
        "Add {items}.",
    ),
}
_ANY_QUESTIONS = {
    "reverse": (
        "Reverse this list: {items}",
        "Reverse the order of {items}.",
        "Write this list backwards: {items}",
        "List in reverse order: {items}",
    ),
    "count": (
        "How many items are in this list: {items}",
        "Count the items: {items}",
        "How many entries does this list have? {items}",
        "What is the length of the list {items}?",
    ),
    "first": (
        "What is the first item of {items}?",
        "First item of this list: {items}",
        "Give the first entry: {items}",
    ),
    "last": (
        "What is the last item of {items}?",
        "Last item of this list: {items}",
        "Give the last entry: {items}",
    ),
    "unique": (
        "Remove the duplicates: {items}",
        "Remove duplicates from this list: {items}",
        "List each item once, in order: {items}",
        "Drop repeated items: {items}",
    ),
}
_JOIN = (
    "Join these with {name}: {items}",
    "Join {items} with {name}.",
    "Write {items} separated by {name}.",
    "Put {name} between these: {items}",
)
_SEPARATORS = {
    "a dash": "-",
    "a hyphen": "-",
    "a slash": "/",
    "a plus sign": "+",
    "an underscore": "_",
    "a semicolon": ";",
    "a colon": ":",
    "a dot": ".",
    "a vertical bar": "|",
}
# The list itself is written in one of these ways, the answer always in the first.
_FORMS = (("", ", ", ""), ("", ", ", ""), ("[", ", ", "]"), ("", " ", ""))


def _shown(random: Random, items: list[str]) -> str:
    head, between, tail = random.choice(_FORMS)
    return head + between.join(items) + tail


def _numbers(random: Random, low: int, high: int) -> list[int]:
    return random.sample(range(random.choice((10, 100, 100))), random.randint(low, high))


def _number_list(random: Random) -> Example:
    kind = random.choice(tuple(_NUMBER_QUESTIONS))
    numbers = _numbers(random, 3, 6)
    summed = None
    if kind == "sum":
        numbers = [random.randint(1, 9) for _ in range(random.randint(3, 5))]
        total = numbers[0]
        steps = []
        for number in numbers[1:]:
            steps.append(f"{total}+{number}={total + number}")
            total += number
        answer, summed = str(total), ", ".join(steps)
    elif kind == "maximum":
        answer = str(max(numbers))
    elif kind == "minimum":
        answer = str(min(numbers))
    else:
        answer = ", ".join(map(str, sorted(numbers, reverse=kind == "descending")))
    items = list(map(str, numbers))
    question = random.choice(_NUMBER_QUESTIONS[kind]).format(items=_shown(random, items))
    hint = _HINTS.get(kind)
    return ask(random, "lists", f"{kind} {items}", question, answer, steps=summed, hint=hint)


def _some_items(random: Random, low: int, high: int) -> list[str]:
    if random.random() < 0.5:
        return list(map(str, _numbers(random, low, high)))
    return random.sample(WORDS, random.randint(low, high))


def _any_list(random: Random) -> Example:
    kind = random.choice(tuple(_ANY_QUESTIONS))
    items = _some_items(random, 3, 6 if kind != "count" else 9)
    if kind == "reverse":
        answer = ", ".join(reversed(items))
    elif kind == "count":
        answer = str(len(items))
    elif kind == "first":
        answer = items[0]
    elif kind == "last":
        answer = items[-1]
    else:
        for _ in range(random.randint(1, 3)):
            items.insert(random.randint(1, len(items)), random.choice(items))
        answer = ", ".join(dict.fromkeys(items))
    question = random.choice(_ANY_QUESTIONS[kind]).format(items=_shown(random, items))
    return ask(random, "lists", f"{kind} {items}", question, answer, hint=_HINTS[kind])


def _joined(random: Random) -> Example:
    items = _some_items(random, 2, 5)
    name, separator = random.choice(tuple(_SEPARATORS.items()))
    question = random.choice(_JOIN).format(name=name, items=", ".join(items))
    key, answer = f"join {separator} {items}", separator.join(items)
    return ask(random, "lists", key, question, answer, hint=f"Join with {separator}")


def _lists(random: Random) -> Example:
    draw = random.choices((_number_list, _any_list, _joined), (45, 42, 13))[0]
    return draw(random)


_WORD_QUESTIONS = {
    "upper": (
        'Write "{word}" in uppercase.',
        "Write {word} in capital letters.",
        "Uppercase: {word}",
        'Convert "{word}" to uppercase.',
    ),
    "lower": (
        'Write "{word}" in lowercase.',
        "Write {word} in small letters.",
        "Lowercase: {word}",
        'Convert "{word}" to lowercase.',
    ),
    "reverse": (
        'Reverse the word "{word}".',
        "Spell {word} backwards.",
        "Reverse: {word}",
        'What is "{word}" backwards?',
    ),
    "length": (
        'How many letters are in "{word}"?',
        "How many letters does {word} have?",
        "Count the letters of {word}.",
        'What is the length of the word "{word}"?',
    ),
    "first": (
        'What is the first letter of "{word}"?',
        "First letter of {word}?",
        "Which letter does {word} begin with?",
    ),
    "last": (
        'What is the last letter of "{word}"?',
        "Last letter of {word}?",
        "Which letter does {word} end with?",
    ),
}
_CONCATENATE = (
    'Concatenate "{a}" and "{b}".',
    "Join {a} and {b} into one word.",
    "Write {a} and {b} as one word.",
    "Put {b} directly after {a}.",
)
_OCCURRENCES = (
    'How many times does "{letter}" occur in "{word}"?',
    "How often does {letter} occur in {word}?",
    "Count the letter {letter} in {word}.",
)
_REPLACE = (
    'Replace "{old}" with "{new}" in "{word}".',
    "In {word}, replace {old} with {new}.",
    "Replace every {old} in {word} with {new}.",
)


def _letters(text: str) -> str:
    return " ".join(text)


def _one_word(random: Random) -> Example:
    kind = random.choice(tuple(_WORD_QUESTIONS))
    text = word(random)
    if kind == "upper":
        answer = text.upper()
        steps = f"{_letters(text)} -> {_letters(answer)}"
    elif kind == "lower":
        text, answer = text.upper(), text
        steps = f"{_letters(text)} -> {_letters(answer)}"
    elif kind == "reverse":
        answer = text[::-1]
        steps = f"{_letters(text)} -> {_letters(answer)}"
    elif kind == "length":
        answer = str(len(text))
        steps = ", ".join(f"{letter} {place}" for place, letter in enumerate(text, 1))
    else:
        answer = text[0] if kind == "first" else text[-1]
        steps = _letters(text)
    question = random.choice(_WORD_QUESTIONS[kind]).format(word=text)
    is_easy = kind != "reverse"
    key = f"{kind} {text}"
    return ask(random, "strings", key, question, answer, steps=steps, is_easy=is_easy)


def _concatenated(random: Random) -> Example:
    a, b = word(random), word(random)
    question = random.choice(_CONCATENATE).format(a=a, b=b)
    key, hint = f"concatenate {a} {b}", f"{a} then {b}."
    return ask(random, "strings", key, question, a + b, hint=hint)


def _occurrences(random: Random) -> Example:
    text = word(random)
    letter = random.choice(text if random.random() < 0.8 else "aeiourst")
    seen = 0
    steps = []
    for each in text:
        seen += each == letter
        steps.append(f"{each} {seen}")
    question = random.choice(_OCCURRENCES).format(letter=letter, word=text)
    key = f"occurrences {letter} {text}"
    return ask(random, "strings", key, question, str(seen), steps=", ".join(steps))


def _replaced(random: Random) -> Example:
    text = word(random)
    # the rarest letters make the dullest questions
    letters = Counter(text)
    old = random.choices(tuple(letters), tuple(letters.values()))[0]
    new = random.choice("".join(sorted(set("aeioubdklmnprst") - {old})))
    answer = text.replace(old, new)
    question = random.choice(_REPLACE).format(old=old, new=new, word=text)
    steps = f"{_letters(text)} -> {_letters(answer)}"
    return ask(random, "strings", f"replace {old} {new} {text}", question, answer, steps=steps)


def _strings(random: Random) -> Example:
    kinds = (_one_word, _concatenated, _occurrences, _replaced)
    draw = random.choices(kinds, (60, 12, 14, 14))[0]
    return draw(random)


TASKS: dict[str, tuple[Draw, float]] = {
    "lists": (_lists, 0.06),
    "strings": (_strings, 0.05),
}
