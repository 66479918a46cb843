"""What an engine needs of a checkpoint's format, in one object: requests in, replies out.

The classes here are the entry points of `deepinfer.recipe`. Nothing in them knows of an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deepseek_recipe.conversation import GenerationSettings, ImageSource
from deepseek_recipe.decoding.events import BackendFinish, Ready, TokenChunk, TokenLogprob
from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent
from deepseek_recipe.encoding.profile import V4, V41, Profile
from deepseek_recipe.encoding.prompt import render
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import (
    ConstraintError,
    ConversionError,
    OptionError,
    ReplyError,
    RequestError,
    TokenizerError,
    shown,
)
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.body import parse_body
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.dispatch import convert, parse, reply_stream
from deepseek_recipe.protocols.fields import Refusals, check_fields
from deepseek_recipe.protocols.structured_outputs import StructuredOutputs, constraint_of

if TYPE_CHECKING:
    from deepseek_recipe.structured.grammar import Grammar
    from deepseek_recipe.structured.reply import ReplyGrammar
    from deepseek_recipe.structured.vocabulary import TokenVocabulary

__all__ = ["DeepseekV4", "DeepseekV41", "Prepared", "Reply"]


class Reply:
    """One reply being read: token ids in, events of the request's protocol out."""

    def __init__(self, stream: ReplyStream) -> None:
        """Read a reply through a stream that nothing was pushed into yet."""
        self._stream = stream

    @property
    def finished(self) -> bool:
        """Whether the reply has ended, maybe by a stop text, so that no more ids are wanted."""
        return self._stream.finished

    @property
    def done_data(self) -> str | None:
        """Data of the message that ends a stream of events, None where the protocol has none."""
        return self._stream.done_data

    @property
    def malformed(self) -> Sequence[str]:
        """Text of the model that fits nowhere; no event and no response holds it."""
        return tuple(each.text for each in self._stream.malformed)

    def start(self, prompt_tokens: int, cached_tokens: int) -> Sequence[ServerEvent]:
        """Begin; takes the prompt's length and how much of it was cached."""
        return self._stream.push(Ready(prompt_tokens, cached_tokens))

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[float, Sequence[tuple[int, float]]]] | None = None,
    ) -> Sequence[ServerEvent]:
        """Take the next ids.

        Args:
            token_ids: as produced; an end-of-sequence id at the end of the reply is no part of it.
            logprobs: one for each id: its own, then (id, log-probability) of alternatives.

        Raises:
            ReplyError: the reply has ended, an id is not in the vocabulary, or there is not one
                log-probability for each id. Nothing was taken in then.
        """
        entries = None if logprobs is None else _entries(token_ids, logprobs)
        return self._stream.push(TokenChunk(token_ids, entries))

    def finish(self, reason: str) -> Sequence[ServerEvent]:
        """End the reply: `stop`, `length` or `content_filter`. Nothing happens if it has ended."""
        if reason not in ("stop", "length", "content_filter"):
            raise OptionError(
                f"The reason is {shown(reason)}; allowed: 'stop', 'length' or 'content_filter'."
            )
        if self._stream.finished:
            return ()
        return self._stream.push(BackendFinish(reason))  # type: ignore[arg-type]

    def response(self) -> dict[str, object]:
        """Return the whole response after the end, as the protocol states it."""
        return self._stream.response()


def _entries(
    token_ids: Sequence[int], logprobs: Sequence[tuple[float, Sequence[tuple[int, float]]]]
) -> tuple[TokenLogprob, ...]:
    try:
        if len(logprobs) != len(token_ids):
            raise ReplyError(
                f"There are {len(logprobs)} log-probabilities for {len(token_ids)} token ids; give "
                "one for each id, or None."
            )
        return tuple(
            TokenLogprob(token_id, own, tuple(top))
            for token_id, (own, top) in zip(token_ids, logprobs, strict=True)
        )
    except (TypeError, ValueError) as error:
        raise ReplyError(
            f"The log-probabilities are {shown(logprobs)}; allowed: for each token id one pair "
            "(log-probability, [(id, log-probability), ...]), or None."
        ) from error


@contextmanager
def _refusals() -> Iterator[None]:
    """Make requests' errors of those about constraints."""
    try:
        yield
    except (ConstraintError, TokenizerError) as error:
        raise ConversionError(f"The form of the answer cannot be enforced: {error}") from error


