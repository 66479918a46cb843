"""Units and dates."""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from random import Random

from nano.data.example import Draw, Example
from nano.data.question import ask

__all__ = ["TASKS"]


@dataclass(frozen=True)
class _Pair:
    """Two units, of which the large one is `factor` small ones; all names as in the text."""

    large: str
    large_short: str
    small: str
    small_short: str
    factor: int
    limit: int


# Powers of ten: only zeros are added or taken away.
_DECIMAL = (
    _Pair("meters", "m", "centimeters", "cm", 100, 99),
    _Pair("kilometers", "km", "meters", "m", 1000, 99),
    _Pair("kilograms", "kg", "grams", "g", 1000, 99),
    _Pair("centimeters", "cm", "millimeters", "mm", 10, 999),
    _Pair("liters", "l", "milliliters", "ml", 1000, 99),
)
_LARGE_TO_SMALL = (
    "How many {small} are {n} {large}?",
    "Convert {n} {large} to {small}.",
    "{n} {large_short} in {small_short}?",
    "Convert {n} {large_short} to {small_short}.",
    "What is {n} {large_short} in {small}?",
)
_SMALL_TO_LARGE = (
    "How many {large} are {n} {small}?",
    "Convert {n} {small} to {large}.",
    "{n} {small_short} in {large_short}?",
    "Convert {n} {small_short} to {large_short}.",
    "What is {n} {small_short} in {large}?",
)
_MIXED = (
    "How many {small} are {a} {large} and {b} {small}?",
    "Convert {a} {large_short} {b} {small_short} to {small_short}.",
    "{a} {large_short} {b} {small_short} in {small_short}?",
)
_SIXTY = (
    _Pair("hours", "h", "minutes", "min", 60, 24),
    _Pair("minutes", "min", "seconds", "s", 60, 60),
)
_CELSIUS = (
    "Convert {n} degrees Celsius to Fahrenheit.",
    "What is {n} C in F?",
    "{n} °C in °F?",
    "How many degrees Fahrenheit are {n} degrees Celsius?",
    "Convert {n} °C to Fahrenheit.",
)
_KIB_TO_BYTES = (
    "How many bytes are {n} KiB?",
    "Convert {n} KiB to bytes.",
    "{n} KiB in bytes?",
)
_BYTES_TO_KIB = (
    "How many KiB are {n} bytes?",
    "Convert {n} bytes to KiB.",
    "{n} bytes in KiB?",
)


def _worded(random: Random, wordings: tuple[str, ...], pair: _Pair, **numbers: int) -> str:
    return random.choice(wordings).format(
        large=pair.large,
        large_short=pair.large_short,
        small=pair.small,
        small_short=pair.small_short,
        **numbers,
    )


def _decimal(random: Random) -> Example:
    pair = random.choice(_DECIMAL)
    large = random.randint(1, pair.limit)
    small = large * pair.factor
    to_small, to_large = f"{small} {pair.small_short}", f"{large} {pair.large_short}"
    hint = f"1 {pair.large_short} = {pair.factor} {pair.small_short}."
    if random.random() < 0.5:
        question = _worded(random, _LARGE_TO_SMALL, pair, n=large)
        return ask(random, "units", f"{to_large} down", question, to_small, hint=hint)
    question = _worded(random, _SMALL_TO_LARGE, pair, n=small)
    return ask(random, "units", f"{to_small} up", question, to_large, hint=hint)


def _mixed(random: Random) -> Example:
    pair = random.choice(_DECIMAL)
    large, rest = random.randint(1, 30), random.randint(1, pair.factor - 1)
    question = _worded(random, _MIXED, pair, a=large, b=rest)
    steps = f"{large}*{pair.factor}={large * pair.factor}, +{rest}"
    answer = f"{large * pair.factor + rest} {pair.small_short}"
    return ask(random, "units", f"{large} {pair.large} {rest} down", question, answer, steps=steps)


def _sixty(random: Random) -> Example:
    pair = random.choice(_SIXTY)
    large = random.randint(1, pair.limit)
    small = large * 60
    to_small, to_large = f"{small} {pair.small_short}", f"{large} {pair.large_short}"
    # sixty times is six times and a zero
    if random.random() < 0.5:
        question = _worded(random, _LARGE_TO_SMALL, pair, n=large)
        steps = f"{large}*6={large * 6}, {large}*60={small}"
        return ask(random, "units", question, question, to_small, steps=steps, is_easy=True)
    question = _worded(random, _SMALL_TO_LARGE, pair, n=small)
    steps = f"{small}/10={large * 6}, {large * 6}/6={large}"
    return ask(random, "units", question, question, to_large, steps=steps, is_easy=True)


def _celsius(random: Random) -> Example:
    celsius = 5 * random.randint(-4, 20)
    fifth = celsius // 5
    fahrenheit = 9 * fifth + 32
    question = random.choice(_CELSIUS).format(n=celsius)
    steps = f"{celsius}/5={fifth}, {fifth}*9={9 * fifth}, {9 * fifth}+32={fahrenheit}"
    return ask(random, "units", question, question, f"{fahrenheit} °F", steps=steps, is_easy=True)


