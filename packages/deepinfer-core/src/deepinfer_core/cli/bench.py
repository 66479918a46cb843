"""`deepinfer bench`: what measurements need, and the measurements themselves."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_core.cli.options import reports_errors

__all__ = ["app"]

app = typer.Typer(help="Make models to try and to measure.", no_args_is_help=True)


class Preset(StrEnum):
    """Shapes of a generated model."""

    DEMO = "demo"
    SECOND = "second-geometry"
    LOADING = "loading"


@app.callback()
def _group() -> None:
    pass


@app.command("make-checkpoint")
@reports_errors
def make_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Where the model goes; must be new or empty.")],
    preset: Annotated[
        Preset,
        typer.Option(
            metavar="NAME",
            help="demo: a few MB; second-geometry: other layers and sizes; loading: 512 MB.",
        ),
    ] = Preset.DEMO,
    seed: Annotated[int, typer.Option(help="Decides all weights.")] = 0,
    num_shards: Annotated[int, typer.Option(min=1, help="Files for the weights.")] = 1,
    plain: Annotated[
        bool, typer.Option("--plain", metavar="", help="bfloat16 instead of FP8 and FP4.")
    ] = False,
) -> None:
    """Write a model with random weights in the released on-disk format."""
    from deepinfer_core.bench import make_checkpoint as maker

    config = {
        Preset.DEMO: maker.demo_config,
        Preset.SECOND: maker.second_geometry_config,
        Preset.LOADING: maker.loading_config,
    }[preset]()
    maker.write_checkpoint(folder, config, seed=seed, quantized=not plain, num_shards=num_shards)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 2**20:.1f} MiB")
