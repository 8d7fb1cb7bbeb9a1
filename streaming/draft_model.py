"""A small model that proposes tokens for a larger one, in the same process: resident, with KV caches of its own.

It is opened in a thread of its own behind the first token, which it does not delay; the second token waits for it, so
that which step uses it does not depend on how fast it loads. It computes in the larger model's forward thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from layers.batch import make_batch
from layers.kv_cache import KVCache
from streaming.draft_plan import DraftPlan
from streaming.errors import StreamingError
from streaming.hooks import Hooks
from streaming.speculation import Wanted

if TYPE_CHECKING:
    from streaming.llm import LLM
    from streaming.model import StreamedModel

logger = logging.getLogger(__name__)

_LOOK_S = 0.05  # how often who waits for the draft model looks whether the request still stands


class DraftModel:
    """The draft model of an open model. `close` ends it, and tells `warn` what its load has found to be wrong with its
    weights: it loads while an answer is printed, which a warning must not interrupt."""

    def __init__(self, plan: DraftPlan, *, warn: Callable[[str], None]) -> None:
        self.plan = plan
        self._found: list[str] = []
        self._hooks, self._warn = Hooks(warn=self._found.append), warn
        self._opened: Future[LLM] = Future()
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """What the budget holds for it."""
        return self.plan.nbytes

    @property
    def is_begun(self) -> bool:
        """Whether it is open or on its way."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether it is being opened just now."""
        return self._thread is not None and self._thread.is_alive()

    def proposer(self) -> DraftProposer:
        """For one generation."""
        return DraftProposer(self)

    def open(self) -> None:
        """Begin to open it, if nobody has."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._open, name="firstlayer-draft", daemon=True)
            self._thread.start()

    def _open(self) -> None:
        from streaming.llm import LLM

        try:
            llm = LLM.start(self.plan.prepared, hooks=self._hooks)
        except BaseException as error:
            self._opened.set_exception(error)
        else:
            self._opened.set_result(llm)

    def loaded(self, stop: Callable[[], None]) -> StreamedModel:
        """Wait until it is resident. `stop` raises to cancel. Raises StreamingError where it cannot be loaded."""
        while True:
            stop()
            try:
                model = self._opened.result(timeout=_LOOK_S).model
                if model.wait_loaded(timeout=_LOOK_S):
                    return model
            except FutureTimeout:
                continue
            except (StreamingError, OSError) as error:
                raise StreamingError(f"the draft model {self.plan.model}: {error}") from error

    def close(self) -> None:
        """End it. Its faults have been told to whoever waited for it, or concern nobody any more."""
        if self._thread is None:
            return
        self._thread.join()
        try:
            self._opened.result().close()
        except Exception:
            logger.debug("closing the draft model", exc_info=True)
        for text in self._found:
            self._warn(f"the draft model: {text}")
        self._found.clear()


@dataclass
class _Sequence:
    """What the draft model knows of a sequence: `tokens` of it are in the cache; the first `sure` will not change."""

    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    sure: int = 0

    def missing(self, tokens: Sequence[int]) -> Sequence[int]:
        """Forget what has turned out wrong, and give what has come since; at least the last token."""
        keep, most = self.sure, min(len(self.tokens), len(tokens) - 1)
        while keep < most and self.tokens[keep] == tokens[keep]:
            keep += 1
        self.cache.truncate(keep)
        del self.tokens[keep:]
        self.sure = keep
        return tokens[keep:]


class DraftProposer:
    """Proposes what the draft model finds likeliest. A sequence that its context, its vocabulary or its share of the
    memory has no room for gets no proposals."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._sequences: dict[int, _Sequence] = {}

    def begin(self) -> None:
        """See Proposer."""
        self._draft.open()

    def propose(self, wanted: Sequence[Wanted], *, stop: Callable[[], None]) -> Sequence[Sequence[int]]:
        """See Proposer."""
        self._draft.open()
        model = self._draft.loaded(stop)
        found: dict[int, list[int]] = {one.index: [] for one in wanted}
        due = [(one, self._known(model, one)) for one in wanted]
        active = [(one, known, list(known.missing(one.tokens))) for one, known in due if known is not None]
        while active:
            tokens = _step(model, [(new, known) for _, known, new in active], stop)
            following = []
            for (one, known, _), token in zip(active, tokens, strict=True):
                found[one.index].append(token)
                if len(found[one.index]) < one.most:
                    following.append((one, known, [token]))
            active = following
        return [found[one.index] for one in wanted]

    def forget(self, index: int) -> None:
        """See Proposer."""
        self._sequences.pop(index, None)

    def _known(self, model: StreamedModel, wanted: Wanted) -> _Sequence | None:
        """The sequence's state, made when it is first asked for; None where there is no room for it."""
        if wanted.index in self._sequences:
            known = self._sequences[wanted.index]
            fits = len(wanted.tokens) + wanted.most <= known.cache.capacity
            return known if fits and _are_known(model, wanted.tokens[known.sure :]) else None
        if not _are_known(model, wanted.tokens):
            return None
        room = min(wanted.room, model.context_length)
        if len(wanted.tokens) + wanted.most > room or not model.fits(room):
            return None
        self._sequences[wanted.index] = _Sequence(model.new_cache(room))
        return self._sequences[wanted.index]


def _are_known(model: StreamedModel, tokens: Sequence[int]) -> bool:
    return max(tokens) < model.prepared.config.vocab_size


def _step(model: StreamedModel, new: Sequence[tuple[Sequence[int], _Sequence]], stop: Callable[[], None]) -> list[int]:
    """Feed each sequence its new tokens; the likeliest token behind each."""
    vocab, runner = model.prepared.config.vocab_size, model.runner
    pairs = [(tokens, known.cache) for tokens, known in new]
    batch = make_batch(pairs, vocab_size=vocab, device=runner.device.torch_device)
    logits: torch.Tensor = runner.forward(batch, batch.last_rows, stop=stop)
    for tokens, known in new:
        known.tokens.extend(tokens)
    likeliest: list[int] = logits.argmax(-1).tolist()
    return likeliest
