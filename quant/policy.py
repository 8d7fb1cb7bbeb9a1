"""Which parameter is kept in which scheme: patterns of names, the first match wins. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quant.scheme import Scheme
from quant.wide import Wide


@dataclass(frozen=True)
class Rule:
    """Parameters of one of these kinds, whose name the pattern is found in, are kept in `scheme`."""

    kinds: frozenset[str]
    pattern: re.Pattern[str]
    scheme: Scheme


@dataclass(frozen=True)
class QuantPolicy:
    """The rules, in order; what none of them names stays wide. Kinds: linear, head, embedding,
    positions, norm, bias."""

    rules: tuple[Rule, ...] = ()

    def scheme_for(self, kind: str, name: str) -> Scheme:
        """The scheme of a parameter of this kind and name."""
        for rule in self.rules:
            if kind in rule.kinds and rule.pattern.search(name):
                return rule.scheme
        return Wide()


def default_policy(scheme: Scheme, *, quantize_head: bool = False) -> QuantPolicy:
    """All projections inside the layers in `scheme`, the head only when that is asked for; routers, norms and
    embeddings stay wide."""
    kinds = frozenset({"linear", "head"} if quantize_head else {"linear"})
    router = Rule(frozenset({"linear"}), re.compile(r"\.(gate|router)\.weight$"), Wide())
    return QuantPolicy((router, Rule(kinds, re.compile(""), scheme)))
