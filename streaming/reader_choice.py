"""Who reads: the one place that turns a prepared load into its Reader. [no-torch]"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from streaming.errors import OptionError
from streaming.prepare import Prepared
from streaming.read_choice import read_method
from streaming.read_plan import ReadPlan
from streaming.read_strategy import BACK_ENDS, ReadMethod
from streaming.reader import ProcessReader, Reader, ThreadReader, open_reader

_PROGRAMS = {
    "runai_streamer": "from streaming.runai_reading import main, open_fetch; main(open_fetch)",
    "fastsafetensors": "from streaming.fastsafetensors_reading import main, open_fetch; main(open_fetch)",
    "instanttensor": "from streaming.instanttensor_reading import run; run({device!r})",
}
_ROOT = Path(__file__).parents[1]


def start_reader(prepared: Prepared) -> Reader:
    """Begin to read the planned bytes, in whichever way the options name."""
    if prepared.checkpoint.format == "dummy":
        from streaming.dummy import open_dummy_reader

        return open_dummy_reader(prepared.read_plan, threads=prepared.options.reader == "threads")
    if not all(isinstance(file, Path) for file in prepared.read_plan.files):
        from streaming.remote.reader import RemoteReader

        return RemoteReader(prepared.read_plan)
    method = read_method(prepared.options, prepared.reading)
    if method.strategy in BACK_ENDS:
        return _open_back_end(prepared.read_plan, method, device=prepared.options.device)
    if prepared.options.reader == "threads":
        return ThreadReader(prepared.read_plan, method=method)
    return open_reader(prepared.read_plan, method=method)


def _open_back_end(read_plan: ReadPlan, method: ReadMethod, *, device: str) -> Reader:
    """A process that sees the packages that this one sees."""
    if not hasattr(os, "memfd_create"):
        raise OptionError(f"--load-format {method.strategy} needs memory that processes can share, as Linux has it")
    work = _PROGRAMS[method.strategy].format(device=device if ":" in device else f"{device}:0")
    code = f"import sys; sys.path[:0] = sys.argv[1:]; {work}"
    paths = [path for path in sys.path if os.path.isabs(path)]
    return ProcessReader(read_plan, method=method, program=("-I", "-c", code, str(_ROOT), *paths), by_path=True)
