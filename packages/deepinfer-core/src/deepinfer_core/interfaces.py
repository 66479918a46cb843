"""What core asks of the packages around it.

Leaves satisfy these Protocols by shape and never import core.

    KernelBackend, DeviceRuntime     entry points `deepinfer.kernels`   cpu | cuda | npu
    VerifyPlanner, Acceptor, Calibration       `deepinfer.verifier`     dspark
    PlacementPlanner                           `deepinfer.planner`      eplb
    Recipe                                     `deepinfer.recipe`       deepseek_v4 | deepseek_v41

This module is long because it is the one place where a contract is written; it holds no code that
runs.

Letters in shapes: B rows of a step laid end to end, R sequences of it, D hidden size, S residual
streams, H heads, d head size, E experts, k experts a token, V vocabulary, W window, K entries kept
by an index source. `act` is `KernelBackend.activation_dtype`: float32 in the modes `ideal` and
`cache`, bfloat16 in `release`.

Rules that hold for every op unless its text says otherwise
- Tensors are on the backend's device and contiguous in their last dimension. B == 0 works and
  launches nothing.
- A row of padding has `rows.sequence == -1`. What an op returns for it is unspecified but finite;
  it writes nothing.
- Nothing is modified but tensors whose text says "written". A result may be
  an input itself where nothing changes.
- With `strict`, the result of a row has the same bits whatever other rows, chunk borders or padding
  the step has.
- In mode `ideal` on float32 inputs every op but those of caches in packed formats is
  differentiable.
- A shape, dtype or device outside a contract is a fault of the caller, not of the user: a backend
  names what it can check cheaply and may fail otherwise. Modes it lacks are told by `supports`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import torch
    from torch import Tensor

__all__ = [
    "Acceptance",
    "Acceptor",
    "BlockStore",
    "Calibration",
    "Carry",
    "ChatSettings",
    "CompressorState",
    "DeviceRuntime",
    "Event",
    "ExpertWeights",
    "Graph",
    "KernelBackend",
    "Matrix",
    "MemoryInfo",
    "Placement",
    "PlacementPlanner",
    "PreparedRequest",
    "Queue",
    "Recipe",
    "Reply",
    "ReplyEvent",
    "Rows",
    "SampleInputs",
    "SampleOutput",
    "Selection",
    "TokenConstraint",
    "Verifier",
    "VerifyBudget",
    "VerifyPlanner",
    "WindowStore",
]


# Values that ops take and return


class Matrix(Protocol):
    """A weight `[out, in]` as stored.

    A backend's `prepare` may replace it by its own layout of the same values.
    """

    @property
    def payload(self) -> Tensor:
        """The values, in the dtype of their `format`.

        bfloat16 or float32 [out, in]; float8_e4m3fn [out, in]; or uint8 [out, in/2], low nibble =
        even column.
        """

    @property
    def scale(self) -> Tensor | None:
        """UE8M0 exponent bytes, uint8.

        [ceil(out/32), ceil(in/32)] for fp8 tiles, [out, in/32] for fp4 rows.
        """

    @property
    def format(self) -> str:
        """`plain`, `fp8_tile` or `fp4_row`.

        The Engram table is `fp8_row`: one scale for a row's 32 channels.
        """

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), unpacked."""


class ExpertWeights(Protocol):
    """Experts of one layer on this rank, stacked along their physical slot."""

    @property
    def w1(self) -> Matrix:
        """Gate projection; payload [slots, intermediate, ...]."""

    @property
    def w3(self) -> Matrix:
        """Up projection; payload [slots, intermediate, ...]."""

    @property
    def w2(self) -> Matrix:
        """Down projection; payload [slots, D, ...]."""


