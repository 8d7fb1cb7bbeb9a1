"""Options are checked before anything is read; a message names the option, the value and what is possible."""

from __future__ import annotations

from typing import Any

import pytest

from quant.registry import scheme_names
from streaming.errors import OptionError
from streaming.options import LoadOptions
from streaming.sizes import format_size, parse_size


def refusal(**options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        LoadOptions(**options)
    return str(caught.value)


def test_an_unknown_word_is_refused_with_those_that_are_known() -> None:
    assert refusal(dtype="int3") == (
        "--dtype 'int3' is not known: choose one of auto, half, float16, bfloat16, float, float32"
    )
    assert refusal(kernels="slow") == "--kernels 'slow' is not known: choose one of default, fast, exact"
    assert refusal(reader="mmap") == "--reader 'mmap' is not known: choose one of process, threads"
    assert (
        "--safetensors-load-strategy 'sideways' is not known: choose one of lazy, eager, prefetch, direct, torchao"
        in refusal(safetensors_load_strategy="sideways")
    )
    assert refusal(device="tpu") == "--device tpu: known devices are cpu and cuda[:index]"


def test_an_unknown_scheme_is_refused_with_those_that_are_known() -> None:
    message = refusal(quantization="fp9")
    assert message.startswith("--quantization 'fp9' is not known")
    assert all(name in message for name in scheme_names())


def test_a_wrong_suffix_of_a_scheme_is_refused_with_those_that_it_takes() -> None:
    assert refusal(quantization="int4_per_group:33") == (
        "--quantization 'int4_per_group:33': '33' is not known there; it is int4_per_group[:32|64|128][:asym]"
    )
    assert refusal(quantization="none:asym") == "--quantization 'none:asym': none takes nothing behind a colon"
    assert refusal(quantization="fp9:64").startswith("--quantization 'fp9:64' is not known")


@pytest.mark.parametrize("device", ["cuda:x", "cuda:", "cuda:-1", "cpu:0:0"])
def test_a_device_without_a_proper_index_is_refused(device: str) -> None:
    assert refusal(device=device) == f"--device {device}: known devices are cpu and cuda[:index]"


@pytest.mark.parametrize("option", ["max_model_len", "threads"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
def test_a_count_must_be_a_whole_number_of_at_least_one(option: str, value: object) -> None:
    flag = f"--{option.replace('_', '-')}"
    assert refusal(**{option: value}) == f"{flag} {value!r}: a whole number of at least 1 is needed"


def test_quantizing_the_head_alone_is_refused() -> None:
    assert refusal(quantize_head=True) == "--quantize-head needs a --quantization other than none"


@pytest.mark.parametrize("option", ["memory", "window"])
@pytest.mark.parametrize(
    "value", ["", "12XB", "GiB", "-3", "1.2.3G", "1e9", "_", "one", pytest.param("9" * 400, id="999..."), True, 1.5]
)
def test_a_size_that_is_none_is_refused_by_its_option(option: str, value: object) -> None:
    message = refusal(**{option: value})
    assert message.startswith(f"--{option} {value!r}: ")


@pytest.mark.parametrize("value", [0, "0", "0GiB", "0.1", "0.4B"])
def test_a_size_below_one_byte_is_refused(value: object) -> None:
    assert refusal(memory=value) == f"--memory {value!r}: must be more than 0 bytes"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (5, 5), ("5", 5), ("1_000_000", 1_000_000), ("512B", 512), ("1k", 1024), ("2MiB", 2 << 20), ("2MB", 2_000_000),
        ("1.5GiB", 3 << 29), ("0.5g", 1 << 29), (" 12 GiB ", 12 << 30), ("1TB", 10**12), ("3tib", 3 << 40),
    ],
)  # fmt: skip
def test_sizes_in_words(text: str | int, nbytes: int) -> None:
    assert parse_size(text, option="--memory") == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 39, "1536.0 GiB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_the_properties_give_bytes_and_none_where_nothing_was_said() -> None:
    options = LoadOptions(memory="1MiB", window=4096)
    assert (options.memory_nbytes, options.window_nbytes) == (1 << 20, 4096)
    assert (LoadOptions().memory_nbytes, LoadOptions().window_nbytes) == (None, None)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="quantisation"):
        LoadOptions(quantisation="none")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["quantization", "dtype", "device", "load_format", "kernels", "moe_load"])
def test_what_is_no_name_is_refused_by_its_option(name: str) -> None:
    with pytest.raises(OptionError, match=f"^--{name.replace('_', '-')} None: a name is needed$"):
        LoadOptions(**{name: None})