class Prepared:
    """A request, ready for an engine."""

    def __init__(
        self,
        converted: ConvertedRequest,
        token_ids: Sequence[int],
        images: Sequence[ImageSource],
        recipe: _Recipe,
    ) -> None:
        """Hold a request and its prompt; `images` are what the placeholders among the ids mean."""
        self.converted = converted
        self.token_ids = token_ids
        self.images = images
        self._recipe = recipe

    @property
    def settings(self) -> GenerationSettings:
        """How to sample."""
        return self.converted.settings

    @property
    def constraint(self) -> Mapping[str, str] | None:
        """What decoding must enforce: `kind` and `schema`, or None; `grammar` enforces it."""
        wanted = self.settings.output_constraint
        return None if wanted is None else {"kind": wanted.kind, "schema": wanted.schema}

    def grammar(self) -> ReplyGrammar | None:
        """Return what gives the masks that enforce the constraint; None if there is nothing to do.

        Tools that may be called but need not, none of them `strict`, need no masks. Takes up to a
        second, and the first one of a recipe 1.5 s more: call it where requests are read.

        Raises:
            ConversionError: the constraint cannot be enforced as it stands.
        """
        from deepseek_recipe.structured.conversation import reply_grammar

        recipe, wanted = self._recipe, self.settings.output_constraint
        if wanted is None:
            return None
        with _refusals():
            return reply_grammar(
                wanted,
                self.converted.parsing,
                recipe.profile,
                recipe.tokenizer,
                recipe.token_vocabulary,
            )

    @property
    def stream(self) -> bool:
        """Whether the client asked for events instead of one response."""
        return self.converted.stream

    @property
    def left_out(self) -> Sequence[str]:
        """Fields of the request that are not honoured and were ignored."""
        return self.converted.left_out

    @property
    def overridden(self) -> Sequence[str]:
        """Fields of the request that the checkpoint's own settings or bounds replaced."""
        return self.converted.overridden

    def max_tokens(self, context_limit: int) -> int:
        """Return how many tokens the reply may have.

        Raises:
            ConversionError: the prompt, or prompt and requested length, exceed the context.
        """
        return self.converted.resolve_max_tokens(len(self.token_ids), context_limit)

    def reply(self, response_id: str, model: str, created: int) -> Reply:
        """Return what reads the reply; `created` is in seconds since 1970."""
        stream = reply_stream(
            self.converted,
            response_id=response_id,
            model=model,
            tokenizer=self._recipe.tokenizer,
            created=created,
        )
        return Reply(stream)


class _Recipe:
    """Requests in, prompts and replies out, for one checkpoint."""

    profile: ClassVar[Profile]
    request_error: ClassVar[type[Exception]] = RequestError
    reply_error: ClassVar[type[Exception]] = ReplyError
    tokenizer_error: ClassVar[type[Exception]] = TokenizerError

    def __init__(
        self,
        tokenizer_file: str | Path,
        *,
        options: ConversionOptions | None = None,
        token_map: Mapping[str, int] | None = None,
    ) -> None:
        """Read the checkpoint's tokenizer.

        Args:
            tokenizer_file: a `tokenizer.json`, or the folder that holds one.
            options: what the server decides; its model names must all mean this checkpoint. None
                accepts the published name.
            token_map: spelling of a special token -> the id that bears another name in the file.

        Raises:
            TokenizerError: it cannot be read, or lacks a special token of the format.
            OptionError: a model's name stands for another checkpoint.
        """
        if options is None:
            known = {n: p for n, p in ConversionOptions().models.items() if p == self.profile.name}
            options = ConversionOptions(models=known)
        for name, profile in options.models.items():
            if profile != self.profile.name:
                raise OptionError(
                    f"`models` maps {shown(name)} to {profile!r}, but this is the recipe of "
                    f"{self.profile.name!r}; leave the name out."
                )
        self._options = options
        self._tokenizer_file = tokenizer_file
        self.tokenizer = PromptTokenizer.from_path(tokenizer_file, token_map)
        for spelling in self.profile.tokens.spellings:
            self.tokenizer.special_id(spelling)

    @cached_property
    def token_vocabulary(self) -> TokenVocabulary:
        """The vocabulary as the mask engine needs it, and the grammars compiled for it.

        Raises:
            TokenizerError: the mask engine cannot read the tokenizer file.
        """
        from deepseek_recipe.structured.vocabulary import TokenVocabulary

        eos_id = self.tokenizer.special_id(self.profile.tokens.eos)
        return TokenVocabulary.of(self._tokenizer_file, eos_ids=(eos_id,))

    def grammar(self, constraint: Mapping[str, object]) -> Grammar:
        """Return what gives the masks of a text that is no reply, such as a plain completion.

        Args:
            constraint: as the field `structured_outputs` of requests: exactly one of `json`,
                `json_object`, `regex`, `choice`, `grammar` and `structural_tag`.

        Raises:
            RequestError: it is something else, or cannot be enforced as it stands.
        """
        from deepseek_recipe.structured.conversation import spec_of
        from deepseek_recipe.structured.grammar import compile

        asked = parse_body(StructuredOutputs, constraint)
        check_fields(asked, Refusals("reject"))
        with _refusals():
            return compile(spec_of(constraint_of(asked, "constraint")), self.token_vocabulary)

    def prepare(
        self, request: Mapping[str, object] | bytes | str, protocol: str = "chat"
    ) -> Prepared:
        """Return a request's prompt and settings; text never becomes a control token.

        Args:
            request: the body, parsed or as JSON text. A mapping may leave `model` out.
            protocol: `chat`, `responses` or `messages`.

        Raises:
            RequestError: the body is malformed, or asks for what is not allowed or not supported.
        """
        if isinstance(request, Mapping) and "model" not in request:
            request = {**request, "model": next(iter(self._options.models))}
        converted = convert(parse(protocol, request), self._options)
        prompt = render(converted.conversation, self.profile)
        try:
            token_ids = self.tokenizer.encode(prompt)
        except TokenizerError as error:  # all special tokens are there, so it is about the text
            raise ConversionError(str(error)) from error
        return Prepared(converted, token_ids, prompt.images, self)


class DeepseekV4(_Recipe):
    """The format of DeepSeek-V4 checkpoints."""

    profile = V4


class DeepseekV41(_Recipe):
    """The format of DeepSeek-V4.1 checkpoints."""

    profile = V41
