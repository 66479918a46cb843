"""Choosing one token a row."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.sampling.choose import choose
from deepinfer_kernels_cuda.sampling.draw import draw
from deepinfer_kernels_cuda.sampling.head import collect
from deepinfer_kernels_cuda.sampling.inputs import Sampled, check_inputs
from deepinfer_kernels_cuda.sampling.scan import CUT_MASSES, NO_MASSES, scan
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["Sampled", "sample"]


def sample(logits: Tensor, inputs: SampleInputs) -> Sampled:
    """Choose one token a row.

    Filters in order: mask, bias, repetition penalty, frequency and presence penalties; then, for
    rows with a temperature above 0, temperature, top-k, top-p and min-p. The token is the argmax of
    what is left plus Gumbel noise; without noise where the temperature is 0. Among equal values the
    lower id wins, at the border of top-k and top-p too.

    Greedy rows cost one pass over the logits, sampled ones another, which is arithmetic: ten rounds
    of Philox for four tokens and two logarithms for each. Of rows that are cut the second pass
    reads little; those so flat that a few thousand tokens do not hold the border (at V = 129280
    about 2000, at most 4096) are ended by one program each, in a few hundred microseconds.

    Args:
        logits: [N, V] float32, V up to 2^18. Not modified. -inf is a token that cannot be chosen.
        inputs: settings of each row; tensors of one number a row may have any stride. Rows of all
            others, and of logits, may lie apart; such rows of V numbers cost a copy.
    Returns:
        Status is 1 and the token 0 where a raw logit is NaN or +inf (masked or not), where no logit
        is finite, and where mask, bias or penalties leave no finite maximum. Rows do not affect one
        another: a row has the same bits alone and in any batch.
    Raises:
        KernelInputError: a shape, dtype or device is not as above.
    Source: reference.sampling.sample.
    """
    logits, inputs = check_inputs(logits, inputs)
    num_rows = len(logits)
    sampled = Sampled(
        torch.empty(num_rows, dtype=torch.int64, device=logits.device),
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
    )
    if num_rows == 0:
        return sampled
    cuts = not (inputs.top_k is None and inputs.top_p is None and inputs.min_p is None)
    masses = NO_MASSES if inputs.top_p is None else CUT_MASSES
    found = scan(logits, inputs, filters=True, groups=cuts, masses=masses)
    drawn = draw(found, inputs)
    choose(found, collect(found, inputs) if cuts else None, inputs, drawn, sampled)
    return sampled
