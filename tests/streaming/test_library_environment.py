"""What torch's libraries find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streaming.library_environment import prepare_libraries, wanted_environment

ZEN3 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx avx2 fma\n"
ICE_LAKE = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu avx avx2 avx512f\n"
CALM = {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(
    ("cpu_info", "more"),
    [
        (ZEN3, {"MKL_CBWR": "AVX2"}),
        (ZEN3.replace("avx2", "avx2 avx512f"), {}),
        (ZEN3.replace("avx2 ", ""), {}),
        (ZEN3.replace("AuthenticAMD", "HygonGenuine"), {}),
        (ICE_LAKE, {}),
        ("", {}),
    ],
)
def test_products_keep_to_one_branch_where_they_would_not(cpu_info: str, more: dict[str, str]) -> None:
    assert wanted_environment(cpu_info) == CALM | more


@pytest.mark.parametrize("there", [True, False])
def test_who_has_set_something_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "cpuinfo").write_text(ZEN3)
    monkeypatch.setattr("streaming.library_environment.CPU_INFO", str(tmp_path / "cpuinfo"))
    monkeypatch.setattr("os.environ", {"OMP_WAIT_POLICY": "active"})
    prepare_libraries()
    assert os.environ == {"OMP_WAIT_POLICY": "active"} | ({"MKL_CBWR": "AVX2"} if there else {})
