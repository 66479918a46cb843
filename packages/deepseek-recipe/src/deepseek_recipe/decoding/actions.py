"""What the states of a reply do with the text they are given; which state is next is not theirs.

Every action takes the text it is called for and, where the next state depends on it, returns the
name of what was found.
"""

from __future__ import annotations

from deepseek_recipe.decoding.dsml import (
    STRING_ATTRIBUTE,
    Arguments,
    begins_closing_word,
    closes_block,
    is_closing_word,
    kind_of_tag,
    quoted,
)
from deepseek_recipe.decoding.events import (
    Malformed,
    Reasoning,
    Text,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from deepseek_recipe.decoding.json_mode import Prose
from deepseek_recipe.decoding.output import Kind, Output, Waste

__all__ = ["Actions"]

_OUTSIDE = "text in the tool block that belongs to no call"
_NO_CALL_TAG = "a tag that is no part of a tool call"
_KINDS = ('true"', 'false"')
_UNENDED = "a tag that does not end"


class Actions:
    """Turns what was read into events.

    Attributes:
        stop: the stop text that was found.
        num_calls: how many calls were begun.
        call: arguments of the open call.
        prose: the text around a JSON value.
    """

    __slots__ = (
        "_key",
        "_kind",
        "_mode",
        "_out",
        "_tag",
        "_text",
        "_tools",
        "_waste",
        "call",
        "num_calls",
        "prose",
        "stop",
    )

    def __init__(self, output: Output, kind: Kind, *, tools: bool, json: bool) -> None:
        """Begin at the start of the reply.

        Args:
            kind: what the reply begins with.
            tools: a tool block may follow the content, so that newlines at its end must wait.
            json: the content is a JSON value.
        """
        self._mode = "json" if json else "plain"
        self._out = output
        self._kind = kind  # what newlines that wait are a part of
        self._tools = tools
        self._waste = Waste(output)
        self._tag: list[str] = []  # the tag that is being read, as it was
        self._text: list[str] = []  # the name or value that is being read
        self._key = ""
        self.stop: str | None = None
        self.num_calls = 0
        self.call: Arguments | None = None
        self.prose = Prose()

    # -- reasoning and content --------------------------------------------------------------------

    def reasoning(self, text: str) -> None:
        """Pass on reasoning, except newlines at its end."""
        self._out.emit(Reasoning, *self._out.without_newlines(text))

    def end_reasoning(self, text: str) -> str:
        """Drop the newlines in front of the end, and say what kind of content follows."""
        self._out.newlines()
        self._kind = Text
        return self._mode

    def cut_reasoning(self, text: str) -> None:
        """Pass on what was held."""
        self.reasoning(text)
        self.release("")

    def content(self, text: str) -> None:
        """Pass on content, except newlines at its end where they may be dropped."""
        if self._tools:
            self._out.emit(Text, *self._out.without_newlines(text))
        else:
            self._out.emit(Text, text, self._out.position)

    def release(self, text: str) -> None:
        """Pass on the newlines in front of something that is no text."""
        self._out.emit(self._kind, *self._out.newlines())

    def cut_content(self, text: str) -> None:
        """Pass on what was held."""
        self.content(text)
        self.release("")

    def stopped(self, text: str) -> None:
        """Note the stop text."""
        self.release("")
        self.stop = text

    def stray_mark(self, text: str) -> None:
        """Keep a mark that stands alone out of the text."""
        self.release("")
        self._out.malformed(text, "a tool mark outside a tag")

    def stray_tag(self, text: str) -> None:
        """Begin what may become a closing tag."""
        self.release("")
        self._tag.append(text)

    def end_stray_tag(self, text: str) -> None:
        """Keep the closing tag, or the mark that begins none, out of the text."""
        self._out.malformed(self._taken_tag(text), "a closing tag outside the tool block")

    # -- JSON mode --------------------------------------------------------------------------------

    def around(self, text: str) -> None:
        """Replace text around the JSON value, except newlines at its end."""
        if self._tools:
            self._replace(*self._out.without_newlines(text))
        else:
            self._replace(text, self._out.position)

    def release_around(self, text: str) -> None:
        """Replace the newlines in front of something that is no text."""
        self._replace(*self._out.newlines())
        self.prose.piece(self._out.position + len(text))

    def begin_fenced(self, text: str) -> None:
        """End the text in front of the fence."""
        self.release_around(text)
        self._tell_prose()

    def begin_bare(self, text: str) -> None:
        """Begin the JSON value with its first character."""
        self.begin_fenced("")
        self._out.emit(Text, text, self._out.position)

    def end_fenced(self, text: str) -> None:
        """Begin the text behind the fence."""
        self.release("")
        self.prose.piece(self._out.position + len(text))

    def cut_around(self, text: str) -> None:
        """Replace what was held."""
        self.around(text)
        self.begin_fenced("")

    # -- tool block: tags -------------------------------------------------------------------------

    def enter_block(self, text: str) -> None:
        """Begin the block's tag; newlines in front of it are dropped."""
        self._out.newlines()
        self._tell_prose()
        self._tag.append(text)

    def skip(self, text: str) -> None:
        """Pass over the rest of a tag."""

    def waste(self, text: str) -> None:
        """Keep text that fits nowhere."""
        self._waste.add(text, _OUTSIDE)

    def waste_behind(self, text: str) -> None:
        """Keep text that stands behind the block's end."""
        self._waste.add(text, "text behind the tool block")

    def waste_rest(self, text: str) -> None:
        """Keep what a call's tag has besides the name."""
        self._waste.add(text, "more than a name in the tag of a call")

    def tag(self, text: str) -> None:
        """Read on in a tag."""
        self._tag.append(text)

    def retag(self, text: str) -> None:
        """Give up a tag, since another one begins."""
        self._waste_tag("", _UNENDED)
        self._tag.append(text)

    def waste_tag(self, text: str) -> None:
        """Give up a tag."""
        self._waste_tag(text, _NO_CALL_TAG)

    def head(self, text: str) -> str:
        """Say what a tag outside calls is, which its first quote or `>` decides."""
        self._tag.append(text)
        kind = kind_of_tag("".join(self._tag[1:]))
        if kind == "block":
            self._tag.clear()
        elif kind != "invoke":
            self._waste_tag("", _NO_CALL_TAG)
        return kind

    def head_in_call(self, text: str) -> str:
        """Say what a tag inside a call is; a call that was not closed ends where another begins."""
        self._tag.append(text)
        kind = kind_of_tag("".join(self._tag[1:]))
        if kind == "invoke":
            self._waste.flush()
            self._end_call()
        elif kind != "parameter":
            self._waste_tag("", _NO_CALL_TAG)
        return kind

    def end_block(self, text: str) -> str:
        """Say whether a closing tag outside calls ends the block."""
        tail = "".join(self._tag[1:]) + text
        if kind_of_tag(tail) == "block":
            self._tag.clear()
            self._waste.flush()
        else:
            self._waste_tag(text, "a closing tag without an opening one")
        return "block" if closes_block(tail) else "other"

    def end_tag(self, text: str) -> None:
        """End a closing tag that has done its work; more than a word in it fits nowhere."""
        rest = "".join(self._tag[1:]) + text
        self._tag.clear()
        if not is_closing_word(rest):
            self.waste(rest)

    def end_tag_open(self, text: str) -> None:
        """End a closing tag where another tag begins."""
        self.end_tag("")
        self._tag.append(text)

    # -- tool block: calls ------------------------------------------------------------------------

    def name(self, text: str) -> None:
        """Read on in a name."""
        self._tag.append(text)
        self._text.append(text)

    def mark_in_name(self, text: str) -> None:
        """Keep a mark out of a name."""
        self._waste.add(text, "a mark in a name")

    def begin_call(self, text: str) -> str:
        """Begin a call, unless its name is empty."""
        name = self._taken_text()
        if not name:
            self._waste_tag(text, "a call without a name")
            return "unnamed"
        self._tag.clear()
        self._waste.flush()
        self.call = Arguments()
        self._out.events.append(ToolStart(self.num_calls, name))
        self.num_calls += 1
        return "named"

    def end_call(self, text: str) -> None:
        """End the open call by a closing tag."""
        self._waste.flush()
        self._end_call()
        self._tag.append(text)

    def end_tag_end_call(self, text: str) -> None:
        """End a closing tag where the call's closing tag begins."""
        self.end_tag("")
        self.end_call(text)

    def end_key(self, text: str) -> None:
        """End a parameter's name."""
        self._tag.append(text)
        self._key = self._taken_text()

    def begin_value(self, text: str) -> str:
        """Begin a value of the kind that the tag says, unless the call has the parameter."""
        call = self._open_call()
        kind = self._taken_text()
        if kind not in _KINDS:
            self._waste_tag(text, 'a parameter whose `string` is not "true" or "false"')
            return "other"
        if call.has(self._key):
            self._waste_tag(text, "a parameter that the call has already")
            return "other"
        self._tag.clear()
        self._waste.flush()
        self._argue(call.begin(self._key))
        if kind == 'true"':
            self._argue('"')
        return kind

    def string(self, text: str) -> None:
        """Pass on a piece of a text value."""
        self._argue(quoted(self._out.spelled(text))[1:-1])

    def end_string(self, text: str) -> None:
        """End a text value."""
        self._argue('"')
        self._tag.append(text)

    def value(self, text: str) -> None:
        """Read on in a JSON value, which is checked as a whole."""
        self._text.append(text)

    def end_value(self, text: str) -> None:
        """End a JSON value."""
        raw = self._taken_text()
        written, why = self._open_call().value(raw)
        self._argue(written)
        if why is not None:
            reason = f"the value of {self._key!r} is not JSON: {why}"
            self._out.events.append(Malformed(raw, reason))
        self._tag.append(text)

    # -- the end of the reply ---------------------------------------------------------------------

    def cut_tag(self, text: str) -> None:
        """Give up a tag that was cut off."""
        self._waste_tag(text, "a tag that was cut off")

    def cut_end_tag(self, text: str) -> None:
        """End a closing tag that was cut off when it had done its work."""
        if begins_closing_word("".join(self._tag[1:]) + text):
            self._tag.clear()
        else:
            self.cut_tag(text)

    def cut_head_in_call(self, text: str) -> None:
        """Write what follows from the begin of a parameter's tag."""
        self._tag.append(text)
        if kind_of_tag("".join(self._tag[1:]) + '"') == "parameter":
            self._tag.clear()
            self._argue(self._open_call().separator())
        else:
            self.cut_tag("")

    def cut_key(self, text: str) -> None:
        """Write the part of a parameter's name that was read, and what follows from its end."""
        if not STRING_ATTRIBUTE.startswith(text):  # it may have become another thing: it is name
            self._text.append(text)
            text = ""
        self._tag.clear()
        key = quoted(self._taken_text())
        ending = {0: key[:-1], 1: key}.get(len(text), f"{key}: ")
        self._argue(self._open_call().separator() + ending)

    def cut_kind(self, text: str) -> None:
        """Write a parameter's name, whose value was cut off."""
        call = self._open_call()
        begun = "".join(self._text) + text
        if call.has(self._key) or not any(kind.startswith(begun) for kind in _KINDS):
            self.cut_tag(text)
        else:
            self._tag.clear()
            self._text.clear()
            self._argue(call.begin(self._key))

    def cut_value(self, text: str) -> None:
        """Write the part of a JSON value that was read."""
        self._text.append(text)
        self._argue(self._taken_text())

    def finish(self) -> None:
        """Tell what fits nowhere and was not yet told."""
        self._waste.flush()

    # -- helpers ----------------------------------------------------------------------------------

    def _replace(self, text: str, start: int) -> None:
        blanks = self.prose.replaced(text, start)
        if blanks:  # that are no token's text, so they have no log-probabilities
            self._out.events.append(Text(blanks))

    def _tell_prose(self) -> None:
        text = self.prose.taken()
        if text and not text.isspace():
            self._out.malformed(text, "text around the JSON value")

    def _argue(self, text: str) -> None:
        if text:
            self._out.events.append(ToolArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        self._argue(self._open_call().end())
        self._out.events.append(ToolEnd(self.num_calls - 1))
        self.call = None

    def _open_call(self) -> Arguments:
        assert self.call is not None, "parameters are read inside calls only"
        return self.call

    def _taken_text(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return self._out.spelled(text)

    def _taken_tag(self, text: str) -> str:
        tag = "".join(self._tag) + text
        self._tag.clear()
        return tag

    def _waste_tag(self, text: str, why: str) -> None:
        self._waste.add(self._taken_tag(text), why)
        self._text.clear()
