"""What the verbs do, without reading or writing: JSON values in, JSON values out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from deepseek_recipe.cli.chunks import expand, mapping, read_chunks, read_finish, read_ids
from deepseek_recipe.conversation import GenerationSettings, JsonValue
from deepseek_recipe.decoding.events import BackendFinish, Chunk, Ready, TextChunk, TokenChunk
from deepseek_recipe.decoding.stream import ReplyStream, ServerEvent
from deepseek_recipe.encoding.profile import PROFILES, profile_named
from deepseek_recipe.encoding.prompt import Prompt, render
from deepseek_recipe.encoding.tokenizer import PromptTokenizer
from deepseek_recipe.errors import (
    BodyError,
    OptionError,
    RecipeError,
    ReplyError,
    RequestError,
    TokenizerError,
    error_body,
    shown,
)
from deepseek_recipe.json_text import load
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.dispatch import PROTOCOLS, Request, convert, parse, reply_stream
from deepseek_recipe.settings import default_max_tokens, sampling_settings

__all__ = ["RenderedRequest", "Verbs", "defaults", "error_line"]


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """A request with its prompt."""

    converted: ConvertedRequest
    prompt: Prompt
    token_ids: list[int]


class Verbs:
    """The verbs that need a tokenizer, with the flags that they share."""

    def __init__(
        self,
        tokenizer: Path | None,
        token_map: Path | None,
        unsupported: Literal["reject", "ignore"],
    ) -> None:
        """Load the tokenizer.

        Args:
            tokenizer: `tokenizer.json` or its folder; None is the packaged vocabulary.
            token_map: a JSON file of {spelling: id}.

        Raises:
            TokenizerError: one of the files cannot be used.
        """
        names = None if token_map is None else _read_token_map(token_map)
        if tokenizer is None:
            self.tokenizer = PromptTokenizer.packaged(names)
        else:
            self.tokenizer = PromptTokenizer.from_path(tokenizer, names)
        self._options = ConversionOptions(unsupported=unsupported)

    def request(self, body: bytes, protocol: str, profile: str) -> RenderedRequest:
        """Return a request body's prompt."""
        return self._rendered(self._converted_for(body, protocol, profile, self._options))

    def render(self, request: RenderedRequest) -> dict[str, object]:
        """Return what `render` prints."""
        prompt = request.prompt
        return {
            "prompt": prompt.text,
            "token_ids": request.token_ids,
            "special_ranges": [
                {"start": start, "end": end, "token": name, "id": self.tokenizer.special_id(name)}
                for start, end, name in prompt.special_ranges
            ],
            **({"images": [asdict(each) for each in prompt.images]} if prompt.images else {}),
            "settings": asdict(request.converted.settings),
            "parsing": asdict(request.converted.parsing),
            **_left_out(request.converted),
        }

    def tokens(self, request: RenderedRequest) -> dict[str, object]:
        """Return what `tokenize` prints."""
        texts = [
            self.tokenizer.special_tokens.get(each)
            or self.tokenizer.token_bytes(each).decode(errors="replace")
            for each in request.token_ids
        ]
        return {
            "num_tokens": len(request.token_ids),
            "token_ids": request.token_ids,
            "tokens": texts,
            **_left_out(request.converted),
        }

    def parse(self, body: bytes, protocol: str, profile: str) -> dict[str, object]:
        """Return what `parse` prints.

        Args:
            body: JSON of `request` and the reply as `token_ids`, `text` or `model_output_chunks`;
                maybe `finish_reason`, `prompt_tokens`, and keys that `parse_line` reads, of which
                `protocol` and `version` must agree with the flags.
        """
        line = _object(body)
        for name, flag in (("protocol", protocol), ("version", profile)):
            if line.get(name, flag) != flag:
                raise OptionError(
                    f"`{name}` of the input is {shown(line[name])}, but the flag says {flag!r}; "
                    "leave it out, or change one of them."
                )
        options = _with_line_options(self._options, line.get("options"))
        converted = self._converted_for(_request_of(line), protocol, profile, options)
        if not {"prompt_tokens", "model_output_chunks"} & line.keys():
            line = {**line, "prompt_tokens": len(self._rendered(converted).token_ids)}
        return self._replied(line, converted, _chunks_of(line, self.tokenizer))

    def render_line(self, text: bytes) -> dict[str, object]:
        """Answer one line of `render --jsonl`; an error is part of the answer."""
        line: Mapping[str, JsonValue] = {}
        try:
            line = _object(text)
            request = self._rendered(self._line_request(line))
        except RecipeError as error:
            return {**_label(line), **error_line(error, line.get("protocol"))}
        return {
            **_label(line),
            "prompt": request.prompt.text,
            "token_ids": request.token_ids,
            "special_tokens": [name for _, _, name in request.prompt.special_ranges],
            **_line_settings(request.converted.settings),
            "parsing_options": asdict(request.converted.parsing),
            **_left_out(request.converted),
        }

    def parse_line(self, text: bytes) -> dict[str, object]:
        """Answer one line of `parse --jsonl`; an error is part of the answer."""
        line: Mapping[str, JsonValue] = {}
        try:
            line = _object(text)
            converted = self._line_request(line)
            chunks = read_chunks(line.get("model_output_chunks"))
            return {**_label(line), **self._replied(line, converted, chunks)}
        except ReplyError as error:
            return {**_label(line), "error": str(error)}
        except RecipeError as error:
            return {**_label(line), **error_line(error, line.get("protocol"))}

    def _converted_for(
        self,
        body: bytes | str | Mapping[str, JsonValue],
        protocol: str,
        profile: str,
        options: ConversionOptions,
    ) -> ConvertedRequest:
        """Convert a body; a model whose name is not known is one of the profile."""
        request = parse(protocol, body)
        models = {request.model: profile, **options.models}
        return _converted(request, profile, replace(options, models=models))

    def _rendered(self, converted: ConvertedRequest) -> RenderedRequest:
        prompt = render(converted.conversation, converted.profile)
        return RenderedRequest(converted, prompt, self.tokenizer.encode(prompt))

    def _line_request(self, line: Mapping[str, JsonValue]) -> ConvertedRequest:
        protocol, profile = line.get("protocol"), line.get("version")
        if protocol not in PROTOCOLS:
            raise OptionError(
                f"`protocol` is {shown(protocol)}; allowed: {' or '.join(map(repr, PROTOCOLS))}."
            )
        if not isinstance(profile, str) or profile not in PROFILES:
            raise OptionError(
                f"`version` is {shown(profile)}; allowed: {' or '.join(map(repr, PROFILES))}."
            )
        options = _with_line_options(self._options, line.get("options"))
        return _converted(parse(str(protocol), _request_of(line)), str(profile), options)

    def _replied(
        self, line: Mapping[str, JsonValue], converted: ConvertedRequest, chunks: list[Chunk]
    ) -> dict[str, object]:
        """Return events and response of a reply. Ids and times come from the line alone."""
        response_id = _text(line, "response_id", "response")
        signature = None if line.get("signature") is None else _text(line, "signature", "")
        stream = reply_stream(
            converted,
            response_id=response_id,
            model=_text(line, "model", getattr(converted.request, "model", "")),
            tokenizer=self.tokenizer if _switch(line, "tokenizer", True) else None,
            created=_integer(line, "created"),
            echo=_switch(line, "echo", False),
            signature=signature,
            call_id=lambda index: _call_id(response_id, index),
        )
        events = _pushed(stream, chunks) + stream.finish()
        malformed = [asdict(each) for each in stream.malformed]
        return {
            "events": [{"event": each.name, "data": each.payload()} for each in events],
            "response": stream.response(),
            "done_data": stream.done_data,
            **({"malformed": malformed} if malformed else {}),
            **_left_out(converted),
        }


