"""From what a user calls a model to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_core.errors import CheckpointError
from deepinfer_core.model import nano

__all__ = ["resolve_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(
    model: str | Path | None, *, revision: str | None = None, config_only: bool = False
) -> Path:
    """Return the folder of a model given as a folder or as a hub id such as `owner/name`.

    A hub id is fetched with huggingface_hub, which keeps to its own cache, shows progress and
    honours its own offline switch (`HF_HUB_OFFLINE`).

    Args:
        model: a folder, or a hub id if there is no such folder. None is the small model that
            comes with the package.
        revision: branch, tag or commit on the hub.
        config_only: fetch `config.json` alone, no weights.
    Raises:
        CheckpointError: neither a folder nor a hub id, or the hub cannot give it.
    """
    if model is None:
        return nano.folder()
    folder = Path(model).expanduser()
    # an empty name is the working directory to `Path`, but a mistake here
    if str(model) and folder.is_dir():
        return folder
    if folder.is_file() or _HUB_ID.fullmatch(str(model)) is None:
        state = "is a file" if folder.is_file() else "does not exist"
        raise CheckpointError(
            f"`{model}` {state}. A model is a folder with config.json, tokenizer.json and "
            f"*.safetensors, or a hub id such as `deepseek-ai/DeepSeek-V4.1-Flash-1017`."
        )
    wanted = ["config.json"] if config_only else ["*.json", "*.safetensors"]
    return _fetch(str(model), revision, wanted)


def _fetch(model: str, revision: str | None, wanted: list[str]) -> Path:
    # imported here: a folder needs no hub
    import huggingface_hub
    from huggingface_hub import errors

    # the error of the HTTP library underneath, which differs between versions of huggingface_hub
    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    try:
        fetched = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=wanted,
            # another layout of the same configuration, not read here
            ignore_patterns=["inference/*"],
        )
    except errors.GatedRepoError as error:
        reason = "it is gated: accept its terms on the hub and log in with `hf auth login`"
        raise CheckpointError(f"Hub model `{model}` cannot be fetched: {reason}.") from error
    except errors.RevisionNotFoundError as error:
        reason = f"it has no revision {revision!r}"
        raise CheckpointError(f"Hub model `{model}` cannot be fetched: {reason}.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"`{model}` is neither a folder here nor a model on the hub (or it is private: log "
            f"in with `hf auth login`)."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"`{model}` is no folder here, is not in the hub's cache, and the hub cannot be "
            f"reached (no network, or `HF_HUB_OFFLINE` is set). Connect, or give a folder."
        ) from error
    except (transport_error, OSError) as error:
        raise CheckpointError(
            f"Hub model `{model}` cannot be fetched: {error}. What was fetched is kept; the "
            f"next attempt goes on from there."
        ) from error
    return Path(fetched)
