"""Names that no model has: what a stranger's file calls a tensor is printed, and becomes a key. [no-torch]"""

from __future__ import annotations

from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import Checkpoint

LONGEST_NAME = 1000  # characters; real names are below 200
_NAMED = 5  # that a message shows


def check_names(checkpoint: Checkpoint) -> None:
    """Raise CheckpointFormatError for names that hold control characters or lone surrogates, or are far too long.

    Printed as they are, the first would write to the terminal what the file wants.
    """
    report = Report(checkpoint.name)
    wrong = [name for name in checkpoint.tensors if len(name) > LONGEST_NAME or not name.isprintable()]
    for name in wrong[:_NAMED]:
        fault = "holds control characters" if len(name) <= LONGEST_NAME else f"has {len(name):,} characters"
        shown = repr(name) if len(name) <= LONGEST_NAME else f"{name[:60]!r}..."
        report.add(f"{checkpoint.tensors[name].file}: a tensor is called {shown}: the name {fault}", broken=True)
    if len(wrong) > _NAMED:
        report.add(f"{len(wrong) - _NAMED} more such names", broken=True)
    report.raise_if_any()
