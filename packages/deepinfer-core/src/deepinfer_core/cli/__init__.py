"""The command `deepinfer`. A verb imports torch when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from deepinfer_core import __version__
from deepinfer_core.cli import bench, demo, doctor, generate, plan_memory, trace

__all__ = ["main"]

app = typer.Typer(
    name="deepinfer",
    help="Run DeepSeek-V4.1-Flash on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)
app.command("trace")(trace.trace)
app.command("plan-memory")(plan_memory.plan_memory)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"deepinfer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; leaves by `SystemExit`.

    Exit status: 0 all well, 1 something failed, 2 wrong options, 130 interrupted.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="deepinfer")
    except KeyboardInterrupt:
        sys.exit(130)
