"""`calibration.json` of a model folder: temperatures that make the drafter's confidences honest.

None comes with the released weights; it is measured (`dspark` calibration, sequential temperature
scaling). It belongs to one drafter and one checkpoint, and is refused for any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from deepinfer_core.errors import CheckpointError

__all__ = ["CALIBRATION_NAME", "DrafterCalibration", "TrafficCalibration", "checkpoint_hash"]

CALIBRATION_NAME = "calibration.json"

# Of greedy requests confidences mean another thing than of sampled ones, and of sampled ones
# another under each rule of acceptance. Greedy acceptance is the same under both rules.
_TRAFFIC = ("greedy", "sampled")
_ACCEPTANCE = ("target_noise", "rejection")
_TEMPERATURES = (0.01, 100.0)
_READ_LEN = 2**20


@dataclass(frozen=True)
class TrafficCalibration:
    """What was measured on one class of traffic.

    Attributes:
        traffic: `greedy` or `sampled`.
        acceptance: `target_noise` or `rejection`: the rule while measuring.
        temperatures: one for each draft of a block; the k-th confidence is
            `sigmoid(logit / temperatures[k])`.
        data_set: what the texts were.
        num_blocks: blocks with full-length verification.
        ece_before: expected calibration error of "the first k pass", for each k, as a share of 1,
            with all temperatures 1.
        ece_after: the same with the temperatures.
    """

    traffic: str
    acceptance: str
    temperatures: tuple[float, ...]
    data_set: str
    num_blocks: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


@dataclass(frozen=True)
class DrafterCalibration:
    """Content of `calibration.json`.

    Attributes:
        block_size: drafts of a block, g.
        checkpoint: `checkpoint_hash` of the weights it was measured with.
        classes: at most one of each class of traffic.
    """

    block_size: int
    checkpoint: str
    classes: tuple[TrafficCalibration, ...]

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, *, block_size: int, checkpoint: str) -> DrafterCalibration:
        """Read the file and check that it is meant for this model.

        Args:
            path: the file.
            block_size: drafts of a block of the model in use.
            checkpoint: `checkpoint_hash` of the weights in use.

        Raises:
            CheckpointError: it cannot be read, is no calibration, or was measured with another
                block size or other weights.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"`{path}` cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise _fault(path, f"is not JSON: {error}") from error
        found = cls(**_fields(path, cls, content))
        if not isinstance(found.classes, list):
            raise _fault(path, "has `classes` that are no list")
        classes = tuple(_class(path, each, found.block_size) for each in found.classes)
        if len({(each.traffic, each.acceptance) for each in classes}) < len(classes):
            raise _fault(path, "has two entries of one class of traffic")
        if found.block_size != block_size or not isinstance(found.block_size, int):
            raise CheckpointError(
                f"`{path}` was measured with blocks of {found.block_size} drafts, but the model "
                f"drafts {block_size}. Calibrate again, or remove the file."
            )
        if found.checkpoint != checkpoint:
            raise CheckpointError(
                f"`{path}` was measured with the weights {found.checkpoint!r}, but these are "
                f"{checkpoint!r}. Calibrate again, or remove the file."
            )
        return cls(block_size, checkpoint, classes)


def checkpoint_hash(folder: Path) -> str:
    """Return `sha256:...` of the bytes of all weight files of a folder, in the order of names."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"`{folder}` has no *.safetensors, so there are no weights to hash.")
    try:
        for file in files:
            with file.open("rb") as stream:
                while piece := stream.read(_READ_LEN):
                    digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"`{file}` cannot be read: {error.strerror}.") from error
    return f"sha256:{digest.hexdigest()}"


def _class(path: Path, content: object, block_size: object) -> TrafficCalibration:
    values = _fields(path, TrafficCalibration, content)
    for name, allowed in (("traffic", _TRAFFIC), ("acceptance", _ACCEPTANCE)):
        if values[name] not in allowed:
            raise _fault(path, f"has `{name}` {values[name]!r}; allowed: {allowed}")
    for name in ("temperatures", "ece_before", "ece_after"):
        numbers = values[name]
        if not isinstance(numbers, list) or len(numbers) != block_size:
            raise _fault(path, f"has `{name}` {numbers!r}; there must be {block_size} numbers")
        least, most = _TEMPERATURES if name == "temperatures" else (0.0, 1.0)
        if not all(_is_number(each) and least <= each <= most for each in numbers):
            raise _fault(path, f"has `{name}` {numbers!r}; each must be in {least} .. {most}")
        values[name] = tuple(map(float, numbers))
    if not isinstance(values["data_set"], str):
        raise _fault(path, f"has `data_set` {values['data_set']!r}; it must be a text")
    count = values["num_blocks"]
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise _fault(path, f"has `num_blocks` {count!r}; it must be a positive integer")
    return TrafficCalibration(**values)


def _fields(path: Path, kind: type, content: object) -> dict[str, Any]:
    wanted = {each.name for each in fields(kind)}
    if not isinstance(content, Mapping) or set(content) != wanted:
        names = ", ".join(f"`{name}`" for name in sorted(wanted))
        raise _fault(path, f"must have exactly these fields in one object: {names}")
    return dict(content)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fault(path: Path, sentence: str) -> CheckpointError:
    return CheckpointError(f"`{path}` {sentence}. Calibrate again, or remove the file.")
