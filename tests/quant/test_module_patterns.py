"""Which modules a pattern names: by whole segments, wildcards, classes and regular expressions."""

from __future__ import annotations

import pytest

from quant.errors import QuantError
from quant.module_patterns import LONGEST, check_pattern, check_patterns, matches

GATE = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.gate_up_proj")
WRAPPED = ("model.language_model.layers.1.mlp.down_proj",)


@pytest.mark.parametrize(
    ("pattern", "names", "expected"),
    [
        ("gate_proj", GATE, True),
        ("gate_up_proj", GATE, True),
        ("mlp.gate_proj", GATE, True),
        ("model.layers.1", GATE, True),
        ("model.layers.1.mlp.gate_proj", GATE, True),
        ("layers.1.mlp", GATE, True),
        ("mlp.gate", GATE, False),
        ("gate", GATE, False),
        ("proj", GATE, False),
        ("model.layers.1", ("model.layers.10.mlp.down_proj",), False),
        ("model.layers.10", ("model.layers.1.mlp.down_proj",), False),
        ("layers.1.gate_proj", GATE, False),
        ("lm_head", ("lm_head",), True),
        ("lm_head", ("model.lm_heads.0",), False),
        # a wrapper's words, in the pattern or in the name
        ("language_model.model.layers.1.mlp", GATE, True),
        ("model.language_model.layers.1", GATE, True),
        ("_orig_mod.module.model.layers.1.mlp.gate_proj", GATE, True),
        ("language_model.model.layers.2", GATE, False),
        ("language_model.lm_head", ("lm_head",), True),
        ("model.layers.1.mlp.down_proj", WRAPPED, True),
        ("language_model.model.layers.1.mlp.down_proj", WRAPPED, True),
        ("model.mlp.down_proj", WRAPPED, False),
        ("vision_model.layers.1", GATE, False),
        ("model", GATE, True),
        # wildcards are over the whole name
        ("*gate_proj", GATE, True),
        ("model.layers.*.mlp.gate_proj", GATE, True),
        ("gate*", GATE, False),
        ("model.layers.1*", ("model.layers.10.mlp",), True),
        ("*.MLP.*", GATE, False),
        # regular expressions match from the beginning
        ("re:.*gate_proj", GATE, True),
        ("re:.*gate_proj$", ("model.layers.1.mlp.gate_proj_2",), False),
        ("re:gate_proj", GATE, False),
        (r"re:model\.layers\.[0-3]\.", GATE, True),
        (r"re:model\.layers\.([02468]|1[02])\.", GATE, False),
        ("re:^(?!.*down).*$", GATE, True),
        ("re:.*(gate|up)_proj", GATE, True),
    ],
)
def test_a_pattern_names_whole_modules(pattern: str, names: tuple[str, ...], expected: bool) -> None:
    assert matches(pattern, names) is expected


def test_a_class_names_the_modules_that_are_of_it() -> None:
    assert matches("Linear", GATE, classes=("Linear",))
    assert not matches("Linear", GATE)
    assert not matches("Embedding", GATE, classes=("Linear",))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", "names nothing"),
        (".", "names nothing"),
        ("re:", "names nothing"),
        ("a" * (LONGEST + 1), "at most 512"),
        ("re:(", "is no regular expression"),
        ("re:[", "is no regular expression"),
        ("re:a{99999999999}", "is no regular expression"),
        ("re:(a+)+$", "repeats a group"),
        ("re:(a|a)*b", "repeats a group"),
        ("re:(?:ab){2,}", "repeats a group"),
        (r"re:(a*)\1+b", "repeats a group"),
        ("re:" + ".*" * 5 + "x", "repeats 5 times"),
        ("re:" + "a?" * 20 + "a" * 20, "20 optional parts"),
        ("*a" * 9, "more than 8 stars"),
    ],
)
def test_a_pattern_that_is_none_is_refused_in_one_line(pattern: str, words: str) -> None:
    with pytest.raises(QuantError, match=words) as caught:
        check_pattern(pattern)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "re:.*self_attn.*",
        r"re:.*\.(q|k|v)_proj$",
        "re:(lm_)?head",
        "re:[*+?]+a",
        r"re:\)\*",
        "re:.*?gate.*+",
        "re:a{2}",
    ],
)
def test_usual_expressions_are_taken(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    "patterns",
    [
        [f"re:.*{number}.*.*.*x" for number in range(16)],
        [f"re:.*{number}.*.*x" for number in range(200)],
        [f"re:{number}" for number in range(4001)],
    ],
)
def test_a_list_of_expressions_that_takes_for_ever_is_refused_in_one_line(patterns: list[str]) -> None:
    with pytest.raises(QuantError, match=f"^{len(patterns)} patterns: .* too often") as caught:
        check_patterns(patterns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "patterns",
    [
        [f"model.layers.{number}.mlp.down_proj" for number in range(20_000)],
        [f"re:.*layers\\.{number}\\..*down_proj" for number in range(500)],
        [f"re:^model\\.layers\\.{number}$" for number in range(3000)],
        ["re:.*.*.*.*x"] * 15,
    ],
)
def test_a_long_list_of_usual_patterns_is_taken(patterns: list[str]) -> None:
    assert check_patterns(patterns) == tuple(patterns)
