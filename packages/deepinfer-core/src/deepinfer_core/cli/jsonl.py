"""JSON lines of `generate`: prompts in, results out, in the order of the prompts."""

from __future__ import annotations

import errno
import json
import math
import os
import select
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deepinfer_core.config import did_you_mean
from deepinfer_core.errors import OutputError, RequestError, shown
from deepinfer_core.types import RequestOutput, SamplingParams, TokenLogprob

__all__ = [
    "Item",
    "LineWriter",
    "OrderedLines",
    "constraint_notes",
    "output_line",
    "read_items",
]

_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("prompt", (str,), "a text"),
    ("prompt_token_ids", (list,), "a list of token ids"),
    ("stop", (str, list), "a text or a list of texts"),
    ("stop_token_ids", (list,), "a list of token ids"),
)


@dataclass(frozen=True)
class Item:
    """One prompt, or what is wrong with its line of the input."""

    prompt: str | list[int]
    params: SamplingParams
    line: int | None = None
    error: RequestError | None = None


def read_items(lines: Iterable[bytes], defaults: SamplingParams) -> list[Item]:
    """Return the prompts of JSON lines; blank lines are left out.

    Args:
        lines: such as `{"prompt": "Hello", "max_tokens": 8}`.
        defaults: settings of lines that do not say otherwise.
    """
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(_read_line(line, number, defaults))
        except RequestError as error:
            items.append(Item([], defaults, number, error))
    return items


def _read_line(line: bytes, number: int, defaults: SamplingParams) -> Item:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError(
            'this is not a JSON object; write {"prompt": "..."}.', code="invalid_json"
        )
    known = ("prompt", "prompt_token_ids", *SamplingParams.names())
    for name in fields:
        if name not in known:
            raise RequestError(
                f"the field `{name}` is unknown. {did_you_mean(name, known)}",
                param=name,
                code="unknown_field",
            )
    if ("prompt" in fields) == ("prompt_token_ids" in fields):
        both = "both `prompt` and" if "prompt" in fields else "neither `prompt` nor"
        raise RequestError(f"it has {both} `prompt_token_ids`; give one of them.", param="prompt")
    for name, kinds, allowed in _TYPES:
        if name in fields and not isinstance(fields[name], kinds):
            raise RequestError(
                f"`{name}` is {shown(fields[name])}; it must be {allowed}.", param=name
            )
    prompt: str | list[int] = fields["prompt" if "prompt" in fields else "prompt_token_ids"]
    settings = {name: fields[name] for name in SamplingParams.names() if name in fields}
    return Item(prompt, replace(defaults, **settings), number)


def output_line(output: RequestOutput, item: Item) -> dict[str, object]:
    """Return the line of a request that has ended.

    What failed while it ran has an error beside what it produced; what was refused has no more than
    index and error.
    """
    line: dict[str, object] = {"index": output.index}
    if output.prompt_token_ids:
        line |= _produced(output)
    if (error := _error(output, item)) is not None:
        line["error"] = error
    return line


def _produced(output: RequestOutput) -> dict[str, object]:
    line: dict[str, object] = {
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason and output.finish_reason.value,
    }
    for name in ("logprobs", "prompt_logprobs"):
        values: tuple[TokenLogprob, ...] | None = getattr(output, name)
        if values is not None:
            line[name] = [_logprob(value) for value in values]
    return line | constraint_notes(output)


def constraint_notes(output: RequestOutput) -> dict[str, object]:
    """Return what a line says of a request's constraint, where there is something to say."""
    notes: dict[str, object] = {}
    if output.constraint_fault is not None:
        notes["constraint_fault"] = output.constraint_fault
    if output.constraint_warnings:
        notes["constraint_warnings"] = list(output.constraint_warnings)
    return notes


def _error(output: RequestOutput, item: Item) -> dict[str, object] | None:
    message, param, code = output.error, output.error_param, output.error_code
    if item.error is not None:
        message, param, code = str(item.error), item.error.param, item.error.code
    if message is None:
        return None
    if item.line is not None:
        message = f"Line {item.line}: {message}"
    return {"message": message, "param": param, "code": code}


def _logprob(value: TokenLogprob) -> dict[str, object]:
    top = [{"token_id": token_id, "logprob": _finite(each)} for token_id, each in value.top]
    return {"token_id": value.token_id, "logprob": _finite(value.logprob), "top": top}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


class LineWriter:
    """Writes JSON lines to a file or to standard output, each one out of our hands at once."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, which keeps its content until `begin`.

        Args:
            path: None is standard output.

        Raises:
            OutputError: it cannot be opened.
        """
        self._name = "standard output" if path is None else f"`{path}`"
        self._num_bytes = 0
        self.num_lines = 0
        if path is None:
            if sys.stdout is None:
                raise OutputError("Standard output is closed; choose a file with `--out`.")
            sys.stdout.flush()
            self._file = sys.stdout.fileno()
        else:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise OutputError(
                    f"{self._name} cannot be opened for results: {error.strerror}. Choose another "
                    "place with `--out`."
                ) from error
        self._status = os.fstat(self._file)
        self._regular = path is not None and stat.S_ISREG(self._status.st_mode)

    def writes_into(self, file: int) -> bool:
        """Whether lines would go into the very file that a descriptor reads."""
        regular = stat.S_ISREG(self._status.st_mode)
        return regular and os.path.samestat(self._status, os.fstat(file))

    def is_terminal(self) -> bool:
        """Whether lines appear on a terminal."""
        return os.isatty(self._file)

    def begin(self) -> None:
        """Empty the file."""
        if self._regular:
            os.ftruncate(self._file, 0)

    def write(self, line: Mapping[str, object]) -> None:
        """Write one line; returns when the system has all of it.

        Raises:
            OutputError: the disk is full or the reader is gone. The file then ends with the last
                whole line.
        """
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        # half a surrogate pair is no character: the backslash form is what JSON writes for it
        data = text.encode(errors="backslashreplace") + b"\n"
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except BlockingIOError:  # standard output may have been made non-blocking by others
                select.select([], [self._file], [])
            except OSError as error:
                if self._regular:
                    os.ftruncate(self._file, self._num_bytes)
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                advice = "Free some space, or choose" if full else "Choose"
                raise OutputError(
                    f"{self._name} cannot be written: {error.strerror}. Lines that are safe: "
                    f"{self.num_lines}. {advice} another place with `--out`."
                ) from error
        self._num_bytes += len(data)
        self.num_lines += 1


class OrderedLines:
    """Hands lines on in the order of their numbers, each as soon as all before it are there."""

    def __init__(self, writer: LineWriter) -> None:
        """Begin with line 0."""
        self._writer = writer
        self._next = 0
        self._waiting: dict[int, Mapping[str, object]] = {}

    def put(self, index: int, line: Mapping[str, object]) -> None:
        """Take line `index`; write it and those behind it, if nothing before it is missing."""
        self._waiting[index] = line
        while self._next in self._waiting:
            line = self._waiting.pop(self._next)  # first, so that nothing writes it again
            self._next += 1
            self._writer.write(line)

    def put_rest(self) -> None:
        """Write what still waits, in order; those before it will not come any more."""
        for index in sorted(self._waiting):
            self._writer.write(self._waiting.pop(index))
