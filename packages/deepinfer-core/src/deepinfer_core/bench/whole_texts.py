"""Whole texts through a model without an engine: what measurements of finished texts need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.checkpoint import Checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41, Forwarded
from deepinfer_core.model.engram import EngramHash
from deepinfer_core.model.state import POOLS, ModelState, Ring, StateSizes
from deepinfer_core.model.weights import load_weights

__all__ = ["TextBatch", "forward_texts", "open_model"]

# Rows of a forward pass. More cost memory and gain nothing on a CPU.
MAX_ROWS = 4096
_BLOCK_SIZE = 64


def open_model(folder: str | Path, backend: KernelBackend, *, drafter: bool = False) -> DeepseekV41:
    """Load a model folder onto the backend's device.

    Args:
        folder: the model.
        backend: ops of the device.
        drafter: load the draft stages too.

    Raises:
        ConfigError: `config.json` or `tokenizer.json` does not fit.
        CheckpointError: the weights cannot be used.
    """
    folder = Path(folder)
    config, device = ModelConfig.from_folder(folder), backend.runtime.device
    engram = EngramHash.of_folder(config, folder, TextCodec(folder).tokenizer, device)
    with Checkpoint.open(folder, config) as checkpoint:
        weights = load_weights(checkpoint, config, backend, drafter=drafter)
    return DeepseekV41(config, weights, engram, device)


@dataclass(frozen=True)
class TextBatch:
    """Some of the texts, run from their first token to their last.

    Attributes:
        texts: their places in the list that was given; text j of the batch has slot j.
        starts: [texts + 1] int64, first row of each text.
        done: hidden streams and drafter features of all rows.
        state: with the drafter's rings, if the model has one, long enough for whole texts and fed
            with every position. A draft looks at no position behind its anchor, so it may start
            anywhere.
    """

    texts: tuple[int, ...]
    starts: Tensor
    done: Forwarded
    state: ModelState


def forward_texts(
    model: DeepseekV41, backend: KernelBackend, texts: Sequence[Sequence[int]]
) -> Iterator[TextBatch]:
    """Run texts, several at a time, and yield what came of them.

    Args:
        model: weights; with a drafter its rings are fed.
        backend: ops.
        texts: token ids, at least one each.
    """
    for texts_here in _packed([len(text) for text in texts]):
        yield _forward(model, backend, texts_here, [texts[i] for i in texts_here])


def _packed(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield places of texts that go together, in order, of at most `MAX_ROWS` rows if they can."""
    chosen: list[int] = []
    total = 0
    for place, length in enumerate(lengths):
        if chosen and total + length > MAX_ROWS:
            yield tuple(chosen)
            chosen, total = [], 0
        chosen.append(place)
        total += length
    if chosen:
        yield tuple(chosen)


@torch.no_grad()
def _forward(
    model: DeepseekV41,
    backend: KernelBackend,
    places: tuple[int, ...],
    texts: list[Sequence[int]],
) -> TextBatch:
    lengths = [len(text) for text in texts]
    state = _state(model, backend, len(texts), max(lengths))
    rows = RowBatch.build(
        backend,
        lengths,
        [0] * len(texts),
        range(len(texts)),
        window=model.config.sliding_window,
    )
    ids = torch.tensor([each for text in texts for each in text], device=backend.runtime.device)
    done = model.forward(backend, ids, rows, state)
    if model.drafter is not None and done.features is not None:
        model.drafter.feed(backend, done.features, done.rows, state)
    return TextBatch(places, rows.row_start, done, state)


def _state(model: DeepseekV41, backend: KernelBackend, count: int, max_len: int) -> ModelState:
    """Return state of `count` sequences in which every position has a place of its own."""
    config, device = model.config, backend.runtime.device
    empty = StateSizes(count, dict.fromkeys(POOLS, 0), _BLOCK_SIZE, max_len, 0)
    sizes = replace(empty, num_blocks=dict.fromkeys(POOLS, count * empty.table_len))
    state = ModelState.allocate(config, backend, sizes)
    for table in state.tables.values():
        order = torch.arange(count * sizes.table_len, device=device)
        table[:count] = order.view(count, -1).to(table.dtype)
    stages = 0 if model.drafter is None else config.num_nextn_predict_layers
    width, dtype = backend.entry_format("window", config.head_dim)
    rings = tuple(
        Ring(torch.zeros(count, max_len, width, dtype=dtype, device=device)) for _ in range(stages)
    )
    return replace(state, draft_windows=rings)
