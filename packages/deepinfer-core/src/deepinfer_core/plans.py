"""What a step is, and what it yields: plans and results, columns of numbers.

Integers only, in numpy where there are many of them; no torch.

A step is three values: `StepPlan` (what the scheduler decided, frozen), the ticket that
`StepWorker.launch` returns, and `StepResult` (the host's copy of what the sampler produced).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property

import numpy as np

from deepinfer_core.params import SamplingParams
from deepinfer_core.types import PromptLogprob

__all__ = [
    "PHASES",
    "PLACEHOLDER",
    "Admission",
    "BlockDelta",
    "Logprobs",
    "Masks",
    "Phase",
    "RowExtras",
    "RowStatus",
    "SchedulerOutput",
    "SequenceMetadata",
    "StepKind",
    "StepPlan",
    "StepResult",
    "StepRows",
    "TableDelta",
]


class StepKind(StrEnum):
    """What a step computes. An empty step of either kind has no rows."""

    PREFILL = "prefill"
    DECODE = "decode"


class Phase(StrEnum):
    """What a sequence does in a step."""

    CHUNK = "chunk"  # part of the prompt, nothing sampled
    FINAL_CHUNK = "final_chunk"  # the prompt's end: its last row is sampled
    VERIFY = "verify"  # the last sampled token and its drafts; no draft is plain decoding


PHASES = (Phase.CHUNK, Phase.FINAL_CHUNK, Phase.VERIFY)  # by the number that stands in a column
PLACEHOLDER = -1  # an illegal id: where the carry supplies the token; one that is fed is a fault


class RowStatus(int, Enum):
    """What the sampler says of one sequence's rows."""

    OK = 0
    NON_FINITE = 1  # no finite logit in a row; the token is a pad id
    BAD_SOURCE = 2  # the carry did not belong to this sequence


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """New entries of one block table.

    `table[pool][slot, first : first + len(block_ids)] = block_ids`.
    """

    pool: str
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admission:
    """What the device must know about a sequence that enters a slot (first step of a generation).

    Args:
        params: sampling settings, constant while the sequence lives.
        seed: key of the noise.
        history: token ids just before the first computed position, oldest first; Engram looks back
            at them.
        prompt_len: number of prompt tokens.
        token_ids: prompt and tokens produced so far; filled only when penalties or drafters need
            them.
    """

    params: SamplingParams
    seed: int
    history: tuple[int, ...]
    prompt_len: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceMetadata:
    """One sequence's part of a step, spelled out; `StepPlan.rows` holds the same as columns.

    Rows are laid end to end in plan order; row i of the sequence sits at position `start + i`.

    Args:
        uid, generation: which sequence; the generation grows with every preemption.
        slot: its place in all per-sequence device state.
        phase: chunk, final chunk or verify.
        start: position of the first row; an upper bound when the row's source is the carry.
        num_rows: tokens fed in this step; at most so many where the device trims drafts.
        token_ids: the rows' tokens, or () when the carry of the previous step supplies them.
        kv_len: positions written once the step ran, upper bound (U: one past the highest position
            that a launched step may have written).
        source: row of the previous unsettled step whose carry supplies the tokens, or -1.
        blocks: block-table entries that are new since the last step of this sequence.
        num_drafts: drafts among the rows (verify only); at most so many where the device trims.
        num_replay: leading rows that only rebuild window state after a prefix hit and write no
            block.
        window_start: first position that windows may see; 0 but for encoder-side replay.
        tail_start: rows below this position skip the layers after the last KV source.
        remaining: tokens it may still produce, this step's included.
        admission: set on the first step of a generation.
        prompt_logprobs: None for none, else how many alternatives of the prompt rows' next tokens.
        prompt_targets: the prompt tokens after this step's first rows, when `prompt_logprobs` is
            set.
    """

    uid: int
    generation: int
    slot: int
    phase: Phase
    start: int
    num_rows: int
    token_ids: tuple[int, ...]
    kv_len: int
    source: int = -1
    blocks: tuple[BlockDelta, ...] = ()
    num_drafts: int = 0
    num_replay: int = 0
    window_start: int = 0
    tail_start: int = 0
    remaining: int = 1
    admission: Admission | None = None
    prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether this step yields tokens of the sequence."""
        return self.phase is not Phase.CHUNK


class StepRows:
    """The sequences of a step as one read-only int64 matrix, a column of numbers for each field.

    Item i of each field belongs to sequence i of the plan; the fields are those of
    `SequenceMetadata`, `phase` as a place in `PHASES`. One matrix is one copy to the device.
    """

    FIELDS = (
        "uid", "generation", "slot", "phase", "start", "num_rows", "source", "num_drafts",
        "num_replay", "window_start", "tail_start", "remaining",
    )  # fmt: skip
    __slots__ = ("data", *FIELDS)

    uid: np.ndarray
    generation: np.ndarray
    slot: np.ndarray
    phase: np.ndarray
    start: np.ndarray
    num_rows: np.ndarray
    source: np.ndarray
    num_drafts: np.ndarray
    num_replay: np.ndarray
    window_start: np.ndarray
    tail_start: np.ndarray
    remaining: np.ndarray

    def __init__(self, data: np.ndarray) -> None:
        """Freeze a matrix [len(FIELDS), R] int64."""
        data.flags.writeable = False
        self.data = data
        (
            self.uid, self.generation, self.slot, self.phase, self.start, self.num_rows,
            self.source, self.num_drafts, self.num_replay, self.window_start, self.tail_start,
            self.remaining,
        ) = data  # fmt: skip

    @classmethod
    def of(cls, num_sequences: int, **columns: np.ndarray | int) -> StepRows:
        """Return rows with the given columns; -1 for a `source` left out, 0 for others."""
        data = np.zeros((len(cls.FIELDS), num_sequences), dtype=np.int64)
        data[_SOURCE] = -1
        for name, values in columns.items():
            data[_PLACES[name]] = values
        return cls(data)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return int(self.data.shape[1])

    @property
    def samples(self) -> np.ndarray:
        """[R] bool: whether the step yields tokens of the sequence."""
        sampled: np.ndarray = self.phase != 0
        return sampled


_PLACES = {name: place for place, name in enumerate(StepRows.FIELDS)}
_SOURCE = _PLACES["source"]


@dataclass(frozen=True, slots=True)
class RowExtras:
    """What few rows have besides numbers; the fields of `SequenceMetadata` of the same names."""

    admission: Admission | None = None
    prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TableDelta:
    """New block-table entries of one pool: `table[slots, places] = block_ids`, each [n] int64."""

    slots: np.ndarray
    places: np.ndarray
    block_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What a step is, apart from its rows.

    Args:
        step_seq: strictly increasing number.
        kind: prefill or decode.
        num_rows: rows of all sequences together, replayed ones included. Fewer than the sequences'
            own numbers add up to where the device trims drafts to what the step has room for.
        strict: use kernels whose rows do not depend on other rows.
        delays_sampling: sampling is launched apart, once the masks of constrained rows are known.
        preempted: uids taken off the device by this plan.
        window_loads: (from, to) slots: stored window state to copy before the step.
        window_saves: (from, to) slots: window state to store after the step.
        expert_map_epoch: which placement of experts the step runs with.
    """

    step_seq: int
    kind: StepKind
    num_rows: int
    strict: bool
    delays_sampling: bool = False
    preempted: tuple[int, ...] = ()
    window_loads: tuple[tuple[int, int], ...] = ()
    window_saves: tuple[tuple[int, int], ...] = ()
    expert_map_epoch: int = 0


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step as the scheduler decided it: frozen, printable, testable without a device.

    Args:
        output: what the step is.
        rows: its sequences.
        token_ids: int64: tokens of all rows end to end, drafts that may be trimmed included;
            `PLACEHOLDER` where the carry supplies them.
        extras: place of a sequence -> what it has besides numbers.
        tables: pool -> new block-table entries, for pools that have any.
    """

    output: SchedulerOutput
    rows: StepRows
    token_ids: np.ndarray
    extras: Mapping[int, RowExtras] = field(default_factory=dict)
    tables: Mapping[str, TableDelta] = field(default_factory=dict)

    @property
    def trims(self) -> bool:
        """Whether the device chooses which drafts are verified: as many as there are rows for."""
        return self.output.num_rows < len(self.token_ids)

    @cached_property
    def sequences(self) -> tuple[SequenceMetadata, ...]:
        """The rows spelled out, for readers and tests; the step path uses columns."""
        starts = np.concatenate(([0], np.cumsum(self.rows.num_rows)))
        return tuple(self._spelled(row, int(starts[row])) for row in range(len(self.rows)))

    def _spelled(self, row: int, first: int) -> SequenceMetadata:
        values = {
            name: int(v)
            for name, v in zip(StepRows.FIELDS, self.rows.data[:, row].tolist(), strict=True)
        }
        phase = PHASES[values.pop("phase")]
        num_rows, extras = values["num_rows"], self.extras.get(row, RowExtras())
        ids = () if values["source"] >= 0 else self.token_ids[first : first + num_rows].tolist()
        return SequenceMetadata(
            **values,
            phase=phase,
            token_ids=tuple(ids),
            kv_len=values["start"] + num_rows,
            blocks=self._new_blocks(values["slot"]),
            admission=extras.admission,
            prompt_logprobs=extras.prompt_logprobs,
            prompt_targets=extras.prompt_targets,
        )

    def _new_blocks(self, slot: int) -> tuple[BlockDelta, ...]:
        found = []
        for pool, delta in self.tables.items():
            mine = np.flatnonzero(delta.slots == slot)
            if len(mine):
                ids = tuple(delta.block_ids[mine].tolist())
                found.append(BlockDelta(pool, int(delta.places[mine[0]]), ids))
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """What the grammar of one sequence says of its rows in a step.

    Args:
        rows: [1 + drafts, ceil(V / 32)] int32: the tokens allowed at its next position and behind
            each draft, as `SampleInputs.mask` states them.
        forced: tokens without a choice, from its next position on. Those that the step does not
            yield are drafted behind it.
    """

    rows: np.ndarray
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities of the tokens a step yields, of the sequences that asked for them.

    Args:
        rows: [n] int64, places of these sequences in the plan, ascending.
        num_top: [n] int64, how many of the best ones each asked for.
        chosen: [n, 1 + drafts] float32, of the tokens in `StepResult.token_ids`.
        best_ids: [n, 1 + drafts, k] int64 and best [n, 1 + drafts, k] float32: best first.
    """

    rows: np.ndarray
    num_top: np.ndarray
    chosen: np.ndarray
    best_ids: np.ndarray
    best: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The host's copy of a step's sampler output; item i belongs to sequence i of the plan.

    Args:
        step_seq: the plan's number.
        token_ids: [R, 1 + drafts] int64: accepted drafts and the token after them; what stands
            behind is unspecified.
        num_tokens: [R] int64: how many of them there are; 0 where nothing was sampled.
        status: [R] int64, `RowStatus`.
        start: [R] int64: position of the sequence's first row on the device; between the settled
            length and the upper bound that was planned.
        num_verified: [R] int64: drafts that were verified.
        drafts: [R, drafts] int64, what was drafted behind those tokens, or None without a drafter.
        survival: [R, drafts] float32: chance that a draft passes together with those before it;
            None where the drafter tells none.
        logprobs: None when nobody asked.
        prompt_logprobs: place in the plan -> those of the prompt rows in this step.
    """

    step_seq: int
    token_ids: np.ndarray
    num_tokens: np.ndarray
    status: np.ndarray
    start: np.ndarray
    num_verified: np.ndarray
    drafts: np.ndarray | None = None
    survival: np.ndarray | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Mapping[int, tuple[PromptLogprob, ...]] = field(default_factory=dict)
