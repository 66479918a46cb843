"""Conversation to prompt: plain text and special tokens, told apart from the beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from deepseek_recipe.conversation import Content, Conversation, ImageSource, Message
from deepseek_recipe.encoding.markup import (
    Marks,
    Piece,
    Special,
    append_calls,
    marks_of,
    tool_lines,
)
from deepseek_recipe.encoding.profile import (
    JOINER,
    LATE_TOOLS_HEAD,
    TOOL_RESULT,
    TOOLS_TAIL,
    UNSUPPORTED_IMAGE,
    Profile,
)
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import dump_prompt

__all__ = ["Piece", "Prompt", "Special", "render"]

# All else of a prompt is about as long as its request, but a few characters can bring a tool in,
# again and again.
_MAX_LATE_CHARS = 2**22


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        pieces: plain text and special tokens; no two texts stand side by side, none is empty.
        images: what the image placeholders stand for, in the order of the placeholders.
    """

    pieces: tuple[Piece, ...]
    images: tuple[ImageSource, ...] = ()

    @property
    def text(self) -> str:
        """The prompt as one text."""
        return "".join(piece if isinstance(piece, str) else piece.spelling for piece in self.pieces)

    @property
    def special_ranges(self) -> tuple[tuple[int, int, str], ...]:
        """Start, end and spelling of each special token, in characters of `text`."""
        ranges = []
        start = 0
        for piece in self.pieces:
            if isinstance(piece, str):
                start += len(piece)
            else:
                end = start + len(piece.spelling)
                ranges.append((start, end, piece.spelling))
                start = end
        return tuple(ranges)


def render(conversation: Conversation, profile: Profile) -> Prompt:
    """Return the prompt of a conversation, ready for the reply.

    Nothing that a message, a tool or a schema says can become a control token: texts are plain
    pieces, whatever they spell. (An assistant's own text may hold grounding tokens.)

    Raises:
        ConversionError: tools that are brought in later come to over 4 Mi characters.
        ValueError: a schema holds what JSON has no form for.
    """
    return _Renderer(conversation, profile).prompt()


