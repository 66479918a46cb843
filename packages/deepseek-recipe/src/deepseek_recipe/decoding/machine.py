"""`ReplyMachine`: token ids or text of one reply in, typed events out. No I/O, no clock.

Every character that is fed ends in exactly one place: in the text of `Reasoning` or `Text`, in the
name or arguments of a call, in `Malformed`, or in what the rules take away: markup that was
understood, layout around it, newlines at the begin of reasoning or content and in front of their
end, and a stop text with all that follows. (A value that is not JSON is in the arguments, as a
string, and in `Malformed`.)

All states and all ways from one to another are in `states.py`. One reply on its way, MARK being the
tool mark's id, with `thinking_initial_stage="reasoning_start"` and `parse_tool_calls`:

    read                      state               action          event
    \n                        REASONING_START     skip
    I see.                    REASONING           reasoning       Reasoning("I see.")
    </think> (id)             REASONING           end_reasoning
    Let me look               CONTENT             content         Text("Let me look")
    \n\n<MARK                 CONTENT             enter_block     (the newlines are dropped)
    calls>                    BLOCK_TAG           head
    \n <MARK invoke name="    BLOCK, BLOCK_TAG    waste, head     (blanks alone are layout)
    find"                     CALL_NAME           begin_call      ToolStart(0, "find")
    > <MARK parameter name="  CALL, PARAMETER_TAG head_in_call
    q" string="               KEY                 end_key         ToolArguments(0, '{"q"') ...
    true">                    VALUE_KIND          begin_value
    x                         STRING_VALUE        string          ToolArguments(0, "x")
    </MARK parameter>         STRING_VALUE        end_string      ToolArguments(0, '"')
    </MARK invoke>            CALL                end_call        ToolArguments(0, "}"), ToolEnd(0)
    </MARK calls>             BLOCK, BLOCK_END    end_block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from deepseek_recipe.conversation import ParsingOptions
from deepseek_recipe.decoding.actions import Actions
from deepseek_recipe.decoding.bytes import TokenText
from deepseek_recipe.decoding.checks import (
    Reason,
    checked_ids,
    checked_logprobs,
    checked_reason,
    checked_text,
)
from deepseek_recipe.decoding.dsml import CLOSING_TAILS, STRING_ATTRIBUTE
from deepseek_recipe.decoding.events import (
    NEED_MORE,
    Event,
    Finish,
    NeedMore,
    Reasoning,
    Text,
    TokenLogprob,
)
from deepseek_recipe.decoding.marks import DSML, THINK_END, Spelling, without_surrogates
from deepseek_recipe.decoding.output import Output
from deepseek_recipe.decoding.scan import Pattern, Patterns, Scanner
from deepseek_recipe.decoding.signals import Signal
from deepseek_recipe.decoding.states import ROWS, Row, State, start_state
from deepseek_recipe.encoding.profile import Profile
from deepseek_recipe.errors import OptionError, ReplyError

if TYPE_CHECKING:
    from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["ReplyMachine"]

_FINISHED: Final = "stream processor has finished"


class ReplyMachine:
    """Reads one reply.

    The events do not depend on how the reply is cut into ids and texts, once neighbouring events of
    one kind are joined; only the number of blanks around a JSON value does.

    Attributes:
        finished: nothing more is taken in: a stop text was found, or `close` was called.
    """

    __slots__ = (
        "_actions",
        "_closed",
        "_eos_id",
        "_eos_logprob",
        "_held_eos",
        "_length",
        "_output",
        "_parsing",
        "_patterns",
        "_row",
        "_scanner",
        "_spelled",
        "_spelling",
        "_state",
        "_taken",
        "_tokens",
        "_tools",
        "_unshown",
        "finished",
    )

    def __init__(
        self,
        parsing: ParsingOptions,
        profile: Profile,
        tokenizer: PromptTokenizer | None = None,
        *,
        continues_content: bool = False,
    ) -> None:
        """Begin in the state that the prompt has led to.

        Args:
            parsing: how the reply is to be read.
            profile: of the checkpoint, for the spelling of marks.
            tokenizer: turns ids into text; without one only text can be fed.
            continues_content: the prompt ends inside the content, so that newlines at the begin are
                kept. The parsing options say so themselves where thinking is on.

        Raises:
            OptionError: a stop text is empty.
            TokenizerError: the tokenizer lacks a mark.
        """
        if "" in parsing.stop_sequences:
            raise OptionError("`stop_sequences` holds an empty text, which would stop at once.")
        self._parsing = parsing
        self._spelling = Spelling(profile)
        self._tokens = None if tokenizer is None else TokenText(tokenizer, self._spelling)
        self._eos_id = None if tokenizer is None else tokenizer.special_id(profile.tokens.eos)
        self._held_eos = False  # the last token was the end-of-sequence one
        self._eos_logprob: TokenLogprob | None = None
        self._output = Output(self._spelling)
        self._tools = parsing.parse_tool_calls or parsing.starts_in_tool_calls
        self._state = start_state(parsing, continues_content=continues_content)
        self._row = ROWS[self._state]
        thinks = self._state in (State.REASONING_START, State.REASONING)
        self._actions = Actions(
            self._output,
            Reasoning if thinks else Text,
            tools=self._tools,
            json=parsing.parse_json_output,
        )
        self._length = 0  # characters fed
        self._taken = 0  # events of the output that `next_event` has returned
        self._spelled = tokenizer is None  # marks are looked for by spelling, not by id
        self._patterns: dict[tuple[State, bool], Patterns] = {}
        self._unshown: list[TokenLogprob] = []  # of tokens whose bytes are no text yet
        self._closed = False
        self.finished = False
        self._scanner = Scanner(self._patterns_here())

    # -- in ---------------------------------------------------------------------------------------

    def feed(self, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Take in a token.

        Raises:
            ReplyError: the reply has ended, the id is outside the vocabulary, or there is no
                tokenizer. Nothing was taken in then.
        """
        self.feed_all((token_id,), None if logprob is None else (logprob,))

    def feed_all(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> int:
        """Take in tokens that came together, all or, when it raises, none of them.

        Returns:
            How many they are.

        Raises:
            ReplyError: as `feed`, what was given is no list of integers, or there is not one
                log-probability for each id, all of tokens of the vocabulary.
        """
        if self.finished:
            raise ReplyError(_FINISHED)
        tokens = self._tokens
        if tokens is None:
            raise ReplyError("token chunk received without a tokenizer")
        if logprobs is None and not tokens.pending and not self._held_eos:
            text = tokens.plain(token_ids)
            if text is not None:
                self._take(text, spelled=False)
                return len(token_ids)
        ids = checked_ids(token_ids)
        pieces = tokens.pieces(ids)  # refuses unknown ids
        if logprobs is not None:
            logprobs = checked_logprobs(logprobs, len(ids))
            tokens.check(logprobs)
        if ids:
            if self._held_eos:
                self._release_eos(tokens)
            if ids[-1] == self._eos_id:
                # dropped if nothing follows: many backends report the token that ended a reply
                self._held_eos = True
                self._eos_logprob = None if logprobs is None else logprobs[-1]
                pieces.pop()
            self._read_tokens(tokens, ids, pieces, logprobs)
        return len(ids)

    def feed_text(self, text: str) -> None:
        """Take in text, in which marks are known by their spelling.

        Raises:
            ReplyError: the reply has ended, or it is no text.
        """
        if self.finished:
            raise ReplyError(_FINISHED)
        if not checked_text(text):
            return
        if self._tokens is not None:
            if self._held_eos:
                self._release_eos(self._tokens)
            if self._tokens.pending:
                self._take(self._flushed(self._tokens), spelled=False)
        self._take(without_surrogates(text), spelled=True)

    def close(self, reason: str = "stop") -> list[Event]:
        """End the reply and return the remaining events, the last of them `Finish`.

        Args:
            reason: the backend's: `stop`, `length` or `content_filter`. A stop text that was found
                is a `stop` whatever the backend says.

        Raises:
            ReplyError: it was closed before, or there is no such reason.
        """
        if self._closed:
            raise ReplyError(_FINISHED)
        known = checked_reason(reason)
        if not self.finished:
            if self._tokens is not None and self._tokens.pending:
                self._take(self._flushed(self._tokens), spelled=False)
            self._row.cut(self._actions, self._scanner.held)
        self.finished = self._closed = True
        self._actions.finish()
        return [*self.drain(), self._finish(known)]

    # -- out --------------------------------------------------------------------------------------

    def next_event(self) -> Event | NeedMore:
        """Return the next event, or `NEED_MORE`."""
        events = self._output.events
        if self._taken < len(events):
            self._taken += 1
            return events[self._taken - 1]
        events.clear()
        self._taken = 0
        return NEED_MORE

    def drain(self) -> list[Event]:
        """Return all events that are there."""
        events = self._output.events[self._taken :] if self._taken else self._output.events
        self._output.events = []
        self._taken = 0
        return events

    # -- the machine ------------------------------------------------------------------------------

    def _release_eos(self, tokens: TokenText) -> None:
        """Read an end-of-sequence token that ended nothing: its spelling is text."""
        self._held_eos = False
        assert self._eos_id is not None, "it was held by its id"
        logprobs = None if self._eos_logprob is None else [self._eos_logprob]
        ids = (self._eos_id,)
        self._read_tokens(tokens, ids, [tokens.complete(self._eos_id)], logprobs)

    def _read_tokens(
        self,
        tokens: TokenText,
        token_ids: Sequence[int],
        pieces: Sequence[str | None],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> None:
        """Read tokens, of which `pieces` are the texts of those that are complete on their own."""
        text = ""
        for place, piece in enumerate(pieces):
            if piece is None:
                piece = tokens.partial(token_ids[place])
            elif tokens.pending:
                text += self._flushed(tokens, len(text))
            if logprobs is not None:
                self._unshown.append(logprobs[place])
            if self._unshown and piece:
                self._place_logprobs(len(text), len(piece))
            if piece in (THINK_END, DSML):
                self._take(text, spelled=False)
                self._output.has_marks = True
                self._take(piece, spelled=False)
                text = ""
            else:
                text += piece
        self._take(text, spelled=False)

    def _flushed(self, tokens: TokenText, offset: int = 0) -> str:
        text = tokens.flush()
        if self._unshown:
            self._place_logprobs(offset, len(text))
        return text

    def _place_logprobs(self, offset: int, length: int) -> None:
        # all tokens whose bytes were needed for a text are shown with it
        start = self._length + offset
        for logprob in self._unshown:
            self._output.shown_later(start, start + length, logprob)
        self._unshown.clear()

    def _take(self, text: str, *, spelled: bool) -> None:
        if not text:
            return
        if spelled is not self._spelled:
            # what was held may become a mark in one way of looking and not in the other
            self._spelled = spelled
            self._read(self._scanner.use(self._patterns_here()))
        if self._parsing.parse_json_output:
            self._actions.prose.piece(self._length)
        self._length += len(text)
        self._read(text)

    def _read(self, text: str) -> None:
        """Read a text to its end, or to where the reply ends."""
        output = self._output
        at = 0
        while at < len(text) and not self.finished:
            row = self._row
            if row.behind_newlines is not None:
                rest = text[at:].lstrip("\n")
                output.position += len(text) - at - len(rest)
                at = len(text) - len(rest)
                if rest:
                    self._enter(row.behind_newlines)
                continue
            if row.otherwise is not None:
                text, at = self._follow(row, row.otherwise, text, at)
                continue
            plain, found, at = self._scanner.scan(text, at)
            if plain:
                row.text(self._actions, plain)
                output.position += len(plain)
            if found is not None:
                self._act(row, found)

    def _follow(self, row: Row, otherwise: State, text: str, at: int) -> tuple[str, int]:
        """Read on what may become one signal as a whole; return what is left, and from where on.

        When it cannot, all of it is left.
        """
        found, waits, end = self._scanner.follow(text, at)
        if found is not None:
            self._act(row, found)
        elif not waits:
            row.text(self._actions, "")
            held = self._enter(otherwise)
            if len(held) > end:  # it began in an earlier text, so that this one was read from 0
                return held[: len(held) - end] + text, 0
            end -= len(held)
        return text, end

    def _act(self, row: Row, found: Pattern) -> None:
        action, then = row.on[found.signal]
        outcome = action(self._actions, found.text)
        self._output.position += len(found.text)
        self._enter(then if isinstance(then, State) else then[outcome or ""])

    def _enter(self, state: State) -> str:
        """Go to a state; return what was held back in the one before."""
        self._state = state
        self._row = ROWS[state]
        self.finished = state is State.STOPPED
        return self._scanner.use(self._patterns_here())

    def _patterns_here(self) -> Patterns:
        """Return what ends plain text in the current state."""
        key = (self._state, self._spelled)
        patterns = self._patterns.get(key)
        if patterns is None:
            texts = self._texts()
            signals = [signal for signal in Signal if signal in self._row.on]
            patterns = self._patterns[key] = Patterns(
                tuple(Pattern(text, signal) for signal in signals for text in texts[signal])
            )
        return patterns

    def _texts(self) -> dict[Signal, tuple[str, ...]]:
        think_end, dsml = THINK_END, DSML
        if self._spelled:
            think_end, dsml = self._spelling.think_end, self._spelling.dsml
        tools = self._tools
        return {
            Signal.STOP: self._parsing.stop_sequences,
            Signal.FENCE_END: ("\n```",),
            Signal.FENCE: ("```\n", "```json\n"),
            Signal.BRACE: ("{", "["),
            Signal.OPEN: (f"<{dsml}",) if tools else (),
            Signal.CLOSE: (f"</{dsml}",) if tools else (),
            # spelled out of brackets it is text
            Signal.MARK: (dsml,) if tools and not self._spelled else (),
            Signal.THINK_END: (think_end,),
            Signal.LONE: () if self._spelled else (THINK_END, DSML),
            Signal.STRING_ATTRIBUTE: (STRING_ATTRIBUTE,),
            Signal.QUOTE: ('"',),
            Signal.TAG_END: (">",),
            Signal.TAIL: CLOSING_TAILS,
        }

    def _finish(self, reason: Reason) -> Finish:
        actions = self._actions
        if actions.stop is not None:
            reason = "stop"
        called = reason == "stop" and actions.num_calls > 0
        return Finish(
            "tool_calls" if called else reason,
            stop_sequence=actions.stop,
            open_tool=None if actions.call is None else actions.num_calls - 1,
        )
