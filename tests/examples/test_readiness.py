"""The readiness example tells of every layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.readiness import main


def test_every_layer_is_told_to_be_read_quantized_and_ready(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny)])
    lines = [line.split(maxsplit=2)[2] for line in capsys.readouterr().out.splitlines()]  # behind "1.234 s"
    assert lines[0].startswith("opened: 5 layers")
    for layer in ("layers.0", "layers.1", "layers.2", "head", "embed"):
        told = [line.split()[1].rstrip(":") for line in lines if line.split()[0] == layer]
        assert sorted(told) == ["quantize", "read", "ready"]
    assert "all ready: embed, layers.0, layers.1, layers.2, head" in lines


def test_bytes_are_those_of_the_checkpoint(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny)])
    out = capsys.readouterr().out
    assert f"embed      read: {160 * 64 * 2:,} bytes" in out
    assert f"head       read: {160 * 64 * 2 + 64 * 2:,} bytes" in out  # with the last norm
