"""A scripted engine, so that what stands above the engine is tested without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from tokenizers import Tokenizer

from deepinfer_core.bench.demo_tokenizer import build_tokenizer
from deepinfer_core.errors import DuplicateRequest
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.types import FinishReason, Request, SequenceUpdate, TokenLogprob

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

Script = Callable[[Request], Iterable[int]]


def echo(request: Request) -> Iterator[int]:
    """Produce the prompt again and again."""
    return itertools.cycle(request.prompt_token_ids)


@dataclass
class Stats:
    """What `LLM` and the progress bar read of the engine."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class ScriptedEngine:
    """One token a step for each live request, taken from a script; no model."""

    def __init__(self, script: Script = echo) -> None:
        """Serve requests by `script`."""
        self.script = script
        self.model_config = SimpleNamespace(
            vocab_size=512, eos_token_ids=(1,), image_token_id=510, sliding_window=8
        )
        self.limits = SchedulerLimits(
            block_size=16,
            num_blocks={"compressed": 9},
            num_slots=4,
            max_model_len=128,
            max_step_tokens=64,
            max_chunk_tokens=64,
            window=8,
        )
        self.stats = Stats()
        self.live: dict[int, tuple[Request, Iterator[int], int]] = {}
        self.requests: list[Request] = []
        self.finished: list[tuple[int, FinishReason]] = []
        self.aborted: list[str] = []
        self.before_step: Callable[[], None] = lambda: None
        self.constrained: list[str] = []
        self.closed = False

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self.live)

    def observe_constrained(self, result: str) -> None:
        """Keep how a request with a constraint ended."""
        self.constrained.append(result)

    def submit(self, request: Request) -> None:
        """Take a request."""
        if any(request.client_id == other.client_id for other, _, _ in self.live.values()):
            raise DuplicateRequest(
                f"`client_id` {request.client_id!r} is in use.", param="client_id", code="duplicate"
            )
        self.requests.append(request)
        self.live[request.uid] = (request, iter(self.script(request)), 0)

    def step(self) -> tuple[SequenceUpdate, ...]:
        """Produce a token of every live request."""
        assert self.live, "a step without work"
        self.before_step()
        return tuple(self._advance(uid) for uid in list(self.live))

    def _advance(self, uid: int) -> SequenceUpdate:
        request, tokens, count = self.live[uid]
        token_id = next(tokens)
        self.stats.decode_tokens += 1
        self.stats.decode_seconds += 0.5
        if token_id < 0:
            del self.live[uid]
            reason, error, code = FinishReason.ERROR, "No finite logit.", "non_finite"
            return SequenceUpdate(uid, finish_reason=reason, error=error, error_code=code)
        reason = FinishReason.LENGTH if count + 1 == request.params.max_tokens else None
        reason = FinishReason.STOP if token_id in request.stop_ids else reason
        self.live[uid] = (request, tokens, count + 1)
        if reason is not None:
            del self.live[uid]
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.params.logprobs is not None:
            top = tuple((token_id + i, -0.5 - i) for i in range(request.params.logprobs))
            logprobs = (TokenLogprob(token_id, -0.5, top),)
        return SequenceUpdate(uid, (token_id,), logprobs, finish_reason=reason)

    def finish(self, uid: int, reason: FinishReason) -> None:
        """End a request for a reason that the engine does not see."""
        del self.live[uid]
        self.finished.append((uid, reason))

    def abort(self, client_id: str) -> bool:
        """End a request early."""
        uids = [uid for uid, (each, _, _) in self.live.items() if each.client_id == client_id]
        for uid in uids:
            del self.live[uid]
            self.aborted.append(client_id)
        return bool(uids)

    def close(self) -> None:
        """Free everything."""
        self.closed = True


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 512 ids with a few special ones."""
    return build_tokenizer(512, {0: "<bos>", 1: "<eos>", 2: "<pad>", 510: "<image>"})


@pytest.fixture
def scripted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Tokenizer
) -> ScriptedEngine:
    """The engine that every `LLM` of the test gets, of the model folder `tmp_path / "model"`."""
    import deepinfer_core.llm as module

    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = ScriptedEngine()
    monkeypatch.setattr(module, "build_engine", lambda *arguments: engine)
    monkeypatch.setattr(module, "resolve_model", Path)
    return engine
