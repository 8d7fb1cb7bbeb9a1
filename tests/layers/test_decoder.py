"""The shell declares what the specs say; its steps ask before they compute; the head goes chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from layers.architecture import layer_specs
from layers.batch import make_batch
from layers.config import parse_config
from layers.context import StepContext
from layers.decoder import build_shell, stored_names
from layers.embedding import CHUNK_ROWS
from layers.linear import stored_rows
from layers.models import FAMILIES
from quant.dtypes import DType, from_torch
from quant.kernels import Kernels
from tests.layers.real_configs import CONFIGS
from tests.layers.row_scales import RowScales
from tests.layers.tiny import (
    OneScheme,
    config_of,
    context,
    fill,
    new_cache,
    random_weights,
    run,
    some_ids,
    tiny_model,
    wide_specs,
)  # fmt: skip

MODEL_TYPES = [family.model_type for family in FAMILIES]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", [RowScales(), None], ids=["quantized", "wide"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_shell_declares_exactly_what_the_specs_store(model_type: str, scheme: RowScales | None, tied: bool) -> None:
    config = config_of(model_type, tie_word_embeddings=tied and model_type != "phi")  # its head has a bias
    specs = wide_specs(config)
    if scheme is not None:
        specs = layer_specs(config, dtype=DType.BF16, policy=OneScheme(scheme, head=True))
    wanted = {
        f"{param.name.rpartition('.')[0]}.{name}": (stored.shape, stored.dtype)
        for spec in specs
        for param in spec.params
        for name, stored in param.storage().items()
    }
    found = {
        name: (tuple(parameter.shape), from_torch(parameter.dtype))
        for name, parameter in build_shell(config, specs).named_parameters()
    }
    assert found == wanted
    assert set(wanted) == {name for spec in specs for param in spec.params for name in stored_names(param)}


def test_a_shell_of_seven_billion_parameters_takes_no_memory() -> None:
    config = parse_config(CONFIGS["Mistral-7B-v0.1"])
    model = build_shell(config, wide_specs(config, dtype=DType.BF16))
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in model.parameters())
    assert sum(prod(parameter.shape) for parameter in model.parameters()) == 7_241_732_096
    assert list(model.buffers()) == []


def test_a_shell_can_be_built_under_another_default_device() -> None:
    config = config_of("phi3")
    with torch.device("meta"):
        model = build_shell(config, wide_specs(config))
    rope = model.rope(make_batch([([1, 2], new_cache(config, max_tokens=2))], vocab_size=9)).full
    assert rope is not None
    assert not rope.cos.is_meta


def test_assign_and_release_change_one_parameter() -> None:
    model = build_shell(config_of(), wide_specs(config_of()))
    name = "model.layers.1.mlp.down_proj.weight"
    values = torch.rand(48, 80)
    model.assign(name, values)
    assert model.get_parameter(name).data_ptr() == values.data_ptr()
    assert not model.get_parameter(name).requires_grad
    assert sum(not parameter.is_meta for parameter in model.parameters()) == 1
    model.release(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_parameter(name).shape == (48, 80)


def test_a_tensor_made_in_inference_mode_can_be_assigned_outside_it() -> None:
    model = build_shell(config_of(), wide_specs(config_of()))
    with torch.inference_mode():
        values = torch.rand(48)
    model.assign("model.norm.weight", values)
    assert model.get_parameter("model.norm.weight").data_ptr() == values.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "words"), [(torch.zeros(49), "49"), (torch.zeros(48, dtype=torch.bfloat16), "bfloat16")]
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(tensor: torch.Tensor, words: str) -> None:
    model = build_shell(config_of(), wide_specs(config_of()))
    with pytest.raises(ValueError, match=rf"model.norm.weight: .*{words}.*\[48\] torch.float32 declared"):
        model.assign("model.norm.weight", tensor)


def test_running_layer_by_layer_is_running_at_once() -> None:
    model = tiny_model("qwen3")
    prompts = [some_ids(6), some_ids(3, seed=1)]
    whole = run(model, *prompts)
    caches = [new_cache(model.config, max_tokens=6) for _ in prompts]
    with torch.inference_mode():
        batch = make_batch(list(zip(prompts, caches, strict=True)), vocab_size=101)
        hidden, rope = model.embed(batch.token_ids, context()), model.rope(batch)
        for layer in model.layers:
            hidden = layer(hidden, batch, rope, context())
        batch.advance()
        last = model.head(hidden[list(batch.last_rows)], context())
    assert batch.last_rows == (5, 8)
    assert [cache.length for cache in caches] == [6, 3]
    torch.testing.assert_close(last, whole[[5, 8]], rtol=1e-5, atol=1e-5)


def test_only_the_rows_asked_for_reach_the_head() -> None:
    model, prompt = tiny_model(), some_ids(5)
    with torch.inference_mode():
        batch = make_batch([(prompt, new_cache(model.config, max_tokens=5))], vocab_size=101)
        some = model(batch, context(), rows=[4, 0])
    assert some.shape == (2, 101)
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, run(model, prompt)[[4, 0]], rtol=1e-5, atol=1e-5)


class Recorder:
    """A context that notes what the model asks, and can refuse to go on."""

    def __init__(self, *, stop_at: int = -1) -> None:
        self.events: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def check(self) -> None:
        if len(self.events) == self.stop_at:
            raise InterruptedError
        self.events.append(("check", 0))

    def await_rows(self, param: str, stop_row: int) -> None:
        self.events.append((param, stop_row))

    @property
    def context(self) -> StepContext:
        return StepContext(Kernels.detect(), check=self.check, await_rows=self.await_rows)


def test_every_matmul_asks_first_whether_it_is_still_wanted() -> None:
    model, recorder = tiny_model(), Recorder()
    run(model, some_ids(3), ctx=recorder.context)
    matmuls = 2 * 4 + 1  # qkv, o, gate_up, down of two layers; the head
    assert [event for event, _ in recorder.events].count("check") == matmuls + 1  # and the look-up


@pytest.mark.parametrize("stop_at", [0, 1, 5, 8, 10])
def test_a_check_that_raises_ends_the_pass_and_leaves_the_cache_as_it_was(stop_at: int) -> None:
    model, prompt = tiny_model(), some_ids(4)
    cache = new_cache(model.config, max_tokens=8)
    with pytest.raises(InterruptedError):
        run(model, prompt, caches=[cache], ctx=Recorder(stop_at=stop_at).context)
    assert cache.length == 0
    assert torch.equal(run(model, prompt, caches=[cache]), run(model, prompt))


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_awaits_its_rows_chunk_by_chunk_in_order(tied: bool) -> None:
    model, recorder = tiny_model(vocab_size=20_000, hidden_size=8, head_dim=4, tie_word_embeddings=tied), Recorder()
    run(model, [19_999], ctx=recorder.context)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    chunks: list[tuple[str, int]] = []
    for stop in (8192, 16384, 20_000):
        chunks += [("check", 0), (name, stop)]
    assert recorder.events[-7:] == [("model.norm.weight", 8), *chunks]


def test_rows_of_the_head_that_arrive_while_it_runs_are_the_ones_that_are_used() -> None:
    model = tiny_model(vocab_size=20_000, hidden_size=8, head_dim=4)
    wanted = run(model, [7])
    arrived = model.get_parameter("lm_head.weight").clone()
    memory = torch.full_like(arrived, torch.nan)
    model.assign("lm_head.weight", memory)

    def arrive(param: str, stop_row: int) -> None:
        if param == "lm_head.weight":
            memory[:stop_row] = arrived[:stop_row]

    got = run(model, [7], ctx=replace(context(), await_rows=arrive))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("row_multiple", [0, 1, 64, 4096])
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_head_in_chunks_is_the_dequantized_matrix(row_multiple: int, tied: bool) -> None:
    config = config_of(vocab_size=20_000, hidden_size=8, head_dim=4, tie_word_embeddings=tied)
    scheme = RowScales(row_multiple)
    specs = layer_specs(config, dtype=DType.F32, policy=OneScheme(scheme, head=True))
    model = fill(config, specs, random_weights(config))
    assert model.lm_head is not None
    x = torch.randn(3, 8)
    with torch.inference_mode():
        logits = model.head(x, context())
        matrix = scheme.dequantize(model.lm_head.stored(), (20_000,), dtype=torch.float32)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * model.get_parameter("model.norm.weight")
    torch.testing.assert_close(logits, normed @ matrix.T, rtol=1e-5, atol=1e-5)
    assert CHUNK_ROWS < 20_000


def test_rows_of_scales_follow_the_rows_of_the_weight() -> None:
    stored = {"weight": torch.arange(10)[:, None], "weight_scale": torch.arange(4)}  # a scale for each 3 rows
    cut = stored_rows(stored, row_multiple=3, start=3, stop=10)
    assert cut["weight"][:, 0].tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert cut["weight_scale"].tolist() == [1, 2, 3]
    assert stored_rows(stored, row_multiple=0, start=3, stop=10)["weight_scale"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("model_type", ["mistral", "qwen3"])
def test_what_is_not_a_matmul_has_the_same_bits_with_any_number_of_threads(model_type: str, threads: int) -> None:
    """Odd sizes, large enough that torch cuts the work into parts; the matmuls are replaced by exact products."""

    def products(count: int) -> list[torch.Tensor]:
        torch.set_num_threads(count)
        model = tiny_model(
            model_type, hidden_size=396, head_dim=66, num_attention_heads=6, intermediate_size=1003, sliding_window=70
        )
        found: list[torch.Tensor] = []
        with torch.inference_mode():
            batch = make_batch([(some_ids(173), new_cache(model.config, max_tokens=173))], vocab_size=101)
            hidden, rope = model.embed(batch.token_ids, context()), model.rope(batch)
            for layer in model.layers:
                for name in ("self_attn.o_proj", "mlp.down_proj"):
                    layer.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0]))
                hidden = layer(hidden, batch, rope, replace(context(), kernels=ExactKernels()))
        return found

    before = torch.get_num_threads()
    try:
        for one, several in zip(products(1), products(threads), strict=True):
            assert torch.equal(one, several)
    finally:
        torch.set_num_threads(before)


class ExactKernels(Kernels):
    """Products in float64 of numbers rounded so far that no sum of theirs is ever rounded: no order of sums matters."""

    def wide(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is None
        grid = 2.0**-12
        return (((x.double() / grid).round() @ (weight.double() / grid).round().T) * grid * grid).to(x.dtype)
