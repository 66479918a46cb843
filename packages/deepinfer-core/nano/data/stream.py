"""An endless stream of training rows, and the questions that are never in it.

Rows are made in blocks. A block draws its examples by the shares of the tasks, packs the large ones
first, wherever they fit best, and fills what is left with plain text, which may be cut. So long
examples are as frequent as they should be and hardly a token is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from deepseek_recipe.conversation import ResponseFormat
from nano.data.encoding import Encoded, encode
from nano.data.example import HELD_OUT_SHARE, Draw, Example, is_for_calibration, is_held_out
from nano.data.tasks import TASKS
from nano.geometry import SEQUENCE_LEN

__all__ = ["BLOCK_LEN", "Row", "held_out", "mean_lengths", "rows"]

# Rows made together. A run that starts inside of a block makes the whole block again.
BLOCK_LEN = 32
# The task that fills gaps.
_FILLER = "text"
# Gaps shorter than this are padding: too short a text teaches nothing.
_SHORTEST_FILLER = 12
# Of the questions that can share a conversation, this part begins one with one or two more. That
# those are drawn besides is made up for by beginning fewer, so that the shares stay as they are.
_JOINED_SHARE = 0.25
_NUM_MORE = (1, 1, 2)
_BEGUN_SHARE = 1 / (1 + _JOINED_SHARE * sum(_NUM_MORE) / len(_NUM_MORE))
_PAD_ID = 2
# Examples, and tokens of them, from which the mean length of a task's examples is estimated.
_MAX_SAMPLES = 500
_SAMPLE_LEN = 60_000


@dataclass(frozen=True)
class Row:
    """One row of training tokens.

    Attributes:
        token_ids: [SEQUENCE_LEN] uint16.
        documents: [SEQUENCE_LEN] uint8, the number of each token's document, from 0. A document
            starts at an even place; padding belongs to the document before it.
        weights: [SEQUENCE_LEN] uint8, of the prediction of each token, in percent.
    """

    token_ids: npt.NDArray[np.uint16]
    documents: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.uint8]


def rows(tokenizer: Tokenizer, seed: int, worker: int, start: int = 0) -> Iterator[Row]:
    """Yield rows from number `start` on, without end; none holds a held-out example.

    The rows depend on seed, worker and their number alone, so that a run resumes without a state.
    """
    mixture = _mixture(mean_lengths(tokenizer))
    index, skipped = divmod(start, BLOCK_LEN)
    while True:
        made = _block(tokenizer, mixture, Random(f"{seed}/{worker}/{index}"))
        yield from made[skipped:]
        index, skipped = index + 1, 0


def held_out(
    tokenizer: Tokenizer | None, task: str, count: int, seed: int, *, calibration: bool = False
) -> list[Example]:
    """Return held-out examples of a task with distinct keys.

    Args:
        tokenizer: leaves out examples that are longer than a training row; None keeps them.
        count: how many are wanted; a task with few contents may have fewer.
        calibration: draw from those that calibrate the drafter; else from those that test.
    """
    draw, _ = TASKS[task]
    random = Random(f"held out/{seed}/{task}")
    found: dict[str, Example] = {}
    for _ in range(count * HELD_OUT_SHARE * 30):
        if len(found) == count:
            break
        example = draw(random)
        if example.key in found or not is_held_out(example):
            continue
        if is_for_calibration(example) != calibration:
            continue
        if tokenizer is None or len(encode(example, tokenizer).token_ids) <= SEQUENCE_LEN:
            found[example.key] = example
    return list(found.values())


@lru_cache(maxsize=1)
def mean_lengths(tokenizer: Tokenizer) -> Mapping[str, float]:
    """Return how many tokens of a row a draw of each task takes, estimated from a seeded sample.

    A draw that is longer than a row is dropped and takes none. Made once for a tokenizer object.
    """
    lengths = {}
    for task, (draw, _) in TASKS.items():
        random = Random(f"lengths/{task}")
        count = total = 0
        while count < _MAX_SAMPLES and total < _SAMPLE_LEN:
            length = _room(encode(draw(random), tokenizer))
            total += length if length <= SEQUENCE_LEN else 0
            count += 1
        lengths[task] = total / count
    return MappingProxyType(lengths)


@dataclass(frozen=True)
class _Mixture:
    tasks: tuple[str, ...]  # without the filler
    chances: tuple[float, ...]
    filler_share: float


def _mixture(lengths: Mapping[str, float]) -> _Mixture:
    total = sum(share for _, share in TASKS.values())
    tasks = tuple(task for task in TASKS if task != _FILLER)
    chances = tuple(TASKS[task][1] / lengths[task] for task in tasks)
    return _Mixture(tasks, chances, TASKS[_FILLER][1] / total)


def _block(tokenizer: Tokenizer, mixture: _Mixture, random: Random) -> list[Row]:
    """Return the rows of one block."""
    budget = int(BLOCK_LEN * SEQUENCE_LEN * (1 - mixture.filler_share))
    drawn: list[Encoded] = []
    while budget > 0:
        encoded = encode(_question(mixture, random), tokenizer)
        if len(encoded.token_ids) <= SEQUENCE_LEN:
            drawn.append(encoded)
            budget -= _room(encoded)
    drawn.sort(key=_room, reverse=True)
    packed: list[list[Encoded]] = [[] for _ in range(BLOCK_LEN)]
    free = [SEQUENCE_LEN] * BLOCK_LEN
    for encoded in drawn:
        room = _room(encoded)
        best = min((left, place) for place, left in enumerate([*free, 2**30]) if left >= room)[1]
        if best < BLOCK_LEN:  # the last, small ones may find no place
            packed[best].append(encoded)
            free[best] -= room
    for place, documents in enumerate(packed):
        random.shuffle(documents)
        _fill(documents, free[place], tokenizer, random)
    random.shuffle(packed)
    return [_row(documents) for documents in packed]


def _fill(documents: list[Encoded], free: int, tokenizer: Tokenizer, random: Random) -> None:
    draw, _ = TASKS[_FILLER]
    while free >= _SHORTEST_FILLER:
        text = _training_example(draw, random)
        encoded = encode(text, tokenizer)
        cut = Encoded(encoded.token_ids[:free], encoded.weights[:free], ())
        documents.append(cut)
        free -= _room(cut)


def _question(mixture: _Mixture, random: Random) -> Example:
    """Return an example of a random task, or several that share a conversation."""
    example = _one(mixture, random)
    while _can_join(example) and random.random() >= _BEGUN_SHARE:
        example = _one(mixture, random)
    if not _can_join(example) or random.random() >= _JOINED_SHARE:
        return example
    messages = example.conversation.messages
    for _ in range(random.choice(_NUM_MORE)):
        while not _can_join(other := _one(mixture, random)):
            pass
        messages += tuple(each for each in other.conversation.messages if each.role != "system")
    return replace(example, conversation=replace(example.conversation, messages=messages))


def _can_join(example: Example) -> bool:
    conversation = example.conversation
    return not (
        conversation.thinking
        or conversation.tools
        or conversation.response_format != ResponseFormat()
        or len(conversation.messages) > 3
    )


def _one(mixture: _Mixture, random: Random) -> Example:
    [task] = random.choices(mixture.tasks, mixture.chances)
    return _training_example(TASKS[task][0], random)


def _training_example(draw: Draw, random: Random) -> Example:
    while is_held_out(example := draw(random)):
        pass
    return example


def _room(encoded: Encoded) -> int:
    return len(encoded.token_ids) + len(encoded.token_ids) % 2


def _row(documents: list[Encoded]) -> Row:
    token_ids = np.full(SEQUENCE_LEN, _PAD_ID, dtype=np.uint16)
    weights = np.zeros(SEQUENCE_LEN, dtype=np.uint8)
    starts = []
    place = 0
    for document in documents:
        end = place + len(document.token_ids)
        token_ids[place:end] = document.token_ids
        weights[place:end] = document.weights
        starts.append(place)
        place += _room(document)
    numbers = np.searchsorted(np.array(starts), np.arange(SEQUENCE_LEN), side="right") - 1
    return Row(token_ids, numbers.astype(np.uint8), weights)
