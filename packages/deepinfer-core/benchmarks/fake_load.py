"""What the benchmarks on the fake device share: requests without end, a grammar, quick sampling."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from deepinfer_core.engine.loop import StepLoop
from deepinfer_core.plans import Logprobs, StepKind, StepPlan
from deepinfer_core.scheduler import Scheduler, SchedulerLimits
from deepinfer_core.testing.fake_device import FakeDevice
from deepinfer_core.testing.fake_sampler import FakeSampler
from deepinfer_core.testing.one_by_one import OneByOne
from deepinfer_core.testing.virtual_clock import VirtualClock
from deepinfer_core.types import Request, SamplingParams

__all__ = ["VOCAB", "Bench", "Grammar", "Mix", "Traffic", "limits_for", "quiet"]

VOCAB = 129_280  # of masks: as many as the real model has
_CYCLE = 8  # of the grammar: one id in so many is refused


class Grammar(OneByOne):
    """Refuses the ids `t` with `t % 8 == n % 4` after n tokens: cheap, and changes with each token.

    A real matcher costs more; what is measured is what surrounds it.
    """

    done = False
    _masks: tuple[np.ndarray, ...] = ()

    def __init__(self) -> None:
        """Start before the first token."""
        self._count = 0
        if not Grammar._masks:
            ids = np.arange(VOCAB)
            allowed = [ids % _CYCLE != state for state in range(4)]
            bits = [np.packbits(each, bitorder="little").view(np.int32) for each in allowed]
            Grammar._masks = tuple(bits)

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        """See `TokenConstraint.fill_window`."""
        for place, row in enumerate(rows):
            row[:] = self._masks[(self._count + place) % 4]
            if place < len(drafts) and drafts[place] % _CYCLE == (self._count + place) % 4:
                rows[place + 1 :] = 0
                return place
        return len(drafts)

    def accept(self, token_ids: Sequence[int]) -> int:
        """See `TokenConstraint.accept`."""
        for taken, token_id in enumerate(token_ids):
            if token_id % _CYCLE == self._count % 4:
                return taken
            self._count += 1
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        """See `TokenConstraint.forced`."""
        return ()


class _QuickSampler(FakeSampler):
    """Looks at a few ids where the fake one looks at the whole vocabulary; for `Grammar` alone.

    The fake device's work costs the virtual clock nothing, but the benchmark's user time.
    """

    def _mask(self, targets: np.ndarray, mask: np.ndarray, planned: int, num_drafts: int) -> None:
        shown = targets[: 1 + num_drafts]
        words = mask[np.arange(1 + num_drafts), shown // 32]
        shown += (words >> (shown % 32) & 1) == 0  # what follows a refused id is allowed

    def _logprobs(self, plan: StepPlan, hashes: np.ndarray, targets: np.ndarray) -> Logprobs | None:
        num_top = self._num_top[plan.rows.slot]
        asked = np.flatnonzero(plan.rows.samples & (num_top >= 0))
        if not len(asked):
            return None
        ranks = np.arange(int(num_top[asked].max()))
        chosen = (hashes[asked] % np.uint64(1024)).astype(np.float32) / -1024
        best_ids = (targets[asked][..., None] + ranks) % self.vocab_size
        best = np.broadcast_to(chosen[..., None], best_ids.shape).copy()
        return Logprobs(asked, num_top[asked], chosen, best_ids, best)


@dataclass(frozen=True)
class Mix:
    """Requests of a kind; shares are of all requests, lengths in tokens, drawn evenly.

    Args:
        shared_len: beginning that a prompt has in common with others, of `num_prefixes` ones.
        prompt_len, output_len: (least, most) tokens of the rest of the prompt and of the output.
        shared, logprobs, penalties, constrained, aborted: shares.
        num_top: most likely tokens that requests with log-probabilities ask for.
    """

    shared_len: int = 256
    num_prefixes: int = 8
    prompt_len: tuple[int, int] = (32, 256)
    output_len: tuple[int, int] = (64, 256)
    shared: float = 0.5
    logprobs: float = 0.25
    penalties: float = 0.2
    constrained: float = 0.2
    aborted: float = 0.05
    num_top: int = 5


class Traffic:
    """Endless requests of a mix, the same ones for each seed."""

    def __init__(self, mix: Mix, num_ids: int = VOCAB, seed: int = 0) -> None:
        """Draw the shared beginnings; ids are below `num_ids`."""
        self._mix, self._num_ids = mix, num_ids
        self._draw = np.random.default_rng(seed)
        self._prefixes = [self._ids(mix.shared_len) for _ in range(mix.num_prefixes)]
        self._count = 0

    def next(self) -> tuple[Request, int | None]:
        """Return a request, and after how many tokens its client gives up, or None."""
        mix, draw, uid = self._mix, self._draw, self._count
        self._count += 1
        logprobs, penalties, constrained, aborted, shared = draw.random(5)
        prompt = self._ids(int(draw.integers(*mix.prompt_len, endpoint=True)))
        if shared < mix.shared:
            prompt = self._prefixes[int(draw.integers(mix.num_prefixes))] + prompt
        length = int(draw.integers(*mix.output_len, endpoint=True))
        params = SamplingParams(
            max_tokens=length,
            logprobs=mix.num_top if logprobs < mix.logprobs else None,
            presence_penalty=0.5 if penalties < mix.penalties else 0.0,
        )
        request = Request(
            uid=uid,
            client_id=f"request-{uid}",
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=uid,
            stop_ids=frozenset((1,)),
            replay_encoder=True,
            replay_decoder=True,
            constraint=Grammar() if constrained < mix.constrained else None,
        )
        gives_up = int(draw.integers(1, length)) if aborted < mix.aborted else None
        return request, gives_up

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._draw.integers(2, self._num_ids, count).tolist()
        return ids


def limits_for(
    num_rows: int, num_blocks: int, max_drafts: int = 0, max_model_len: int = 4096
) -> SchedulerLimits:
    """Return the limits of a rank that decodes `num_rows` sequences at a time."""
    return SchedulerLimits(
        block_size=64,
        num_blocks={"compressed": num_blocks, "index": num_blocks},
        num_slots=num_rows,
        max_model_len=max_model_len,
        max_step_tokens=2048,
        max_chunk_tokens=2048,
        window=128,
        history_len=3,
        max_drafts=max_drafts,
        prefix_cache=True,
        vocab_size=VOCAB,
    )


@dataclass
class Bench:
    """A scheduler and its loop on a fake device, in virtual time.

    The clock runs with the CPU time of this thread. The device's own work is left out; in its place
    a launch takes `launch_ns`.
    """

    limits: SchedulerLimits
    depth: int = 2
    step_ns: int = 1_000_000
    launch_ns: int = 0
    jitter: float = 0.0
    accepts: float = 0.0
    num_ids: int = VOCAB
    clock: VirtualClock = field(init=False)
    scheduler: Scheduler = field(init=False)
    device: FakeDevice = field(init=False)
    loop: StepLoop = field(init=False)

    def __post_init__(self) -> None:
        """Build the rank."""
        self.clock = VirtualClock.measured()
        self.scheduler = Scheduler(self.limits)
        self.device = FakeDevice(
            self.limits,
            self.clock,
            step_time_ns=self.step_ns,
            sampling_time_ns=self.step_ns // 20,
            launch_time_ns=self.launch_ns,
            jitter=self.jitter,
            depth=self.depth,
            vocab_size=self.num_ids,
            accepts=self.accepts,
            checks="none",
        )
        sampler = (self.limits.num_slots, self.limits.max_drafts, self.num_ids, self.accepts)
        self.device.model.sampler = _QuickSampler(*sampler)
        self.loop = StepLoop(self.scheduler, self.device, depth=self.depth, clock=self.clock.now_ns)

    def fill(self, num_rows: int, prompt_len: int, output_len: int) -> None:
        """Submit equal requests and run until all of them decode."""
        mix = Mix(shared=0, logprobs=0, penalties=0, constrained=0, aborted=0)
        lengths = (prompt_len, prompt_len), (output_len, output_len)
        traffic = Traffic(replace(mix, prompt_len=lengths[0], output_len=lengths[1]), self.num_ids)
        for _ in range(num_rows):
            request, _ = traffic.next()
            # an end-of-sequence id to look for, which never comes
            self.scheduler.submit(replace(request, stop_ids=frozenset((VOCAB,))))
        while self.scheduler.ballot().want_prefill:
            self.loop.iterate()
        for _ in range(8):  # the last prefill is settled, every part has run once
            self.loop.iterate()
        newest = self.loop.records.last(1)[0]
        assert newest.kind is StepKind.DECODE and newest.num_sequences == num_rows, newest


def quiet() -> str:
    """Keep this process on one core, where that can be; return what was done, in words."""
    with suppress(AttributeError, OSError):
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        return f"pinned to core {core}"
    return "not pinned"
