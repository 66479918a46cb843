"""The table of the reply machine: all states, what each does, and all ways from one to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, TypeAlias

from deepseek_recipe.conversation import ParsingOptions
from deepseek_recipe.decoding.actions import Actions
from deepseek_recipe.decoding.signals import Signal

__all__ = ["ROWS", "Row", "State", "start_state"]


class State(Enum):
    """Where in a reply the machine is."""

    REASONING_START = auto()
    REASONING = auto()
    REASONING_TAG = auto()  # behind a `</MARK` that may begin a closing tag which closes nothing
    CONTENT_START = auto()
    CONTENT = auto()
    CONTENT_TAG = auto()
    JSON_START = auto()
    BEFORE_JSON = auto()
    JSON = auto()
    JSON_TAG = auto()
    AFTER_JSON = auto()
    STOPPED = auto()  # a stop text was found

    BLOCK = auto()  # the tool block, outside calls
    BLOCK_TAG = auto()  # behind `<MARK`
    BLOCK_END = auto()  # behind `</MARK`
    CALL_NAME = auto()
    CALL_TAG_REST = auto()
    CALL = auto()
    CALL_END = auto()  # behind the `</MARK` that ended a call
    PARAMETER_TAG = auto()  # behind `<MARK`
    KEY = auto()
    VALUE_KIND = auto()  # behind `" string="`
    STRING_VALUE = auto()
    JSON_VALUE = auto()
    VALUE_END = auto()  # behind the `</MARK` that ended a value
    BAD_PARAMETER = auto()
    BAD_PARAMETER_END = auto()
    BEHIND_BLOCK = auto()  # what follows the block fits nowhere


Action: TypeAlias = Callable[[Actions, str], str | None]
Then: TypeAlias = State | Mapping[str, State]


@dataclass(frozen=True, slots=True)
class Row:
    """What a state does.

    Attributes:
        text: with plain text.
        cut: with text that is held back when the reply ends.
        on: with a signal, and the next state, which may depend on what the action found.
        behind_newlines: newlines are dropped; the state that reads the first other character.
        otherwise: a signal counts only where the state begins; the state that reads all else, which
            `text` is not given.
    """

    text: Action
    cut: Action
    on: Mapping[Signal, tuple[Action, Then]]
    behind_newlines: State | None = None
    otherwise: State | None = None


def start_state(parsing: ParsingOptions, *, continues_content: bool) -> State:
    """Return the state that the prompt has led to.

    Args:
        continues_content: the prompt ends inside the content, thinking being off.
    """
    if parsing.starts_in_tool_calls:
        return State.BLOCK
    json = parsing.parse_json_output
    match parsing.thinking_initial_stage:
        case "reasoning_start":
            return State.REASONING_START
        case "reasoning_continuation":
            return State.REASONING
        case "content_continuation":
            continues_content = True
    if continues_content:
        return State.BEFORE_JSON if json else State.CONTENT
    return State.JSON_START if json else State.CONTENT_START


_A = Actions
_S = State
_STOP: Final = (_A.stopped, _S.STOPPED)
_ENTER_BLOCK: Final = (_A.enter_block, _S.BLOCK_TAG)
_BLOCK_HEAD: Final = MappingProxyType(
    {"invoke": _S.CALL_NAME, "block": _S.BLOCK, "parameter": _S.BLOCK, "bad": _S.BLOCK}
)
_CALL_HEAD: Final = MappingProxyType(
    {
        "invoke": _S.CALL_NAME,
        "parameter": _S.KEY,
        "block": _S.BAD_PARAMETER,
        "bad": _S.BAD_PARAMETER,
    }
)


def _start(then: State) -> Row:
    return Row(text=_A.skip, cut=_A.skip, on={}, behind_newlines=then)


def _stray_tag(then: State) -> Row:
    return Row(
        text=_A.end_stray_tag,
        cut=_A.end_stray_tag,
        on={Signal.TAIL: (_A.end_stray_tag, then)},
        otherwise=then,
    )


ROWS: Final[Mapping[State, Row]] = MappingProxyType(
    {
        # ---- reasoning and content
        _S.REASONING_START: _start(_S.REASONING),
        _S.REASONING: Row(
            text=_A.reasoning,
            cut=_A.cut_reasoning,
            on={
                Signal.THINK_END: (
                    _A.end_reasoning,
                    {"plain": _S.CONTENT_START, "json": _S.JSON_START},
                ),
                Signal.OPEN: _ENTER_BLOCK,
                Signal.CLOSE: (_A.stray_tag, _S.REASONING_TAG),
                Signal.MARK: (_A.stray_mark, _S.REASONING),
            },
        ),
        _S.REASONING_TAG: _stray_tag(_S.REASONING),
        _S.CONTENT_START: _start(_S.CONTENT),
        _S.CONTENT: Row(
            text=_A.content,
            cut=_A.cut_content,
            on={
                Signal.STOP: _STOP,
                Signal.OPEN: _ENTER_BLOCK,
                Signal.CLOSE: (_A.stray_tag, _S.CONTENT_TAG),
                Signal.MARK: (_A.stray_mark, _S.CONTENT),
                Signal.THINK_END: (_A.release, _S.CONTENT),
            },
        ),
        _S.CONTENT_TAG: _stray_tag(_S.CONTENT),
        _S.STOPPED: Row(text=_A.skip, cut=_A.skip, on={}),
        # ---- JSON mode
        _S.JSON_START: _start(_S.BEFORE_JSON),
        _S.BEFORE_JSON: Row(
            text=_A.around,
            cut=_A.cut_around,
            on={
                Signal.FENCE: (_A.begin_fenced, _S.JSON),
                Signal.BRACE: (_A.begin_bare, _S.JSON),
                Signal.OPEN: _ENTER_BLOCK,
                Signal.THINK_END: (_A.release_around, _S.BEFORE_JSON),
            },
        ),
        _S.JSON: Row(
            text=_A.content,
            cut=_A.cut_content,
            on={
                Signal.STOP: _STOP,
                Signal.FENCE_END: (_A.end_fenced, _S.AFTER_JSON),
                Signal.OPEN: _ENTER_BLOCK,
                Signal.CLOSE: (_A.stray_tag, _S.JSON_TAG),
                Signal.MARK: (_A.stray_mark, _S.JSON),
                Signal.THINK_END: (_A.release, _S.JSON),
            },
        ),
        _S.JSON_TAG: _stray_tag(_S.JSON),
        _S.AFTER_JSON: Row(
            text=_A.around,
            cut=_A.cut_around,
            on={
                Signal.OPEN: _ENTER_BLOCK,
                Signal.THINK_END: (_A.release_around, _S.AFTER_JSON),
            },
        ),
        # ---- tool block, outside calls
        _S.BLOCK: Row(
            text=_A.waste,
            cut=_A.cut_tag,
            on={
                Signal.OPEN: (_A.tag, _S.BLOCK_TAG),
                Signal.CLOSE: (_A.tag, _S.BLOCK_END),
            },
        ),
        _S.BLOCK_TAG: Row(
            text=_A.tag,
            cut=_A.cut_tag,
            on={
                Signal.QUOTE: (_A.head, _BLOCK_HEAD),
                Signal.TAG_END: (_A.head, _BLOCK_HEAD),
                Signal.OPEN: (_A.retag, _S.BLOCK_TAG),
                Signal.CLOSE: (_A.retag, _S.BLOCK_END),
            },
        ),
        _S.BLOCK_END: Row(
            text=_A.tag,
            cut=_A.cut_tag,
            on={
                Signal.TAG_END: (
                    _A.end_block,
                    {"block": _S.BEHIND_BLOCK, "other": _S.BLOCK},
                ),
                Signal.OPEN: (_A.retag, _S.BLOCK_TAG),
                Signal.CLOSE: (_A.retag, _S.BLOCK_END),
            },
        ),
        _S.BEHIND_BLOCK: Row(text=_A.waste_behind, cut=_A.waste_behind, on={}),
        # ---- calls
        _S.CALL_NAME: Row(
            text=_A.name,
            cut=_A.cut_tag,
            on={
                Signal.QUOTE: (
                    _A.begin_call,
                    {"named": _S.CALL_TAG_REST, "unnamed": _S.BLOCK},
                ),
                Signal.LONE: (_A.mark_in_name, _S.CALL_NAME),
                Signal.OPEN: (_A.retag, _S.BLOCK_TAG),
                Signal.CLOSE: (_A.retag, _S.BLOCK_END),
            },
        ),
        _S.CALL_TAG_REST: Row(
            text=_A.waste_rest,
            cut=_A.cut_tag,
            on={
                Signal.TAG_END: (_A.skip, _S.CALL),
                Signal.OPEN: (_A.tag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.end_call, _S.CALL_END),
            },
        ),
        _S.CALL: Row(
            text=_A.waste,
            cut=_A.cut_tag,
            on={
                Signal.OPEN: (_A.tag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.end_call, _S.CALL_END),
            },
        ),
        _S.CALL_END: Row(
            text=_A.tag,
            cut=_A.cut_end_tag,
            on={
                Signal.TAG_END: (_A.end_tag, _S.BLOCK),
                Signal.OPEN: (_A.end_tag_open, _S.BLOCK_TAG),
                Signal.CLOSE: (_A.end_tag_open, _S.BLOCK_END),
            },
        ),
        # ---- parameters
        _S.PARAMETER_TAG: Row(
            text=_A.tag,
            cut=_A.cut_head_in_call,
            on={
                Signal.QUOTE: (_A.head_in_call, _CALL_HEAD),
                Signal.TAG_END: (_A.head_in_call, _CALL_HEAD),
                Signal.OPEN: (_A.retag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.waste_tag, _S.BAD_PARAMETER_END),
            },
        ),
        _S.KEY: Row(
            text=_A.name,
            cut=_A.cut_key,
            on={
                Signal.STRING_ATTRIBUTE: (_A.end_key, _S.VALUE_KIND),
                Signal.LONE: (_A.mark_in_name, _S.KEY),
                Signal.OPEN: (_A.retag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.waste_tag, _S.BAD_PARAMETER_END),
            },
        ),
        _S.VALUE_KIND: Row(
            text=_A.name,
            cut=_A.cut_kind,
            on={
                Signal.TAG_END: (
                    _A.begin_value,
                    {
                        'true"': _S.STRING_VALUE,
                        'false"': _S.JSON_VALUE,
                        "other": _S.BAD_PARAMETER,
                    },
                ),
                Signal.OPEN: (_A.retag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.waste_tag, _S.BAD_PARAMETER_END),
            },
        ),
        _S.STRING_VALUE: Row(
            text=_A.string, cut=_A.string, on={Signal.CLOSE: (_A.end_string, _S.VALUE_END)}
        ),
        _S.JSON_VALUE: Row(
            text=_A.value, cut=_A.cut_value, on={Signal.CLOSE: (_A.end_value, _S.VALUE_END)}
        ),
        _S.VALUE_END: Row(
            text=_A.tag,
            cut=_A.cut_end_tag,
            on={
                Signal.TAG_END: (_A.end_tag, _S.CALL),
                Signal.OPEN: (_A.end_tag_open, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.end_tag_end_call, _S.CALL_END),
            },
        ),
        # A tag inside a call that is no parameter has its own closing tag, or ends where the next
        # tag begins.
        _S.BAD_PARAMETER: Row(
            text=_A.waste,
            cut=_A.cut_tag,
            on={
                Signal.OPEN: (_A.tag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.waste, _S.BAD_PARAMETER_END),
            },
        ),
        _S.BAD_PARAMETER_END: Row(
            text=_A.waste,
            cut=_A.cut_tag,
            on={
                Signal.TAG_END: (_A.waste, _S.CALL),
                Signal.OPEN: (_A.tag, _S.PARAMETER_TAG),
                Signal.CLOSE: (_A.end_call, _S.CALL_END),
            },
        ),
    }
)
