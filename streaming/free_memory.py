"""A model that is larger than the memory that is free, opened without a limit: streamed, not killed. [no-torch]"""

from __future__ import annotations

from dataclasses import replace

from streaming.available_memory import available_nbytes
from streaming.errors import BudgetError
from streaming.prepare import Prepared, prepare
from streaming.sizes import format_size


def within_free_memory(prepared: Prepared) -> Prepared:
    """The same load, as with `--memory auto` and a warning, where no limit was given, the whole does not fit into what
    is free, and weights can be streamed; else as it is.

    Where not even that fits it is tried as it was asked for: the system may have more than it says (swap).
    """
    options, needed = prepared.options, prepared.budget.peak_nbytes
    if options.memory is not None or prepared.read_plan.mapped:
        return prepared
    free = available_nbytes()
    if free is None or needed <= free:
        return prepared
    from streaming.stream_budget import why_not_streamed

    if why_not_streamed(options, prepared.topology) is not None:
        return prepared
    try:
        found = prepare(prepared.model, replace(options, memory="auto"))
    except BudgetError:
        return prepared
    note = (
        f"the model takes {format_size(needed)}, but {format_size(free)} of memory are free: it is opened with "
        "--memory auto, and what does not fit is streamed"
    )
    known = [text for text in prepared.plan.warnings if text not in found.plan.warnings]  # a draft model's
    return replace(found, plan=replace(found.plan, warnings=(*found.plan.warnings, *known, note)))
