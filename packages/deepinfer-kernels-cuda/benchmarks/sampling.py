"""Sampling at V = 129280: greedy and sampled rows, filters, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference import sampling as twins
from deepinfer_kernels_cuda.sampling.logprobs import logprobs
from deepinfer_kernels_cuda.sampling.probabilities import probabilities
from deepinfer_kernels_cuda.sampling.sample import sample
from deepinfer_kernels_cuda.testing.bench import Case, main
from deepinfer_kernels_cuda.values import SampleInputs

V = 129280
ROWS = (1, 8, 60, 128, 512)
COLD = 130e6  # bytes of inputs to go through, so that the L2 holds none of the next call's
SPREAD = 2.0  # standard deviation of most logits
LIKELY = 40  # tokens of a row that stand out, as a language model's do: they have nearly all mass


def cases() -> Iterator[Case]:
    """Yield the cases; the plain forms are the twins, which sort whole rows."""
    torch.manual_seed(0)
    for rows in ROWS:
        logits = _logits(rows)
        size = rows * V * 4.0
        base = SampleInputs(
            seeds=torch.randint(0, 2**32, (rows, 2), device="cuda"),
            positions=torch.randint(0, 10**6, (rows,), device="cuda"),
            temperature=torch.zeros(rows, device="cuda"),
        )
        warm = replace(base, temperature=torch.full((rows,), 1.0, device="cuda"))
        top_p = torch.full((rows,), 0.95, device="cuda")
        top_k = torch.full((rows,), 50, device="cuda")
        settings = {"greedy": base, "noise": warm, "top-p .95": replace(warm, top_p=top_p)}
        settings["top-k 50"] = replace(warm, top_k=top_k)
        settings["greedy, top-p given"] = replace(base, top_p=torch.ones_like(top_p))
        if rows <= 128:
            settings["all filters"] = replace(
                warm,
                top_p=top_p,
                bias=0.01 * torch.randn(rows, V, device="cuda"),
                mask=torch.full((rows, V // 32), -1, dtype=torch.int32, device="cuda"),
                penalties=torch.full((rows, 3), 1.1, device="cuda"),
                prompt_seen=torch.rand(rows, V, device="cuda") < 0.01,
                output_counts=torch.zeros(rows, V, dtype=torch.int32, device="cuda"),
            )
        flat = [2.5 * torch.randn(rows, V, device="cuda") for _ in logits[:4]]
        yield Case(
            "sample",
            f"{rows} flat rows, top-p .95",
            _over(flat, lambda x, inputs=settings["top-p .95"]: sample(x, inputs)),
            size,
            note="15 % of the vocabulary is kept",
        )
        for name, inputs in settings.items():
            moved = size * (3.25 if inputs.bias is not None else 1) + rows * V / 8
            yield Case(
                "sample",
                f"{rows} rows, {name}",
                _over(logits, lambda x, inputs=inputs: sample(x, inputs)),
                moved if inputs.bias is not None else size,
                plain=_over(logits, lambda x, inputs=inputs: twins.sample(x, inputs))
                if rows <= 60
                else None,
            )
        ids = torch.randint(0, V, (rows,), device="cuda")
        for num_top in (0, 20):
            yield Case(
                "logprobs",
                f"{rows} rows, {num_top} best",
                _over(logits, lambda x, ids=ids, k=num_top: logprobs(x, ids, k)),
                size,
                plain=_over(logits, lambda x, ids=ids, k=num_top: twins.logprobs(x, ids, k))
                if rows <= 60
                else None,
            )
        inputs = replace(warm, top_p=top_p)
        yield Case(
            "probabilities",
            f"{rows} rows, top-p .95",
            _over(logits, lambda x, inputs=inputs: probabilities(x, inputs)),
            2 * size,
            plain=None,
        )


def _logits(rows: int) -> list[Tensor]:
    count = max(2, min(64, -(-int(COLD) // (rows * V * 4))))
    return [_peaked(rows) for _ in range(count)]


def _peaked(rows: int) -> Tensor:
    logits = SPREAD * torch.randn(rows, V, device="cuda")
    ids = torch.randint(0, V, (rows, LIKELY), device="cuda")
    return logits.scatter_add_(1, ids, 14 + 2 * torch.randn(rows, LIKELY, device="cuda"))


def _over(inputs: list[Tensor], op: Callable[[Tensor], object]) -> Callable[[], object]:
    """Return a call of the op that takes the next inputs every time."""
    following = cycle(inputs)
    return lambda: op(next(following))


if __name__ == "__main__":
    main(cases)
