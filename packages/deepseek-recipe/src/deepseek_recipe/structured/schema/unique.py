"""Arrays without a value twice: which values there are, and the grammar that crosses them off.

The mask engine lets a rule carry a number of 64 bits: bit k says that value k is there already. So
one rule stands for all 2**64 sets of values, and only those that a text meets are ever made.
"""

from __future__ import annotations

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.expander import Expander
from deepseek_recipe.structured.schema.grammar_text import MARKS, SEPARATOR
from deepseek_recipe.structured.schema.scalars import value_terminal
from deepseek_recipe.structured.schema.shapes import Boolean, Node, Null, Number, String

__all__ = ["MAX_UNIQUE", "unique_symbol", "value_terminals"]

MAX_UNIQUE = 64  # bits of the engine's number


def value_terminals(expander: Expander, node: Node, path: str) -> list[str]:
    """Return the terminal of every value of a node, each once; equal values have equal ones.

    Raises:
        ConstraintError: they are not few scalars.
    """
    values: list[bool | float | str | None] = []
    for shape in expander.of_node(node):
        match shape:
            case Null():
                values.append(None)
            case Boolean():
                values += sorted(shape.values)
            case Number(values=listed) if listed is not None:
                values += listed
            case String(values=texts, formats=()) if texts is not None:
                values += texts
            case Number(kind="integer", low=low, high=high) if (
                low is not None and high is not None and high - low < MAX_UNIQUE
            ):
                values += [each for each in range(int(low), int(high) + 1) if shape.holds(each)]
            case _:
                raise ConstraintError(
                    path,
                    "`uniqueItems` is enforced for items whose values are listed: an `enum` of "
                    f"scalars, or integers between limits, up to {MAX_UNIQUE}. List them in "
                    "`items`, or leave `uniqueItems` out.",
                )
    return list(dict.fromkeys(map(value_terminal, values)))


def unique_symbol(terminals: list[str], low: int, high: int | None) -> str | None:
    """Return the symbol of what follows the `[` of an array of different values.

    Args:
        terminals: the values, at most `MAX_UNIQUE`.
        low, high: bounds of the number of items.

    Returns:
        The symbol, None if no array is so long.
    """
    num_values = len(terminals)
    most = num_values if high is None else min(high, num_values)
    if low > most:
        return None
    # a condition may name no number above 63, so that the whole set is asked for in other words
    enough = f"is_ones([0:{num_values}])" if low == num_values else f"bit_count_ge(_, {low})"
    free = (
        "bit_clear({})" if most == num_values else f"and(bit_clear({{}}), bit_count_lt(_, {most}))"
    )
    first = ["CLOSE"] if low == 0 else []
    later = [f"CLOSE %if {enough}"]
    lines = []
    for bit, terminal in enumerate(terminals):
        first.append(f"VALUE_{bit} later::{1 << bit:#x}")
        later.append(f"{SEPARATOR} VALUE_{bit} later::set_bit({bit}) %if {free.format(bit)}")
        lines.append(f"VALUE_{bit}: {terminal}")
    lines = [
        f"start: {' | '.join(first)}",
        f"later::_: {' | '.join(later)}",
        f"CLOSE: {MARKS['CLOSE_ARRAY']}",
        f"{SEPARATOR}: {MARKS[SEPARATOR]}",
        *lines,
    ]
    return "%lark {\n" + "\n".join(lines) + "\n}"