class Rows(Protocol):
    """The marker of a flattened step: which sequence a row belongs to and what it may see."""

    @property
    def positions(self) -> Tensor:
        """[B] int64, absolute; 0 for padding."""

    @property
    def sequence(self) -> Tensor:
        """[B] int64, index of the row's sequence in this step; -1 is padding."""

    @property
    def slots(self) -> Tensor:
        """[B] int64, slot of the row's sequence; padding names the scratch slot, the last one."""

    @property
    def row_start(self) -> Tensor:
        """[R + 1] int64: first key of each sequence.

        Keys of sequence s are rows row_start[s] .. row_start[s+1] - 1, at consecutive positions.
        Where a layer computes keys for all rows but queries for some, this one and `first_position`
        describe the keys' rows.
        """

    @property
    def first_position(self) -> Tensor:
        """[R] int64, position of each sequence's first key of this step."""

    @property
    def sequence_slots(self) -> Tensor:
        """[R] int64, slot of each sequence."""

    @property
    def window_first(self) -> Tensor:
        """[B] int64, first position the row's window covers; may be negative."""

    @property
    def window_last(self) -> Tensor:
        """[B] int64, last position it covers; beyond the row itself only inside a draft block."""

    @property
    def window_floor(self) -> Tensor:
        """[B] int64, positions below this are not visible in windows.

        It is the start of the sequence, of a replay or of the tail.
        """

    @property
    def window_len(self) -> int:
        """Host-side bound of `window_last - window_first + 1`; equal in every step of one kind."""

    @property
    def writes(self) -> Tensor:
        """[B] bool: may write blocks and compressor state. False for padding and replayed rows."""

    @property
    def is_image(self) -> Tensor | None:
        """[B] bool, or None when no row lies inside an image span."""


class WindowStore(Protocol):
    """Window rings of one layer: entry of position p lies at `data[slot, p % ring_len]`."""

    @property
    def data(self) -> Tensor:
        """[slots + 1, ring_len, width] in the backend's window format; the last slot is scratch."""


class BlockStore(Protocol):
    """Block KV of one source layer in one pool.

    Entry j of a slot covers tokens j*ratio .. j*ratio + ratio - 1.
    """

    @property
    def data(self) -> Tensor:
        """[blocks + 1, entries a block, width] in the backend's format.

        The last block is scratch.
        """

    @property
    def table(self) -> Tensor:
        """[slots + 1, max blocks] int32: block ids of each slot in order.

        Shared by all layers of a pool.
        """

    @property
    def ratio(self) -> int:
        """Tokens an entry stands for."""


class CompressorState(Protocol):
    """Unfinished groups of one ratio-2 source: inputs of position p lie at `data[slot, p % depth]`.

    The depth covers a group and the drafts of a step, so that refused drafts are undone by
    arithmetic alone.
    """

    @property
    def data(self) -> Tensor:
        """[slots + 1, depth, 2, d] float32: projected value and gate."""


class Selection(Protocol):
    """What an index source chose for each row."""

    @property
    def picks(self) -> Tensor:
        """[B, K] int32 entry numbers, ascending, -1 behind the last one."""

    @property
    def candidates(self) -> Tensor | None:
        """[B, blocks] int32 candidate blocks, ascending, -1 behind the last.

        None unless published.
        """


class SampleInputs(Protocol):
    """Settings of N sampled rows; tensors of N items, or None when no row uses the filter."""

    @property
    def seeds(self) -> Tensor:
        """[N, 2] int64: low and high 32 bits of the seed."""

    @property
    def positions(self) -> Tensor:
        """[N] int64: index in its sequence of the token being produced."""

    @property
    def temperature(self) -> Tensor:
        """[N] float32; 0 is greedy."""

    @property
    def top_k(self) -> Tensor | None:
        """[N] int64; 0 keeps all."""

    @property
    def top_p(self) -> Tensor | None:
        """[N] float32."""

    @property
    def min_p(self) -> Tensor | None:
        """[N] float32."""

    @property
    def penalties(self) -> Tensor | None:
        """[N, 3] float32: repetition, frequency, presence."""

    @property
    def prompt_seen(self) -> Tensor | None:
        """[N, V] bool: token occurs in the prompt. Set whenever `penalties` is."""

    @property
    def output_counts(self) -> Tensor | None:
        """[N, V] int32: times a token occurs in the output so far."""

    @property
    def bias(self) -> Tensor | None:
        """[N, V] float32 added to the logits."""

    @property
    def mask(self) -> Tensor | None:
        """[N, ceil(V / 32)] int32 bit mask, bit v%32 of word v//32 set when token v is allowed."""

    @property
    def stream(self) -> int:
        """Which noise: 0 target, 1 draft, 2 accept, 3 residual; 1 to 3 serve rejection sampling."""

    @property
    def cycle(self) -> Tensor | None:
        """[N] int64, position of the anchor for stream 1; None is 0 everywhere."""


