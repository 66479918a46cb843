"""`deepinfer generate`: an offline batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from deepinfer_core.cli.options import (
    BAD_OPTION,
    INTERRUPTED,
    fail,
    reports_errors,
    with_engine_config,
)
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import OutputError, RequestError
from deepinfer_core.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from deepinfer_core.cli.jsonl import Item, LineWriter

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
        metavar="off|decoder",
        help="Whether late layers skip the prompt before its last window. Default: decoder in "
        "`normal`, off in `strict`.",
        rich_help_panel=_SAMPLING,
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
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    seed: _Seed = None,
    logprobs: _Logprobs = None,
    bounded_replay: _BoundedReplay = None,
    ignore_eos: _IgnoreEos = False,
    *,
    config: EngineConfig,
) -> None:
    """Complete prompts; print one JSON line for each, in order.

    A line comes as soon as all before it are there. It has index, prompt_token_ids, token_ids,
    text, finish_reason and, if asked for, logprobs and prompt_logprobs. If the prompt failed, it
    has an error too; if it was refused, index and error only. The exit status is then 1.
    """
    from deepinfer_core.cli.jsonl import Item, LineWriter, read_items

    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "logprobs": logprobs,
        "bounded_replay": bounded_replay,
        "ignore_eos": ignore_eos,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        defaults = SamplingParams(**settings)  # type: ignore[arg-type]
    except RequestError as error:
        raise fail(error, BAD_OPTION) from None
    if config.model is None:
        raise fail("`--model` is not set; give a model folder or a hub id.", BAD_OPTION)
    with _opened(source, prompt or (), input_file) as lines:
        writer = LineWriter(out)
        if lines is None:
            items = [Item(text, defaults) for text in prompt or ()]
        elif writer.writes_into(lines.fileno()):
            raise fail("Results would go into the file of the prompts; change one.", BAD_OPTION)
        else:
            items = read_items(lines, defaults)
    _run(config, items, writer, 'the lines with "error"' if out is None else str(out))


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


def _run(config: EngineConfig, items: list[Item], writer: LineWriter, place: str) -> None:
    """Complete the prompts and write their lines; `place` says where to look for failures."""
    from deepinfer_core.cli.jsonl import OrderedLines, output_line
    from deepinfer_core.cli.progress import RunProgress, rates
    from deepinfer_core.llm import LLM

    lines = OrderedLines(writer)
    done, failed = 0, 0

    def take(ended: Sequence[RequestOutput]) -> None:
        nonlocal done, failed
        for output in ended:
            line = output_line(output, items[output.index])
            with progress.away() if writer.is_terminal() else nullcontext():
                lines.put(output.index, line)
            done, failed = done + 1, failed + ("error" in line)
        progress.update(done, llm.engine.stats)

    try:
        with RunProgress(len(items)) as progress, LLM(config=config) as llm:
            writer.begin()
            prompts, params = [item.prompt for item in items], [item.params for item in items]
            try:
                llm.generate(prompts, params, on_step=take, on_error="output")
            except OutputError:
                raise
            except BaseException:
                lines.put_rest()  # of requests that ended while others before them ran
                raise
            progress.summary(f"{done} prompts; {rates(llm.engine.stats)}")
    except KeyboardInterrupt:
        message = f"interrupted; {writer.num_lines} of {len(items)} lines are written"
        raise fail(message, INTERRUPTED) from None
    if failed:
        raise fail(f"{failed} of {len(items)} prompts failed; see {place}")