def defaults(profile: str) -> dict[str, object]:
    """Return the settings that requests get where they ask for nothing."""
    modes: list[dict[str, object]] = []
    for thinking, effort, has_tools in (
        (False, None, False),
        (False, None, True),
        (True, "high", False),
        (True, "high", True),
        (True, "max", False),
        (True, "max", True),
    ):
        temperature, top_p = sampling_settings(
            profile, thinking=thinking, has_tools=has_tools, temperature=None, top_p=None
        )
        modes.append(
            {
                "thinking": thinking,
                "reasoning_effort": effort,
                "tools": has_tools,
                "temperature": temperature,
                "top_p": top_p,
                "max_tokens": default_max_tokens(thinking=thinking, reasoning_effort=effort),
            }
        )
    options = {
        each.name: getattr(ConversionOptions(), each.name) for each in fields(ConversionOptions)
    }
    return {
        "profile": profile,
        "special_tokens": list(profile_named(profile).tokens.spellings),
        "settings": modes,
        "conversion_options": {**options, "models": dict(ConversionOptions().models)},
    }


def error_line(error: RecipeError, protocol: object) -> dict[str, object]:
    """Return an error as a JSON object: `stage`, `status_code` and `body` of the HTTP answer."""
    if isinstance(error, RequestError):
        body = error_body(error, str(protocol))
        return {"error": {"stage": error.stage, "status_code": error.status_code, "body": body}}
    stage = "tokenizer" if isinstance(error, TokenizerError) else "input"
    body = {"error": {"message": str(error), "type": f"{stage}_error"}}
    return {"error": {"stage": stage, "status_code": None, "body": body}}


def _converted(request: Request, profile: str, options: ConversionOptions) -> ConvertedRequest:
    converted = convert(request, options)
    if converted.profile.name != profile:
        raise OptionError(
            f"The request is for a model of the profile {converted.profile.name!r}, not "
            f"{profile!r}; change `model` or the profile."
        )
    return converted


