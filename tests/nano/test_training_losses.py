"""What training minimises, how experts are kept busy, and the check that tells when it is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from nano.data.encoding import encode
from nano.data.stream import held_out
from nano.geometry import config_dict
from nano.training import check
from nano.training.backend import Chosen
from nano.training.parameters import is_drafter, start_values
from nano.training.phases import DrafterPhase, Ramp, TargetPhase
from nano.training.target import INDEX_WEIGHT, Target, _divergence, _next_token, index_loss
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.engram import EngramHash

CPU = torch.device("cpu")
VOCAB = 16
LENGTH = 64  # of a row of the check, here


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dict(config_dict(4096))


@pytest.fixture(scope="module")
def values(config: ModelConfig) -> dict[str, Tensor]:
    return start_values(config, 3)


@pytest.fixture(scope="module")
def target(config: ModelConfig) -> Target:
    return Target(config, EngramHash.build(config, np.arange(4096)), torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("losses") / "model"
    write_checkpoint(folder, demo_config(), seed=3)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# the next token


def saying(wanted: Tensor, chances: Tensor) -> Tensor:
    """Return logits [n, VOCAB] that give the wanted token [n] its chance and others the rest."""
    rest = (1 - chances) / (VOCAB - 1)
    probabilities = rest.unsqueeze(1).repeat(1, VOCAB)
    probabilities.scatter_(1, wanted.unsqueeze(1), chances.unsqueeze(1))
    return probabilities.log() + 2.5  # a shift that changes nothing


# two rows of five tokens, no two neighbours alike; the first row holds two documents
TOKENS = torch.tensor([[3, 5, 7, 9, 11], [2, 4, 6, 8, 10]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
# token 9 begins a document and token 2 a row: nothing predicts them, whatever they would count
WEIGHTS = torch.tensor([[0.0, 0.05, 1.0, 1.0, 1.0], [1.0, 0.05, 0.0, 1.0, 0.05]])
CHANCES = torch.tensor([0.9, 0.5, 0.01, 0.02, 0.03, 0.7, 0.04, 0.6, 0.8, 0.06])
# chance and weight of each prediction that counts
COUNTED = ((0.9, 0.05), (0.5, 1.0), (0.02, 1.0), (0.7, 0.05), (0.6, 1.0), (0.8, 0.05))


def test_next_token_loss_by_hand() -> None:
    logits = saying(TOKENS.roll(-1, 1).flatten(), CHANCES)
    loss, accuracy = _next_token(logits, TOKENS, DOCUMENTS, WEIGHTS)
    total = sum(-math.log(chance) * weight for chance, weight in COUNTED)
    assert loss.item() == pytest.approx(total / sum(w for _, w in COUNTED), rel=1e-5)
    # of the three that count fully, that of chance 0.02 has likelier ones beside it
    assert accuracy.item() == pytest.approx(2 / 3)


def test_next_token_gradient_is_where_it_counts() -> None:
    logits = saying(TOKENS.roll(-1, 1).flatten(), CHANCES).requires_grad_()
    loss, _ = _next_token(logits, TOKENS, DOCUMENTS, WEIGHTS)
    loss.backward()
    assert logits.grad is not None
    counts = torch.tensor([True, True, False, True, False, True, False, True, True, False])
    assert torch.equal(logits.grad.abs().amax(1) > 0, counts)
    wanted = logits.grad.gather(1, TOKENS.roll(-1, 1).flatten().unsqueeze(1)).squeeze(1)
    assert (wanted[counts] < 0).all(), "a step down makes the next token likelier"


def test_loss_is_that_of_the_models_logits(target: Target, values: dict[str, Tensor]) -> None:
    tokens = torch.randint(0, 4096, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(LENGTH) >= 24).long().unsqueeze(0)
    off, on = torch.tensor(0.0), torch.tensor(False)
    with torch.no_grad():
        loss, metrics = target.loss(values, tokens, documents, torch.ones(tokens.shape), off, on)
        done = target.run(values, tokens, documents, off, on)
        logits = done.model.logits(cast(Any, done.backend), done.result.hidden)
    each = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    each = torch.cat((each[:23], each[24:]))  # the one across the border
    assert metrics["next_token"].item() == pytest.approx(each.mean().item(), rel=1e-4)
    assert metrics["index"] > 0
    wanted = metrics["next_token"] + INDEX_WEIGHT * metrics["index"]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


# the indexers

# mass that two layers gave to four entries, of which the last is not seen
MASSES = torch.tensor([[0.3, 0.1, 0.2, 0.0], [0.3, 0.3, 0.0, 0.0]]).view(2, 1, 1, 4)
SEEN = torch.tensor([True, True, True, False]).view(1, 1, 4)
SHARES = (0.5, 1 / 3, 1 / 6)


def scored(*scores: float) -> Tensor:
    return torch.tensor([*scores, -torch.inf]).view(1, 1, 4)


def test_divergence_is_zero_where_scores_are_the_log_of_mass() -> None:
    exact = scored(*(math.log(share) + 1.7 for share in SHARES))
    assert _divergence(MASSES, exact, SEEN).item() == pytest.approx(0, abs=1e-6)


def test_divergence_by_hand() -> None:
    flat = _divergence(MASSES, scored(0, 0, 0), SEEN)
    assert flat.item() == pytest.approx(sum(s * math.log(3 * s) for s in SHARES), rel=1e-5)
    steep = _divergence(MASSES, scored(0, 1, 0), SEEN)  # the direction matters: KL(mass || scores)
    norm = math.log(2 + math.e)
    wanted = sum(s * (math.log(s) - x + norm) for s, x in zip(SHARES, (0, 1, 0), strict=True))
    assert steep.item() == pytest.approx(wanted, rel=1e-5)


def test_divergence_falls_along_its_gradient() -> None:
    scores = scored(0, 1, 0).requires_grad_()
    before = _divergence(MASSES, scores, SEEN)
    before.backward()
    assert scores.grad is not None
    guess = scores.detach().softmax(-1)[0, 0]
    towards = guess - torch.tensor([*SHARES, 0.0])
    assert torch.allclose(scores.grad[0, 0], towards, atol=1e-6)
    after = _divergence(MASSES, scores.detach() - scores.grad, SEEN)
    assert 0 < after < 0.8 * before.item()


def test_rows_without_a_choice_do_not_count() -> None:
    masses = torch.cat((MASSES, torch.tensor([0.4, 0, 0, 0]).expand(2, 1, 1, 4)), 2)
    seen = torch.cat((SEEN, torch.tensor([True, False, False, False]).view(1, 1, 4)), 1)
    scores = torch.cat((scored(0, 1, 0), scored(-3, -torch.inf, -torch.inf)), 1)
    assert _divergence(masses, scores, seen) == _divergence(MASSES, scored(0, 1, 0), SEEN)


def test_index_loss_is_the_mean_of_the_choices() -> None:
    exact = Chosen(SEEN, scored(*(math.log(s) for s in SHARES)), list(MASSES))
    flat = Chosen(SEEN, scored(0, 0, 0), list(MASSES))
    wanted = sum(s * math.log(3 * s) for s in SHARES) / 2
    assert index_loss([exact, flat]).item() == pytest.approx(wanted, rel=1e-5)


# the experts


def phases(values: dict[str, Tensor]) -> dict[str, TargetPhase | DrafterPhase]:
    own: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, value in values.items():
        own[is_drafter(name)][name] = value.clone()
    nothing: Any = None
    ramp = Ramp(0, 1)
    return {
        "layers": TargetPhase(nothing, own[0], CPU, ramp, sparse_from=0),
        "mtp": DrafterPhase(nothing, own[1], {}, CPU, ramp),
    }


@pytest.mark.parametrize("part", ["layers", "mtp"])
def test_a_busy_experts_bias_falls_and_an_idle_ones_rises(
    values: dict[str, Tensor], part: str
) -> None:
    phase = phases(values)[part]
    layers = len(phase.buffers)
    assert layers == {"layers": 8, "mtp": 2}[part]
    experts = len(next(iter(phase.buffers.values())))
    load = torch.full((layers, experts), 10)
    for layer in range(layers):  # other experts in each layer
        load[layer, layer] += 6
        load[layer, (layer + 3) % experts] -= 6
    phase.after_step({"load": load})
    phase.after_step({"load": load})
    for layer in range(layers):
        wanted = torch.zeros(experts)
        wanted[layer], wanted[(layer + 3) % experts] = -2e-3, 2e-3
        bias = phase.buffers[f"{part}.{layer}.ffn.gate.bias"]
        assert torch.allclose(bias, wanted)


# the check


@dataclass
class Parrot:
    """Stands in for a target: its logits are those of the true tokens, but for some it misses.

    Attributes:
        missed: places (row, place) whose token it does not foresee.
    """

    missed: frozenset[tuple[int, int]] = frozenset()
    strengths: list[float] = field(default_factory=list)

    def run(
        self, values: Any, tokens: Tensor, documents: Tensor, strength: Tensor, sparse: Tensor
    ) -> Any:
        assert sparse, "decoding sees what the indexers choose"
        assert (documents == 0).all()
        self.strengths.append(strength.item())
        said = tokens.roll(-1, 1)
        for row, place in self.missed:
            said[row, place - 1] += 1
        logits = torch.nn.functional.one_hot(said.flatten(), 4096).float()
        model = SimpleNamespace(logits=lambda backend, hidden: hidden)
        return SimpleNamespace(model=model, backend=None, result=SimpleNamespace(hidden=logits))


def checked(
    target: Any, values: dict[str, Tensor], tokenizer: Tokenizer, *, count: int = 2, **more: Any
) -> float:
    return check.exact_match(target, values, tokenizer, ["addition2"], count, **more)["addition2"]


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SEQUENCE_LEN", LENGTH)
    monkeypatch.setattr(check, "_ROWS", 2)


@pytest.mark.usefixtures("short_rows")
def test_random_weights_know_nothing(
    target: Target, values: dict[str, Tensor], tokenizer: Tokenizer
) -> None:
    assert checked(target, values, tokenizer) == 0.0


@pytest.mark.usefixtures("short_rows")
def test_who_foresees_every_token_is_right(values: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    parrot = Parrot()
    assert checked(parrot, values, tokenizer, count=3) == 1.0
    assert checked(parrot, values, tokenizer, count=2, rounded=False) == 1.0
    assert parrot.strengths == [1.0, 1.0, 0.0]


@pytest.mark.usefixtures("short_rows")
def test_one_token_of_a_reply_decides(values: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    found = held_out(tokenizer, "addition2", 2, seed=0)
    first, second = (encode(each, tokenizer) for each in found)
    start, stop = second.replies[0]
    assert stop == len(second.token_ids)
    for place in (start, stop - 1):
        missed = frozenset({(1, place)})
        assert checked(Parrot(missed), values, tokenizer) == 0.5
    # neither a prompt nor what pads a row is asked for
    around = {(1, place) for place in (1, start - 1, stop, LENGTH - 1)}
    around.add((0, first.replies[0][0] - 1))
    assert checked(Parrot(frozenset(around)), values, tokenizer) == 1.0
