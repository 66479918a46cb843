"""Examples as token ids: the prompt format of the V4.1 profile, with what is to be learned marked.

The ids are those that `deepseek-recipe` makes. It encodes a prompt piece by piece, so that no text
can spell a control token. Here the whole prompt is spelled out and encoded in one call, which is
much faster and gives the same ids as long as no text of an example spells a control token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_recipe.conversation import Conversation, Message, text_of
from deepseek_recipe.encoding.profile import V41
from deepseek_recipe.encoding.prompt import render
from nano.data.example import Example

__all__ = ["Encoded", "encode", "is_document", "spelled"]

# Weights of the loss, in percent.
_REPLY, _PROMPT, _DOCUMENT = 100, 5, 30
_TOKENS = V41.tokens
_BLOCK_OPEN = f"\n\n<{_TOKENS.dsml}{V41.block_word}>\n"


@dataclass(frozen=True)
class Encoded:
    """An example in tokens.

    Attributes:
        token_ids: [n] uint16, from BOS to the last reply's EOS.
        weights: [n] uint8, how much the prediction of each token counts, in percent.
        replies: [start, end) of each reply to be learned, its EOS included. The prompt of an
            evaluation is all that stands in front of the last one. None for a document.
    """

    token_ids: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.uint8]
    replies: tuple[tuple[int, int], ...]


def is_document(conversation: Conversation) -> bool:
    """Return whether it is plain text: one message, of the assistant, answering nobody."""
    messages = conversation.messages
    return len(messages) == 1 and messages[0].role == "assistant"


def spelled(conversation: Conversation) -> str:
    """Return the conversation with its last reply as text, control tokens by their spelling."""
    *before, last = conversation.messages
    assert last.role == "assistant", "an example ends with the reply to be learned"
    if is_document(conversation):
        return f"{_TOKENS.bos}{text_of(last.content)}{_TOKENS.eos}"
    if conversation.thinking and not conversation.tools:
        # the format drops the reasoning of all replies but the one that is being written
        prompt = render(replace(conversation, messages=tuple(before)), V41).text
        return prompt + _thought(last)
    text = render(conversation, V41).text
    # the prompt for one reply more, which nobody gives
    opening = _TOKENS.assistant + (_TOKENS.think if conversation.thinking else _TOKENS.think_end)
    if _is_forced(conversation):
        opening += _BLOCK_OPEN
    return text.removesuffix(opening)


def _thought(reply: Message) -> str:
    assert not reply.tool_calls, "calls need tools"
    return f"{reply.reasoning or ''}{_TOKENS.think_end}{text_of(reply.content)}{_TOKENS.eos}"


def _is_forced(conversation: Conversation) -> bool:
    return bool(conversation.tools) and conversation.tool_choice == "required"


def encode(example: Example, tokenizer: Tokenizer) -> Encoded:
    """Return an example in tokens.

    Args:
        tokenizer: its special tokens are spelled as in the V4.1 profile.
    """
    conversation = example.conversation
    text = spelled(conversation)
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    token_ids = np.array(encoding.ids, dtype=np.uint16)
    if is_document(conversation):
        weights = np.full(len(token_ids), _DOCUMENT, dtype=np.uint8)
        weights[0] = 0
        return Encoded(token_ids, weights, ())
    # a reply begins behind `<｜Assistant｜><think>` or `<｜Assistant｜></think>`
    starts = np.flatnonzero(token_ids == tokenizer.token_to_id(_TOKENS.assistant)) + 2
    ends = np.flatnonzero(token_ids == tokenizer.token_to_id(_TOKENS.eos)) + 1
    replies = [(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
    if conversation.thinking and not conversation.tools:
        del replies[:-1]  # nobody wrote those without thinking
    if _is_forced(conversation):
        start, end = replies[-1]
        [opening] = tokenizer.encode_batch_fast([_BLOCK_OPEN], add_special_tokens=False)
        replies[-1] = (start + len(opening.ids), end)
    weights = np.full(len(token_ids), _PROMPT, dtype=np.uint8)
    weights[0] = 0
    for start, end in replies:
        weights[start:end] = _REPLY
    return Encoded(token_ids, weights, tuple(replies))
