"""Triton kernels against dequantized weights: in Triton's interpreter on the CPU, and compiled for GPUs without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from quant.device_features import DeviceFeatures
from quant.device_products import OnDevice

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
HOPPER, AMPERE = DeviceFeatures((9, 0), triton=True), DeviceFeatures((8, 0), triton=True)
HALF, BRAIN = torch.float16, torch.bfloat16
TOKENS = ((1, BRAIN), (3, HALF), (17, BRAIN), (64, HALF), (65, BRAIN))
SHAPES = ((33, 100), (130, 272))


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """Kernels are declared for the interpreter in this module, and forgotten behind it."""
    triton = pytest.importorskip("triton")
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        for name in ("float4", "float8", "integers"):
            import_module(f"quant.triton.{name}")
    yield
    for name in [name for name in sys.modules if name.startswith("quant.triton")]:
        del sys.modules[name]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def codes(*shape: int, below: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=generator)


def e4m3(*shape: int) -> torch.Tensor:
    return numbers(*shape).mul_(30).to(torch.float8_e4m3fn)


def nibbles(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Codes [O, inputs] as int64, by Python's own arithmetic."""
    rows = [[code for byte in row for code in (byte % 16, byte // 16)][:inputs] for row in packed.tolist()]
    return torch.tensor(rows)


def repeated(scale: torch.Tensor, block: int, inputs: int) -> torch.Tensor:
    return scale.repeat_interleave(block, 1)[:, :inputs]


def no_strips(start: int, stop: int) -> torch.Tensor:
    raise AssertionError(f"rows {start} to {stop} were widened")


def assert_product(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], wide: torch.Tensor) -> None:
    """product(x, bias) is x times wide, in float32 up to the order of sums, for odd numbers of tokens.

    The interpreter cuts float32 to bfloat16 instead of rounding it: a whole unit of 8 bits may be lost.
    """
    bias = numbers(wide.shape[0])
    for tokens, dtype in TOKENS:
        x, room = numbers(tokens, wide.shape[1]).to(dtype), {HALF: 2**-10, BRAIN: 2**-7}[dtype]
        found, expected = product(x, bias.to(dtype)), x.double() @ wide.double().t() + bias.to(dtype).double()
        assert found.dtype == dtype
        error = (found.double() - expected).abs()
        assert bool((error <= room * expected.abs() + 1e-5 * expected.abs().amax()).all()), (tokens, dtype)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("features", [HOPPER, AMPERE])
def test_float8_blocks(outputs: int, inputs: int, features: DeviceFeatures) -> None:
    weight, scale = e4m3(outputs, inputs), numbers(-(-outputs // 128), -(-inputs // 128)).abs() / 30
    wide = weight.float() * repeated(scale, 128, inputs).repeat_interleave(128, 0)[:outputs]
    run = OnDevice(features)
    assert_product(lambda x, b: run.float8_blocks(x, weight, scale, b, block=(128, 128), widen=no_strips), wide)


@pytest.mark.parametrize("features", [HOPPER, AMPERE])
def test_float8_rows_with_scales_of_their_own_or_one_for_all(features: DeviceFeatures) -> None:
    weight, run = e4m3(40, 100), OnDevice(features)
    for scale in (numbers(40).abs() / 30, torch.tensor([0.25]).expand(40)):
        wide = weight.float() * scale.unsqueeze(1)
        assert_product(
            lambda x, b, scale=scale: run.float8_rows(x, weight, scale, b, widen=no_strips),  # type: ignore[misc]
            wide,
        )


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_mxfp8(outputs: int, inputs: int) -> None:
    weight, scale = e4m3(outputs, inputs), codes(outputs, -(-inputs // 32), below=12) + 118
    wide = weight.float() * repeated(torch.exp2(scale.float() - 127), 32, inputs)
    stored, run = scale.view(torch.float8_e8m0fnu), OnDevice(HOPPER)
    assert_product(lambda x, b: run.small_floats(x, weight, stored, None, b, block=32, widen=no_strips), wide)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 101), (130, 272)])
def test_mxfp4(outputs: int, inputs: int) -> None:
    weight, scale = codes(outputs, -(-inputs // 2)), codes(outputs, -(-inputs // 32), below=12) + 118
    wide = E2M1[nibbles(weight, inputs)] * repeated(torch.exp2(scale.float() - 127), 32, inputs)
    stored, run = scale.view(torch.float8_e8m0fnu), OnDevice(HOPPER)
    assert_product(lambda x, b: run.small_floats(x, weight, stored, None, b, block=32, widen=no_strips), wide)


@pytest.mark.parametrize("sections", [(33,), (20, 13)])
def test_nvfp4_with_a_scale_for_each_section(sections: tuple[int, ...]) -> None:
    weight, scale = codes(33, 51), numbers(33, 7).abs().to(torch.float8_e4m3fn)
    whole = torch.tensor([0.5, 0.03125])[: len(sections)]
    rows = whole.expand(33) if len(sections) == 1 else whole.repeat_interleave(torch.tensor(sections))
    wide = E2M1[nibbles(weight, 101)] * repeated(scale.float(), 16, 101) * rows.unsqueeze(1)
    run = OnDevice(HOPPER)
    assert_product(lambda x, b: run.small_floats(x, weight, scale, rows, b, block=16, widen=no_strips), wide)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(33, 101, 16), (33, 101, 48), (33, 101, 0), (130, 272, 32), (130, 272, 128)]
)
def test_integers_of_4_bits(outputs: int, inputs: int, group: int, symmetric: bool) -> None:
    groups = -(-inputs // group) if group else 1
    weight, scale = codes(outputs, -(-inputs // 2)), numbers(outputs, groups).bfloat16()
    zero = 8 if symmetric else codes(outputs, groups, below=16)
    size = group or inputs
    whole = zero if isinstance(zero, int) else repeated(zero.long(), size, inputs)
    wide = (nibbles(weight, inputs) - whole) * repeated(scale.float(), size, inputs)
    run = OnDevice(AMPERE)
    assert_product(lambda x, b: run.integers(x, weight, scale, zero, b, bits=4, group=group, widen=no_strips), wide)


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_integers_of_8_bits(stored: torch.dtype) -> None:
    weight, scale = codes(33, 100).view(stored), numbers(33, 1).abs()
    zero = 0 if stored == torch.int8 else 128
    run = OnDevice(AMPERE)
    assert_product(
        lambda x, b: run.integers(x, weight, scale, zero, b, bits=8, group=0, widen=no_strips),
        (weight.double() - zero).float() * scale,
    )


def test_every_code_of_e4m3_stands_for_its_number() -> None:
    from quant.triton.float8 import multiply_float8

    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1).repeat(1, 16)
    one = torch.eye(16)
    for native in (False, True):
        found = multiply_float8(
            one, weight, torch.ones(256), None, rows_per_scale=1, columns_per_scale=16, native=native
        )
        finite = ~weight.float().isnan().any(1)
        assert int(finite.sum()) == 254
        assert torch.equal(found.t()[finite], weight.float()[finite])
        if not native:  # the interpreter's own conversion knows no NaN
            assert bool(found.t()[~finite].isnan().all())


def test_every_code_of_e8m0_stands_for_its_number() -> None:
    from quant.triton.float8 import multiply_float8

    weight = torch.ones(256, 16).to(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).unsqueeze(1)
    found = multiply_float8(torch.eye(16), weight, scale, None, rows_per_scale=1, columns_per_scale=16, native=True)
    expected = torch.tensor([2.0 ** (code - 127) for code in range(255)])
    assert torch.equal(found[0, :255], expected)
    assert bool(found[0, 255].isnan())


def test_a_tokens_sums_do_not_depend_on_the_other_tokens_of_its_tile() -> None:
    weight, scale, run = codes(40, 51), numbers(40, 4).bfloat16(), OnDevice(HOPPER)
    x = numbers(16, 101).bfloat16()
    together = run.integers(x, weight, scale, 8, None, bits=4, group=32, widen=no_strips)
    alone = run.integers(x[5:6], weight, scale, 8, None, bits=4, group=32, widen=no_strips)
    assert torch.equal(together[5:6], alone)


def test_leading_dimensions_stay_and_strides_do_not_matter() -> None:
    weight, scale, run = e4m3(24, 100), numbers(24).abs(), OnDevice(HOPPER)
    x = numbers(2, 100, 3).bfloat16().transpose(1, 2)
    found = run.float8_rows(x, weight, scale, None, widen=no_strips)
    flat = run.float8_rows(x.reshape(6, 100), weight, scale, None, widen=no_strips)
    assert found.shape == (2, 3, 24)
    assert torch.equal(found.view(6, 24), flat)


def test_every_kernel_compiles_within_the_shared_memory_of_its_gpu(tmp_path: Path) -> None:
    # KiB that a block may have (CUDA programming guide, compute capabilities).
    limits = {"80:1": 163, "89:64": 99, "90:512": 227, "120:17": 99}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.quant.triton_compiled", *limits],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout)
    assert len(shared) == 9 * len(limits)
    assert not {name: nbytes for name, nbytes in shared.items() if nbytes > limits[name.split()[0]] * 1024}
