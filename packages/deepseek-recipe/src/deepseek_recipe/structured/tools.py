"""Tool calls as a grammar: DSML by token id, arguments of `strict` tools by their schemas.

What the mark's token stands for cannot be spelled by text, and text of a grammar never becomes the
mark: so names and values need no escaping, and `</` inside a value ends nothing. The mark is
`<[ID]>` here. One call, in the words of V4.1:

    <MARK invoke name="NAME">
    <MARK parameter name="KEY" string="true">TEXT</MARK parameter>
    <MARK parameter name="KEY" string="false">JSON</MARK parameter>
    </MARK invoke>

A string is written as it is, every other value as JSON. A `strict` tool has its parameters in the
order of the schema; another tool any parameters, with values of either form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.structured.lowered import Lowered, quoted
from deepseek_recipe.structured.schema import check_schema
from deepseek_recipe.structured.schema.document import Document
from deepseek_recipe.structured.schema.expander import Expander
from deepseek_recipe.structured.schema.grammar_text import Rules
from deepseek_recipe.structured.schema.raw import ANY_TEXT, raw_terminal
from deepseek_recipe.structured.schema.shapes import Node, Object, String
from deepseek_recipe.structured.schema.writer import Writer, contradiction

__all__ = ["CallMarkup", "CalledTool", "lower_calls"]

_ANY_BYTE = bytes(range(256))
# Anything but the quote that ends it; a line feed there is never meant.
_ANY_KEY = r'/[^"\n\r]{1,256}" string="/'
_NO_STRING = {"type": ["null", "boolean", "number", "array", "object"]}


@dataclass(frozen=True)
class CallMarkup:
    """What a checkpoint writes around calls.

    Attributes:
        mark: id of the token inside `<...>`.
        block, invoke, parameter: the words behind it, with the space that V4.1 has before them.
        empty_call: what stands inside a call without parameters.
    """

    mark: int
    block: str
    invoke: str
    parameter: str
    empty_call: str


@dataclass(frozen=True)
class CalledTool:
    """A tool that may be called; `parameters` is the schema of its arguments if that is enforced.

    The schema is None where any arguments will do.
    """

    name: str
    parameters: JsonValue = None


def lower_calls(
    tools: Sequence[CalledTool], markup: CallMarkup, *, opened: bool, several: bool
) -> Lowered:
    """Return the grammar of a block of calls, from behind its beginning to its end.

    Args:
        tools: one or more, of different names.
        opened: the prompt has opened the block; else the text begins behind the mark of the tag
            that opens it.
        several: more than one call is allowed.

    Raises:
        ConstraintError: a schema cannot be enforced; the message names the tool.
    """
    writer = _CallWriter(markup)
    call = writer.call(tools)
    rules = writer.rules
    start, more = rules.new(), rules.new()
    head = () if opened else (writer.text(f"{markup.block}>\n"),)
    rules.add(start, *head, call, more)
    rules.add(more, *writer.tag("</"), writer.text(f"{markup.block}>"))
    if several:
        rules.add(more, call, more)
    text = rules.text(start)
    assert text is not None, "every tool was checked to have arguments"
    return Lowered(text, tuple(writer.warnings))


class _CallWriter:
    """Rules of calls."""

    def __init__(self, markup: CallMarkup) -> None:
        self.rules = Rules()
        self.warnings: list[str] = []
        self._markup = markup

    def text(self, text: str) -> str:
        """Return the symbol of a fixed text."""
        return self.rules.terminal(f"/{quoted(text)}/")

    def tag(self, opening: str) -> tuple[str, str]:
        """Return the symbols of `<` or `</` and the mark."""
        return self.text(opening), f"<[{self._markup.mark}]>"

    def call(self, tools: Sequence[CalledTool]) -> str:
        """Return the rule of one call to any of the tools."""
        markup, rules = self._markup, self.rules
        which = rules.new()
        strict: list[tuple[CalledTool, str, Expander]] = []
        for tool in tools:
            if tool.parameters is None:
                arguments = self._any_arguments()
            else:
                try:
                    arguments, expander = self._arguments(tool.parameters)
                except ConstraintError as error:
                    raise _of_tool(tool, error) from error
                strict.append((tool, arguments, expander))
                self.warnings += [f"tool {tool.name}: {each}" for each in expander.warnings]
            rules.add(which, self.text(f'{tool.name}">\n'), arguments)
        ending = rules.ending()
        for tool, arguments, expander in strict:
            if arguments not in ending:
                raise _of_tool(tool, contradiction(expander))
        call = rules.new()
        begin = (*self.tag("<"), self.text(f'{markup.invoke} name="'))
        rules.add(call, *begin, which, *self.tag("</"), self.text(f"{markup.invoke}>\n"))
        return call

    def _arguments(self, parameters: JsonValue) -> tuple[str, Expander]:
        """Return the rule of arguments that follow a schema, and what reads the schema."""
        check_schema(parameters)
        try:
            expander = Expander(Document(parameters))
            return self._strict_arguments(expander), expander
        except RecursionError as error:
            raise ConstraintError("", "schemas are nested too deeply; use flatter ones") from error

    def _any_arguments(self) -> str:
        rules = self.rules
        rule, more, parameter = rules.new(), rules.new(), rules.new()
        text = (self.text('true">'), rules.terminal(ANY_TEXT))
        value = (self.text('false">'), rules.json(_NO_STRING), self.text("</"))
        for form in (text, value):
            rules.add(parameter, *self._key(rules.terminal(_ANY_KEY)), *form, *self._close())
        self._add_empty(rule)
        rules.add(rule, parameter, more)
        rules.add(more)
        rules.add(more, parameter, more)
        return rule

    def _strict_arguments(self, expander: Expander) -> str:
        rules, writer = self.rules, Writer(self.rules, expander)
        root = expander.node(expander.document.root())
        rule = rules.new()
        for shape in expander.of_node(root):
            if isinstance(shape, Object):
                _check_closed(expander, shape, expander.place(root))
                self._write_object(rule, writer, shape)
        writer.finish()
        return rule

    def _write_object(self, rule: str, writer: Writer, shape: Object) -> None:
        """Add the calls that an object allows, from its last parameter to its first."""
        rules, expander = self.rules, writer.expander
        names = dict.fromkeys(name for family in shape.families for name, _ in family.named)
        some, none = rules.new(), rules.new()  # what may follow behind a parameter, and behind none
        rules.add(some)
        self._add_empty(none)
        for name in reversed(names):
            node = expander.member(shape, name)
            before_some, before_none = rules.new(), rules.new()
            if expander.lives(node):
                parameter = self._parameter(name, node, writer)
                rules.add(before_some, parameter, some)
                rules.add(before_none, parameter, some)
            if name not in shape.required:
                rules.add(before_some, some)
                rules.add(before_none, none)
            some, none = before_some, before_none
        rules.add(rule, none)

    def _parameter(self, name: str, node: Node, writer: Writer) -> str:
        rules, expander = self.rules, writer.expander
        path = expander.place(node)
        ending = '" string="'
        if f"{name}{ending}".find(ending) < len(name):
            raise ConstraintError(
                path, f"the name {shown(name)} cannot be told from what follows it; rename it."
            )
        key = self._key(self.text(f'{name}" string="'))
        parameter = rules.new()
        others = []
        for shape in expander.of_node(node):
            if not isinstance(shape, String):
                others.append(shape)
                continue
            terminal = raw_terminal(shape, path)
            if rules.writable(terminal, path, _ANY_BYTE):
                text = (self.text('true">'), rules.terminal(terminal))
                rules.add(parameter, *key, *text, *self._close())
        if others:
            value = rules.new()
            writer.write(value, others, path)
            begin, end = self.text('false">'), self.text("</")
            rules.add(parameter, *key, begin, value, end, *self._close())
        return parameter

    def _key(self, key: str) -> tuple[str, ...]:
        return (*self.tag("<"), self.text(f'{self._markup.parameter} name="'), key)

    def _close(self) -> tuple[str, ...]:
        # behind `</`, with which a value ends
        return f"<[{self._markup.mark}]>", self.text(f"{self._markup.parameter}>\n")

    def _add_empty(self, rule: str) -> None:
        empty = self._markup.empty_call
        self.rules.add(rule, *((self.text(empty),) if empty else ()))


def _check_closed(expander: Expander, shape: Object, path: str) -> None:
    """Refuse objects that markup cannot hold: those with members that no name lists."""
    named = {name for family in shape.families for name, _ in family.named}
    rests: list[Node] = [family.rest for family in shape.families]
    closed = any(not expander.lives(rest) for rest in rests)
    if not closed or any(family.patterns for family in shape.families):
        raise ConstraintError(
            path,
            "arguments may have names that are not listed, which is not enforced; list all in "
            "`properties` and set `additionalProperties` to false.",
        )
    if shape.names or shape.min_len or shape.max_len is not None or set(shape.required) - named:
        raise ConstraintError(
            path,
            "names of arguments are counted or limited beside `properties`, which is not "
            "enforced; leave out `minProperties`, `maxProperties` and `propertyNames`.",
        )


def _of_tool(tool: CalledTool, error: ConstraintError) -> ConstraintError:
    where = f"`{error.path}`: " if error.path else ""
    return ConstraintError(
        error.path, f"the parameters of tool {shown(tool.name)}: {where}{error.message}"
    )
