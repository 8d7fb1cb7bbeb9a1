"""A sample of what the runtime asks of torch, as plain numbers that two processes can compare."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def sample() -> Iterator[tuple[str, Any]]:
    """Each case's name and result: digests of tensors, and what prints as text.

    Those up to "generator" need nothing of what a shortened import of torch puts off.
    """
    torch.manual_seed(7)
    for name, case in CASES.items():
        yield name, case()


def digest(tensor: torch.Tensor) -> str:
    """The bits of a tensor, with dtype and shape."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Reproducible numbers; makes a generator of its own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def _attention() -> str:
    q, k = noise(1, 4, 5, 8, dtype=torch.bfloat16), noise(1, 2, 5, 8, dtype=torch.bfloat16)
    return digest(F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True))


def _meta_modules() -> list[str]:
    with torch.device("meta"):
        shell = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 6, dtype=torch.bfloat16))
    shapes = [f"{name} {tuple(tensor.shape)} {tensor.device}" for name, tensor in shell.state_dict().items()]
    shell[1].load_state_dict(
        {"weight": noise(6, 8, dtype=torch.bfloat16), "bias": torch.zeros(6).bfloat16()}, assign=True
    )
    meta = F.linear(torch.empty(3, 8, device="meta"), torch.empty(6, 8, device="meta"))
    return [*shapes, digest(shell[1](noise(2, 8, dtype=torch.bfloat16))), str(tuple(meta.shape))]


def _saved_and_loaded() -> str:
    buffer = io.BytesIO()
    torch.save({"weight": noise(3, 4), "dtype": torch.bfloat16}, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return digest(loaded["weight"]) + str(loaded["dtype"])


def _pickled() -> str:
    parts = pickle.loads(pickle.dumps((noise(3), torch.float8_e4m3fn, torch.device("cpu"), torch.Size((2, 3)))))
    return digest(parts[0]) + str(parts[1:])


def _library() -> str:
    library = torch.library.Library("firstlayer_sample", "FRAGMENT")
    if not hasattr(torch.ops.firstlayer_sample, "twice"):
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    return digest(torch.ops.firstlayer_sample.twice(noise(3)))


def _int8_matmul() -> str:
    weight = torch.arange(-64, 64, dtype=torch.int8).view(8, 16)
    return digest(torch._weight_int8pack_mm(noise(2, 16, dtype=torch.bfloat16), weight, torch.ones(8).bfloat16()))


def _gradient() -> str:
    weight = noise(4, 4).requires_grad_()
    (weight @ weight).relu().sum().backward()
    assert weight.grad is not None
    return digest(weight.grad)


def _error_of_a_missing_meta_operator() -> str:
    try:
        torch.empty(2, device="meta").item()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


CASES: dict[str, Callable[[], Any]] = {
    "matmul": lambda: digest(noise(5, 7) @ noise(7, 3)),
    "linear bf16": lambda: digest(F.linear(noise(5, 8, dtype=torch.bfloat16), noise(6, 8, dtype=torch.bfloat16))),
    "linear fp16": lambda: digest(F.linear(noise(1, 8, dtype=torch.float16), noise(6, 8, dtype=torch.float16))),
    "attention": _attention,
    "norm": lambda: digest(F.rms_norm(noise(3, 8), (8,), noise(8), eps=1e-5)),
    "silu": lambda: digest(F.silu(noise(9, dtype=torch.bfloat16))),
    "embedding": lambda: digest(F.embedding(torch.tensor([1, 0, 4]), noise(5, 8))),
    "sampling": lambda: digest(torch.multinomial(noise(2, 9).softmax(-1), 2)),
    "topk": lambda: [digest(part) for part in noise(3, 9).topk(4)],
    "float8": lambda: digest(noise(4, 4).to(torch.float8_e4m3fn).float()),
    "int8 matmul": _int8_matmul,
    "aminmax": lambda: [digest(part) for part in torch.aminmax(noise(9))],
    "frombuffer": lambda: digest(torch.frombuffer(bytearray(range(16)), dtype=torch.bfloat16)),
    "numpy": lambda: digest(torch.from_numpy(noise(3).numpy())),
    "inference mode": lambda: digest(torch.inference_mode()(lambda: noise(2, 2).exp())()),
    "generator": lambda: [type(torch.Generator).__name__, digest(torch.Generator().manual_seed(1).get_state())],
    "save and load": _saved_and_loaded,
    "missing meta": _error_of_a_missing_meta_operator,
    "pickle": _pickled,
    "library": _library,
    "gradient": _gradient,
    "print": lambda: str(noise(2, 2)),
    "meta modules": _meta_modules,
    "broadcast_shapes": lambda: str(torch.broadcast_shapes((2, 1), (1, 3))),
}
