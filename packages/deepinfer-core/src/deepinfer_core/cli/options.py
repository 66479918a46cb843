"""What verbs share: flags made from `EngineConfig`, and errors as one line and an exit status."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from deepinfer_core.config import ENV_PREFIX, EngineConfig
from deepinfer_core.errors import DeepInferError, OutputError

__all__ = [
    "BAD_OPTION",
    "FAILED",
    "INTERRUPTED",
    "fail",
    "print_table",
    "reports_errors",
    "with_engine_config",
]

FAILED = 1
BAD_OPTION = 2
INTERRUPTED = 130

_PIPE_WIDTH = 120  # columns of tables that no terminal shows

Verb = Callable[..., None]


def fail(message: object, status: int = FAILED) -> typer.Exit:
    """Print an error and return the exception that ends the command with that status."""
    if sys.stderr is not None:  # else it would go to standard output
        print(f"error: {message}", file=sys.stderr, flush=True)
    return typer.Exit(status)


def print_table(title: str, rows: Iterable[tuple[str, str, str]]) -> None:
    """Print lines of (what, how much, note) as a table; what is too wide goes on below."""
    from rich.console import Console
    from rich.table import Table

    if sys.stdout is None:
        raise OutputError("Standard output is closed; the table has nowhere to go.")
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False).print(table)


def reports_errors(verb: Verb) -> Verb:
    """Make a verb end with a message instead of a traceback when it fails on purpose."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
            if sys.stdout is not None:
                sys.stdout.flush()  # here a full disk is still an error of ours
        except DeepInferError as error:
            raise fail(error) from None
        except BrokenPipeError:
            raise  # the reader has had enough
        except OSError as error:
            if error.filename is not None:  # a file's: not a matter of what is printed
                raise
            raise fail(f"the output cannot be written: {error.strerror or error}") from None
        except KeyboardInterrupt:
            raise fail("interrupted", INTERRUPTED) from None

    return run


def with_engine_config(only: Collection[str] | None = None) -> Callable[[Verb], Verb]:
    """Give a verb flags for options of the engine, and the options as its argument `config`.

    Args:
        only: which options; None for all. The others can still be set in the file or environment.
    """
    names = [name for name in EngineConfig.model_fields if only is None or name in only]

    def wrap(verb: Verb) -> Verb:
        hints = get_type_hints(verb, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(verb).parameters.items()
            if name != "config"
        ]
        flags = [_flag(name) for name in names]
        file = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None,
                typer.Option(
                    metavar="FILE",
                    help=f"TOML file of options; `{ENV_PREFIX}*` variables and flags win over it.",
                    rich_help_panel="Options file",
                ),
            ],
        )

        def run(**kwargs: Any) -> None:
            given = {name: kwargs.pop(name) for name in names}
            try:
                config = EngineConfig.load(kwargs.pop("config"), os.environ, given)
            except DeepInferError as error:
                raise fail(error, BAD_OPTION) from None
            verb(**kwargs, config=config)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [each.replace(kind=keyword) for each in (*own, *flags)]
        parameters.append(file)
        run.__name__, run.__doc__ = verb.__name__, verb.__doc__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return wrap


def _flag(name: str) -> inspect.Parameter:
    """Make the parameter that typer turns into the flag of an engine option."""
    info = EngineConfig.model_fields[name]
    assert info.description is not None, f"`{name}` has no help text"
    kind, words = _kind(info.annotation)
    metavar = "|".join(words) if words else (info.examples or [None])[0]
    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=info.description + ("" if info.default is None else f" Default: {info.default}."),
        metavar=metavar,
        rich_help_panel=info.title,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Union[kind, None], option],  # noqa: UP007 - `kind` is a value
    )


def _kind(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """Return int, float or str, and the words a string may be."""
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    if get_args(annotation):
        inner = [each for each in get_args(annotation) if isinstance(each, type) or get_args(each)]
        return _kind(next(each for each in inner if each is not type(None)))
    return annotation, ()
