"""Schemes as data: what is written is read back as the same value; what a stranger writes is refused in one line."""

from __future__ import annotations

import inspect
import json
import pkgutil
from dataclasses import is_dataclass
from importlib import import_module

import pytest

import quant
from quant.dtypes import DType
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel
from quant.int4 import IntPerGroup
from quant.microscaling import NvFp4
from quant.nf4 import Nf4
from quant.registry import scheme_by_name, scheme_names
from quant.scheme import Scheme
from quant.scheme_data import scheme_classes, scheme_from_data, scheme_to_data

OTHERS: list[Scheme] = [
    Fp8PerBlock(block=(64, 256)),
    Fp8PerChannel(percentile=99.5),
    IntPerGroup(bits=8, group_size=0, symmetric=False, scale_dtype=DType.F16, ordered=True),
    scheme_by_name("int4_per_group:64:asym"),
    Nf4("fp4", 64, 2),
    IntPerGroup(ordered=True, groups=7),
    NvFp4(divides=True, block=4),
]


@pytest.mark.parametrize("scheme", [*map(scheme_by_name, scheme_names()), *OTHERS], ids=lambda scheme: scheme.name)
def test_what_is_written_is_read_back_as_the_same(scheme: Scheme) -> None:
    assert scheme_from_data(json.loads(json.dumps(scheme_to_data(scheme)))) == scheme


def test_what_is_written_is_the_class_and_its_fields() -> None:
    assert scheme_to_data(IntPerGroup()) == {
        "class": "IntPerGroup", "bits": 4, "group_size": 32, "symmetric": True, "scale_dtype": "BF16", "ordered": False,
        "groups": 0,
    }  # fmt: skip


def test_every_scheme_of_the_package_can_be_saved() -> None:
    found = set()
    for module in pkgutil.iter_modules(quant.__path__, "quant."):
        if not module.ispkg:
            classes = inspect.getmembers(import_module(module.name), inspect.isclass)
            found |= {name for name, one in classes if is_dataclass(one) and hasattr(one, "section_views")}
    assert found == {*scheme_classes(), "Processed"}  # which a device's modules see, and no file ever does


def test_fields_that_are_not_there_have_their_defaults() -> None:
    assert scheme_from_data({"class": "IntPerGroup", "group_size": 64}) == IntPerGroup(group_size=64)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "'None'"),
        ([], "[]"),
        ({"class": "Popen"}, "Popen"),
        ({"class": ["Wide"]}, "Wide"),
        ({"class": "Wide", "percentile": 1}, "has no 'percentile'"),
        ({"class": "IntPerGroup", "bits": 3}, "bits are 4 or 8"),
        ({"class": "IntPerGroup", "bits": True}, "bits of a scheme of the class IntPerGroup is 'True'"),
        ({"class": "IntPerGroup", "group_size": -1}, "group_size"),
        ({"class": "IntPerGroup", "group_size": 1 << 40}, "group_size"),
        ({"class": "IntPerGroup", "scale_dtype": "I32"}, "scale_dtype"),
        ({"class": "IntPerGroup", "scale_dtype": "__class__"}, "scale_dtype"),
        ({"class": "IntPerGroup", "symmetric": 1}, "symmetric"),
        ({"class": "Fp8PerBlock", "block": [0, 128]}, "block"),
        ({"class": "Fp8PerBlock", "block": [128]}, "block"),
        ({"class": "Fp8PerBlock", "block": "ab"}, "block"),
        ({"class": "Fp8PerTensor", "percentile": float("nan")}, "percentile"),
        ({"class": "Fp8PerTensor", "percentile": "99"}, "percentile"),
        ({"class": "Nf4", "numbers": "nf4"}, "of the class Nf4 needs more than numbers"),
        ({"class": "Nf4", "numbers": "nf5", "block": 64}, "'nf5'"),
        ({"class": "Nf4", "numbers": "nf4", "block": 0}, "blocks of 0"),
        ({"class": "Nf4", "numbers": "nf4" * 99, "block": 64}, "numbers"),
    ],
)
def test_anything_else_is_one_line(raw: object, words: str) -> None:
    with pytest.raises(QuantError) as raised:
        scheme_from_data(raw)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
