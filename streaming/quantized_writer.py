"""Writing what `plan_folder` planned: a layer is loaded, quantized, written and let go before the next one is read.

So the peak is one layer as it is kept, beside the window. The index and config.json come last: without them nothing
loads the folder, and whatever ends the work before removes what is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from streaming.budget import Budget, make_budget
from streaming.checkpoint.members import CONFIG
from streaming.errors import OptionError
from streaming.hooks import Hooks
from streaming.new_folder import NewFolder, bytes_of, copied_files, names_in, new_folder
from streaming.prepare import Prepared
from streaming.quantized_folder import INDEX, FolderPlan, FolderTensor

if TYPE_CHECKING:
    import torch

Stored = Mapping[str, "torch.Tensor"]


def check_out(out: Path) -> None:
    """Raise OptionError, before anything is read, where the folder is not a new or an empty one."""
    if names := names_in(out, option="OUT"):
        raise OptionError(f"OUT {out}: is not empty ({len(names)} files, such as {names[0]}): name a new folder")


def layer_budget(prepared: Prepared, folder: FolderPlan, *, limit_nbytes: int | None) -> Budget:
    """What the layer takes that takes most. Raises BudgetError when the limit is too small for it."""
    from streaming.one_layer import only_layer

    ones = [only_layer(prepared, name) for name, tensors in folder.layers if tensors]
    window = prepared.options.window_nbytes or prepared.budget.window_nbytes
    held = prepared.budget.file_nbytes
    budgets = [
        make_budget(one.plan, window_nbytes=window, cache_nbytes=0, limit_nbytes=limit_nbytes, file_nbytes=held)
        for one in ones
    ]
    return max(budgets, key=lambda budget: budget.peak_nbytes)


def write_folder(prepared: Prepared, folder: FolderPlan, out: Path, *, hooks: Hooks) -> None:
    """Load, quantize and write everything. Raises LayerLoadError, and StreamingError for a disk that is full or fails;
    nothing is left behind then."""
    with new_folder(out, option="OUT") as new:
        tensors = _tensors(prepared, folder, hooks)
        for file in folder.files:
            with new.file(file.name) as written:
                written.write(file.header)
                for _ in file.tensors:
                    for part in bytes_of(next(tensors)):
                        written.write(part)
        for name, data in copied_files(prepared.checkpoint.root):
            with new.file(name) as written:
                written.write(data)
        new.publish()
        if folder.index is not None:
            _write_json(new, INDEX, folder.index)
        _write_json(new, CONFIG, folder.config)
        new.keep()


def _write_json(new: NewFolder, name: str, data: Mapping[str, object]) -> None:
    with new.file(name) as written:
        written.write(json.dumps(data, indent=2).encode() + b"\n")
    new.publish()


def _tensors(prepared: Prepared, folder: FolderPlan, hooks: Hooks) -> Iterator[torch.Tensor]:
    """Every tensor of the folder in its order; of the model no more than one layer is held."""
    from streaming.one_layer import load_one_layer

    for name, tensors in folder.layers:
        if tensors:
            stored = load_one_layer(prepared, name, hooks=hooks)
            for tensor in tensors:
                yield _made(tensor, stored)
            del stored


def _made(tensor: FolderTensor, stored: Stored) -> torch.Tensor:
    from streaming.compressed_forms import written_tensor

    param, module = tensor.module.param, tensor.module
    kept = {name: stored[f"{param.name.rpartition('.')[0]}.{name}"] for name in param.storage()}
    if not module.is_quantized:
        first = param.section_starts[module.first]
        return kept[tensor.written.source][first : first + sum(module.rows)]
    source = tensor.written.source
    assert module.parts is not None  # others are refused before anything is read
    views = [param.scheme.section_views(kept, param.kept_rows, index)[source or "weight"] for index in module.parts]
    return written_tensor(tensor.written.form, views, tensor.spec, in_features=param.shape[1])
