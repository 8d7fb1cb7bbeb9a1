"""A draft model beside a model: both planned, its memory taken off the limit. [no-torch]"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from layers.kv_cache import kv_cache_nbytes
from streaming.errors import BudgetError, OptionError
from streaming.options import LoadOptions
from streaming.prepare import Prepared, memory_limit, prepare
from streaming.sizes import format_size

if TYPE_CHECKING:
    from streaming.draft_model import DraftModel


@dataclass(frozen=True)
class DraftPlan:
    """The small model that proposes tokens: planned, not opened. `nbytes`: the most that it holds."""

    model: str
    prepared: Prepared

    @property
    def nbytes(self) -> int:
        """Weights, window and caches."""
        return self.prepared.budget.peak_nbytes

    @property
    def told(self) -> DraftPlan:
        """The same, of which nobody needs to be warned any more."""
        prepared = self.prepared
        checkpoint, plan = replace(prepared.checkpoint, notes=()), replace(prepared.plan, warnings=())
        return replace(self, prepared=replace(prepared, checkpoint=checkpoint, plan=plan))


def prepare_with_draft(
    model: str, options: LoadOptions, *, draft_model: str | Path | None
) -> tuple[Prepared, DraftPlan | None]:
    """`prepare` for the model and, where one is named, for its draft model.

    What there is to know of the draft model's files is among the model's warnings. Raises as `prepare` does;
    OptionError where the draft model has tokens that the model has not, or another tokenizer, or several ranks are
    asked for; BudgetError where --memory does not hold both.
    """
    if draft_model is None:
        return prepare(model, options), None
    if not options.topology().is_single:
        raise OptionError(
            f"--draft-model {draft_model} does not go with several ranks ({options.topology().world} are asked for)"
        )
    limit = memory_limit(options)
    draft = DraftPlan(str(draft_model), _prepare_draft(str(draft_model), options, is_limited=limit is not None))
    prepared = prepare(model, options) if limit is None else _prepare_beside(draft, model, options, limit)
    own, wanted = draft.prepared.config.vocab_size, prepared.config.vocab_size
    if own > wanted:
        raise OptionError(
            f"--draft-model {draft_model} has a vocabulary of {own} tokens, {model} one of {wanted}: a model of the "
            "same family is needed, with the same tokenizer"
        )
    from streaming.draft_tokenizer import check_tokenizers

    told = (*draft.prepared.warnings, *check_tokenizers(draft.prepared, prepared))
    return _warned(prepared, [f"the draft model: {text}" for text in told]), draft.told


def draft_beside(plan: DraftPlan | None, stack: ExitStack, *, warn: Callable[[str], None]) -> DraftModel | None:
    """The draft model, not opened yet; `stack` ends it behind the forward thread, which uses it. Imports torch where
    there is one."""
    if plan is None:
        return None
    from streaming.draft_model import DraftModel

    return stack.enter_context(closing(DraftModel(plan, warn=warn)))


def _warned(prepared: Prepared, more: Sequence[str]) -> Prepared:
    return replace(prepared, plan=replace(prepared.plan, warnings=(*prepared.plan.warnings, *more)))


def _prepare_draft(model: str, options: LoadOptions, *, is_limited: bool) -> Prepared:
    """Its caches together may take what one of the whole context takes, where there is a limit."""
    own = LoadOptions(device=options.device, threads=options.threads)
    prepared = prepare(model, own)
    if prepared.checkpoint.address is None:  # no second process beside the model's reader
        prepared = replace(prepared, options=replace(own, reader="threads"))
    if not is_limited:
        return prepared
    budget = prepared.budget
    if options.max_model_len is not None:
        shorter = kv_cache_nbytes(prepared.config, max_tokens=options.max_model_len, dtype=prepared.dtype)
        budget = replace(budget, cache_nbytes=min(budget.cache_nbytes, shorter))
    return replace(prepared, budget=replace(budget, limit_nbytes=budget.peak_nbytes))


def _prepare_beside(draft: DraftPlan, model: str, options: LoadOptions, limit: int) -> Prepared:
    """The model in what the draft model leaves."""
    if draft.nbytes >= limit:
        raise BudgetError(
            f"--memory {format_size(limit)} is too small: --draft-model {draft.model} alone needs "
            f"{format_size(draft.nbytes)}; {_ways_out(draft, limit)}"
        )
    try:
        return prepare(model, options.within_memory(limit - draft.nbytes))
    except BudgetError as error:
        raise BudgetError(
            f"{error} (of --memory {format_size(limit)} the draft model takes {format_size(draft.nbytes)})"
        ) from None


def _ways_out(draft: DraftPlan, limit: int) -> str:
    """What would let it fit; a shorter context where its caches are what is too large."""
    shorter = ", a smaller --max-model-len" if draft.nbytes - draft.prepared.budget.cache_nbytes < limit else ""
    return f"try a larger --memory{shorter} or a smaller draft model"
