"""What the CPU's matmuls are good at: decides which path runs, so it is read once and is a value."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CpuFeatures:
    """native_bf16: bfloat16 products run on instructions of their own (AMX or AVX512-BF16); without them a product in
    bfloat16 is several times slower than one widened to float32.
    vnni: FBGEMM's int8 products sum in 32 bits at once (AVX512-VNNI), where they otherwise go through 16."""

    native_bf16: bool = False
    vnni: bool = False

    @classmethod
    def detect(cls) -> CpuFeatures:
        """Of this machine, as far as oneDNN is allowed to use them (ONEDNN_MAX_CPU_ISA)."""
        return cls(native_bf16=_native_bf16(), vnni=bool(torch.cpu._is_vnni_supported()))


# Limits of ONEDNN_MAX_CPU_ISA under which oneDNN has no bfloat16 products of its own.
_ISA_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})


def _native_bf16() -> bool:
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISA_WITHOUT_BF16:
        return False
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
