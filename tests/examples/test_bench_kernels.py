"""The table of matmuls: every path has its line, every cell is a time, and what cannot run is left blank."""

from __future__ import annotations

import pytest

from examples.bench_kernels import capability_line, main, medians
from quant.registry import scheme_names


def test_the_tables_of_a_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--shapes", "64x32", "--rows", "1,2", "--threads", "1,2", "--seconds", "0"])
    text = capsys.readouterr().out
    assert text.startswith("torch ")
    for count in ("1 thread", "2 threads"):
        lines = text.partition(f"## Products, {count}: microseconds")[2].partition("##")[0].strip().splitlines()
        assert lines[0] == "| path | 64x32, 1 rows | 64x32, 2 rows |"
        cells = {name: values for name, *values in (_cells(line) for line in lines[2:])}
        assert {"bf16 F.linear", "fp32 F.linear", "int8pack", "fbgemm int8", "fbgemm fp16"} <= set(cells)
        assert {f"{name}, chosen" for name in scheme_names()} <= set(cells)
        assert all(float(value) >= 0 for value in cells["int8_per_channel, exact"])
        assert cells["bf16 torch.mv"][1] == ""  # for one row alone


def test_the_rates_of_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--shapes", "64x32", "--rows", "1", "--threads", "2"])
    lines = capsys.readouterr().out.partition("## Quantization")[2].strip().splitlines()[4:]
    names, clipped = scheme_names()[1:], scheme_names()[1:5]  # the first four take a percentile
    expected = ["memory copy (none)", *names, *(f"{name}, percentile 99.9" for name in clipped)]
    assert [_cells(line)[0] for line in lines] == expected
    assert all(float(_cells(line)[1]) > 0 for line in lines)


def test_the_capability_line_names_what_limits_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert capability_line().endswith("ATEN_CPU_CAPABILITY=avx2")


def test_paths_take_turns() -> None:
    order: list[str] = []
    medians({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0)
    assert order == ["a", "b"] * 4


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
