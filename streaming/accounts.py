"""The account of a load: every row of every stored tensor was filled, and exactly once. [no-torch]

The plan promises it from headers; this counts what was really published, against the shell's own declaration and not
against the plan, so that a mistake anywhere between the two ends the load in place of leaving memory as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layers.weights import LayerSpec, ParamSpec
from quant.disk_forms.form import DiskForm, disk_tensors
from streaming.errors import LayerLoadError
from streaming.plan import LoadItem

_Run = tuple[int, int]
# By stored tensor, where it is on disk in stored form; by leaf, where it is there in another quantized form; else None.
_Runs = dict[str | None, list[_Run]]


class Accounts:
    """What has been filled so far of the parameters of some layers."""

    def __init__(self, specs: Iterable[LayerSpec]) -> None:
        self._layers = {spec.name: spec.params for spec in specs}
        self._filled: dict[str, _Runs] = {}

    def note(self, item: LoadItem) -> None:
        """One item is where it belongs. Raises LayerLoadError when some of its rows were filled before."""
        first = 0 if item.stored is not None else item.param.section_starts[item.section]
        start, stop = first + item.section_rows[0], first + item.section_rows[1]
        key = item.stored or item.leaf or None
        runs = self._filled.setdefault(item.param.name, {}).setdefault(key, [])
        for other in runs:
            if start < other[1] and other[0] < stop:
                rows = f"rows {max(start, other[0])} to {min(stop, other[1])}"
                raise LayerLoadError(item.layer, "account", item.tensor.name, f"{rows} of {item.param.name} come twice")
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)  # rows come in order: most parameters are one run
        else:
            runs.append((start, stop))

    def check(self, layer: str | None = None) -> None:
        """Raise LayerLoadError for the first parameter, of one layer or of all, that is not whole."""
        for name in self._layers if layer is None else (layer,):
            for param in self._layers[name]:
                for gap in _gaps(param, self._filled.get(param.name, {})):
                    raise LayerLoadError(name, "account", param.name, gap)


def _gaps(param: ParamSpec, filled: _Runs) -> Iterator[str]:
    for stored, first, last in _wanted(param, filled):
        done = first
        for start, stop in (*sorted(filled.get(stored, [])), (last, last)):
            if stop > first and min(start, last) > done:
                yield f"rows {done} to {min(start, last)}{f' of its {stored}' if stored else ''} were never filled"
            done = max(done, stop)


def _needed(form: DiskForm, shape: tuple[int, int]) -> list[str]:
    """The tensors on disk, by leaf, of which something is kept: several may make one stored tensor."""
    return [one.leaf for one in disk_tensors(form, *shape) if one.fills and not one.optional]


def _wanted_of_parts(param: ParamSpec) -> Iterator[tuple[str | None, int, int]]:
    whole = param.whole
    for index, part in enumerate(param.parts):
        run = whole.run_at(part.section)
        form, first = whole.forms[run], param.section_starts[index]
        names = [None] if form is None else _needed(form, (whole.run_rows[run], whole.shape[1]))
        yield from ((name, first, first + param.section_rows[index]) for name in names)


def _wanted(param: ParamSpec, filled: _Runs) -> Iterator[tuple[str | None, int, int]]:
    """What must be filled: (stored tensor, leaf, or None for wide numbers, first row, row behind the last)."""
    if param.is_cut_within and param.whole.forms:
        yield from _wanted_of_parts(param)
    elif param.forms:
        first = 0
        for form, rows in zip(param.forms, param.run_rows, strict=True):
            names = [None] if form is None else _needed(form, (rows, param.shape[1]))
            yield from ((name, first, first + rows) for name in names)
            first += rows
    elif any(stored is not None for stored in filled):
        yield from ((name, 0, spec.shape[0] if spec.shape else 1) for name, spec in param.storage().items())
    else:
        yield None, 0, param.shape[0]