def _object(text: bytes) -> Mapping[str, JsonValue]:
    try:
        value = load(text)
    except ValueError as error:
        raise BodyError(f"invalid JSON: {error}") from error
    return mapping(value, "the input")


def _request_of(line: Mapping[str, JsonValue]) -> str | Mapping[str, JsonValue]:
    """Return the request of a line: a JSON object, or the raw text of a body."""
    if "request_body" in line:
        if "request" in line:
            raise BodyError("There are both `request` and `request_body`; give one of them.")
        return _text(line, "request_body", "")
    return mapping(expand(line.get("request")), "request")


def _chunks_of(line: Mapping[str, JsonValue], tokenizer: PromptTokenizer) -> list[Chunk]:
    given = [name for name in ("token_ids", "text", "model_output_chunks") if name in line]
    if len(given) != 1:
        raise BodyError(
            f"The reply is given as {' and '.join(given) or 'nothing'}; give one of `token_ids`, "
            "`text` and `model_output_chunks`."
        )
    if given == ["model_output_chunks"]:
        for name in ("finish_reason", "prompt_tokens"):
            if name in line:
                raise BodyError(
                    f"`{name}` is given beside `model_output_chunks`; say it in a chunk."
                )
        return read_chunks(line["model_output_chunks"])
    if given == ["text"]:
        text = _text(line, "text", "")
        chunk: Chunk = TextChunk(text, tokenizer.count(text))
    else:
        chunk = TokenChunk(read_ids(line["token_ids"], "token_ids"))
    return [
        Ready(_integer(line, "prompt_tokens")),
        chunk,
        read_finish(line.get("finish_reason", "stop"), "finish_reason"),
    ]


def _pushed(stream: ReplyStream, chunks: list[Chunk]) -> list[ServerEvent]:
    """Push until a stop sequence ends the reply; what comes behind one is not read."""
    events: list[ServerEvent] = []
    for chunk in chunks:
        events += stream.push(chunk)
        if stream.finished and not isinstance(chunk, BackendFinish):
            break
    return events


def _with_line_options(options: ConversionOptions, value: JsonValue) -> ConversionOptions:
    """Return the options with those of a line: fields of `ConversionOptions`, and `aliases`."""
    if value is None:
        return options
    given: dict[str, Any] = dict(mapping(value, "options"))
    aliases = mapping(given.pop("aliases", {}), "options.aliases")
    known = {each.name for each in fields(ConversionOptions)}
    for name in given:
        if name not in known:
            raise OptionError(
                f"`options.{name}` is unknown; allowed: {', '.join(sorted({*known, 'aliases'}))}."
            )
    models = mapping(given.get("models", dict(options.models)), "options.models")
    if aliases:
        given["models"] = {**models, **aliases}
    return replace(options, **given)


def _read_token_map(path: Path) -> dict[str, int]:
    try:
        value = load(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"The token map `{path}` cannot be read: {error}") from error
    if not isinstance(value, dict) or not all(type(each) is int for each in value.values()):
        raise TokenizerError(
            f"The token map `{path}` is {shown(value)}; it must be a JSON object of "
            '{"spelling": id}.'
        )
    return value


def _label(line: Mapping[str, JsonValue]) -> dict[str, object]:
    return {"id": line["id"]} if "id" in line else {}


def _left_out(converted: ConvertedRequest) -> dict[str, object]:
    """Return what of a request has no effect, where there is any."""
    lists = {"left_out": list(converted.left_out), "overridden": list(converted.overridden)}
    return {name: names for name, names in lists.items() if names}


_MORE = ("parallel", "definitions", "exact")  # of a constraint, beside what golden lines have


def _line_settings(settings: GenerationSettings) -> dict[str, object]:
    """Return settings as golden lines have them; more about a constraint stands beside them."""
    options = asdict(settings)
    constraint = options["output_constraint"] or {}
    more = {name: constraint.pop(name) for name in _MORE if constraint}
    told = {name: value for name, value in more.items() if value not in (True, "")}
    return {"inference_options": options, **({"constraint": told} if told else {})}


def _text(line: Mapping[str, JsonValue], name: str, default: str) -> str:
    value = line.get(name, default)
    if not isinstance(value, str):
        raise BodyError(f"`{name}` is {shown(value)}; it must be a text.")
    return value


def _switch(line: Mapping[str, JsonValue], name: str, default: bool) -> bool:
    value = line.get(name, default)
    if not isinstance(value, bool):
        raise BodyError(f"`{name}` is {shown(value)}; it must be true or false.")
    return value


def _integer(line: Mapping[str, JsonValue], name: str) -> int:
    value = line.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BodyError(f"`{name}` is {shown(value)}; it must be an integer from 0.")
    return value


def _call_id(response_id: str, index: int) -> str:
    """Return the id of a call, the same for the same input."""
    digest = hashlib.sha256(f"{response_id}/{index}".encode()).hexdigest()
    return f"call_{index:02d}_{digest[:20]}{int(digest[20:30], 16) % 10_000:04d}"
