"""Who reads: the one place that turns a prepared load into its Reader. [no-torch]"""

from __future__ import annotations

from streaming.prepare import Prepared
from streaming.reader import Reader, ThreadReader, open_reader


def start_reader(prepared: Prepared) -> Reader:
    """Begin to read the planned bytes, in whichever way the options name."""
    if prepared.options.reader == "threads":
        return ThreadReader(prepared.read_plan)
    return open_reader(prepared.read_plan)
