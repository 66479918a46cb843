"""A model folder's weights: found, checked as a whole, then read one tensor at a time.

    checkpoint = Checkpoint.open(resolve_model(model), config)
    embed = checkpoint.tensor("embed.weight")
    w1 = checkpoint.experts("layers.3.ffn.experts", my_experts)["w1"]

Opening reads headers only. A tensor that is asked for is read into memory of its own, so what
a rank does not ask for costs it nothing. `mapped` leaves a tensor in the file.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from deepinfer_core.errors import CheckpointError
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.hub import resolve_model
from deepinfer_core.model.shards import StoredTensor, read_folder
from deepinfer_core.model.tensors import TensorKind, TensorSpec, tensor_specs

__all__ = ["Checkpoint", "StoredMatrix", "resolve_model"]

# Faults of one sort that are named one by one; the rest is counted.
_NAMED_FAULTS = 100

# Scales and packed FP4 stay raw bytes: torch has no arithmetic for either.
_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}

_EXPERT_MATRICES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix, or a stack of matrices, as stored; satisfies `interfaces.Matrix`.

    Attributes:
        payload: float8_e4m3fn [.., out, in], uint8 [.., out, in / 2] (two E2M1, low nibble
            first), or bfloat16 / float32 [.., out, in].
        scale: uint8 exponent bytes, 2 ** (byte - 127): [.., ceil(out / 32), ceil(in / 32)] for
            `fp8_tile`, [.., out, ceil(in / 32)] for `fp4_row` and `fp8_row`; None iff `plain`.
        format: `plain`, `fp8_tile`, `fp4_row`, or `fp8_row` (the Engram table).
    """

    payload: Tensor
    scale: Tensor | None = None
    format: str = TensorKind.PLAIN.value

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of one matrix, unpacked."""
        rows, width = self.payload.shape[-2:]
        return rows, width * 2 if self.format == TensorKind.FP4_ROW.value else width


class Checkpoint:
    """The weights of one model folder. Reading is thread safe; `close` ends it."""

    def __init__(self, specs: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]):
        """Use `Checkpoint.open`, which checks that `stored` is what `specs` says."""
        self._specs = specs
        self._stored = stored
        self._files: dict[Path, io.FileIO] = {}

    @classmethod
    def open(cls, folder: str | Path, config: ModelConfig) -> Checkpoint:
        """Read all headers of a model folder and check every tensor against the config.

        Raises:
            CheckpointError: a file is absent, unreadable or truncated, or a tensor is missing,
                not known, misshapen or of another dtype. One error lists every fault.
        """
        folder = Path(folder)
        found = read_folder(folder)
        specs = _as_stored(tensor_specs(config), found.tensors)
        faults = {
            "File": found.faults,
            "Missing tensor": [
                f"`{name}`"
                for name in specs
                if name not in found.tensors and name not in found.lost and found.complete
            ],
            "Extra tensor": [f"`{name}`" for name in found.tensors if name not in specs],
            "Wrong shape": [],
            "Wrong dtype": [],
        }
        for name in specs.keys() & found.tensors.keys():
            spec, stored = specs[name], found.tensors[name]
            if stored.dtype not in spec.kind.dtypes:
                wanted = " or ".join(spec.kind.dtypes)
                faults["Wrong dtype"].append(f"`{name}` is {stored.dtype}, must be {wanted}")
            if stored.shape != spec.shape:
                wanted = f"must be {list(spec.shape)}"
                faults["Wrong shape"].append(f"`{name}` is {list(stored.shape)}, {wanted}")
        if any(faults.values()):
            raise CheckpointError(_describe(folder, faults, config))
        return cls(specs, found.tensors)

    def __enter__(self) -> Checkpoint:
        """Return itself; the end of the `with` block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files. Tensors already read, or mapped, stay valid."""
        while self._files:
            self._files.popitem()[1].close()

    def names(self, *, vision: bool = False) -> list[str]:
        """Return the names of the tensors, those of the image path only if asked for."""
        return [name for name, spec in self._specs.items() if vision or not spec.is_vision]

    def spec(self, name: str) -> TensorSpec:
        """Return a tensor's stored shape and format."""
        if name not in self._specs:
            raise CheckpointError(f"The model has no tensor `{name}`.")
        return self._specs[name]

    def num_bytes(self, name: str) -> int:
        """Return a tensor's size in the file, and in memory, in bytes."""
        self.spec(name)
        return self._stored[name].num_bytes

    def tensor(self, name: str) -> Tensor:
        """Read one tensor into new memory, in its stored format.

        Returns:
            The stored shape; bfloat16, float32, float8_e4m3fn, or uint8 for packed FP4 and for
            exponent bytes.
        Raises:
            CheckpointError: no such tensor, or the file changed since it was opened.
        """
        return self.rows(name, 0, self.spec(name).shape[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read the stored rows [start, stop) of a tensor's first axis; otherwise as `tensor`."""
        num_rows, *rest = self.spec(name).shape
        if not 0 <= start <= stop <= num_rows:
            raise CheckpointError(
                f"Rows {start} to {stop} of `{name}` were asked for; it has {num_rows}."
            )
        out = torch.empty((stop - start, *rest), dtype=self._dtype(name))
        self._fill(name, start, out)
        return out

    def mapped(self, name: str) -> Tensor:
        """Return a tensor that stays in its file: pages are read when touched.

        For a table too large for memory, such as Engram's. It must not be written to.
        """
        spec, stored = self.spec(name), self._stored[name]
        if stored.num_bytes == 0:
            return torch.empty(spec.shape, dtype=self._dtype(name))
        # read only: a writable private map would count against the machine's memory limit,
        # which a table of hundreds of GB does not fit. torch warns that it cannot know of this.
        data = numpy.memmap(
            stored.path, numpy.uint8, mode="r", offset=stored.offset, shape=(stored.num_bytes,)
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            flat = torch.from_numpy(data)
        return flat.view(self._dtype(name)).view(spec.shape)

    def matrix(self, name: str, *, mapped: bool = False) -> StoredMatrix:
        """Read a matrix and its scales, or map both; `name` is without `.weight`."""
        get = self.mapped if mapped else self.tensor
        spec = self.spec(f"{name}.weight")
        scale = None if spec.scale_name is None else get(spec.scale_name)
        return StoredMatrix(get(spec.name), scale, spec.kind.value)

    def experts(self, prefix: str, expert_ids: Sequence[int]) -> dict[str, StoredMatrix]:
        """Read some routed experts of a layer, stacked in the order asked for.

        Args:
            prefix: such as `layers.3.ffn.experts`.
            expert_ids: logical experts; an id may appear more than once (replicas).
        Returns:
            `w1` and `w3` [n, intermediate, hidden], `w2` [n, hidden, intermediate], as stored.
        Raises:
            CheckpointError: no such expert, experts stored in different formats, or as `tensor`.
        """
        return {matrix: self._stack(prefix, expert_ids, matrix) for matrix in _EXPERT_MATRICES}

    def _stack(self, prefix: str, expert_ids: Sequence[int], matrix: str) -> StoredMatrix:
        names = [f"{prefix}.{expert}.{matrix}.weight" for expert in expert_ids]
        # without experts there is still a shape
        first = names[0] if names else f"{prefix}.0.{matrix}.weight"
        like = (self.spec(first).kind, self._dtype(first))
        for name in names:
            if (self.spec(name).kind, self._dtype(name)) != like:
                raise CheckpointError(
                    f"`{name}` and `{first}` are stored in different formats; the experts that "
                    f"one rank holds must have one format."
                )
        # one allocation filled expert by expert: stacking afterwards would need twice the memory
        payload = self._read_stacked(names, self.spec(first).shape, like[1])
        scale = None
        if (scale_name := self.spec(first).scale_name) is not None:
            names = [name.removesuffix("weight") + "scale" for name in names]
            scale = self._read_stacked(names, self.spec(scale_name).shape, torch.uint8)
        return StoredMatrix(payload, scale, like[0].value)

    def _read_stacked(self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.empty((len(names), *shape), dtype=dtype)
        for part, name in zip(out, names, strict=True):
            self._fill(name, 0, part)
        return out

    def _dtype(self, name: str) -> torch.dtype:
        return _TORCH_DTYPES[self._stored[name].dtype]

    def _fill(self, name: str, start: int, out: Tensor) -> None:
        """Read rows from `start` on into `out`, a contiguous tensor of the stored dtype."""
        stored = self._stored[name]
        row_bytes = stored.num_bytes // max(1, stored.shape[0])
        # Plain reads, not a map of the file: the pages of a map stay resident beside the copies
        # made from them, so loading would peak at up to twice the size of what is kept.
        target = out.view(-1).view(torch.uint8).numpy().data
        offset = stored.offset + start * row_bytes
        try:
            if (file := self._files.get(stored.path)) is None:
                file = self._files[stored.path] = io.FileIO(stored.path)
            while target:
                count = os.preadv(file.fileno(), [target], offset)
                if count == 0:
                    raise CheckpointError(
                        f"`{stored.path}` ended at byte {offset} while `{name}` was read; the "
                        f"file changed after it was opened. Fetch it again."
                    )
                target, offset = target[count:], offset + count
        except OSError as error:
            raise CheckpointError(
                f"`{name}` cannot be read from `{stored.path}`: {error.strerror}."
            ) from error


def _as_stored(
    specs: dict[str, TensorSpec], stored: Mapping[str, StoredTensor]
) -> dict[str, TensorSpec]:
    """Return the specs with plain ones for matrices that the files hold without scales."""
    result = dict(specs)
    for name, spec in specs.items():
        scale = spec.scale_name
        if scale is None or scale in stored or name not in stored:
            continue
        plain = spec.without_scale()
        if stored[name].dtype in plain.kind.dtypes:
            result[name] = plain
            del result[scale]
    return result


def _describe(folder: Path, faults: Mapping[str, list[str]], config: ModelConfig) -> str:
    """Return one message for all faults, grouped by sort."""
    total = sum(map(len, faults.values()))
    lines = [f"Model folder `{folder}` cannot be used: {total} fault{'s' if total > 1 else ''}."]
    for sort, found in faults.items():
        if not found:
            continue
        lines.append(f"{sort}{'s' if len(found) > 1 and 'tensor' in sort else ''} ({len(found)}):")
        lines += [f"  {fault}" for fault in sorted(found)[:_NAMED_FAULTS]]
        if rest := sorted(found)[_NAMED_FAULTS:]:
            places = Counter(_place(fault) for fault in rest)
            counts = ", ".join(f"{count} in {place}" for place, count in places.items())
            lines.append(f"  and {len(rest)} more: {counts}")
    if not config.quantized and any(name.endswith(".scale`") for name in faults["Extra tensor"]):
        lines.append("There are scales, but config.json has no `quantization_config`.")
    lines.append("Fetch the files again, or check that config.json belongs to them.")
    return "\n".join(lines)


def _place(fault: str) -> str:
    """Return the layer, stage or part that a fault's tensor belongs to."""
    parts = fault.strip("`").split(".")
    return ".".join(parts[:2] if parts[0] in ("layers", "mtp") else parts[:1])
