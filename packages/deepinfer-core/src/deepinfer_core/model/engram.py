"""Engram's constants and its layer.

The constants are token folding, hash multipliers and bucket sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.config import ModelConfig, engram_primes
from deepinfer_core.model.weights import EngramWeights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["EngramHash", "apply_engram", "engram_multipliers", "fold_vocabulary"]

# Stands for a lone space while the rest is trimmed; private use, in no vocabulary.
_SPACE_MARK = "\ue000"
_REPLACEMENT = "\ufffd"


def fold_vocabulary(tokenizer: Tokenizer, size: int | None = None) -> np.ndarray:
    """Return the class of each token id: [size] int64, classes numbered by first appearance.

    Ids whose text is equal but for case, accents, width and white space fall into one class; ids
    that are no whole text are told apart by their spelling in the vocabulary.

    Args:
        size: ids to fold; the tokenizer's own count when None.
    """
    fold_text = _text_folder()
    count = tokenizer.get_vocab_size(with_added_tokens=True) if size is None else size
    classes: dict[str, int] = {}
    folded = np.empty(count, dtype=np.int64)
    for token_id in range(count):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = fold_text(text) or text
        folded[token_id] = classes.setdefault(key, len(classes))
    return folded


def _text_folder() -> Callable[[str], str]:
    from tokenizers import Regex, normalizers

    steps = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),  # every combining mark: categories Mn, Mc and Me
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _SPACE_MARK),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_MARK, " "),
        ]
    )
    return lambda text: str(steps.normalize_str(text))


def engram_multipliers(config: ModelConfig) -> np.ndarray:
    """Return odd hash multipliers [layers, n-gram size] int64.

    They are small enough that no product overflows.
    """
    cap = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    rows = [
        np.random.default_rng(10007 * layer_id).integers(
            0, cap, config.engram_max_ngram_size, dtype=np.int64
        )
        for layer_id in config.engram_layer_ids
    ]
    return np.stack(rows) * 2 + 1


@dataclass(frozen=True)
class EngramHash:
    """What turns token ids into table rows.

    Attributes:
        fold: [V] int64 token id -> class.
        pad_id: class of the pad token.
        multipliers: [layers, n] int64. primes: [layers, n - 1, heads] int64.
    """

    fold: Tensor
    pad_id: int
    multipliers: Tensor
    primes: Tensor

    @classmethod
    def build(
        cls, config: ModelConfig, fold: np.ndarray, device: torch.device | str = "cpu"
    ) -> EngramHash:
        """Check the folding against the config and make the tables.

        Raises:
            ConfigError: the tokenizer folds to another number of classes than the model was trained
                with.
        """
        classes = int(fold.max()) + 1 if len(fold) else 0
        if classes != config.engram_compressed_vocab_size:
            raise ConfigError(
                f"`engram_compressed_vocab_size` is {config.engram_compressed_vocab_size}, but "
                f"tokenizer.json folds to {classes} classes. Every hash depends on this number: "
                f"use the tokenizer.json that belongs to these weights."
            )
        if len(fold) < config.vocab_size:
            raise ConfigError(
                f"`vocab_size` is {config.vocab_size}, but tokenizer.json has {len(fold)} entries. "
                f"Use the tokenizer.json that belongs to these weights."
            )
        heads = config.engram_n_heads
        primes = torch.tensor(engram_primes(config), dtype=torch.int64)
        return cls(
            fold=torch.from_numpy(np.asarray(fold, dtype=np.int64)).to(device),
            pad_id=int(fold[config.engram_pad_token_id]),
            multipliers=torch.from_numpy(engram_multipliers(config)).to(device),
            primes=primes.unflatten(-1, (-1, heads)).to(device),
        )

    @classmethod
    def of_folder(
        cls,
        config: ModelConfig,
        folder: Path,
        tokenizer: Tokenizer | None,
        device: torch.device,
    ) -> EngramHash | None:
        """Return the tables of a model folder; None for a model without Engram layers.

        Args:
            tokenizer: that of the folder, if it has one.

        Raises:
            ConfigError: there is no tokenizer, or as for `build`.
        """
        if not config.engram_layer_ids:
            return None
        if tokenizer is None:
            raise ConfigError(
                f"`{folder / 'tokenizer.json'}` is absent, but the model's Engram layers hash "
                "folded tokens and need it. Put the tokenizer.json of these weights there."
            )
        return cls.build(config, fold_vocabulary(tokenizer), device)

    def folded(self, token_ids: Tensor, is_image: Tensor | None) -> Tensor:
        """Return classes [B] int64, -1 at image positions."""
        folded = self.fold[token_ids]
        return folded if is_image is None else folded.masked_fill(is_image, -1)


def apply_engram(
    backend: KernelBackend,
    weights: EngramWeights,
    streams: Tensor,
    memory: Tensor,
    eps: float,
    is_image: Tensor | None,
) -> Tensor:
    """Return streams [B, S, D] with the gated memory [B, columns * width] of each row added."""
    kv = backend.linear(memory, weights.wkv)
    return backend.engram_gate(streams, kv, weights.q_weight, weights.k_weight, eps, is_image)
