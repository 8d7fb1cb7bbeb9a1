"""What torch's libraries are told by their environment, before they are loaded: they look at it once. [no-torch]

Whoever has set something keeps it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

CPU_INFO = "/proc/cpuinfo"


def prepare_libraries() -> None:
    """Set what is not set."""
    for name, value in wanted_environment(_cpu_info()).items():
        os.environ.setdefault(name, value)


def wanted_environment(cpu_info: str) -> Mapping[str, str]:
    """Of the first processor's description, "" where the system gives none.

    OpenMP's idle workers spin by default, on the cores that the reader and our own threads need (decoding a 1B model
    took a quarter longer).

    MKL's products have other last bits at other addresses on AMD's processors, unless it is told to keep to one branch
    (conditional numerical reproducibility): then attention in float32 has the same bits however heads and threads
    share it. That branch is also the faster one there: float32 products of strips of a weight by a third (AVX2; those
    with AVX512 have not been tried).
    """
    wanted = {"OMP_WAIT_POLICY": "passive"}
    flags = re.search(r"^flags\s*:(.*)$", cpu_info, re.MULTILINE)
    found = set(flags[1].split()) if flags else set()
    is_amd = re.search(r"^vendor_id\s*:\s*AuthenticAMD$", cpu_info, re.MULTILINE) is not None
    if is_amd and "avx2" in found and "avx512f" not in found:
        wanted["MKL_CBWR"] = "AVX2"
    return wanted


def _cpu_info() -> str:
    try:
        with open(CPU_INFO, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 13)
    except OSError:
        return ""
