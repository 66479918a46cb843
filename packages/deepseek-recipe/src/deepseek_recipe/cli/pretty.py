"""A view of a prompt for the eye: special tokens in colour, what is plain text as it is."""

from __future__ import annotations

from deepseek_recipe.cli.verbs import RenderedRequest
from deepseek_recipe.encoding.tokenizer import PromptTokenizer

__all__ = ["coloured_prompt", "coloured_tokens"]

_SPECIAL = "\x1b[1;30;46m"
_SHADES = ("\x1b[48;5;236m", "\x1b[48;5;239m")
_RESET = "\x1b[0m"


def coloured_prompt(request: RenderedRequest, tokenizer: PromptTokenizer) -> str:
    """Return the prompt, every special token highlighted.

    Text that only looks like a special token is not: it is what a user typed. Escape characters of
    the text are shown as symbols, so that it cannot colour itself.
    """
    text, out, end = request.prompt.text, [], 0
    for start, stop, _ in request.prompt.special_ranges:
        out += [_harmless(text[end:start]), _SPECIAL, _harmless(text[start:stop]), _RESET]
        end = stop
    return "".join([*out, _harmless(text[end:]), "\n"])


def coloured_tokens(request: RenderedRequest, tokenizer: PromptTokenizer) -> str:
    """Return the prompt with alternating shades, one for each token."""
    out = []
    for place, token_id in enumerate(request.token_ids):
        special = tokenizer.special_tokens.get(token_id)
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        colour = _SHADES[place % 2] if special is None else _SPECIAL
        # a colour that runs over a line break would fill the next line
        lines = _harmless(text if special is None else special).split("\n")
        out.append("\n".join(f"{colour}{line}{_RESET}" for line in lines))
    return "".join([*out, f"\n{len(request.token_ids)} tokens\n"])


def _harmless(text: str) -> str:
    return text.replace("\x1b", "␛").replace("\x9b", "␛")