def _bytes(random: Random) -> Example:
    kib = random.randint(1, 32)
    size = 1024 * kib
    parts = f"{kib}*1000={1000 * kib}, {kib}*24={24 * kib}"
    if random.random() < 0.5:
        question = random.choice(_KIB_TO_BYTES).format(n=kib)
        steps = f"{parts}, {1000 * kib}+{24 * kib}={size}"
        return ask(random, "units", question, question, f"{size} bytes", steps=steps, is_easy=True)
    question = random.choice(_BYTES_TO_KIB).format(n=size)
    steps = f"{size}={1000 * kib}+{24 * kib}, {1000 * kib}/1000={kib}"
    return ask(random, "units", question, question, f"{kib} KiB", steps=steps, is_easy=True)


def _units(random: Random) -> Example:
    kinds = (_decimal, _mixed, _sixty, _celsius, _bytes)
    draw = random.choices(kinds, (40, 20, 16, 12, 12))[0]
    return draw(random)


_MONTHS = tuple(calendar.month_name)[1:]
_WEEKDAYS = tuple(calendar.day_name)
_TO_WORDS = (
    "Write {date} in words.",
    "Write out the date {date}.",
    "What date is {date}?",
    "Convert {date} to day, month and year.",
)
_TO_ISO = (
    "Write {date} in ISO format.",
    "Convert {date} to YYYY-MM-DD.",
    "ISO date of {date}?",
    "What is {date} as an ISO date?",
)
_NEXT_DAY = (
    "What is the day after {date}?",
    "Which date follows {date}?",
    "{date} plus one day?",
    "What date is one day after {date}?",
)
_DAYS_IN_MONTH = (
    "How many days does {month} {year} have?",
    "How many days are in {month} {year}?",
    "Number of days in {month} {year}?",
)
_LATER = (
    "Today is {day}. What day is it in {n} days?",
    "It is {day}. Which weekday is it {n} days later?",
    "Which day is {n} days after {day}?",
    "What weekday comes {n} days after {day}?",
)


def _year(random: Random) -> int:
    # no century: the rule for leap years stays the one of the four
    return random.choice((random.randint(1950, 1999), random.randint(2001, 2060)))


def _date(random: Random) -> tuple[int, int, int]:
    year, month = _year(random), random.randint(1, 12)
    return year, month, random.randint(1, calendar.monthrange(year, month)[1])


def _iso(year: int, month: int, day: int) -> str:
    return f"{year}-{month:02}-{day:02}"


def _written(random: Random) -> Example:
    year, month, day = _date(random)
    words, iso = f"{day} {_MONTHS[month - 1]} {year}", _iso(year, month, day)
    if random.random() < 0.5:
        question = random.choice(_TO_WORDS).format(date=iso)
        hint = f"Month {month:02} is {_MONTHS[month - 1]}."
        return ask(random, "dates", f"{iso} words", question, words, hint=hint)
    spelled = random.choice((words, f"{_MONTHS[month - 1]} {day}, {year}"))
    question = random.choice(_TO_ISO).format(date=spelled)
    hint = f"{_MONTHS[month - 1]} is month {month:02}."
    return ask(random, "dates", f"{iso} iso", question, iso, hint=hint)


def _next_day(random: Random) -> Example:
    year, month, _ = _date(random)
    day = random.randint(1, 27)  # within the month, whichever it is
    iso = _iso(year, month, day)
    question = random.choice(_NEXT_DAY).format(date=iso)
    return ask(
        random,
        "dates",
        f"{iso} next",
        question,
        _iso(year, month, day + 1),
        hint=f"{day}+1={day + 1}.",
    )


def _days_in_month(random: Random) -> Example:
    year, month = _year(random), random.choice((2, random.randint(1, 12)))
    days = calendar.monthrange(year, month)[1]
    question = random.choice(_DAYS_IN_MONTH).format(month=_MONTHS[month - 1], year=year)
    steps = f"{_MONTHS[month - 1]} always has {days}."
    if month == 2:
        ending, rest = year % 100, year % 4
        kind = "a leap year" if rest == 0 else "no leap year"
        steps = f"{ending:02} mod 4 = {rest}, {kind}."
    return ask(
        random,
        "dates",
        f"{year}-{month:02} days",
        question,
        f"{days} days",
        steps=steps,
        is_easy=True,
    )


def _weekday_later(random: Random) -> Example:
    start, n = random.randrange(7), random.randint(1, 40)
    rest = n % 7
    walk = [_WEEKDAYS[(start + step) % 7] for step in range(rest + 1)]
    question = random.choice(_LATER).format(day=walk[0], n=n)
    steps = f"{n} mod 7 = {rest}. " + ", ".join(f"{day} +{step}" for step, day in enumerate(walk))
    return ask(
        random, "dates", f"{walk[0]} {n} later", question, f"{walk[-1]}.", steps=steps, is_easy=True
    )


def _dates(random: Random) -> Example:
    kinds = (_written, _next_day, _days_in_month, _weekday_later)
    draw = random.choices(kinds, (40, 15, 20, 25))[0]
    return draw(random)


TASKS: dict[str, tuple[Draw, float]] = {
    "units": (_units, 0.04),
    "dates": (_dates, 0.04),
}
