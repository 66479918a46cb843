"""Every op of training can be traced whole: on a GPU it is compiled, and no test runs there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nano.geometry import config_dict
from nano.training import fused
from nano.training.drafter import DrafterTrainer
from nano.training.parameters import is_drafter, is_trained, start_values
from nano.training.target import Target

from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.engram import EngramHash

LENGTH = 128


@pytest.mark.slow
def test_both_losses_trace_and_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(config_dict(4096))
    target = Target(config, EngramHash.build(config, np.arange(4096)), torch.float32)
    values = {n: v.requires_grad_(is_trained(n)) for n, v in start_values(config, 0).items()}
    drafter = {name: value for name, value in values.items() if is_drafter(name)}
    frozen = {name: value.detach() for name, value in values.items() if not is_drafter(name)}
    tokens = torch.randint(0, 4096, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(LENGTH) >= 64).long().unsqueeze(0)
    weights, on, jitter = torch.ones(1, LENGTH), torch.tensor(1.0), torch.rand(1, LENGTH)

    def losses() -> tuple[float, float]:
        own = {name: value for name, value in values.items() if not is_drafter(name)}
        first, _ = target.loss(own, tokens, documents, weights, on, on > 0)
        first.backward()
        second, _ = DrafterTrainer(target, 8).loss(
            drafter, frozen, tokens, documents, weights, on, jitter
        )
        second.backward()
        return first.item(), second.item()

    plain = losses()
    monkeypatch.setattr(fused, "_COMPILER", "aot_eager")
    assert losses() == pytest.approx(plain, rel=1e-4)
