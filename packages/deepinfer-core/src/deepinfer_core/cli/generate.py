"""`deepinfer generate`: an offline batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Protocol

import typer

from deepinfer_core.cli.options import (
    BAD_OPTION,
    INTERRUPTED,
    fail,
    reports_errors,
    with_engine_config,
)
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import OutputError, RequestError, shown
from deepinfer_core.types import SamplingParams

if TYPE_CHECKING:
    from deepinfer_core.cli.chat_lines import Conversation
    from deepinfer_core.cli.jsonl import Item, LineWriter
    from deepinfer_core.llm import LLM

    Take = Callable[[Sequence[tuple[int, Mapping[str, object]]]], None]

__all__ = ["generate"]

# `--seed` is that of the requests here. The engine's own, from which missing ones are derived,
# comes from the options file or the environment.
_ENGINE = frozenset(EngineConfig.model_fields) - {"seed"}

_PROMPTS, _SAMPLING = "Prompts and results", "Sampling"
_Source = Annotated[
    str | None, typer.Argument(metavar="[-]", help="`-` reads JSON lines from standard input.")
]
_Prompt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="A prompt; may be given several times.", rich_help_panel=_PROMPTS
    ),
]
_Input = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE.jsonl",
        help='Lines of {"prompt": TEXT} or {"prompt_token_ids": [..]}, with sampling fields where '
        "they differ from the flags.",
        rich_help_panel=_PROMPTS,
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Where results go. Default: standard output.",
        rich_help_panel=_PROMPTS,
    ),
]
_MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens to produce. Default: 256.", rich_help_panel=_SAMPLING),
]
_Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy. Default: 1.", rich_help_panel=_SAMPLING),
]
_Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of all prompts. Default: one each, derived from the engine's `seed`.",
        rich_help_panel=_SAMPLING,
    ),
]
_Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Log-probabilities of each token and of the K most likely ones.",
        rich_help_panel=_SAMPLING,
    ),
]
_BoundedReplay = Annotated[
    str | None,
    typer.Option(
        metavar="off|encoder|decoder|both",
        help="encoder: a cached prefix is resumed from its last rows; decoder: late layers skip "
        "the prompt before its last window. Default: both in `normal`, off in `strict`.",
        rich_help_panel=_SAMPLING,
    ),
]
_Constraint = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='What each text must be: {"json": SCHEMA}, {"json_object": true}, {"regex": TEXT}, '
        '{"choice": [TEXT, ..]}, {"grammar": EBNF} or {"structural_tag": ..}.',
        rich_help_panel=_SAMPLING,
    ),
]
_Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        metavar="",
        help="Prompts are what a user says; lines are Chat Completions requests with `messages`.",
        rich_help_panel=_PROMPTS,
    ),
]
_IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        metavar="",
        help="Go on after end-of-sequence ids.",
        rich_help_panel=_SAMPLING,
    ),
]


@reports_errors
@with_engine_config(_ENGINE)
def generate(
    source: _Source = None,
    prompt: _Prompt = None,
    input_file: _Input = None,
    out: _Out = None,
    chat: _Chat = False,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    seed: _Seed = None,
    logprobs: _Logprobs = None,
    bounded_replay: _BoundedReplay = None,
    ignore_eos: _IgnoreEos = False,
    constraint: _Constraint = None,
    *,
    config: EngineConfig,
) -> None:
    """Complete prompts; print one JSON line for each, in order.

    A line comes as soon as all before it are there. It has index, prompt_token_ids, token_ids,
    text, finish_reason and, if asked for, logprobs and prompt_logprobs; constraint_fault says why
    a finished text does not satisfy its constraint, constraint_warnings what of it is not enforced.
    If the prompt failed, it has an error too; if it was refused, index and error only. The exit
    status is then 1.

    With --chat a line has index, message, finish_reason, logprobs and usage.
    """
    from deepinfer_core.cli.jsonl import LineWriter

    if config.determinism == "strict" and bounded_replay not in (None, "off"):
        raise fail(
            f"`--bounded-replay` is {bounded_replay!r}, but `determinism` is 'strict', which needs "
            "the exact prefill. Choose 'off', or 'normal' determinism.",
            BAD_OPTION,
        )
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "logprobs": logprobs,
        "bounded_replay": bounded_replay,
        "ignore_eos": ignore_eos,
        "constraint": None if constraint is None else _parsed(constraint),
    }
    settings = {name: value for name, value in given.items() if value is not None}
    with _opened(source, prompt or (), input_file) as lines:
        writer = LineWriter(out)
        if lines is not None and writer.writes_into(lines.fileno()):
            raise fail("Results would go into the file of the prompts; change one.", BAD_OPTION)
        batch = (_conversations if chat else _prompts)(lines, prompt or (), settings)
    _run(config, batch, writer, 'the lines with "error"' if out is None else str(out))


class _Batch(Protocol):
    """What is to be completed, and how its lines look."""

    def __len__(self) -> int: ...

    def run(self, llm: LLM, take: Take) -> None:
        """Complete all of it; `take` gets the lines of a step."""


@dataclass(frozen=True)
class _Prompts:
    items: list[Item]

    def __len__(self) -> int:
        return len(self.items)

    def run(self, llm: LLM, take: Take) -> None:
        from deepinfer_core.cli.jsonl import output_line

        prompts, params = [each.prompt for each in self.items], [each.params for each in self.items]
        llm.generate(
            prompts,
            params,
            on_step=lambda ended: take(
                [(each.index, output_line(each, self.items[each.index])) for each in ended]
            ),
            on_error="output",
        )


@dataclass(frozen=True)
class _Conversations:
    items: list[Conversation]

    def __len__(self) -> int:
        return len(self.items)

    def run(self, llm: LLM, take: Take) -> None:
        from deepinfer_core.cli.chat_lines import chat_line

        llm.chat(
            [each.body for each in self.items],
            on_step=lambda ended: take(
                [(each.index, chat_line(each, self.items[each.index])) for each in ended]
            ),
            on_error="output",
        )


def _prompts(
    lines: BinaryIO | None, texts: Sequence[str], settings: Mapping[str, object]
) -> _Batch:
    from deepinfer_core.cli.jsonl import Item, read_items

    try:
        defaults = SamplingParams(**settings)  # type: ignore[arg-type]
    except RequestError as error:
        raise fail(error, BAD_OPTION) from None
    if lines is None:
        return _Prompts([Item(text, defaults) for text in texts])
    return _Prompts(read_items(lines, defaults))


def _conversations(
    lines: BinaryIO | None, texts: Sequence[str], settings: Mapping[str, object]
) -> _Batch:
    from deepinfer_core.cli.chat_lines import Conversation, read_conversations

    for name in ("bounded_replay", "ignore_eos", "constraint"):
        if settings.get(name) not in (None, False):
            instead = ", or give lines with `structured_outputs`" if name == "constraint" else ""
            raise fail(
                f"`--{name.replace('_', '-')}` is not for `--chat`; leave it out{instead}.",
                BAD_OPTION,
            )
    defaults = {
        name: settings[name] for name in ("max_tokens", "temperature", "seed") if name in settings
    }
    if "logprobs" in settings:
        defaults |= {"logprobs": True, "top_logprobs": settings["logprobs"]}
    if lines is None:
        said = ([{"role": "user", "content": text}] for text in texts)
        return _Conversations([Conversation({**defaults, "messages": each}) for each in said])
    return _Conversations(read_conversations(lines, defaults))


def _parsed(constraint: str) -> object:
    try:
        parsed = json.loads(constraint)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        allowed = 'a JSON object such as {"regex": "[0-9]+"}'
        raise fail(f"`--constraint` is {shown(constraint)}; allowed: {allowed}.", BAD_OPTION)
    return parsed


def _opened(
    source: str | None, prompts: Sequence[str], file: Path | None
) -> AbstractContextManager[BinaryIO | None]:
    """Open the one place that was named for prompts; None when they are on the command line."""
    if source not in (None, "-"):
        raise fail(f"{source!r} is no place for prompts; use `--prompt` or `-`.", BAD_OPTION)
    if (source is not None) + bool(prompts) + (file is not None) != 1:
        raise fail("Give prompts in one way: `--prompt`, `--input` or `-`.", BAD_OPTION)
    if prompts:
        return nullcontext()
    if file is None or str(file) == "-":
        if sys.stdin is None:
            raise fail("Standard input is closed; give `--prompt` or `--input`.", BAD_OPTION)
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise fail(
            f"`--input` {str(file)!r} cannot be read: {error.strerror}.", BAD_OPTION
        ) from None


def _run(config: EngineConfig, batch: _Batch, writer: LineWriter, place: str) -> None:
    """Complete the batch and write its lines; `place` says where to look for failures."""
    from deepinfer_core.cli.jsonl import OrderedLines
    from deepinfer_core.cli.progress import RunProgress, rates
    from deepinfer_core.llm import LLM

    lines = OrderedLines(writer)
    done, failed = 0, 0

    def take(ended: Sequence[tuple[int, Mapping[str, object]]]) -> None:
        nonlocal done, failed
        for index, line in ended:
            with progress.away() if writer.is_terminal() else nullcontext():
                lines.put(index, line)
            done, failed = done + 1, failed + ("error" in line)
        progress.update(done, llm.engine.stats)

    try:
        with RunProgress(len(batch)) as progress, LLM(config=config) as llm:
            writer.begin()
            try:
                batch.run(llm, take)
            except OutputError:
                raise
            except BaseException:
                lines.put_rest()  # of requests that ended while others before them ran
                raise
            progress.summary(f"{done} prompts; {rates(llm.engine.stats)}")
    except KeyboardInterrupt:
        message = f"interrupted; {writer.num_lines} of {len(batch)} lines are written"
        raise fail(message, INTERRUPTED) from None
    if failed:
        raise fail(f"{failed} of {len(batch)} prompts failed; see {place}")
