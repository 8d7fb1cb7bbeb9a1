"""Scales made from a percentile of magnitudes in place of the largest: which schemes take one, and what it means.

The P-th percentile of n magnitudes is, by nearest rank, the ceil(P / 100 x n)-th smallest of them: one of the numbers,
never one between two. P is taken as it is written in decimals (99.9 is 999 / 1000), so that no rounding decides a rank.
Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from quant.errors import QuantError
from quant.scheme import Scheme


def check_percentile(percentile: object) -> None:
    """QuantError unless it is None or a number above 0, at most 100."""
    if percentile is None:
        return
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise QuantError(f"percentile {percentile!r}: a number above 0 and at most 100 is needed")


def nearest_rank(percentile: float, *, count: int) -> int:
    """The rank, from 1 to `count`, of the percentile among `count` numbers in rising order."""
    from fractions import Fraction

    return max(1, math.ceil(Fraction(str(percentile)) * count / 100))


def takes_percentile(scheme: object) -> bool:
    """Whether its scales can be made from a percentile: it has a field of that name."""
    return is_dataclass(scheme) and "percentile" in {field.name for field in fields(scheme)}


def with_percentile(scheme: Scheme, percentile: float | None) -> Scheme:
    """The scheme with scales from that percentile; None: as it is. QuantError for one that takes none."""
    check_percentile(percentile)
    if percentile is None:
        return scheme
    if not takes_percentile(scheme):
        raise QuantError(f"quantization {scheme.name!r} takes no percentile; those that do: {', '.join(_takers())}")
    changed: Scheme = replace(cast(Any, scheme), percentile=percentile)
    return changed


def _takers() -> list[str]:
    from quant.registry import scheme_by_name, scheme_names

    return [name for name in scheme_names() if takes_percentile(scheme_by_name(name))]
