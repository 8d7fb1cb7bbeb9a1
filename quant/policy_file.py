"""A quantization configuration: a scheme for each pattern of module names, and the modules that stay wide.

    {
      "default": "fp8_per_channel",
      "rules": [{"match": "mlp.down_proj", "scheme": "int8_per_channel", "percentile": 99.99}],
      "ignore": ["model.layers.0", "re:.*self_attn.*"]
    }

All three are optional. What an `ignore` pattern names stays wide; else the first rule that names it gives its scheme;
else the default, which leaves routers wide, and the head where that is not asked for. Patterns: quant.module_patterns.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant.errors import QuantError
from quant.module_patterns import check_pattern
from quant.percentile import with_percentile
from quant.registry import scheme_by_name
from quant.scheme import Scheme

_KEYS = ("default", "rules", "ignore")
_RULE_KEYS = ("match", "scheme", "percentile")
MOST_PATTERNS = 10_000


@dataclass(frozen=True)
class SchemeRule:
    """What the pattern `match` names is kept in `scheme`."""

    match: str
    scheme: Scheme


@dataclass(frozen=True)
class QuantizationConfig:
    """What the file says; no `default`: it is said elsewhere."""

    default: Scheme | None = None
    rules: tuple[SchemeRule, ...] = ()
    ignore: tuple[str, ...] = ()


def parse_quantization_config(raw: Mapping[str, object]) -> QuantizationConfig:
    """The configuration in a JSON object. QuantError names the key and what was found there."""
    _check_keys(raw, _KEYS, where="the configuration")
    rules, ignore = raw.get("rules", []), raw.get("ignore", [])
    for key, value in (("rules", rules), ("ignore", ignore)):
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MOST_PATTERNS:
            raise QuantError(f"{key} is {str(value)[:60]!r}: a list is needed, of at most {MOST_PATTERNS}")
    assert isinstance(rules, Sequence)
    assert isinstance(ignore, Sequence)
    default = raw.get("default")
    return QuantizationConfig(
        None if default is None else _scheme(default, where="default"),
        tuple(_rule(entry, index) for index, entry in enumerate(rules)),
        tuple(_pattern(entry, where=f"ignore[{index}]") for index, entry in enumerate(ignore)),
    )


def _rule(entry: object, index: int) -> SchemeRule:
    where = f"rules[{index}]"
    if not isinstance(entry, Mapping):
        raise QuantError(f'{where} is {str(entry)[:60]!r}: an object with "match" and "scheme" is needed')
    _check_keys(entry, _RULE_KEYS, where=where)
    for key in ("match", "scheme"):
        if key not in entry:
            raise QuantError(f"{where} has no {key!r}")
    match = _pattern(entry["match"], where=f"{where}.match")
    scheme = _scheme(entry["scheme"], where=f"{where}.scheme")
    try:
        return SchemeRule(match, with_percentile(scheme, entry.get("percentile")))
    except QuantError as error:
        raise QuantError(f"{where} ({match!r}): {error}") from None


def _check_keys(raw: Mapping[str, object], known: tuple[str, ...], *, where: str) -> None:
    if unknown := [key for key in raw if key not in known]:
        raise QuantError(f"{where} has {str(unknown[0])[:60]!r}, which is not known; known are {', '.join(known)}")


def _scheme(name: object, *, where: str) -> Scheme:
    if not isinstance(name, str):
        raise QuantError(f"{where} is {str(name)[:60]!r}: a scheme's name is needed")
    try:
        return scheme_by_name(name)
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from None


def _pattern(pattern: object, *, where: str) -> str:
    if not isinstance(pattern, str):
        raise QuantError(f"{where} is {str(pattern)[:60]!r}: a pattern of module names is needed")
    try:
        check_pattern(pattern)
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from None
    return pattern
