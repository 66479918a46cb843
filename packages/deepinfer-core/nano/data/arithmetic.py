"""Arithmetic: addition with thinking off and on, subtraction, products, comparison, parity."""

from __future__ import annotations

from random import Random

from deepseek_recipe.conversation import Conversation
from nano.data.example import Draw, Example, is_held_out
from nano.data.question import ask

__all__ = ["TASKS"]

# Wording -> whether the answer is the whole equation.
_ADDITION = (
    ("What is {a}+{b}?", False),
    ("What is {a} + {b}?", False),
    ("{a} + {b} =", False),
    ("{a}+{b}=", False),
    ("{a}+{b}", False),
    ("Calculate {a} + {b}.", False),
    ("Compute {a}+{b}", False),
    ("How much is {a} plus {b}?", False),
    ("What is the sum of {a} and {b}?", False),
    ("What's {a} plus {b}?", False),
    ("Add {a} and {b}.", True),
    ("Add {b} to {a}.", True),
    ("Please add {a} and {b}.", True),
    ("Write the equation: {a} + {b}", True),
)
_SUBTRACTION = (
    ("What is {a}-{b}?", False),
    ("What is {a} - {b}?", False),
    ("{a} - {b} =", False),
    ("{a}-{b}", False),
    ("Calculate {a} - {b}.", False),
    ("How much is {a} minus {b}?", False),
    ("What is {a} minus {b}?", False),
    ("Subtract {b} from {a}.", True),
    ("Write the equation: {a} - {b}", True),
)
_PRODUCT = (
    ("What is {a}*{b}?", False),
    ("What is {a} * {b}?", False),
    ("{a} * {b} =", False),
    ("{a}*{b}", False),
    ("Calculate {a} * {b}.", False),
    ("How much is {a} times {b}?", False),
    ("What is {a} times {b}?", False),
    ("Multiply {a} by {b}.", True),
    ("Write the equation: {a} * {b}", True),
)
_LARGER = (
    "Which is larger, {a} or {b}?",
    "Which number is greater: {a} or {b}?",
    "What is the larger of {a} and {b}?",
    "Larger: {a} or {b}?",
)
_SMALLER = (
    "Which is smaller, {a} or {b}?",
    "Which number is less: {a} or {b}?",
    "What is the smaller of {a} and {b}?",
    "Smaller: {a} or {b}?",
)
_GREATER = (
    "Is {a} greater than {b}?",
    "Is {a} larger than {b}?",
    "Is {a} > {b}?",
)
_LESS = ("Is {a} less than {b}?", "Is {a} smaller than {b}?", "Is {a} < {b}?")
_PARITY = (
    "Is {a} even or odd?",
    "Is the number {a} even or odd?",
    "Even or odd: {a}?",
    "Tell me whether {a} is even or odd.",
)

_NOTHING = Conversation((), thinking=False)


def _equation(
    random: Random,
    task: str,
    wordings: tuple[tuple[str, bool], ...],
    numbers: tuple[int, str, int, int],
    steps: str | None = None,
    hint: str | None = None,
) -> Example:
    a, sign, b, result = numbers
    wording, is_whole = random.choice(wordings)
    answer = f"{a} {sign} {b} = {result}" if is_whole else str(result)
    question = wording.format(a=a, b=b)
    return ask(random, task, f"{a}{sign}{b}", question, answer, steps=steps, hint=hint)


def _summands(random: Random) -> tuple[int, int]:
    """Two numbers of two digits, now and then smaller ones."""
    lowest = 0 if random.random() < 0.15 else 10
    return random.randint(lowest, 99), random.randint(lowest, 99)


def _sum_not_of(task: str, random: Random) -> tuple[int, str, int, int]:
    """Draw a sum that the other task of sums does not hold out: it must not be learned here."""
    while True:
        a, b = _summands(random)
        if not is_held_out(Example(task, f"{a}+{b}", _NOTHING)):
            return a, "+", b, a + b


def _column_sum(a: int, b: int) -> str:
    """Think through a sum digit by digit, from the right: `7+8=15, carry 1. 2+5+1=8.`"""
    width = max(len(str(a)), len(str(b)))
    steps = []
    carry = 0
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        terms = f"{x}+{y}" if place == 0 else f"{x}+{y}+{carry}"
        carry = total // 10
        steps.append(f"{terms}={total}" + (f", carry {carry}." if place < width - 1 else "."))
    return f"{' '.join(steps)} So {a + b}."


