"""Which scheme every module of a model gets from a quantization configuration: decided once, for all of them.

A module fused from several parts (q, k and v in qkv_proj) is one weight in one scheme, so all of its parts must come to
the same one, whatever the patterns call them by. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quant.errors import QuantError
from quant.module_patterns import matches
from quant.policy import QuantPolicy
from quant.policy_file import QuantizationConfig
from quant.scheme import Scheme
from quant.wide import Wide

_CLASSES: Mapping[str, tuple[str, ...]] = {"linear": ("Linear",), "head": ()}  # the head is asked for by its name


@dataclass(frozen=True)
class Module:
    """A module that may be quantized: its parameter and kind (see QuantPolicy), and for each of its parts the names
    that a pattern may call it by; the module's own are among them."""

    param: str
    kind: str
    parts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ModulePolicy:
    """The scheme of each parameter; those that are not named stay wide. `unmatched`: patterns that name no module."""

    schemes: Mapping[str, Scheme]
    unmatched: tuple[str, ...] = ()

    def scheme_for(self, kind: str, name: str) -> Scheme:
        """The scheme of a parameter."""
        return self.schemes.get(name) or Wide()


def decide_schemes(modules: Sequence[Module], config: QuantizationConfig, *, default: QuantPolicy) -> ModulePolicy:
    """The scheme of every module; `default` where no pattern says one.

    QuantError where the parts of a module come to different schemes: the first such module, and how many more.
    """
    choice = _Choice(config, default)
    schemes: dict[str, Scheme] = {}
    torn: list[str] = []
    for module in modules:
        found = [choice.of(module, names) for names in module.parts]
        schemes[module.param] = found[0][0]
        other = next((index for index, (scheme, _) in enumerate(found) if scheme != found[0][0]), None)
        if other is not None:
            torn.append(_torn_words(module, found, other))
    if torn:
        more = f" (and {len(torn) - 1} more weights)" if len(torn) > 1 else ""
        raise QuantError(f"{torn[0]}{more}")
    patterns = dict.fromkeys([*config.ignore, *(rule.match for rule in config.rules)])
    return ModulePolicy(schemes, tuple(pattern for pattern in patterns if pattern not in choice.matched))


class _Choice:
    def __init__(self, config: QuantizationConfig, default: QuantPolicy) -> None:
        self._config, self._default = config, default
        self.matched: set[str] = set()  # patterns that name a module, the first to do so or not

    def of(self, module: Module, names: tuple[str, ...]) -> tuple[Scheme, str]:
        """The scheme of one part, and by what."""
        ignored = [pattern for pattern in self._config.ignore if self._names(pattern, module, names)]
        rules = [rule for rule in self._config.rules if self._names(rule.match, module, names)]
        if ignored:
            return Wide(), f"ignored by {ignored[0]!r}"
        if rules:
            return rules[0].scheme, f"rule {rules[0].match!r}"
        return self._default.scheme_for(module.kind, module.param), "no rule"

    def _names(self, pattern: str, module: Module, names: tuple[str, ...]) -> bool:
        if found := matches(pattern, names, classes=_CLASSES[module.kind]):
            self.matched.add(pattern)
        return found


def _torn_words(module: Module, found: Sequence[tuple[Scheme, str]], other: int) -> str:
    def words(index: int) -> str:
        scheme, reason = found[index]
        return f"{module.parts[index][0].rpartition('.')[2]} would be {scheme.name} ({reason})"

    name = module.param.rpartition(".")[0]
    return f"{name} is one weight: {words(0)}, but {words(other)}; give all its parts the same scheme"
