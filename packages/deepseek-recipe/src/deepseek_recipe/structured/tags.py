"""Structural tags: free text in which certain beginnings lead into JSON that a schema rules.

    {"structures": [{"begin": "<call=add>", "schema": {...}, "end": "</call>"}, ...],
     "triggers": ["<call="]}

Text is free up to the first trigger. Behind it one of the structures follows whose `begin` starts
with the trigger: the rest of its `begin`, JSON, its `end`. Then text is free again; it may end
wherever it is free.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.json_text import load
from deepseek_recipe.structured.lowered import Lowered, quoted
from deepseek_recipe.structured.schema import check_schema
from deepseek_recipe.structured.schema.document import Document
from deepseek_recipe.structured.schema.expander import Expander
from deepseek_recipe.structured.schema.grammar_text import Rules
from deepseek_recipe.structured.schema.writer import Writer, contradiction

__all__ = ["lower_tags"]

_MAX_STRUCTURES = 256
_IN_NUMBERS = frozenset("0123456789+-.eE")
_MEMBERS = {"type", "structures", "triggers"}


def lower_tags(content: str) -> Lowered:
    """Return the grammar of structural tags, given as JSON text.

    Raises:
        ConstraintError: they are malformed, or a schema cannot be enforced; `path` is a JSON
            pointer.
    """
    structures, triggers = _read(content)
    rules = Rules()
    start, tail = rules.new(), rules.new()
    either = "|".join(map(quoted, triggers))
    ahead = f"~/[\\s\\S]*(?:{either})[\\s\\S]+/"  # the first trigger is the end of it
    rules.add(tail, rules.terminal(f"/[\\s\\S]+/ & ~/[\\s\\S]*(?:{either})[\\s\\S]*/"))
    rules.add(tail)
    rules.add(start, tail)
    tags = {trigger: rules.new() for trigger in triggers}
    for trigger, tag in tags.items():
        rules.add(start, rules.terminal(f"/[\\s\\S]*{quoted(trigger)}/ & {ahead}"), tag, start)
    warnings: list[str] = []
    written: list[tuple[int, str, Expander]] = []
    for number, structure in enumerate(structures):
        begin, schema, end = structure["begin"], structure["schema"], structure["end"]
        assert isinstance(begin, str) and isinstance(end, str), "checked when read"
        trigger = _trigger_of(begin, triggers, number)
        try:
            check_schema(schema)
            expander = Expander(Document(schema))
            writer = Writer(rules, expander)
            value = writer.rule(expander.node(expander.document.root()))
            writer.finish()
        except ConstraintError as error:
            raise _inside(number, error) from error
        rest = [f"/{quoted(text)}/" for text in (begin[len(trigger) :], end)]
        before, behind = ((rules.terminal(each),) if each != "//" else () for each in rest)
        rules.add(tags[trigger], *before, value, *behind)
        warnings += [f"/structures/{number}/schema{each}" for each in expander.warnings]
        written.append((number, value, expander))
    ending = rules.ending()
    for number, value, expander in written:
        if value not in ending:
            raise _inside(number, contradiction(expander))
    text = rules.text(start)
    assert text is not None, "free text alone is enough"
    return Lowered(text, tuple(warnings))


def _read(content: str) -> tuple[list[Mapping[str, JsonValue]], list[str]]:
    try:
        tags = load(content)
    except (ValueError, RecursionError) as error:
        raise ConstraintError("", f"the tags are not JSON: {error}.") from error
    allowed = 'an object with "structures" and "triggers"'
    if not isinstance(tags, dict):
        raise ConstraintError("", f"the tags are {shown(tags)}; allowed: {allowed}.")
    for key in tags:
        if key not in _MEMBERS:
            raise ConstraintError("", f"unknown member {shown(key)}; allowed: {allowed}.")
    structures, triggers = tags.get("structures"), tags.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= _MAX_STRUCTURES:
        raise ConstraintError(
            "/structures",
            f"{shown(structures)}; allowed: a list of 1 to {_MAX_STRUCTURES} objects with "
            '"begin", "schema" and "end".',
        )
    if not isinstance(triggers, list) or not triggers:
        raise ConstraintError(
            "/triggers", f"{shown(triggers)}; allowed: a list of one text or more."
        )
    for number, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            raise ConstraintError(
                f"/triggers/{number}", f"{shown(trigger)}; allowed: a text that is not empty."
            )
    for number, structure in enumerate(structures):
        _check_structure(structure, f"/structures/{number}")
    return structures, list(dict.fromkeys(triggers))


def _check_structure(structure: JsonValue, path: str) -> None:
    if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
        raise ConstraintError(
            path, f'{shown(structure)}; allowed: an object with "begin", "schema" and "end" alone.'
        )
    if isinstance(structure["end"], str) and structure["end"][:1] in _IN_NUMBERS:
        raise ConstraintError(
            f"{path}/end",
            f"{shown(structure['end'])} begins like the rest of a number, so that it could not be "
            "told from one; allowed: a text that does not begin with a digit, a sign, `.` or `e`.",
        )
    for name in ("begin", "end"):
        if not isinstance(structure[name], str):
            raise ConstraintError(f"{path}/{name}", f"{shown(structure[name])}; allowed: a text.")


def _trigger_of(begin: str, triggers: list[str], number: int) -> str:
    """Return the trigger that is complete first in a begin, which must start with it."""
    found = [(at + len(each), -at, each) for each in triggers if (at := begin.find(each)) >= 0]
    first = min(found, default=None)
    if first is None or first[1]:
        raise ConstraintError(
            f"/structures/{number}/begin",
            f"{shown(begin)} starts with no trigger, so it could never follow; allowed: one that "
            f"starts with {', '.join(map(shown, triggers[:8]))} and holds no other trigger before "
            "its end.",
        )
    return first[2]


def _inside(number: int, error: ConstraintError) -> ConstraintError:
    return ConstraintError(f"/structures/{number}/schema{error.path}", error.message)
