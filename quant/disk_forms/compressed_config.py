"""The quantization_config of compressed-tensors: which targets are quantized how, as far as numbers are read by it.

Its fields: https://github.com/vllm-project/compressed-tensors (QuantizationConfig, QuantizationScheme,
QuantizationArgs). What changes the numbers and is not read here (sparse formats, transforms, pruned experts) is
refused. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quant.disk_forms.settings import LARGEST
from quant.errors import QuantError
from quant.module_patterns import check_patterns

FORMATS = (
    "dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "nvfp4-pack-quantized", "mixed-precision", "fakequant",
)  # fmt: skip
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class WeightArgs:
    """How the weights of a group are quantized: QuantizationArgs, as far as numbers are read by them."""

    bits: int
    is_float: bool
    strategy: str
    group_size: int  # 0 where there are no groups
    symmetric: bool
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale, of strategy block
    ordered: bool = False  # groups are of inputs in an order of their own, which weight_g_idx holds


def weight_targets(config: Mapping[str, Any]) -> dict[str, WeightArgs]:
    """Target -> how the weights of the modules that it names are quantized; of equal targets the last one holds.

    Raises QuantError for what cannot be read.
    """
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        _refuse_beside(key, config.get(key))
    _check_format(config.get("format"))
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise QuantError(f"config_groups {str(groups)[:60]!r}: an object is needed")
    targets: dict[str, WeightArgs] = {}
    for name, group in groups.items():
        targets.update(_targets_of(f"config_groups.{name[:40]}", group))
    check_patterns(targets)
    return targets


def checked_patterns(config: Mapping[str, Any], key: str, *, where: str = "") -> tuple[str, ...]:
    """A list of patterns; QuantError for another thing, or for a pattern that is none."""
    found = config.get(key)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise QuantError(f"{where}{key} {str(found)[:60]!r}: a list of names is needed")
    return check_patterns(found)


def _refuse_beside(key: str, found: object) -> None:
    """Raise QuantError for what changes the numbers besides; what is empty or says "dense" does not."""
    if not found:
        return
    shape = found if isinstance(found, Mapping) else {}
    if key == "sparsity_config" and shape.get("format") == "dense":
        return
    if key == "transform_config" and shape and not shape.get("config_groups"):
        return
    shown = shape.get("format") or shape.get("method") or ", ".join(map(str, shape)) or str(found)
    raise QuantError(f"{key} ({str(shown)[:60]}) cannot be read; of sparsity, the dense format can")


def _check_format(found: object) -> None:
    if found is not None and found not in FORMATS:
        raise QuantError(f"format {str(found)[:60]!r}: these can be read: {', '.join(FORMATS)}")


def _targets_of(where: str, group: object) -> Mapping[str, WeightArgs]:
    if not isinstance(group, Mapping):
        raise QuantError(f"{where} is {str(group)[:60]!r}: an object with targets and weights is needed")
    patterns = checked_patterns(group, "targets", where=f"{where}.")
    weights = group.get("weights")
    if weights is None:  # only activations, such as those of an attention: its weights stay wide
        return {}
    if not isinstance(weights, Mapping):
        raise QuantError(f"{where}.weights is {str(weights)[:60]!r}, not an object")
    _check_format(group.get("format"))
    return dict.fromkeys(patterns, _weight_args(f"{where}.weights", weights))


def _weight_args(where: str, weights: Mapping[str, Any]) -> WeightArgs:
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
    known = {"int": range(2, 9), "float": (4, 8)}.get(kind, ())
    if type(bits) is not int or bits not in known:
        raise QuantError(
            f"{where}: {kind[:20]} of {str(bits)[:20]} bits: int of 2 to 8 and float of 4 and 8 can be read"
        )
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or not -1 <= size <= LARGEST or size == 0):
        raise QuantError(f"{where}: group_size {str(size)[:20]!r}: a number from 1 to {LARGEST} is needed, or -1")
    strategy = str(weights.get("strategy") or _usual_strategy(size)).lower()
    if strategy not in STRATEGIES or (kind == "int" and strategy in ("block", "tensor_group")):
        raise QuantError(f"{where}: strategy {strategy[:40]!r} of {kind} weights cannot be read")
    grouped = strategy in ("group", "tensor_group")
    if grouped and (size is None or size < 1):
        raise QuantError(f"{where}: strategy {strategy} has no group_size")
    block = _block(where, weights.get("block_structure")) if strategy == "block" else (0, 0)
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool or (kind == "float" and not symmetric):
        raise QuantError(f"{where}: symmetric {str(symmetric)[:20]!r}: true is needed, or false for integers")
    if weights.get("dynamic"):
        raise QuantError(f"{where}: dynamic weights are none that a checkpoint could hold")
    ordered = grouped and _is_ordered(weights.get("actorder"))
    return WeightArgs(bits, kind == "float", strategy, size if grouped and size else 0, symmetric, block, ordered)


def _is_ordered(actorder: object) -> bool:
    """Of the orders that the library knows, "group" alone (true, "dynamic") is not that of the inputs."""
    return actorder is True or (isinstance(actorder, str) and actorder.lower() in ("group", "dynamic"))


def _usual_strategy(size: int | None) -> str:
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def _block(where: str, found: object) -> tuple[int, int]:
    """[rows, columns], or "rowsxcolumns" as older writers have it."""
    sizes = [int(size) for size in found.split("x") if size.isdecimal()] if isinstance(found, str) else found
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n <= LARGEST for n in sizes):
        raise QuantError(f"{where}: block_structure {str(found)[:40]!r}: [rows, columns] are needed")
    return sizes[0], sizes[1]