def _column_difference(a: int, b: int) -> str:
    """Think through a difference of at most two digits: `3<8, borrow. 13-8=5. 5-1-2=2.`"""
    units, tens = (a % 10, b % 10), (a // 10, b // 10)
    if units[0] >= units[1]:
        first, borrow = f"{units[0]}>={units[1]}. {units[0]}-{units[1]}", 0
    else:
        first, borrow = f"{units[0]}<{units[1]}, borrow. 1{units[0]}-{units[1]}", 1
    digit = units[0] + 10 * borrow - units[1]
    rest = tens[0] - borrow - tens[1]
    return f"{first}={digit}. {tens[0]}-{borrow}-{tens[1]}={rest}. So {a - b}."


def _column_product(a: int, b: int) -> str:
    """Think through two digits times one: `4*6=24, carry 2. 3*6=18, 18+2=20. So 204.`"""
    units, tens = a % 10, a // 10
    low, high = units * b, tens * b
    carry = low // 10
    return (
        f"{units}*{b}={low}, carry {carry}. {tens}*{b}={high}, {high}+{carry}={high + carry}. "
        f"So {a * b}."
    )


def _addition2(random: Random) -> Example:
    return _equation(random, "addition2", _ADDITION, _sum_not_of("addition2_think", random))


def _addition2_think(random: Random) -> Example:
    numbers = _sum_not_of("addition2", random)
    steps = _column_sum(numbers[0], numbers[2])
    return _equation(random, "addition2_think", _ADDITION, numbers, steps)


def _addition3(random: Random) -> Example:
    a, b = random.randint(100, 999), random.randint(10, 999)
    return _equation(random, "arithmetic", _ADDITION, (a, "+", b, a + b), _column_sum(a, b))


def _subtraction(random: Random) -> Example:
    b, a = sorted(_summands(random))
    steps = _column_difference(a, b) if random.random() < 0.5 else None
    return _equation(random, "arithmetic", _SUBTRACTION, (a, "-", b, a - b), steps)


def _small_product(random: Random) -> Example:
    a, b = random.randint(0, 10), random.randint(0, 10)
    example = _equation(
        random, "arithmetic", _PRODUCT, (a, "*", b, a * b), hint=f"{a}*{b}={a * b}."
    )
    # the table is to be known by heart, so it is the wording that is new in the evaluation
    question = "".join(map(str, example.conversation.messages[-2].content))
    return Example("arithmetic", question, example.conversation)


def _product(random: Random) -> Example:
    a, b = random.randint(11, 99), random.randint(2, 9)
    return _equation(random, "arithmetic", _PRODUCT, (a, "*", b, a * b), _column_product(a, b))


def _two_numbers(random: Random) -> tuple[int, int]:
    limit = random.choice((99, 99, 999))
    a = random.randint(0, limit)
    # near ones half of the time: there the last digits decide
    b = a
    while b == a:
        if random.random() < 0.5:
            b = random.randint(0, limit)
        else:
            b = max(0, a + random.randint(-12, 12))
    return a, b


def _comparison(random: Random) -> Example:
    a, b = _two_numbers(random)
    kind = random.choice(("larger", "smaller", "greater", "less"))
    if kind == "larger":
        wording, answer = random.choice(_LARGER), str(max(a, b))
    elif kind == "smaller":
        wording, answer = random.choice(_SMALLER), str(min(a, b))
    elif kind == "greater":
        wording, answer = random.choice(_GREATER), "Yes." if a > b else "No."
    else:
        wording, answer = random.choice(_LESS), "Yes." if a < b else "No."
    question = wording.format(a=a, b=b)
    hint = f"{a} > {b}." if a > b else f"{a} < {b}."
    return ask(random, "arithmetic", f"{kind} {a} {b}", question, answer, hint=hint)


def _parity(random: Random) -> Example:
    a = random.randint(0, 9999 if random.random() < 0.3 else 999)
    answer = "Odd." if a % 2 else "Even."
    question = random.choice(_PARITY).format(a=a)
    hint = f"The last digit is {a % 10}."
    return ask(random, "arithmetic", f"parity {a}", question, answer, hint=hint)


_KINDS: tuple[tuple[Draw, int], ...] = (
    (_addition3, 25),
    (_subtraction, 30),
    (_small_product, 8),
    (_product, 15),
    (_comparison, 15),
    (_parity, 7),
)


def _arithmetic(random: Random) -> Example:
    [draw] = random.choices([kind for kind, _ in _KINDS], [chance for _, chance in _KINDS])
    return draw(random)


TASKS: dict[str, tuple[Draw, float]] = {
    "addition2": (_addition2, 0.06),
    "addition2_think": (_addition2_think, 0.05),
    "arithmetic": (_arithmetic, 0.08),
}
