"""`deepinfer plan-memory`: what fits, before any weight is read."""

from __future__ import annotations

from deepinfer_core.cli.options import print_table, reports_errors, with_engine_config
from deepinfer_core.config import EngineConfig

__all__ = ["plan_memory"]

_ENGINE = (
    "model",
    "accelerator",
    "numerics",
    "block_size",
    "num_blocks",
    "cache_memory_gib",
    "max_sequences",
    "max_model_len",
    "speculation",
    "num_drafts",
    "acceptance",
)


@reports_errors
@with_engine_config(_ENGINE)
def plan_memory(*, config: EngineConfig) -> None:
    """Show the memory of weights and caches, the longest context and the largest batch.

    Reads the model's config.json only.
    """
    from deepinfer_core.engine.memory import plan_memory as plan
    from deepinfer_core.engine.speculation import choose_drafts
    from deepinfer_core.loader import find_backend, find_verifier
    from deepinfer_core.model import nano
    from deepinfer_core.model.config import ModelConfig
    from deepinfer_core.model.hub import resolve_model

    model = ModelConfig.from_folder(resolve_model(config.model, config_only=True))
    backend = find_backend(config.accelerator, config.numerics)
    title = f"{config.model or nano.NAME} on `{backend.name}`, numerics {config.numerics}"
    _, num_drafts = choose_drafts(config, model, installed=find_verifier() is not None)
    print_table(title, plan(model, config, backend, num_drafts=num_drafts).table())
