"""`deepinfer bench`: what measurements need, and the measurements themselves."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_core.cli.options import BAD_OPTION, fail, reports_errors, with_engine_config
from deepinfer_core.config import EngineConfig

__all__ = ["app"]

app = typer.Typer(help="Make models to try and to measure.", no_args_is_help=True)


_STARTUP = (
    "model",
    "accelerator",
    "numerics",
    "determinism",
    "num_threads",
    "block_size",
    "max_model_len",
    "max_step_tokens",
)


_SPECULATION = (
    "model",
    "accelerator",
    "numerics",
    "determinism",
    "num_threads",
    "block_size",
    "max_model_len",
    "max_step_tokens",
    "depth",
    "num_drafts",
    "speculation_threshold",
)


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


@app.command("startup")
@reports_errors
@with_engine_config(_STARTUP)
def startup(
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Tokens before the chunks to measure. Default: up to 3072."
        ),
    ] = None,
    chunks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Tokens of the chunks to measure. Default: 1/8 to all of `--max-step-tokens`.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measured runs of each chunk.")
    ] = 5,
    budget_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Show the chunks that a step of so many ms would take."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Store the cost model for the option `cost_model`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the JSON line to this file.")
    ] = None,
    *,
    config: EngineConfig,
) -> None:
    """Measure what starting takes and what prefill chunks take; fit the cost model to it."""
    wanted_contexts = _numbers("--contexts", contexts, low=0)
    wanted_chunks = _numbers("--chunks", chunks, low=1)
    if budget_ms is not None and not 0 < budget_ms < float("inf"):
        raise fail(f"`--budget-ms` is {budget_ms:g}; it must be a positive number.", BAD_OPTION)
    began = time.perf_counter_ns()
    from deepinfer_core.bench import startup as bench

    bench.bench_startup(
        config,
        bench.Grid(wanted_contexts, wanted_chunks, repeats),
        import_ns=time.perf_counter_ns() - began,
        budget_ms=budget_ms,
        save=save,
        out=out,
    )


@app.command("speculation")
@reports_errors
@with_engine_config(_SPECULATION)
def speculation(
    load: Annotated[
        str, typer.Option(metavar="N,N,...", help="Sequences that decode at a time.")
    ] = "1,4,16",
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...", help="Of off, fixed, threshold and delayed. Default: all."
        ),
    ] = "off,fixed,threshold,delayed",
    tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Most tokens of an answer.")
    ] = 128,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Prompts of a load. Default: 4 for each sequence, and 8."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="T", help="Of all requests; they have seeds.")
    ] = 0.0,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="target_noise|rejection|both",
            help="Rule by which drafts stand; both: each policy twice, and what rejection gains. "
            "Default: the option of the engine.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            metavar="",
            help="Measure what steps cost, even if no policy needs it. Policy `delayed` does if "
            "it has no `--costs`.",
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Store the measured costs for the option `speculation_costs`. Takes one load.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `--save` stored, instead of measuring."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the JSON line to this file.")
    ] = None,
    *,
    config: EngineConfig,
) -> None:
    """Measure what drafts gain: policies side by side, on the same prompts.

    Each policy at each load has an engine of its own. Decode steps alone count, and of these the
    ones with as many sequences as the load says.
    """
    loads = _numbers("--load", load, low=1)
    assert loads is not None, "a text was given"
    from deepinfer_core.bench import speculation as bench

    rule = config.acceptance if acceptance is None else acceptance
    rules = bench.ACCEPTANCES if rule == "both" else _words("--acceptance", rule, bench.ACCEPTANCES)
    known = config.speculation_costs
    asked = bench.Asked(
        loads=loads,
        policies=_words("--policies", policies, bench.POLICIES),
        acceptances=rules,
        tokens=tokens,
        prompts=prompts,
        temperature=temperature,
        profile=profile,
        save=save,
        costs=known if costs is None else str(costs),
    )
    bench.bench_speculation(config, asked, out)


def _words(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a list such as `off,fixed`, each once, in the order of `allowed`."""
    words = {word.strip() for word in text.split(",")}
    if not words <= set(allowed):
        raise fail(
            f"`{option}` is {text!r}; it must be of {', '.join(allowed)}, with commas between "
            "them.",
            BAD_OPTION,
        )
    return tuple(word for word in allowed if word in words)


def _numbers(option: str, text: str | None, low: int) -> tuple[int, ...] | None:
    """Return the numbers of a list such as `0,512,1024`, ascending."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and int(word) >= low for word in words):
        raise fail(
            f"`{option}` is {text!r}; it must be whole numbers of at least {low} with commas "
            "between them, such as 512,1024.",
            BAD_OPTION,
        )
    return tuple(sorted({int(word) for word in words}))
