"""`deepinfer trace`: where the time of a run goes, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_core.cli.options import (
    BAD_OPTION,
    fail,
    print_table,
    reports_errors,
    with_engine_config,
)
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import Unsupported
from deepinfer_core.types import SamplingParams

if TYPE_CHECKING:
    from deepinfer_core.engine.records import StepRecord

__all__ = ["PROMPTS", "summary", "trace"]

# Of different lengths, so that prefill has something to pack.
PROMPTS = (
    "What is 27 + 58?",
    "Extract name and age as JSON: Anna Keller from Rome is 34 years old.",
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "Return a list of",
    "The weather in Paris is",
    'class Stack:\n    """A stack of items, the newest on top."""\n\n    def push(self, item):\n',
)


@reports_errors
@with_engine_config()
def trace(
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE.json", help="Where the timeline goes; ui.perfetto.dev opens it."
        ),
    ],
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg|png",
            help="Draw some steps as well. PNG needs the extra `plot`.",
        ),
    ] = None,
    picture_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps in the picture, from the middle of the run. Default: 16."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="A prompt; may be given several times. Default: some short ones."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each produces.")] = 32,
    *,
    config: EngineConfig,
) -> None:
    """Run prompts greedily and write when each part of each step ran on host and device.

    Prints where the time went. `settle` is reading a result into the books, `deferred` is text and
    streams, `wait` is for the device.
    """
    from deepinfer_core.llm import LLM
    from deepinfer_core.trace import check_picture, draw, write_trace
    from deepinfer_core.trace.picture import NUM_STEPS

    _check(output, picture, picture_steps)
    if picture is not None:
        try:
            check_picture(picture)
        except Unsupported as error:
            raise fail(error, BAD_OPTION) from None
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with LLM(config=config) as llm:
        llm.generate(list(prompt or PROMPTS), params)
        records = list(llm.engine.records)
    write_trace(output, records)
    if picture is not None:
        draw(picture, records, num_steps=picture_steps or NUM_STEPS)
    print_table(f"Timeline in {output}", summary(records))


def _check(output: Path, picture: Path | None, picture_steps: int | None) -> None:
    """Find wrong options before the model is loaded."""
    for name, path in (("output", output), ("picture", picture)):
        if path is not None and not path.parent.is_dir():
            raise fail(
                f"`--{name}` is {str(path)!r}, but there is no folder {str(path.parent)!r}. Make "
                "it, or choose another.",
                BAD_OPTION,
            )
    if picture_steps is not None and picture is None:
        raise fail("`--picture-steps` is for a picture; give `--picture` too.", BAD_OPTION)
    if picture is not None and picture.resolve() == output.resolve():
        raise fail(f"`--output` and `--picture` are both {str(output)!r}; change one.", BAD_OPTION)


def summary(records: Sequence[StepRecord]) -> list[tuple[str, str, str]]:
    """Return lines of (what, how much, note) about a run of at least one step."""
    from deepinfer_core.engine.records import overlap_ratio
    from deepinfer_core.plans import StepKind
    from deepinfer_core.trace.timeline import HOST_PARTS, host_slices, shown_time

    rows = []
    for kind in StepKind:
        of_kind = [record for record in records if record.kind is kind]
        times = [_step_ns(record) for record in of_kind]
        if times:
            num_rows = median(record.num_rows for record in of_kind)
            note = f"median of {len(times)} steps, {num_rows:g} rows"
            rows.append((f"{kind.value} step", shown_time(median(times)), note))
    ratio = overlap_ratio(records)
    rows.append(
        ("device busy", "unknown", "the device does not tell its times")
        if ratio is None
        else ("device busy", f"{ratio:.1%}", "from the first forward to the last, idling left out")
    )
    parts: dict[str, list[int]] = {part: [] for part in HOST_PARTS}
    for record in records:
        for each in host_slices(record):
            parts[each.name].append(each.end_ns - each.begin_ns)
    rows += [
        (f"host: {part}", shown_time(median(times)), f"median of {len(times)}")
        for part, times in parts.items()
        if times
    ]
    late = Counter(record.bubble for record in records if record.bubble is not None)
    causes = ", ".join(f"{cause} {num}" for cause, num in late.most_common())
    rows.append(("launched late", f"{late.total()} of {len(records)}", causes))
    return rows


def _step_ns(record: StepRecord) -> int:
    """Return a step's time on the device, or from launch to results where it does not tell."""
    if record.device is None:
        return record.wait_end_ns - record.launched_ns
    begin, end = record.device.forward
    return end - begin
