"""`LLM`: offline generation, for batches and as a stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from tokenizers import Tokenizer

from deepinfer_core.chat import ChatReader, Conversations, Follower, bodies_of, judge, switches_of
from deepinfer_core.config import EngineConfig
from deepinfer_core.engine.engine import Engine, build_engine
from deepinfer_core.engine.interrupt import undivided
from deepinfer_core.engine.outputs import OutputBuilder, refused
from deepinfer_core.engine.requests import Prompts, RequestReader, as_list, params_of_each
from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.errors import ConfigError, RequestError, shown
from deepinfer_core.interfaces import OutputGrammar
from deepinfer_core.loader import find_backend, find_recipe, find_verifier
from deepinfer_core.model import nano
from deepinfer_core.model.checkpoint import resolve_model
from deepinfer_core.types import ChatOutput, FinishReason, Request, RequestOutput, SamplingParams

__all__ = ["LLM"]

OnError = Literal["raise", "output"]
OutputT = TypeVar("OutputT")


@dataclass(frozen=True)
class _Ready:
    """A checked request, what its text must follow, and, for a chat, what reads it."""

    request: Request
    grammar: OutputGrammar | None = None
    follower: Follower | None = None


@dataclass
class _Live:
    """A request the engine works on, and where its outputs go."""

    ready: _Ready
    builder: OutputBuilder
    sink: list[RequestOutput]
    every_output: bool


class LLM:
    """A model on this machine.

    Text is encoded as the model folder's `tokenizer.json` says, its post-processor included; no
    begin-of-sequence id is added besides. Text never becomes a control token: `<eos>` in a prompt
    is five characters. Give token ids to place control tokens.

    A request without a seed gets one from the engine's `seed` and the request's number: prompts
    are numbered from 0 in the order they are given to this object, the invalid ones included.

    Use it from one thread. Several streams may be open at a time; they share the engine's steps.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        **options: object,
    ) -> None:
        """Load a model.

        Args:
            model: folder, or a hub id such as `owner/name`. Where the options name none either,
                the small model that comes with the package.
            config: all options at once; then nothing else may be given.
            options: fields of `EngineConfig`; they win over `DEEPINFER_*` variables.

        Raises:
            ConfigError: an option or the model's `config.json` is wrong.
            CheckpointError: the model folder cannot be used.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(
                f"`config` is {config!r}; allowed: an `EngineConfig`. For a file of options write "
                "`EngineConfig.load(Path(FILE), os.environ, {})`."
            )
        if config is None:
            flags = {**options, "model": None if model is None else str(model)}
            config = EngineConfig.load(None, os.environ, flags)
        elif model is not None or options:
            names = ", ".join(f"`{name}`" for name in (*options, *(["model"] if model else [])))
            raise ConfigError(
                f"{names} and `config` are both given; put all options into `config`."
            )
        folder = resolve_model(config.model)
        self._codec = TextCodec(folder)
        backend = find_backend(config.accelerator, config.numerics)
        self.config = config
        self.engine: Engine = build_engine(
            config, backend, folder, self._codec.tokenizer, find_verifier()
        )
        self._reader = RequestReader(
            config,
            self.engine.model_config,
            limits=self.engine.limits,
            encode=self._codec.encode,
            no_strict=None if backend.supports("strict") else backend.name,
        )
        self._folder = folder
        self._chat_reader: ChatReader | None = None
        self._num_requests = 0
        self._live: dict[int, _Live] = {}
        self._closed = False

    def __enter__(self) -> LLM:
        """Return itself; leaving the `with` block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Abort what runs and wait for the device; later requests are refused."""
        self._abort(list(self._live))
        self.engine.close()
        self._closed = True

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model folder; None when it has no `tokenizer.json`."""
        return self._codec.tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; `RequestError` without a tokenizer."""
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out; `RequestError` without a tokenizer."""
        return self._codec.decode([self._reader.check_id("token_ids", each) for each in token_ids])

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[Sequence[RequestOutput]], None] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output for each, in the order given.

        Args:
            prompts: a text, a sequence of ids, a mapping with `prompt` or `prompt_token_ids` (and
                maybe a `client_id`), or a list of these. An empty list is no prompt at all.
            params: for all prompts, or one for each.
            on_step: called after every step with the outputs of the requests that have ended
                since the last call, often none. Ctrl-C waits until it returns, so each of these
                outputs is seen.
            on_error: "raise" stops at the first request that is invalid, before any of them runs;
                "output" makes it an output with `finish_reason` ERROR and completes the others.

        Raises:
            ConfigError: there is a `constraint`, but no recipe for the model that compiles it.
            RequestError: a request is invalid; the message says which.
        """
        batch = self._prepare(prompts, params, on_error)
        rounds = self._rounds(batch, on_error, every=False)
        return self._results(rounds, lambda output: output, on_step)

    def chat(
        self,
        conversations: Conversations,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: bool | Mapping[str, object] | None = None,
        on_step: Callable[[Sequence[ChatOutput]], None] | None = None,
        on_error: OnError = "raise",
        **fields: object,
    ) -> list[ChatOutput]:
        """Answer conversations; returns one output for each, in the order given.

        The package `deepseek-recipe` states the format. Sampling settings are the checkpoint's own
        where a field is left out, and partly where it is not (`ChatOutput.overridden`).

        Args:
            conversations: a list of messages as in Chat Completions, such as
                `[{"role": "user", "content": "Hello"}]`, a list of such lists, or a list of whole
                request bodies.
            tools: functions that the assistant may call, as in Chat Completions.
            thinking: whether to reason before the answer, or the field of Chat Completions; None
                leaves it to the recipe.
            on_step, on_error: as for `generate`.
            fields: further fields of a Chat Completions request, such as `temperature`,
                `max_tokens`, `response_format`, `reasoning_effort`, `tool_choice`, `seed`, `stop`
                or `logprobs`.

        Raises:
            ConfigError: there is no recipe for the model.
            RequestError: a request is invalid; the message says which.
        """
        _check_on_error(on_error)
        bodies = bodies_of(conversations, {**fields, **switches_of(tools, thinking)})
        reader = self._chats()
        followers: dict[int, Follower] = {}

        def read(index: int, uid: int) -> _Ready:
            chat = reader.read(bodies[index], uid)
            prompt = {"prompt_token_ids": chat.prompt_token_ids}
            request = self._reader.read(prompt, chat.params, uid, chat.grammar)
            followers[index] = Follower(chat, request.stop_ids)
            return _Ready(request, chat.grammar, followers[index])

        def answered(output: RequestOutput) -> ChatOutput:
            if not output.prompt_token_ids:  # it never ran
                return ChatOutput(output.index, output, None)
            return followers[output.index].output(output)

        batch = self._numbered(len(bodies), read, on_error)
        rounds = self._rounds(batch, on_error, every=False)
        return self._results(rounds, answered, on_step)

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> Iterator[RequestOutput]:
        """Complete prompts and yield outputs as they grow; `delta` is the text that is new.

        Requests are checked at once and run while the result is iterated over. Closing it, leaving
        the loop or an exception in it aborts what still runs. Arguments and errors as `generate`.

        Each output is a copy of all ids, text and log-probabilities so far, so its cost grows with
        them; `generate` makes one output a request.
        """
        batch = self._prepare(prompts, params, on_error)
        return _one_by_one(self._rounds(batch, on_error, every=True))

    def abort(self, client_id: str) -> bool:
        """End a request early; its stream then ends with `finish_reason` ABORT.

        Returns:
            Whether a live request has that client id.
        """
        live = self._live.items()
        uids = [uid for uid, each in live if each.ready.request.client_id == client_id]
        self._abort(uids)
        return bool(uids)

    def _prepare(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        on_error: OnError,
    ) -> list[_Ready | RequestOutput]:
        """Check and number all prompts."""
        _check_on_error(on_error)
        items = as_list(prompts)
        each = params_of_each(params, len(items))
        no_recipe: ConfigError | None = None
        if any(one.constraint is not None for one in each):
            try:
                self._chats()
            except ConfigError as error:
                if on_error == "raise":
                    raise
                no_recipe = error  # other prompts can be completed

        def read(index: int, uid: int) -> _Ready:
            constraint, grammar = each[index].constraint, None
            if constraint is not None:
                if no_recipe is not None:
                    raise RequestError(str(no_recipe), param="constraint", code="no_recipe")
                grammar = self._chats().grammar(constraint)
            return _Ready(self._reader.read(items[index], each[index], uid, grammar), grammar)

        return self._numbered(len(items), read, on_error)

    def _numbered(
        self, count: int, read: Callable[[int, int], _Ready], on_error: OnError
    ) -> list[_Ready | RequestOutput]:
        """Make `count` requests by `read(index, uid)`."""
        if self._closed:
            raise RequestError("This `LLM` is closed; make a new one, or stay in its `with` block.")
        first_uid = self._num_requests
        self._num_requests += count
        batch: list[_Ready | RequestOutput] = []
        for index, uid in enumerate(range(first_uid, first_uid + count)):
            try:
                batch.append(read(index, uid))
            except RequestError as error:
                batch.append(_failed(error, index, f"request-{uid}", on_error, count))
        return batch

    def _chats(self) -> ChatReader:
        if self._chat_reader is None:
            model_type = self.engine.model_config.model_type
            recipe = find_recipe(model_type, self._folder / "tokenizer.json")
            name = self.config.model or nano.NAME
            self._chat_reader = ChatReader(recipe, name, self.engine.limits.max_model_len)
        return self._chat_reader

    def _results(
        self,
        rounds: Generator[list[RequestOutput], None, None],
        made: Callable[[RequestOutput], OutputT],
        on_step: Callable[[Sequence[OutputT]], None] | None,
    ) -> list[OutputT]:
        """Run to the end; return what is made of the outputs, in the order of the prompts."""
        results: dict[int, OutputT] = {}
        with closing(rounds):
            while True:
                with undivided():
                    ended = next(rounds, None)
                    if ended is None:
                        break
                    new = {output.index: made(output) for output in ended}
                    results |= new
                    if on_step is not None:
                        on_step(list(new.values()))
        return [results[index] for index in sorted(results)]

    def _rounds(
        self,
        batch: list[_Ready | RequestOutput],
        on_error: OnError,
        *,
        every: bool,
    ) -> Generator[list[RequestOutput], None, None]:
        """Submit requests and step the engine until they have ended; abort them when closed.

        Yields the outputs of each step, maybe none. Unless `every`, they are final ones only.
        """
        sink: list[RequestOutput] = []
        uids: list[int] = []
        try:
            for index, item in enumerate(batch):
                if isinstance(item, RequestOutput):
                    sink.append(item)
                    continue
                request = item.request
                builder = OutputBuilder(
                    request,
                    index,
                    self._codec.decoder(),
                    skips_rows=self._reader.skips_rows(request),
                    watcher=item.follower,
                )
                try:
                    with undivided():
                        self.engine.submit(request)
                        self._live[request.uid] = _Live(item, builder, sink, every)
                        uids.append(request.uid)
                except RequestError as error:
                    sink.append(_failed(error, index, request.client_id, on_error, len(batch)))
            num_open = len(batch)
            while num_open:
                if not sink:
                    try:
                        self._step()
                    except KeyboardInterrupt:
                        yield sink  # the step was settled: what it finished is not lost
                        raise
                outputs = sink.copy()
                sink.clear()
                num_open -= sum(output.finished for output in outputs)
                yield outputs
        finally:
            with undivided():
                self._abort(uids)

    def _step(self) -> None:
        assert self.engine.has_work, "requests are open, but the engine has nothing to do"
        with undivided():
            for update in self.engine.step():
                live = self._live.get(update.uid)
                if live is None:
                    continue  # aborted while the step ran
                stopped = live.builder.feed(update)
                if stopped and update.finish_reason is None:
                    self.engine.finish(update.uid, FinishReason.STOP)
                if stopped or update.finish_reason is not None:
                    del self._live[update.uid]
                elif not live.every_output:
                    continue
                self._put_output(live)

    def _abort(self, uids: Sequence[int]) -> None:
        for uid in uids:
            live = self._live.pop(uid, None)
            if live is not None:
                self.engine.abort(live.ready.request.client_id)
                live.builder.abort()
                self._put_output(live)

    def _put_output(self, live: _Live) -> None:
        """Put what can be shown of a request where it belongs; judge a constrained text first."""
        output = live.builder.next_output()
        if output is None:
            return
        ready = live.ready
        if output.finished and ready.grammar is not None:
            result, fault = "unfinished", None
            if live.builder.is_whole:
                text = output.text if ready.follower is None else ready.follower.answer(output)
                fault = None if text is None else judge(ready.grammar, text)
                result = "valid" if fault is None else "invalid"
            self.engine.observe_constrained(result)
            warnings = tuple(ready.grammar.warnings)
            output = replace(output, constraint_fault=fault, constraint_warnings=warnings)
        live.sink.append(output)


def _check_on_error(on_error: OnError) -> None:
    if on_error not in ("raise", "output"):
        raise RequestError(
            f"`on_error` is {shown(on_error)}; allowed: 'raise' or 'output'.", param="on_error"
        )


def _failed(
    error: RequestError, index: int, client_id: str, on_error: OnError, num_prompts: int
) -> RequestOutput:
    if on_error == "raise":
        if num_prompts == 1:
            raise error
        named = type(error)(f"Prompt {index}: {error}", param=error.param, code=error.code)
        raise named from error
    return refused(error, index, client_id)


def _one_by_one(rounds: Generator[list[RequestOutput], None, None]) -> Iterator[RequestOutput]:
    with closing(rounds):
        for outputs in rounds:
            yield from outputs