class SampleOutput(Protocol):
    """Result of `sample`."""

    @property
    def token_ids(self) -> Tensor:
        """[N] int64."""

    @property
    def status(self) -> Tensor:
        """[N] int32: 0 right, 1 no finite logit (the token is 0)."""


class Carry(Protocol):
    """What a step leaves on the device for the next one: a row for each of its sequences."""

    @property
    def tokens(self) -> Tensor:
        """[R, 1 + drafts] int64: the token to feed next and its drafts."""

    @property
    def start(self) -> Tensor:
        """[R] int64: committed length, the position of that token."""

    @property
    def tag(self) -> Tensor:
        """[R] int64: names the sequence and its generation; -1 where nothing was left."""


# Device


class Event(Protocol):
    """A point in a queue."""

    @property
    def time_ns(self) -> int | None:
        """`time.perf_counter_ns()` when the queue passed the point.

        None before that, or where the device does not tell.
        """

    def done(self) -> bool:
        """Whether the queue has passed the point. Never waits."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until the queue has passed it; TimeoutError after `timeout_s` seconds."""


class Queue(Protocol):
    """Device work in order. Three exist: `forward`, `copy_in`, `copy_out`."""

    def submit(self, work: Callable[[], None]) -> None:
        """Queue the device work that `work` issues; may return before it ran.

        Its error surfaces at the next wait.
        """

    def record(self) -> Event:
        """Return an event behind everything submitted so far."""

    def wait_for(self, event: Event) -> None:
        """Make later work of this queue wait for `event`; the host does not wait."""


class Graph(Protocol):
    """Captured work with fixed addresses and shapes."""

    def replay(self) -> None:
        """Submit the captured work once more."""


class MemoryInfo(Protocol):
    """Bytes of device memory."""

    @property
    def total(self) -> int:
        """All there is."""

    @property
    def free(self) -> int:
        """Not in use by anyone."""


class DeviceRuntime(Protocol):
    """The queues, events, buffers and graphs of one device."""

    @property
    def device(self) -> torch.device:
        """Where tensors of this backend live."""

    def set_background(self, background: bool) -> None:
        """Choose, before any queue is used, whether the host goes on while submitted work runs.

        Where the device always works beside the host, this changes nothing.
        """

    def queue(self, name: str) -> Queue:
        """Return the queue of that name, the same object every time."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a host buffer that copies without blocking.

        Its address stays valid while it is referenced.
        """

    def capture(self, queue: Queue, work: Callable[[], None]) -> Graph | None:
        """Capture `work`, or return None where the device has no graphs.

        The caller then runs it eagerly.
        """

    def memory(self) -> MemoryInfo:
        """Return what the device has and what is free."""

    def synchronize(self) -> None:
        """Wait for every queue (start-up, Flush and tests only)."""

    def close(self) -> None:
        """End what works in the background; later work starts it anew."""


# Kernels


