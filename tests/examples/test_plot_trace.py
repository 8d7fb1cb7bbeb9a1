"""A trace that was written can be read again and drawn: the same spans, the same picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.plot_trace import main, spans_of
from streaming.trace import Span, write_chrome_trace

SPANS = (
    Span("read", "a", 10.0, 10.5, "layers.0", {"nbytes": 7}),
    Span("forward", "layers.0", 10.25, 10.75, "layers.0"),
    Span("stall", "read", 10.75, 11.0, "layers.1"),
    Span("mark", "first token", 11.0, 11.0),
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_chrome_trace(SPANS, tmp_path / "trace.json", origin_s=10.0, facts={"read": "7 B"})
    return tmp_path / "trace.json"


def test_the_spans_are_read_back_with_the_origin_at_zero(trace: Path) -> None:
    found = spans_of(json.loads(trace.read_text()))
    wanted = [Span(s.lane, s.name, s.start_s - 10, s.end_s - 10, s.layer, s.args) for s in SPANS]
    assert sorted(found, key=lambda span: span.start_s) == wanted


def test_it_draws_the_picture_and_says_how_busy_the_lanes_were(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = trace.with_suffix(".svg")
    main([str(trace), str(picture)])
    assert capsys.readouterr().out == (
        "read 0.500 s, forward 0.500 s, stall 0.250 s; reading and computing at once: 0.250 s\n"
    )
    text = "".join(ElementTree.fromstring(picture.read_text()).itertext())
    for word in ("trace.json", "7 B", "forward", "first token"):
        assert word in text


def test_a_part_can_be_cut_out(trace: Path) -> None:
    picture = trace.with_suffix(".svg")
    main([str(trace), str(picture), "--from", "0.6", "--to", "0.9"])
    titles = [node.text or "" for node in ElementTree.fromstring(picture.read_text()).iter() if "title" in node.tag]
    assert not [title for title in titles if title.startswith("read: ")]  # it ended at 0.5
    assert [title for title in titles if title.startswith("forward: ")]
