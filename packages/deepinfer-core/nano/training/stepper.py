"""One training step, launched as one graph on CUDA.

A step is several thousand small kernels; launched one by one they keep the host busier than the
device. So the first steps run as they are, which compiles what must be compiled, and from then on
the whole step, with gradients and update, is replayed over the same buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nano.training.loader import Batch
from nano.training.optimizer import Optimizer, StepFacts

if TYPE_CHECKING:
    from nano.training.loop import Phase

__all__ = ["Stepper"]

# Steps before the capture: everything is compiled and every buffer of a library made in them.
_EAGER_STEPS = 4

Result = tuple[Tensor, Mapping[str, Tensor], StepFacts]


class Stepper:
    """Runs the steps of a phase without waiting for the device.

    What a step returns lives until the next one.
    """

    def __init__(self, phase: Phase, optimizer: Optimizer, *, graph: bool = True):
        """Run steps of `phase` that are applied by `optimizer`; kernel by kernel if not `graph`."""
        self._phase, self._optimizer, self._may_capture = phase, optimizer, graph
        self._eager_steps = _EAGER_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._batch: Batch | None = None
        self._inputs: dict[str, Tensor] = {}
        self._rate: Tensor | None = None
        self._result: Result | None = None

    def __call__(self, batch: Batch, inputs: Mapping[str, float | bool], rate: float) -> Result:
        """Run one step."""
        own = self._fill(batch, inputs, rate)
        if not batch.tokens.is_cuda or not self._may_capture:
            return self._run(own)
        if self._eager_steps > 0:
            self._eager_steps -= 1
            return self._beside(own)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._run(own)
        self._graph.replay()
        assert self._result is not None, "the capture made it"
        return self._result

    def _fill(self, batch: Batch, inputs: Mapping[str, float | bool], rate: float) -> Batch:
        """Copy what a step is given into buffers that stay where they are."""
        if self._batch is None:
            device = batch.tokens.device
            self._batch = Batch(
                *(t.clone() for t in (batch.tokens, batch.documents, batch.weights))
            )
            self._inputs = {n: torch.full((), v, device=device) for n, v in inputs.items()}
            self._rate = torch.full((), rate, device=device)
        assert self._rate is not None, "made with the batch"
        self._batch.tokens.copy_(batch.tokens)
        self._batch.documents.copy_(batch.documents)
        self._batch.weights.copy_(batch.weights)
        for name, value in inputs.items():
            self._inputs[name].fill_(value)
        self._rate.fill_(rate)
        return self._batch

    def _run(self, batch: Batch) -> Result:
        phase, rate = self._phase, self._rate
        assert rate is not None, "filled before a step"
        parameters = phase.parameters
        loss, metrics = phase.loss(parameters, batch, self._inputs)
        grads = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        loss = loss.detach()
        facts = self._optimizer.step(
            dict(zip(parameters, grads, strict=True)), rate, torch.isfinite(loss)
        )
        with torch.no_grad():
            phase.after_step(metrics)
        return loss, metrics, facts

    def _beside(self, batch: Batch) -> Result:
        """Run a step on a stream of its own: a capture wants no work left on the main one."""
        main = torch.cuda.current_stream()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            result = self._run(batch)
        main.wait_stream(self._stream)
        return result
