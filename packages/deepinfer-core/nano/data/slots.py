"""What the declarations of several tools share: kinds of values, parameters, result fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from deepseek_recipe.conversation import JsonValue
from nano.data import values as v
from nano.data.catalogue import Arguments, Field, Slot

__all__ = [
    "BOOLEAN",
    "CITY",
    "DATE",
    "ID",
    "INTEGER",
    "NUMBER",
    "ON_OFF",
    "ORDER",
    "PATH",
    "ROOM",
    "STATUS",
    "STRINGS",
    "TIME",
    "calculated",
    "coin",
    "converted",
    "enum",
    "expression",
    "fresh",
    "one",
    "people",
    "symbol",
    "whole",
]

INTEGER: Mapping[str, JsonValue] = {"type": "integer"}
NUMBER: Mapping[str, JsonValue] = {"type": "number"}
BOOLEAN: Mapping[str, JsonValue] = {"type": "boolean"}
STRINGS: Mapping[str, JsonValue] = {"type": "array", "items": {"type": "string"}}


def fresh(make: Callable[[Random], JsonValue]) -> Callable[[Random, Arguments], JsonValue]:
    """Return the maker of a result field that depends on nothing."""
    return lambda random, _: make(random)


def whole(low: int, high: int) -> Callable[[Random], int]:
    """Return the maker of an integer of these bounds."""
    return lambda random: random.randint(low, high)


def one(*choices: str) -> Callable[[Random], str]:
    """Return the maker of one of these texts."""
    return lambda random: random.choice(choices)


def enum(*choices: str) -> Mapping[str, JsonValue]:
    """Return the schema of one of these texts."""
    return {"type": "string", "enum": list(choices)}


def coin(random: Random) -> bool:
    """True or false."""
    return random.random() < 0.5


def people(random: Random) -> list[str]:
    """One to three first names."""
    return v.distinct(random, v.first_name, random.randint(1, 3))


def symbol(random: Random) -> str:
    """The symbol of a stock."""
    return "".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=random.randint(3, 4)))


def expression(random: Random) -> str:
    """A sum, a difference or a product to calculate."""
    sign = random.choice("+-*")
    high = 20 if sign == "*" else 500
    return f"{random.randint(2, high)} {sign} {random.randint(2, high)}"


def calculated(_: Random, arguments: Arguments) -> int:
    """The result of the expression."""
    left, sign, right = str(arguments["expression"]).split(" ")
    a, b = int(left), int(right)
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def converted(random: Random, arguments: Arguments) -> float:
    """The amount in some other currency."""
    amount = arguments["amount"]
    assert isinstance(amount, int | float)
    return round(amount * random.uniform(0.2, 5), 2)


ON_OFF: tuple[tuple[JsonValue, str], ...] = ((True, "on"), (False, "off"))
ID = Field(("id", "reference", "number"), fresh(v.identifier))
STATUS = Field(("status", "state"), lambda random, _: random.choice(("ok", "done")))
CITY = Slot(("city", "location", "place", "town"), v.city, about="Name of the city")
DATE = Slot(("date", "day"), v.date, about="YYYY-MM-DD")
TIME = Slot(("time", "at", "clock_time"), v.clock_time, about="HH:MM")
ROOM = Slot(("room", "area", "zone"), v.room, about="Room of the house")
ORDER = Slot(("order_id", "order", "id"), v.identifier, about="Id of the order")
PATH = Slot(("path", "file", "filename"), v.file_path, about="Path of the file")
