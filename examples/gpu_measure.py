"""What gpu_check asks of the device itself: memory, waits, copy rate, and a checkpoint large enough to measure."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.write_tiny_model import TinyModel, config_of, tensor_shapes

ONE_BILLION = TinyModel(
    family="llama", layers=16, hidden_size=2048, heads=32, kv_heads=8, head_dim=64, intermediate_size=8192,
    vocab_size=128256, tied=True, files=1,
)  # fmt: skip
"""The shapes of Llama-3.2-1B: 1.24e9 parameters, 2.5 GB in bfloat16."""

LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


class Gpu:
    """One device. On "cpu", where the checks' own tests run, every figure is 0 and nothing is forbidden."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.is_cuda = name, torch.device(name), name.startswith("cuda")
        self._before = 0

    def describe(self) -> dict[str, object]:
        """Name and memory, for the report."""
        if not self.is_cuda:
            return {"device": self.name}
        properties = torch.cuda.get_device_properties(self.device)
        return {"device": self.name, "name": properties.name, "memory_bytes": properties.total_memory}

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def allocated_nbytes(self) -> int:
        """Bytes that tensors take on the device now."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    def reset_peak(self) -> None:
        """Count the peak from here."""
        if self.is_cuda:
            self.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)
        self._before = self.allocated_nbytes()

    def peak_nbytes(self) -> int:
        """The most that tensors took since `reset_peak`, without what was there then."""
        return torch.cuda.max_memory_allocated(self.device) - self._before if self.is_cuda else 0

    def forbid_waits(self, forbid: bool) -> None:
        """Make every call that waits for the device raise RuntimeError, in all threads."""
        if self.is_cuda:
            torch.cuda.set_sync_debug_mode("error" if forbid else "default")

    def torch_pinned_nbytes(self) -> int:
        """Page-locked bytes that torch's own allocator holds; the window is not among them."""
        stats = torch.cuda.host_memory_stats() if self.is_cuda else {}
        return int(stats.get("allocated_bytes.current", 0))


def copy_rate(gpu: Gpu, sizes: Sequence[int]) -> float:
    """Bytes per second of copies of these sizes, one behind the other, from page-locked memory to the device."""
    source = torch.empty(max(sizes), dtype=torch.uint8, pin_memory=gpu.is_cuda)
    target = torch.empty(max(sizes), dtype=torch.uint8, device=gpu.device)
    target.copy_(source)
    gpu.synchronize()
    begin = time.perf_counter()
    for size in sizes:
        target[:size].copy_(source[:size], non_blocking=True)
    gpu.synchronize()
    return sum(sizes) / (time.perf_counter() - begin)


def write_random_checkpoint(folder: Path, *, model: TinyModel, gpu: Gpu) -> Path:
    """A checkpoint of `model`'s shapes with Llama 3's rotary scaling, its numbers drawn on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device=gpu.device).manual_seed(model.seed)
    tensors = {}
    for name, shape in tensor_shapes(model):
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device=gpu.device)
        if "norm" in name:
            numbers = 1 + 0.1 * numbers
        elif "embed_tokens" not in name:
            numbers /= shape[1] ** 0.5
        tensors[name] = numbers.to(getattr(torch, model.dtype)).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(model) | LLAMA3_ROPE
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
