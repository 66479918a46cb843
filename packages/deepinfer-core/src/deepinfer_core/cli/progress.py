"""The progress bar of `generate`: requests done, and tokens a second of prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["RunProgress", "RunStats", "rates"]


class RunStats(Protocol):
    """What the engine has counted."""

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed."""

    @property
    def decode_tokens(self) -> int:
        """Tokens produced in decode steps."""

    @property
    def prefill_seconds(self) -> float:
        """Time in prefill steps."""

    @property
    def decode_seconds(self) -> float:
        """Time in decode steps."""


def rates(stats: RunStats) -> str:
    """Return the two speeds as text."""
    prefill = stats.prefill_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    decode = stats.decode_tokens / stats.decode_seconds if stats.decode_seconds else 0.0
    return f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


class RunProgress:
    """A bar on standard error if that is a terminal; nothing at all otherwise."""

    def __init__(self, num_requests: int, console: Console | None = None) -> None:
        """Show `loading` until the first update."""
        console = console or Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rates]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("loading", total=num_requests, rates="")

    def __enter__(self) -> RunProgress:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, num_done: int, stats: RunStats) -> None:
        """Show how many requests have ended, and the speeds."""
        if self._bar is not None:
            self._bar.update(
                self._task, description="generating", completed=num_done, rates=rates(stats)
            )

    @contextmanager
    def away(self) -> Iterator[None]:
        """Clear the bar while other text goes to the same terminal."""
        if self._bar is not None:
            self._bar.stop()
        yield
        if self._bar is not None:
            self._bar.start()

    def summary(self, text: str) -> None:
        """Print a last line where the bar was."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