@runtime_checkable
class KernelBackend(Protocol):
    """All ops of the model for one kind of device, in one numerics mode.

    `numerics`: `ideal` (float32, nothing rounded), `cache` (caches and index operands rounded to
    their stored formats), `release` (also bfloat16 and fp8 activations). Rounding is inside the
    ops: the model's code is the same.
    """

    @property
    def name(self) -> str:
        """`cpu`, `cuda` or `npu`."""

    @property
    def numerics(self) -> str:
        """`ideal`, `cache` or `release`."""

    @property
    def strict(self) -> bool:
        """Whether ops promise rows that do not depend on other rows."""

    @property
    def activation_dtype(self) -> torch.dtype:
        """`act` of the shapes."""

    @property
    def block_multiple(self) -> int:
        """`block_size` must be a multiple of this (tokens)."""

    @property
    def runtime(self) -> DeviceRuntime:
        """Queues, events and memory of the device."""

    @staticmethod
    def why_unavailable() -> str | None:
        """Return None when the backend can run here, else one sentence on what is missing.

        Cheap.
        """

    def supports(self, capability: str) -> bool:
        """Whether the backend has a mode or format.

        A numerics mode, `strict`, `graphs` or `autograd`.
        """

    def with_strict(self, strict: bool) -> KernelBackend:
        """Return the same backend with strict kernels on or off; weights and caches are shared."""

    def prepare(self, matrix: Matrix) -> Matrix:
        """Return the matrix on this device in the layout its ops want.

        Called once, when a weight is loaded.
        """

    def entry_format(self, kind: str, width: int) -> tuple[int, torch.dtype]:
        """Return (last dimension, dtype) of stored entries of `width` channels.

        Args:
            kind: `window` (fp8, groups of 32), `compressed` (E2M1, groups of 16) or `index` (E2M1,
                groups of 32).
            width: channels, such as 512 for `window`: 528 bytes, uint8, in the packed modes; 512
                float32 in `ideal`.
        """

    # linear

    def embed(self, token_ids: Tensor, table: Matrix) -> Tensor:
        """Return rows of the embedding table: token_ids [B] int64, table [V, D] -> [B, D] act."""

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """Return `x @ weight^T`: x [B, in] act -> [B, out] act.

        In `release` the input of a quantised weight is first rounded to fp8 with a power-of-two
        scale for each row and 32 channels; products are summed in float32; the output is rounded
        once.
        """

    def linear_float32(self, x: Tensor, weight: Matrix) -> Tensor:
        """Return `x @ weight^T` from up-cast operands, unrounded: x [B, in] -> [B, out] float32.

        For the router, ratio-2 compressors, the head, Markov and confidence heads.
        """

    def grouped_linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """Apply one block of rows of the weight to each group of inputs.

        x [B, G, in] act, weight [G * out, in] -> [B, G * out] act. The input is not rounded
        (attention's `wo_a`).
        """

    # norms and residual streams

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Return `x * rsqrt(mean(x^2) + eps) * weight` over the last dimension.

        Computed in float32; dtype of x.
        """

    def mhc_mix(
        self,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coefficients of a hyper-connection, all float32.

        The normed streams times `fn`, split into three parts, each times its scale plus its base:
        pre = sigmoid + eps; post = 2 * sigmoid; comb = softmax over the destination + eps, then
        Sinkhorn: divided by the sums over the source, and, `iterations` - 1 times, by those over
        the destination and over the source again, each sum + eps.

        Args:
            streams: [B, S, D] act. fn: [S*(2+S), S*D] float32. scale: [3]. base: [S*(2+S)].
            norm_eps: of the weightless norm over all streams.
            eps: `hc_eps`. iterations: Sinkhorn column passes.
        Returns:
            pre [B, S], post [B, S], comb [B, S, S] with comb[source, destination].
        """

    def mhc_collapse(self, coefficient: Tensor, streams: Tensor) -> Tensor:
        """Return `sum_s coefficient[s] * streams[s]`.

        [B, S] float32, [B, S, D] act -> [B, D] act.
        """

    def mhc_merge(self, y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
        """Return new streams `[o] = post[o] * y + sum_i comb[i, o] * streams[i]`; [B, S, D] act."""

    # attention

    def rotate(
        self, x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False
    ) -> Tensor:
        """Turn the last 2n channels, as interleaved pairs, by `positions * inv_freq`.

        x [B, ..., d] act; positions [B] int64; inv_freq [n] float32; the angle is a float32
        product. Dtype of x.
        """

    def round_window(self, keys: Tensor) -> Tensor:
        """Return keys [B, d] act as they read back from a window ring; act, identity in `ideal`."""

    def write_window(self, store: WindowStore, keys: Tensor, rows: Rows) -> None:
        """Write keys [B, d] act of the last `ring_len` rows of each sequence into their rings.

        Written: store.data. Also for rows whose `writes` is False: replay exists to refill windows.
        """

    def pool_groups(
        self, values: Tensor, gates: Tensor, state: CompressorState, rows: Rows
    ) -> Tensor:
        """Pool two tokens of a ratio-2 group by a softmax of their gates, for each channel.

        Args:
            values, gates: [B, d] float32 of each row.
            state: inputs of earlier steps; written with those of this step (rows whose `writes` is
                True).
        Returns:
            [B, d] float32; rows at odd positions hold the pooled latent of their group, others
            zero.
        """

    def write_entries(self, store: BlockStore, entries: Tensor, rows: Rows, kind: str) -> None:
        """Round entries [B, d] act to format `kind`; store those of rows that complete a group.

        Row at position p completes group (p + 1) // ratio - 1 when ratio divides p + 1 (written:
        store.data).
        """

    def round_index(self, x: Tensor) -> Tensor:
        """Return index queries [B, H, d] act rounded to the index format; identity in `ideal`."""

    def index_select(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: BlockStore,
        rows: Rows,
        *,
        top_k: int,
        candidates: Tensor | None,
        candidate_block: int,
        publish: int,
    ) -> Selection:
        """Score visible entries and keep the best.

        score[j] = sum_h weights[h] * max(0, queries[h] . keys[j]); entry j is visible to a row at p
        when j < (p + 1) // ratio. Equal scores: the lower entry wins.

        Args:
            queries: [B, H, d] act, rounded. weights: [B, H] act.
            top_k: entries kept. candidates: [B, n] int32, or None for all visible ones.
            candidate_block: entries a candidate block spans.
            publish: candidate blocks to publish (0: none); the block of the newest visible entry is
                always one.
        """

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        window: WindowStore,
        rows: Rows,
        sink: Tensor,
        *,
        scale: float,
        entries: BlockStore | None = None,
        picks: Tensor | None = None,
    ) -> Tensor:
        """Attend to the window and to picked block entries; key and value are the same vector.

        Window positions of a row run from `window_first` to `window_last`, those at or above the
        sequence's `first_position` come from `keys` (this step's rows), older ones from the ring;
        none below `window_floor`. The softmax's denominator gets `exp(sink[h])` besides. A row that
        sees nothing yields zero.

        Args:
            queries: [B, H, d] act. keys: [B, d] act, as `round_window` returns them.
            sink: [H] float32.
            entries, picks: block entries and [B, K] int32 of `index_select`; None for window-only
                layers.
        Returns:
            [B, H, d] act, not yet rotated back.
        """

    # experts

    def route(
        self, x: Tensor, gate: Matrix, bias: Tensor, *, top_k: int, temperature: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Choose experts: ids [B, k] int32, best biased score first, and their weights.

        The weights are [B, k] float32.
        bias: [E] or, for rows with their own bias, [B, E], float32. Equal scores: the lower id
        wins.
        """

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, *, limit: float
    ) -> Tensor:
        """Return the sum over chosen experts in top-k order, unrounded: [B, D] float32.

        ids: [B, k] int32 physical slots of this rank, -1 where the expert is elsewhere or the row
        is padding. Gate clamped above at `limit`, up to +-limit; the routing weight enters before
        `w2`.
        """

    def shared_expert(
        self, x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float
    ) -> Tensor:
        """Return the expert every row passes, without weight: [B, D] act."""

    # Engram

    def engram_rows(
        self,
        folded: Tensor,
        history: Tensor,
        rows: Rows,
        pad_id: int,
        multipliers: Tensor,
        primes: Tensor,
    ) -> Tensor:
        """Return the table rows of each row's n-grams, for all Engram layers at once.

        The layers share one history.

        Args:
            folded: [B] int64 folded ids, -1 at image positions.
            history: [slots + 1, depth] int64, folded id of position p at p % depth; written,
                by replayed rows too.
            pad_id: folded pad id. multipliers: [layers, n] int64.
            primes: [layers, n - 1, heads] int64.
        Returns:
            [layers, B, (n - 1) * heads] int64, offsets of the columns included.
        """

    def engram_fetch(self, table: Matrix, row_ids: Tensor) -> Callable[[], Tensor]:
        """Begin to gather and widen table rows [B, c] int64; return what hands them over.

        The table may lie in host memory; the device may then read it beside what is submitted in
        between. The function is called once, on the same queue: [B, c * width] act.
        """

    def engram_gate(
        self,
        streams: Tensor,
        kv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        eps: float,
        is_image: Tensor | None,
    ) -> Tensor:
        """Add the gated value to each stream.

        kv [B, (S + 1) * D] -> new streams [B, S, D].
        """

    # sampling

    def sample(self, logits: Tensor, inputs: SampleInputs) -> SampleOutput:
        """Choose one token a row.

        Filters, Philox noise keyed by seed, position and token id, argmax, lower id on ties.
        logits: [N, V] float32, not modified.
        """

    def probabilities(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        """Return the distribution that `sample` draws from: [N, V] float32.

        All the mass on one token where the temperature is 0; zero everywhere where `sample` would
        report a fault. For rejection sampling.
        """

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of raw logits.

        Those of token_ids [N] -> [N], and the best [N, num_top] ids and values.
        """

    # step plumbing

    def expand_rows(self, num_rows: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Lay sequences end to end and name the place of each row.

        num_rows, start [R] int64 -> (sequence, positions) [total] int64, padding -1, 0.
        """

    def correct_inputs(
        self, tokens: Tensor, start: Tensor, tag: Tensor, remap: Tensor, carry: Carry | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace host values by the carry of the previous step where `remap[s] >= 0`.

        tokens [R, n] int64, start [R], tag [R] int64, remap [R] int64 -> corrected tokens, start
        and status [R] int32 (2 where the carry's tag differs; such a row gets token 0).
        """


# Verification of drafts


class VerifyBudget(Protocol):
    """How many drafts a step verifies."""

    @property
    def total(self) -> int:
        """Drafts of all requests together; at most those that are available."""

    @property
    def rows(self) -> int:
        """Rows of the step, the requests' own included, after rounding to a graph size."""


class VerifyPlanner(Protocol):
    """Chooses verify lengths from survival probabilities.

    Survival of a draft: the probability that it and all drafts before it are accepted. How many
    drafts is decided on the host, which must not know this step's; which ones, on the device.
    """

    def budget(
        self, survival: np.ndarray, known: np.ndarray, available: np.ndarray
    ) -> VerifyBudget:
        """Return the budget from records two steps old.

        survival: [R, g] float32, non-increasing in a row; known: [R] bool, False where a request
        has no record; available: [R] int64, drafts of each request that may be verified.
        """

    def lengths(self, survival: Tensor, available: Tensor, total: int) -> Tensor:
        """Return drafts to verify for each request.

        survival [R, g] float32, available [R] int64 -> [R] int32, at most what is available, that
        sums to `total`. Runs on the device and waits for nothing; ties go to the smaller draft
        number, then to the smaller request.
        """

    def observe(self, rows: int, seconds: float) -> None:
        """Take note of a measured step."""


class Acceptance(Protocol):
    """Outcome of verification."""

    @property
    def token_ids(self) -> Tensor:
        """[R, g + 1] int64: accepted drafts, the token after them, then -1."""

    @property
    def num_accepted(self) -> Tensor:
        """[R] int32: accepted drafts, the token after them not counted."""


class Acceptor(Protocol):
    """Decides which drafts stand."""

    def accept(
        self,
        drafts: Tensor,
        lengths: Tensor,
        target: Tensor,
        *,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        probabilities: tuple[Tensor, Tensor] | None = None,
    ) -> Acceptance:
        """Compare drafts with the target.

        Args:
            drafts: [R, g] int64.
            lengths: [R] int32, drafts that were verified.
            target: [R, g + 1] int64, the target's own token at each row.
            seeds, positions: [R, 2] int64 words of the seed and [R] int64 position of the first
                draft; for the noise of rejection sampling (streams 2 and 3).
            probabilities: (draft [R, g, V], target [R, g + 1, V]) float32, as
                `KernelBackend.probabilities` gives them; only for rejection sampling.
        """


class Calibration(Protocol):
    """Temperatures, one a draft number, that make confidences honest."""

    def apply(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """Return calibrated confidences [R, g] float32.

        logits [R, g] float32, before the sigmoid; sampled [R] bool, False where the request is
        greedy: the two classes have temperatures of their own.
        """


class Verifier(Protocol):
    """What an entry point of `deepinfer.verifier` names: the parts of one engine's verification.

    It is constructed with the keywords `policy` (`fixed`, `threshold` or `delayed`), `acceptance`
    (`target_noise` or `rejection`), `num_drafts`, `block_size` (drafts of the drafter's block),
    `threshold`, `costs` (a file or None) and its `fingerprint`, `calibration` (a file or None) and
    its `checkpoint`. What it refuses it raises as its class attribute `error`.
    """

    @property
    def error(self) -> type[Exception]:
        """Base of the errors of its constructor."""

    @property
    def planner(self) -> VerifyPlanner:
        """Chooses lengths."""

    @property
    def acceptor(self) -> Acceptor:
        """Decides which drafts stand."""

    @property
    def calibration(self) -> Calibration:
        """Makes confidences honest."""

    @property
    def has_costs(self) -> bool:
        """Whether a cost table is in use; without one `delayed` verifies all drafts."""

    @staticmethod
    def write_costs(
        path: str,
        samples: Mapping[int, Sequence[float]],
        *,
        fingerprint: Mapping[str, str | int],
    ) -> None:
        """Store a table of measured steps, rows -> seconds of each, for the keyword `costs`."""


# Placement of experts


class Placement(Protocol):
    """Where experts live."""

    @property
    def physical_to_logical(self) -> np.ndarray:
        """[layers, ranks * slots] int32."""

    @property
    def logical_to_physical(self) -> np.ndarray:
        """[layers, E, most replicas] int32, -1 behind the last one."""

    @property
    def num_replicas(self) -> np.ndarray:
        """[layers, E] int32."""

    @property
    def split(self) -> np.ndarray | None:
        """[layers, ranks * slots] float64, share of its expert's tokens; None for equal shares."""

    @property
    def moves(self) -> int:
        """Copies to make on the way from the plan before."""

    def report(self, load: np.ndarray) -> str:
        """Return a table for a terminal: what the placement gains under `load` [layers, E]."""


class PlacementPlanner(Protocol):
    """Plans where experts live. Pure: same arguments, same plan."""

    def plan(
        self,
        loads: np.ndarray,
        *,
        ranks: int,
        nodes: int,
        slots_per_rank: int,
        prev: np.ndarray | None = None,
        history: np.ndarray | None = None,
        groups: int | None = None,
    ) -> Placement:
        """Plan from token counts.

        loads [layers, E], history [pieces, layers, E], prev [layers, ranks * slots]; groups of
        experts that stay on one node, for the hierarchical policy.
        """


# Protocol of conversations


class TokenConstraint(Protocol):
    """A grammar's state for one text: what may come next."""

    @property
    def done(self) -> bool:
        """Whether the grammar allows nothing but the end, or has ended."""

    @staticmethod
    def fill_windows(
        constraints: Sequence[Any], drafts: Sequence[Sequence[int]], rows: np.ndarray
    ) -> Sequence[int | Exception]:
        """Write masks before each draft of several texts and behind the last; states stay.

        Args:
            constraints: of different texts, and of classes that share this function.
            drafts: proposed ids of each.
            rows: [sum of len(drafts) + 1, words] int32, contiguous, one text behind the other;
                words are ceil(V / 32) of the model's vocabulary, which may be larger than the
                tokenizer's. Bit v % 32 of word v // 32 is token v. Every word is written; behind
                the first refused draft of a text, and behind its end, all are 0.

        Returns:
            For each how many drafts are allowed, from the front, or what went wrong.
        """

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance; return how many tokens were allowed.

        A refused token leaves the state unchanged, and so does one behind the grammar's end.
        """

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, as far as there is no choice.

        Empty where there is one; the end is not among them.
        """


class OutputGrammar(Protocol):
    """A constraint on a whole output, compiled."""

    @property
    def warnings(self) -> Sequence[str]:
        """What of the constraint does not constrain the text."""

    def matcher(self) -> TokenConstraint:
        """Return a fresh state, for one text."""

    def fault_of(self, text: str) -> str | None:
        """Return why a finished text does not satisfy the constraint.

        None if it does, or where that cannot be told. A safety net: masks see to it already.
        """


class ReplyEvent(Protocol):
    """One event for a client, in the protocol of its request."""

    @property
    def name(self) -> str | None:
        """The event's name; None where the protocol has none."""

    @property
    def data(self) -> str:
        """JSON text."""


class Reply(Protocol):
    """One reply being read: token ids in, events of the request's protocol out.

    Events and response are the same for every way of cutting the ids.
    """

    @property
    def finished(self) -> bool:
        """Whether the reply has ended, maybe by a stop text, so that no more ids are wanted."""

    @property
    def malformed(self) -> Sequence[str]:
        """Text of the model that fits nowhere; no event and no response holds it."""

    def start(self, prompt_tokens: int, cached_tokens: int) -> Sequence[ReplyEvent]:
        """Begin; says how long the prompt was, and how much of it was in the prefix index."""

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[tuple[float, Sequence[tuple[int, float]]]] | None = None,
    ) -> Sequence[ReplyEvent]:
        """Take the next ids; an end-of-sequence id at the end of the reply is no part of it.

        Args:
            token_ids: as produced.
            logprobs: one for each id: its own, then (id, log-probability) of alternatives.
        """

    def finish(self, reason: str) -> Sequence[ReplyEvent]:
        """End the reply: `stop` or `length`. Nothing happens if it has ended already."""

    def response(self) -> dict[str, object]:
        """Return the whole response after the end, as the protocol states it."""


class ChatSettings(Protocol):
    """Sampling settings of a request, after the checkpoint's own rules."""

    @property
    def temperature(self) -> float:
        """0 is greedy."""

    @property
    def top_p(self) -> float:
        """As in `SamplingParams`."""

    @property
    def seed(self) -> int | None:
        """As in `SamplingParams`."""

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are wanted."""

    @property
    def top_logprobs(self) -> int | None:
        """How many alternatives of each; None is 0."""


class PreparedRequest(Protocol):
    """A request of an API protocol, as the engine needs it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt."""

    @property
    def settings(self) -> ChatSettings:
        """How to sample."""

    @property
    def images(self) -> Sequence[object]:
        """What the image placeholders among the ids stand for."""

    @property
    def left_out(self) -> Sequence[str]:
        """Fields of the request that are not honoured and were ignored."""

    @property
    def overridden(self) -> Sequence[str]:
        """Fields of the request that the checkpoint's own settings replaced."""

    def max_tokens(self, context_limit: int) -> int:
        """Return how many tokens the reply may have; `request_error` if the prompt is too long."""

    def grammar(self) -> OutputGrammar | None:
        """Return what the reply must follow, if anything.

        `request_error` where that cannot be enforced.
        """

    def reply(self, response_id: str, model: str, created: int) -> Reply:
        """Return what reads the reply.

        Args:
            response_id: the response's id.
            model: the model's name for the client.
            created: seconds since 1970.
        """


class Recipe(Protocol):
    """A checkpoint's conversation format, behind the public API protocols.

    Constructed with the path of a `tokenizer.json`. The entry point's name is the `model_type` of
    `config.json`.
    """

    @property
    def request_error(self) -> type[Exception]:
        """What a refused request raises; it has `message`, `param`, `code` and `status_code`."""

    @property
    def reply_error(self) -> type[Exception]:
        """What `Reply.push` raises for an id that the tokenizer does not know."""

    @property
    def tokenizer_error(self) -> type[Exception]:
        """What the constructor raises for a tokenizer that does not fit the format."""

    def prepare(
        self, request: Mapping[str, object] | bytes | str, protocol: str = "chat"
    ) -> PreparedRequest:
        """Return a request's prompt and settings; text never becomes a control token.

        Args:
            request: the body, parsed or as JSON text. `model` may be left out.
            protocol: `chat`, `responses` or `messages`.
        """

    def grammar(self, constraint: Mapping[str, object]) -> OutputGrammar:
        """Compile a constraint on a whole text; an equal one is compiled once.

        Args:
            constraint: one kind and what it says, such as `{"json": schema}`; kinds are those of
                `SamplingParams.constraint`. `request_error` where it cannot be enforced.
        """
