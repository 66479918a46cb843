"""A quick check on the device of training: would greedy decoding give the expected replies?

Where the right reply is unique, greedy decoding gives it exactly if every token of it is the most
likely one behind the true tokens before it; so one pass over known replies tells. The evaluation
that counts (`nano.evaluate`) decodes with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from nano.data.encoding import encode
from nano.data.stream import held_out
from nano.geometry import SEQUENCE_LEN
from nano.training.target import Target

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["exact_match"]

_ROWS = 32


def exact_match(
    target: Target,
    values: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    count: int,
    *,
    rounded: bool = True,
) -> dict[str, float]:
    """Return, for each task, the share of held-out examples all of whose replies are right."""
    shares = {}
    full = torch.full((), float(rounded), device=next(iter(values.values())).device)
    for task in tasks:
        examples = [encode(each, tokenizer) for each in held_out(tokenizer, task, count, seed=0)]
        right = 0
        for start in range(0, len(examples), _ROWS):
            part = examples[start : start + _ROWS]
            tokens = np.full((_ROWS, SEQUENCE_LEN), 2, dtype=np.int64)
            asked = np.zeros((_ROWS, SEQUENCE_LEN), dtype=bool)
            for row, example in enumerate(part):
                tokens[row, : len(example.token_ids)] = example.token_ids
                for first, last in example.replies:
                    asked[row, first:last] = True
            got = _right(target, dict(values), tokens, asked, full)
            right += int(got[: len(part)].sum())
        shares[task] = right / max(1, len(examples))
    return shares


@torch.no_grad()
def _right(
    target: Target, values: dict[str, Tensor], tokens: Any, asked: Any, full: Tensor
) -> Tensor:
    """Return for each row whether every asked token is the most likely one."""
    ids = torch.from_numpy(tokens).to(full.device)
    wanted = torch.from_numpy(asked).to(full.device)
    done = target.run(values, ids, torch.zeros_like(ids), full, full >= 0)
    logits = done.model.logits(cast(Any, done.backend), done.result.hidden)
    best = logits.argmax(-1).unflatten(0, ids.shape)[:, :-1]
    right: Tensor = (best == ids[:, 1:]) | ~wanted[:, 1:]
    return right.all(1)
