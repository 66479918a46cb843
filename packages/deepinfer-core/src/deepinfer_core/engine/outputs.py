"""Text of running requests: detokenisation, stop strings, and the outputs a caller sees.

What an output shows ends at a token border, so that ids, text and log-probabilities are of the
same tokens. A token is shown once its last character is complete and its text cannot be part of
a stop string any more:

    tokens      | Hel | lo | wor | l    |            stop string "world"
    decided     |----------|                         text "Hello"
    held back              |------------|            "worl" may become "world"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepinfer_core.engine.tokenizer import TextDecoder
from deepinfer_core.errors import RequestError
from deepinfer_core.types import FinishReason, Request, RequestOutput, SequenceUpdate, TokenLogprob

__all__ = ["OutputBuilder", "StopMatcher", "Watcher", "refused"]

# Sees each token as it comes, and how much of the prompt was cached; says whether the request is to
# end behind it.
Watcher = Callable[[int, TokenLogprob | None, int], bool]


# (encoder side, decoder side) -> what is told
_REPLAY = {
    (False, False): "off",
    (True, False): "encoder",
    (False, True): "decoder",
    (True, True): "both",
}


def refused(error: RequestError, index: int, client_id: str) -> RequestOutput:
    """Return the output of a request that never ran."""
    return RequestOutput(
        index=index,
        client_id=client_id,
        prompt_token_ids=(),
        token_ids=(),
        text="",
        delta="",
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_param=error.param,
        error_code=error.code,
    )


class StopMatcher:
    """Finds the first stop string in text that comes in pieces.

    The first is the one that is complete first, and of those the longest, so the result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for any of `stops`, non-empty texts."""
        self._stops = tuple(stops)
        self._held = ""
        self.start: int | None = None
        """Where the stop string begins in the whole text, once it was found."""
        self.decided_len = 0
        """So many characters of the text are no part of a stop string."""

    def feed(self, piece: str) -> bool:
        """Take more text; return whether a stop string was found. Nothing is fed after that."""
        buffer = self._held + piece
        found = []
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.start = self.decided_len + min(found)[1]
            self.decided_len = self.start
            return True
        held_len = max((_overlap(buffer, stop) for stop in self._stops), default=0)
        self._held = buffer[len(buffer) - held_len :]
        self.decided_len += len(buffer) - held_len
        return False


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` but is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class OutputBuilder:
    """Collects what the engine says of one request and makes `RequestOutput`s of it."""

    def __init__(
        self,
        request: Request,
        index: int,
        decoder: TextDecoder | None,
        *,
        skips_rows: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        """Start with nothing produced.

        Args:
            request: whose output it is.
            index: its place in the caller's list.
            decoder: a fresh one; without it the text stays empty.
            skips_rows: late layers skip rows of its prompt.
            watcher: may end the request after any token.
        """
        self._watcher = watcher
        self._request = request
        self._index = index
        self._skips_rows = skips_rows
        self._replayed = False
        self._num_cached = 0
        self._decoder = decoder
        self._matcher = StopMatcher(request.params.stop)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._ordered_prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._text = ""
        # Borders at which all characters are complete: (number of tokens, length of their text).
        self._borders: list[tuple[int, int]] = []
        self._shown = (0, 0)
        self._finish_reason: FinishReason | None = None
        self._cut = False
        self._error: str | None = None
        self._error_code: str | None = None
        self._num_preemptions = 0

    def feed(self, update: SequenceUpdate) -> bool:
        """Take what a step meant for the request.

        Returns:
            Whether a stop string or the watcher ended it, so that the engine has to be told unless
            the update ended it as well. Tokens behind that one are dropped.
        """
        self._num_preemptions = update.num_preemptions
        self._num_cached, self._replayed = update.num_cached_tokens, update.replayed
        for item in update.prompt_logprobs:
            self._prompt_logprobs[item.position] = item.value
        for place, token_id in enumerate(update.token_ids):
            self._token_ids.append(token_id)
            if update.logprobs:
                self._logprobs.append(update.logprobs[place])
            stopped = self._take_text(token_id)
            if self._watcher is not None:
                logprob = self._logprobs[-1] if update.logprobs else None
                stopped = self._watcher(token_id, logprob, self._num_cached) or stopped
            if stopped:
                self._finish_reason, self._cut = FinishReason.STOP, True
                return True
        if update.finish_reason is None:
            return False
        self._finish_reason = update.finish_reason
        self._error, self._error_code = update.error, update.error_code
        tail = "" if self._decoder is None else self._decoder.flush()
        self._cut = self._append(tail)
        if self._cut and update.finish_reason is FinishReason.LENGTH:
            self._finish_reason = FinishReason.STOP
        return False

    @property
    def is_whole(self) -> bool:
        """Whether the text ended where the model or its grammar ended it.

        Not by a cap, an error, a stop string, the watcher or one of `stop_token_ids`.
        """
        params, last = self._request.params, self._token_ids[-1:]
        stopped = any(token_id in params.stop_token_ids for token_id in last)
        return self._finish_reason is FinishReason.STOP and not self._cut and not stopped

    def abort(self) -> None:
        """End the request as aborted."""
        self.feed(SequenceUpdate(self._request.uid, finish_reason=FinishReason.ABORT))

    def next_output(self) -> RequestOutput | None:
        """Return what can be shown now, or None if that is no more than the last time.

        It takes a copy of all that was produced, so ask only for what somebody looks at.
        """
        if self._finish_reason is not None:
            shown = (len(self._token_ids), len(self._text))
            return self._output(shown)
        decided_len = self._matcher.decided_len
        keep = 0
        while keep < len(self._borders) and self._borders[keep][1] <= decided_len:
            keep += 1
        if not keep:
            return None
        shown = self._borders[keep - 1]
        del self._borders[:keep]
        return self._output(shown)

    def _take_text(self, token_id: int) -> bool:
        if self._decoder is None:
            self._borders.append((len(self._token_ids), 0))
            return False
        piece, complete = self._decoder.feed(token_id)
        if self._append(piece):
            return True
        if complete:
            self._borders.append((len(self._token_ids), len(self._text)))
        return False

    def _append(self, piece: str) -> bool:
        """Add text; return whether it completed a stop string, before which the text now ends."""
        if not piece:
            return False
        self._text += piece
        found = self._matcher.feed(piece)
        if found:
            self._text = self._text[: self._matcher.start]
        return found

    def _output(self, shown: tuple[int, int]) -> RequestOutput:
        num_tokens, text_len = shown
        params = self._request.params
        if len(self._ordered_prompt_logprobs) < len(self._prompt_logprobs):
            in_order = sorted(self._prompt_logprobs.items())
            self._ordered_prompt_logprobs = tuple(value for _, value in in_order)
        known = None if params.prompt_logprobs is None else self._ordered_prompt_logprobs
        delta = self._text[self._shown[1] : text_len]
        self._shown = shown
        return RequestOutput(
            index=self._index,
            client_id=self._request.client_id,
            prompt_token_ids=self._request.prompt_token_ids,
            token_ids=tuple(self._token_ids[:num_tokens]),
            text=self._text[:text_len],
            delta=delta,
            finish_reason=self._finish_reason,
            logprobs=None if params.logprobs is None else tuple(self._logprobs[:num_tokens]),
            prompt_logprobs=known,
            error=self._error,
            error_code=self._error_code,
            determinism="strict" if self._request.strict else "normal",
            bounded_replay=_REPLAY[self._replayed, self._skips_rows],
            num_preemptions=self._num_preemptions,
            num_cached_tokens=self._num_cached,
        )
