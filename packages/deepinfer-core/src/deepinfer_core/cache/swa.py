"""Sliding windows after a prefix hit: which rows a sequence computes, and what they may see.

Windows are not in the prefix index. Unless a window state of exactly the hit is stored, the last
rows of the hit are computed again for their windows alone (encoder-side bounded replay). Decoder-
side replay is another matter: it leaves out late layers for prompt rows before the last window.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ResumePlan", "first_late_row", "publish_point", "resume_plan"]


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What a sequence computes first, in positions.

    Attributes:
        hit_len: positions whose blocks are shared; no row below it writes a block.
        start: first row that is computed.
        num_replay: rows from `start` on that rebuild windows alone: `hit_len - start`.
        window_start: windows of all layers are cut below it.
        tail_start: rows below it skip the late layers, whose windows are cut there as well.
    """

    hit_len: int
    start: int
    num_replay: int
    window_start: int
    tail_start: int


def resume_plan(
    hit_len: int,
    num_tokens: int,
    prompt_len: int,
    window: int,
    *,
    replay_encoder: bool,
    replay_decoder: bool,
    stored_window: bool,
) -> ResumePlan:
    """Return where a sequence resumes after a prefix hit.

    Without a stored window state (H hit_len, W window, P prompt_len, T tail_start = P - W):

        0 ........ H-W ................. H ................................ P
        | shared, only read              | computed, writes blocks          |
                    | replay: no blocks  |                                  |
        early layers see  [H-W ...                                          ]
        late layers run on and see    [T ...                                ]

    A late layer cuts its windows at max(T, H - W); the model takes the larger of `tail_start` and
    `window_start`. In a prompt T is the larger one, since H < P: when the uncached part P - H is
    shorter than the window, late rows [T, H) are replayed rows. After a preemption H may lie in the
    output, with T below H - W: then every row runs the late layers and sees nothing below H - W.
    A hit not longer than the window is replayed from position 0 on: nothing is cut, and the result
    is that of a cold run.

    Args:
        hit_len: positions found in the prefix index, a multiple of the block size below
            `num_tokens`.
        num_tokens: committed tokens, output included after a preemption.
        prompt_len: tokens of the prompt.
        window: positions a row sees, its own included.
        replay_encoder: whether windows may be rebuilt from the last rows of the hit.
        replay_decoder: whether prompt rows before the last window skip the late layers.
        stored_window: a window state of exactly `hit_len` positions is stored and will be loaded.
    """
    assert 0 <= hit_len < num_tokens, f"a hit of {hit_len} among {num_tokens} tokens computes none"
    assert stored_window or replay_encoder or not hit_len, (
        f"a hit of {hit_len} tokens has no windows, and the request does not allow replay"
    )
    num_replay = 0 if stored_window else min(window, hit_len)
    start = hit_len - num_replay
    # The tail depends on the prompt alone: a recompute after a preemption repeats the arithmetic.
    tail_start = max(0, prompt_len - window) if replay_decoder else 0
    return ResumePlan(
        hit_len=hit_len,
        start=start,
        num_replay=num_replay,
        window_start=0 if stored_window else start,
        tail_start=tail_start,
    )


def first_late_row(hit_len: int, tail_start: int, window: int) -> int:
    """Return the first position below `hit_len` that late layers of the rows from there on look at.

    Args:
        hit_len: where a sequence resumes.
        tail_start: its own; late layers cut their windows there.
        window: positions a row sees, its own included.
    """
    return max(0, tail_start, hit_len - window + 1)


def publish_point(prompt_len: int, block_size: int) -> int:
    """Return the length after which a prompt's window state is worth storing; 0 for none.

    It is the longest hit that the same prompt can have: whole blocks, and one token is computed.
    """
    return (prompt_len - 1) // block_size * block_size
