"""One process's share of an evaluation: replies, drafts of finished replies, losses of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.bench.acceptance import FinishedText, Verified, verify_texts
from deepinfer_core.bench.whole_texts import forward_texts, open_model
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.loader import find_backend
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from nano.judge import Ask

__all__ = ["Done", "Share", "Text", "work"]

# Sequences that decode together. More take longer to fill up and gain little.
_BATCH = 96
_PREFILL_ROWS = 2048
# Tokens that a reply may be longer than the expected one before it is cut off.
_MARGIN = 8
# Rows whose logits exist at a time.
_PIECE = 1024


@dataclass(frozen=True)
class Text:
    """Tokens, and the places of those whose loss counts; never the first."""

    token_ids: tuple[int, ...]
    counted: tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What a process does.

    Attributes:
        folder: the model; `float_folder` the same one before quantisation, or None.
        asks: replies to give.
        verify: places among `asks` whose replies are drafted for.
        texts: to take losses of.
    """

    folder: Path
    float_folder: Path | None
    asks: tuple[Ask, ...]
    verify: tuple[int, ...]
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Done:
    """What came of it.

    Attributes:
        replies: of each ask, with the EOS if it came.
        verified: `text` is a place in `Share.verify`; None without a drafter or anything to verify.
        losses: of each text [3] float64: tokens, sum of losses in nats, the same of the model with
            floats (0 without one).
    """

    replies: tuple[tuple[int, ...], ...]
    verified: Verified | None
    losses: tuple[np.ndarray, ...]
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float


def work(share: Share) -> Done:
    """Do one share, on one core."""
    torch.set_num_threads(1)
    with LLM(
        share.folder,
        accelerator="cpu",
        num_threads=1,
        max_sequences=_BATCH,
        max_step_tokens=_PREFILL_ROWS,
        prefill_run_max=_BATCH,
    ) as llm:
        params = [
            SamplingParams(temperature=0.0, max_tokens=len(ask.expected) + _MARGIN)
            for ask in share.asks
        ]
        outputs = llm.generate([{"prompt_token_ids": ask.prompt} for ask in share.asks], params)
        stats = llm.engine.stats
    replies = tuple(output.token_ids for output in outputs)
    backend = find_backend("cpu", "release").with_strict(False)
    model = open_model(share.folder, backend, drafter=True)
    verified = None
    if model.drafter is not None and share.verify:
        texts = [FinishedText(share.asks[i].prompt, replies[i]) for i in share.verify]
        verified = verify_texts(model, backend, texts)
    losses = np.zeros((len(share.texts), 3))
    losses[:, 0] = [len(text.counted) for text in share.texts]
    losses[:, 1] = _losses(model, backend, share.texts)
    if share.float_folder is not None:
        ideal = find_backend("cpu", "ideal").with_strict(False)
        losses[:, 2] = _losses(open_model(share.float_folder, ideal), ideal, share.texts)
    return Done(
        replies=replies,
        verified=verified,
        losses=tuple(losses),
        prefill_tokens=stats.prefill_tokens,
        prefill_seconds=stats.prefill_seconds,
        decode_tokens=stats.decode_tokens,
        decode_seconds=stats.decode_seconds,
    )


@torch.no_grad()
def _losses(model: DeepseekV41, backend: KernelBackend, texts: Sequence[Text]) -> np.ndarray:
    """Return the sum of the losses of each text's counted tokens, [texts] float64."""
    sums = np.zeros(len(texts))
    for batch in forward_texts(model, backend, [text.token_ids for text in texts]):
        starts = batch.starts.tolist()
        for slot, place in enumerate(batch.texts):
            text = texts[place]
            for begin in range(0, len(text.counted), _PIECE):
                counted = text.counted[begin : begin + _PIECE]
                rows = torch.tensor([starts[slot] + i - 1 for i in counted])
                targets = torch.tensor([text.token_ids[i] for i in counted])
                logits = model.logits(backend, batch.done.hidden[rows])
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                sums[place] += float(loss)
    return sums
