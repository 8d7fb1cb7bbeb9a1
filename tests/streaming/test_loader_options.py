"""--model-loader-extra-config, and what goes with which strategy: both values of every option, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from streaming.errors import OptionError
from streaming.loader_options import LoaderOptions, parse_loader_options
from streaming.options import LoadOptions


def refusal(given: object) -> str:
    with pytest.raises(OptionError) as caught:
        parse_loader_options(given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, LoaderOptions(False, 2, True)),
        ({}, LoaderOptions(False, 2, True)),
        ('{"enable_multithread_load": true}', LoaderOptions(True, 8, True)),
        ({"enable_multithread_load": True, "num_threads": 3}, LoaderOptions(True, 3, True)),
        ({"enable_multithread_load": False}, LoaderOptions(False, 2, True)),
        ({"num_threads": 5}, LoaderOptions(True, 5, True)),
        ('{"enable_weights_track": false}', LoaderOptions(False, 2, False)),
        ({"enable_weights_track": True}, LoaderOptions(False, 2, True)),
    ],
)
def test_text_and_mappings_say_the_same(given: object, found: LoaderOptions) -> None:
    assert parse_loader_options(given) == found


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "4", None, 257])
def test_a_number_of_threads_that_is_none_is_refused(threads: object) -> None:
    assert refusal({"num_threads": threads}) == (
        f"--model-loader-extra-config: num_threads is {threads!r}; a whole number from 1 to 256 is needed"
    )


@pytest.mark.parametrize("key", ["enable_multithread_load", "enable_weights_track"])
@pytest.mark.parametrize("value", [1, "true", None])
def test_a_switch_that_is_neither_true_nor_false_is_refused(key: str, value: object) -> None:
    assert refusal({key: value}) == f"--model-loader-extra-config: {key} is {value!r}; true or false is needed"


def test_other_mistakes_are_told_in_words() -> None:
    assert "'threads' is not known; known are enable_multithread_load" in refusal({"threads": 8})
    assert "is a list; a JSON object is needed" in refusal("[8]")
    assert "is a int; a JSON object is needed" in refusal(8)
    assert "is not JSON" in refusal("{num_threads: 8}")
    assert "is not JSON" in refusal("[" * 100_000)
    assert "num_threads 4 does not go with enable_multithread_load false" in refusal(
        {"enable_multithread_load": False, "num_threads": 4}
    )


def option_refusal(**options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        LoadOptions(**options)
    return str(caught.value)


@pytest.mark.parametrize("strategy", [None, "lazy"])
def test_several_threads_go_with_no_strategy_and_with_lazy(strategy: str | None) -> None:
    options = LoadOptions(safetensors_load_strategy=strategy, model_loader_extra_config='{"num_threads": 6}')
    assert options.loader.threads == 6


@pytest.mark.parametrize("strategy", ["eager", "prefetch", "direct", "torchao"])
def test_several_threads_with_another_strategy_are_refused(strategy: str) -> None:
    message = option_refusal(
        safetensors_load_strategy=strategy, model_loader_extra_config={"enable_multithread_load": True}
    )
    assert message.endswith(f"or with lazy, not with --safetensors-load-strategy {strategy}")
    assert LoadOptions(
        safetensors_load_strategy=strategy, model_loader_extra_config={"enable_multithread_load": False}
    ).loader == LoaderOptions(False, 2, True)


@pytest.mark.parametrize(
    ("option", "value"), [("safetensors_prefetch_num_threads", 4), ("safetensors_prefetch_block_size", "1MiB")]
)
def test_options_of_prefetch_with_another_strategy_are_refused(option: str, value: object) -> None:
    asked: dict[str, Any] = {option: value}
    assert getattr(LoadOptions(safetensors_load_strategy="prefetch", **asked), option) == value
    message = option_refusal(safetensors_load_strategy="direct", **asked)
    assert message == f"--{option.replace('_', '-')} goes with --safetensors-load-strategy prefetch, not direct"
    assert option in option_refusal(load_format="fastsafetensors", **asked).replace("-", "_")


def test_sizes_and_counts_of_prefetch_are_checked() -> None:
    assert "-num-threads 0: a whole number of at least 1" in option_refusal(safetensors_prefetch_num_threads=0)
    assert "-num-threads 999: at most 256" in option_refusal(safetensors_prefetch_num_threads=999)
    assert "-block-size 'big': a size such as" in option_refusal(safetensors_prefetch_block_size="big")


@pytest.mark.parametrize("load_format", ["runai_streamer", "fastsafetensors"])
def test_a_back_end_takes_no_strategy_no_threads_and_no_other_reader(load_format: str) -> None:
    message = option_refusal(load_format=load_format, safetensors_load_strategy="lazy")
    assert f"does not go with --load-format {load_format}" in message
    assert load_format in option_refusal(load_format=load_format, model_loader_extra_config={"num_threads": 2})
    assert "--reader threads" in option_refusal(load_format=load_format, reader="threads")
