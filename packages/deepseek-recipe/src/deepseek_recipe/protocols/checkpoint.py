"""Which checkpoint a request's model name stands for."""

from __future__ import annotations

from deepseek_recipe.encoding.profile import Profile, profile_named
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.options import ConversionOptions

__all__ = ["checkpoint_profile"]


def checkpoint_profile(model: str, options: ConversionOptions) -> Profile:
    """Return the profile of the checkpoint that a model's name stands for.

    Raises:
        ConversionError: the name is not among `options.models`.
    """
    name = options.models.get(model)
    if name is None:
        raise ConversionError(
            f"The supported API model names are {', '.join(options.models)}, but you passed "
            f"{model}."
        )
    return profile_named(name)