class _Renderer:
    """The pieces of one prompt, in the making."""

    def __init__(self, conversation: Conversation, profile: Profile) -> None:
        self._conversation = conversation
        self._profile = profile
        self._marks: Marks = marks_of(profile)
        self._pieces: list[Piece] = [self._marks.bos]
        self._images: list[ImageSource] = []
        self._late_chars = 0
        # place of each call in its turn, for the results that follow
        self._call_order: dict[str | None, int] = {}

    def prompt(self) -> Prompt:
        messages = self._conversation.messages
        if not self._profile.systems_in_place:
            self._collected_systems()
            messages = tuple(message for message in messages if message.role != "system")
        elif messages and messages[0].role == "system":
            self._first_system(messages[0])
            messages = messages[1:]
        elif self._has_head():
            self._first_system(Message("system"))
        self._turns(messages)
        if not (messages and messages[-1].prefix):
            self._pieces.append(self._marks.assistant)
            self._pieces.append(
                self._marks.think if self._conversation.thinking else self._marks.think_end
            )
        if self._conversation.tools and self._conversation.tool_choice == "required":
            self._pieces += self._marks.block_open
        return Prompt(_merged(self._pieces), tuple(self._images))

    def _has_head(self) -> bool:
        conversation = self._conversation
        if conversation.tools or conversation.response_format.kind in (
            "json_object",
            "json_schema",
        ):
            return True
        # A conversation without anything in it has no head either.
        return conversation.thinking and bool(conversation.messages)

    def _effort(self) -> None:
        if self._conversation.thinking:
            effort = self._conversation.reasoning_effort or "high"
            self._pieces.append(self._profile.effort_text[effort])

    def _collected_systems(self) -> None:
        self._effort()
        joiner = ""
        for message in self._conversation.messages:
            if message.role == "system" and any(message.content):
                self._pieces.append(joiner)
                self._content(message.content)
                joiner = JOINER
        self._tools_and_format()

    def _first_system(self, message: Message) -> None:
        self._system_mark()
        self._effort()
        self._content(message.content)
        self._tools_and_format()
        self._late_tools(message)

    def _system_mark(self) -> None:
        system = self._marks.system
        assert system is not None, "a profile with systems in place has a system token"
        self._pieces.append(system)

    def _tools_and_format(self) -> None:
        style = self._profile.float_style
        tools = self._conversation.tools
        if tools:
            self._pieces += self._marks.tools_head
            self._pieces.append(
                tool_lines(tuple(tool for tool in tools if not tool.deferred), style)
            )
            self._pieces.append(TOOLS_TAIL)
        answer = self._conversation.response_format
        if answer.kind == "json_object":
            self._pieces.append(self._profile.json_object_text)
        elif answer.kind == "json_schema":
            self._pieces.append(self._profile.json_schema_head)
            self._pieces.append(dump_prompt(answer.schema, style))

    def _late_tools(self, message: Message) -> None:
        if message.tools and self._profile.late_tools:
            lines = tool_lines(message.tools, self._profile.float_style)
            self._late_chars += len(lines)
            if self._late_chars > _MAX_LATE_CHARS:
                raise ConversionError(
                    f"Tools that come in later make more than {_MAX_LATE_CHARS} characters of the "
                    "prompt. Bring each of them in once."
                )
            self._pieces.append(LATE_TOOLS_HEAD)
            self._pieces.append(lines)

    def _turns(self, messages: Sequence[Message]) -> None:
        last = len(messages) - 1
        index = 0
        for is_user_side, group in groupby(messages, _is_user_side):
            if is_user_side:
                block = list(group)
                index += len(block)
                self._user_side(block)
                continue
            for message in group:
                if message.role == "assistant":
                    self._assistant(message, continued=message.prefix and index == last)
                elif message.role == "system":
                    self._system_mark()
                    self._content(message.content)
                    self._late_tools(message)
                else:
                    self._pieces.append(self._marks.reminder)
                    self._content(message.content)
                index += 1

    def _user_side(self, block: list[Message]) -> None:
        results = [message for message in block if message.role == "tool"]
        # Results stand in the order of the calls, whatever order they came in.
        results.sort(key=lambda message: self._call_order.get(message.tool_call_id, -1))
        in_order = iter(results)
        if self._profile.empty_user_texts:
            self._joined([m if m.role == "user" else next(in_order) for m in block])
            return
        parts: list[Message] = []
        for role, group in groupby(block, lambda message: message.role):
            if role == "tool":
                if parts:
                    self._joined(parts)
                parts = [next(in_order) for _ in group]
            else:
                users = list(group)
                parts += [message for message in users if any(message.content)] or users[:1]
        self._joined(parts)

    def _joined(self, parts: list[Message]) -> None:
        pieces = self._pieces
        pieces.append(self._marks.user)
        for index, message in enumerate(parts):
            if index:
                pieces.append(JOINER)
            if message.role == "tool":
                pieces.append(TOOL_RESULT[0])
                self._content(message.content)
                pieces.append(TOOL_RESULT[1])
            else:
                self._content(message.content)

    def _assistant(self, message: Message, *, continued: bool) -> None:
        pieces, marks = self._pieces, self._marks
        pieces.append(marks.assistant)
        said_nothing = not (any(message.content) or message.tool_calls)
        if self._conversation.thinking and (self._conversation.tools or continued):
            pieces.append(marks.think)
            marks.append_assistant_text(pieces, message.reasoning or "")
            if continued and said_nothing:
                return  # the reply goes on inside the reasoning
        pieces.append(marks.think_end)
        for piece in message.content:
            if isinstance(piece, str):
                marks.append_assistant_text(pieces, piece)
            else:
                self._content((piece,))
        if message.tool_calls:
            append_calls(pieces, message.tool_calls, marks, self._profile.float_style)
            self._call_order = {call.id: place for place, call in enumerate(message.tool_calls)}
        if not continued:
            pieces.append(marks.eos)

    def _content(self, content: Content) -> None:
        for piece in content:
            if isinstance(piece, str):
                self._pieces.append(piece)
            elif self._marks.image is None:
                self._pieces.append(UNSUPPORTED_IMAGE)
            else:
                self._pieces.append(self._marks.image)
                self._images.append(piece)


def _is_user_side(message: Message) -> bool:
    return message.role in ("user", "tool")


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    # The text between two special tokens is encoded as one, so it has to be one piece.
    merged: list[Piece] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            if piece:
                texts.append(piece)
            continue
        if texts:
            merged.append(texts[0] if len(texts) == 1 else "".join(texts))
            texts.clear()
        merged.append(piece)
    if texts:
        merged.append("".join(texts))
    return tuple(merged)
