"""`--quantization-config`: JSON or a file of it, and what it says of a model's modules. [no-torch]"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from layers.architecture import layer_specs
from layers.model_config import ModelConfig
from layers.name_lookup import NameLookup
from layers.weights import Dropped, ParamSpec, WeightMap
from quant.dtypes import DType
from quant.errors import QuantError
from quant.module_policy import Module, ModulePolicy, decide_schemes
from quant.policy import QuantPolicy, default_policy
from quant.policy_file import QuantizationConfig, parse_quantization_config
from quant.registry import scheme_by_name
from streaming.errors import OptionError

OPTION = "--quantization-config"
LARGEST_NBYTES = 1 << 20
_EXAMPLE = '{"default": "fp8_per_channel", "rules": [], "ignore": []}'


def read_quantization_config(given: Mapping[str, object] | str) -> QuantizationConfig:
    """The configuration in a mapping, in JSON text, or in a file. OptionError says what is wrong in it."""
    where = OPTION
    raw: object = given
    if isinstance(given, str):
        text = given
        if not given.strip():
            raise OptionError(f"{OPTION} is empty; a JSON object or its file is needed, such as {_EXAMPLE}")
        if not given.lstrip().startswith(("{", "[")):
            where, text = f"{OPTION} {given}", _text_of(given)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{where}: is not JSON ({str(error)[:80]})") from None
    if not isinstance(raw, Mapping):
        raise OptionError(f"{where}: is a {type(raw).__name__}; a JSON object is needed, such as {_EXAMPLE}")
    try:
        return parse_quantization_config(raw)
    except QuantError as error:
        raise OptionError(f"{where}: {error}") from None


def _text_of(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST_NBYTES + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)[:80]
        raise OptionError(f"{OPTION} {path}: cannot be read ({reason})") from None
    if len(data) > LARGEST_NBYTES:
        raise OptionError(f"{OPTION} {path}: is larger than {LARGEST_NBYTES:,} bytes")
    return text


def module_policy(
    found: QuantizationConfig,
    *,
    default: QuantPolicy,
    config: ModelConfig,
    weight_map: WeightMap,
    tied: bool,
    tensors: Iterable[str],
) -> ModulePolicy:
    """The scheme of every module of the model; `tensors`: the checkpoint's names, which patterns may use too.

    Raises OptionError where the parts of a fused weight come to different schemes.
    """
    every = default_policy(scheme_by_name("fp8_per_channel"), quantize_head=True)  # a tied model's head is there too
    specs = layer_specs(config, dtype=DType.BF16, policy=every, tied=tied)
    params = [param for spec in specs for param in spec.params if param.kind.has_scheme]
    modules = _modules(params, weight_map, tensors)
    try:
        return decide_schemes(modules, found, default=default)
    except QuantError as error:
        raise OptionError(f"{OPTION}: {error}") from None


def unmatched_warnings(policy: ModulePolicy) -> tuple[str, ...]:
    """A line for each pattern that names nothing."""
    return tuple(
        f"{OPTION}: {pattern!r} names no weight of this model that could be quantized" for pattern in policy.unmatched
    )


def _modules(params: Sequence[ParamSpec], weight_map: WeightMap, tensors: Iterable[str]) -> list[Module]:
    """The modules with the names of their parts: our own first, then those that the family's checkpoints and this one
    give them, then the fused name."""
    names: dict[str, list[dict[str, None]]] = {}
    for param in params:
        module = param.name.rpartition(".")[0]
        names[module] = [dict[str, None]() for _ in param.sections]
        parent, _, last = module.rpartition(".")
        for rule in weight_map.stacked:
            if rule.target == last:
                _add(names[module], f"{parent}.{rule.source}", rule.first, rule.stop)
    lookup = NameLookup(weight_map)
    for name in tensors:
        target = lookup.locate(name)
        if not isinstance(target, Dropped) and (parts := names.get(target.param.rpartition(".")[0])):
            _add(parts, name.rpartition(".")[0], target.first, target.stop)
    return [
        Module(param.name, param.kind.value, tuple((*part, module) for part in names[module]))
        for param in params
        for module in [param.name.rpartition(".")[0]]
    ]


def _add(parts: Sequence[dict[str, None]], name: str, first: int, stop: int) -> None:
    for part in parts[first:stop]:
        part[name] = None
