"""How an engine speculates: what its options, its model and what is installed come to."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces import KernelBackend, Verifier
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.fingerprint import checkpoint_hash

__all__ = ["CALIBRATION_NAME", "Speculation", "choose_drafts", "plan_speculation"]

CALIBRATION_NAME = "calibration.json"  # in the folder of a model


@dataclass(frozen=True)
class Speculation:
    """A drafter is used.

    Attributes:
        policy: `fixed`, `threshold` or `delayed`.
        num_drafts: g, drafts of a sequence in a step.
        rejection: accept by rejection sampling instead of by the target's own token.
        verifier: chooses, calibrates, accepts.
    """

    policy: str
    num_drafts: int
    rejection: bool
    verifier: Verifier


def choose_drafts(config: EngineConfig, model: ModelConfig, *, installed: bool) -> tuple[str, int]:
    """Return (policy, drafts of a sequence in a step); ("off", 0) is plain decoding.

    Args:
        installed: whether there is a verifier.

    Raises:
        ConfigError: options ask for what the model or the installation lacks.
    """
    policy, block = config.speculation, model.dspark_block_size
    drafts = model.num_nextn_predict_layers > 0
    if policy is None:
        policy = "delayed" if drafts and installed else "off"
    if policy == "off":
        for name in ("num_drafts", "speculation_costs"):
            if (value := getattr(config, name)) is not None:
                raise ConfigError(
                    f"`{name}` is {value!r}, but nothing is drafted: `speculation` is off"
                    f"{'' if config.speculation else ', as the model or the installation cannot'}. "
                    "Leave it out."
                )
        return policy, 0
    if not drafts:
        raise ConfigError(
            f"`speculation` is {policy!r}, but the model has no draft stages. Leave it out, or "
            "choose 'off'."
        )
    if not installed:
        raise ConfigError(
            f"`speculation` is {policy!r}, but the package `deepinfer-specdec` is not installed. "
            "Install it, or choose 'off'."
        )
    num_drafts = block if config.num_drafts is None else config.num_drafts
    if num_drafts > block:
        raise ConfigError(
            f"`num_drafts` is {num_drafts}, but the model drafts blocks of {block}. Set it to 1 "
            f"to {block}, or leave it out."
        )
    return policy, num_drafts


def plan_speculation(
    config: EngineConfig,
    model: ModelConfig,
    backend: KernelBackend,
    folder: Path,
    verifier_class: type[Any] | None,
) -> Speculation | None:
    """Return how to speculate, or None for plain decoding.

    Args:
        folder: the model's; its calibration is used if it has one.
        verifier_class: what the group `deepinfer.verifier` offers, or None.

    Raises:
        ConfigError: as of `choose_drafts`, or a file of costs or temperatures does not fit.
    """
    policy, num_drafts = choose_drafts(config, model, installed=verifier_class is not None)
    if verifier_class is None or not num_drafts:
        return None
    calibration = folder / CALIBRATION_NAME
    calibrated = calibration.exists()
    try:
        verifier: Verifier = verifier_class(
            policy=policy,
            acceptance=config.acceptance,
            num_drafts=num_drafts,
            block_size=model.dspark_block_size,
            threshold=config.speculation_threshold,
            costs=config.speculation_costs,
            fingerprint=fingerprint(config, backend, folder, num_drafts),
            calibration=calibration if calibrated else None,
            checkpoint=checkpoint_hash(folder) if calibrated else None,
        )
    except verifier_class.error as error:
        raise ConfigError(str(error)) from error
    return Speculation(policy, num_drafts, config.acceptance == "rejection", verifier)


def fingerprint(
    config: EngineConfig, backend: KernelBackend, folder: Path, num_drafts: int
) -> Mapping[str, str | int]:
    """Return what a cost table depends on: another value makes it useless."""
    content = (folder / "config.json").read_bytes()
    return {
        "model": hashlib.sha256(content).hexdigest()[:16],
        "device": _device_name(backend),
        "backend": backend.name,
        "numerics": config.numerics,
        "determinism": config.determinism,
        "acceptance": config.acceptance,
        "num_drafts": num_drafts,
    }


def _device_name(backend: KernelBackend) -> str:
    device = backend.runtime.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"
