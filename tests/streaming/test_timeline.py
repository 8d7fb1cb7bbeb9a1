"""The SVG timeline: well-formed, bounded, and with its bars where the spans were."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from streaming.errors import OptionError
from streaming.timeline import merged_bars, render_timeline, tick_seconds, write_timeline
from streaming.trace import MARK, Span

SVG = "{http://www.w3.org/2000/svg}"


def bars_of(document: str, lane: str) -> list[tuple[float, float]]:
    """(left, width) of the bars whose tooltip names the lane."""
    found = []
    for rect in ElementTree.fromstring(document).iter(f"{SVG}rect"):
        tooltip = rect.find(f"{SVG}title")
        if tooltip is not None and (tooltip.text or "").startswith(f"{lane}:"):
            found.append((float(rect.attrib["x"]), float(rect.attrib["width"])))
    return found


def words_of(document: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(document).iter(f"{SVG}text")]


def a_load() -> list[Span]:
    return [
        Span("read", "q_proj", 1.0, 2.0, "layers.0"),
        Span("read", "k_proj", 2.0, 3.0, "layers.1"),
        Span("stall", "read", 1.0, 2.0, "layers.0"),
        Span("forward", "layers.0", 2.0, 5.0, "layers.0"),
        Span(MARK, "first token", 5.0, 5.0),
    ]


def test_bars_lie_in_proportion_to_their_seconds() -> None:
    document = render_timeline(a_load(), title="t", facts={}, origin_s=1.0, end_s=5.0)
    (first_x, first_width), (second_x, second_width) = bars_of(document, "read")
    ((forward_x, forward_width),) = bars_of(document, "forward")
    assert first_width == pytest.approx(second_width, abs=0.2)
    assert second_x == pytest.approx(first_x + first_width, abs=0.2)
    assert forward_x == pytest.approx(second_x, abs=0.2)
    assert forward_width == pytest.approx(3 * first_width, abs=0.4)


def test_stalls_are_drawn_hatched_in_the_forward_lane_and_named_in_the_legend() -> None:
    document = render_timeline(a_load(), title="t", facts={})
    rows = {
        (rect.attrib["y"], rect.attrib["fill"] == "url(#stall)")
        for rect in ElementTree.fromstring(document).iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None and (title.text or "").startswith(("stall:", "forward:"))
    }
    assert len({y for y, _ in rows}) == 1
    assert {hatched for _, hatched in rows} == {True, False}
    assert "forward waits" in words_of(document)
    assert "stall" not in words_of(document)


def test_layers_are_tinted_in_turn() -> None:
    document = render_timeline(a_load(), title="t", facts={})
    fills = [
        rect.attrib["fill"]
        for rect in ElementTree.fromstring(document).iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None and (title.text or "").startswith("read:")
    ]
    assert len(fills) == 2
    assert fills[0] != fills[1]


def test_title_facts_marks_and_axis_are_written_and_escaped() -> None:
    document = render_timeline(a_load(), title="a <b> & c", facts={"model": "x<y", "read": "9 MB"}, origin_s=1.0)
    words = words_of(document)
    assert "a <b> & c" in words
    assert "model x<y  ·  read 9 MB" in words
    assert "first token 4.00 s" in words
    assert {"0.0", "0.5", "4.0", "seconds"} <= set(words)


def test_the_picture_ends_shortly_after_the_last_mark() -> None:
    decoding = [Span("forward", "step", 5.0 + n, 6.0 + n) for n in range(100)]
    document = render_timeline([*a_load(), *decoding], title="t", facts={}, origin_s=0.0)
    ticks = [float(word) for word in words_of(document) if word.replace(".", "").isdigit()]
    assert max(ticks) == 5.0


def test_more_spans_than_pixels_stay_below_the_size_limit() -> None:
    spans = [
        Span(lane, f"tensor {n}", n * 1e-3, n * 1e-3 + 0.4e-3, f"layers.{n // 7}")
        for lane in ("read", "slice", "quantize", "post-process", "publish", "forward")
        for n in range(4000)
    ]
    document = render_timeline(spans, title="t", facts={})
    assert len(document.encode()) < 500_000
    assert len(bars_of(document, "read")) > 20


def test_thin_neighbours_are_merged_and_wide_ones_of_other_layers_are_not() -> None:
    wide = [Span("read", "a", 0.0, 1.0, "layers.0"), Span("read", "b", 1.0, 2.0, "layers.1")]
    thin = [Span("read", "c", 2.0 + n / 1000, 2.0005 + n / 1000, f"layers.{n + 2}") for n in range(100)]
    bars = merged_bars([*wide, *thin], pixels_per_s=100, merge_px=0.5)
    assert [(bar.start_s, bar.end_s, bar.count) for bar in bars[:2]] == [(0.0, 1.0, 1), (1.0, 2.0, 1)]
    merged = bars[2:]
    assert sum(bar.count for bar in merged) == 100
    assert len(merged) == 5  # 2 pixels each, of the 10 that they cover
    assert sum(bar.busy_s for bar in merged) == pytest.approx(0.05)


def test_a_merged_bar_is_as_pale_as_the_gaps_it_hides() -> None:
    spans = [Span("read", "c", n / 1000, n / 1000 + 0.0005, f"layers.{n}") for n in range(1001)]
    document = render_timeline(spans, title="t", facts={})
    shares = [
        float(rect.attrib["fill-opacity"])
        for rect in ElementTree.fromstring(document).iter(f"{SVG}rect")
        if "fill-opacity" in rect.attrib
    ]
    assert len(shares) > 20
    assert sum(shares) / len(shares) == pytest.approx(0.6, abs=0.15)


def test_tensors_of_one_layer_that_touch_are_one_bar() -> None:
    touching = [Span("read", str(n), float(n), n + 1.0, "layers.0") for n in range(3)]
    apart = Span("read", "later", 5.0, 6.0, "layers.0")
    bars = merged_bars([*touching, apart], pixels_per_s=100, merge_px=0.5)
    assert [(bar.start_s, bar.end_s, bar.count) for bar in bars] == [(0.0, 3.0, 3), (5.0, 6.0, 1)]


def test_an_empty_trace_is_a_picture_too() -> None:
    assert "nothing ran" in words_of(render_timeline([], title="nothing ran", facts={}))


@pytest.mark.parametrize(("length_s", "tick_s"), [(10.0, 1.0), (4.6, 0.5), (0.013, 0.002), (125.0, 20.0)])
def test_ticks_are_round_numbers(length_s: float, tick_s: float) -> None:
    assert tick_seconds(length_s) == pytest.approx(tick_s)


@pytest.mark.parametrize("length_s", [0.001, 0.0199, 0.7, 1.0, 3.3, 59.9, 1000.0])
def test_an_axis_has_between_five_and_thirteen_ticks(length_s: float) -> None:
    assert 5 <= length_s / tick_seconds(length_s) + 1 <= 13.001


def test_the_file_is_written_and_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    write_timeline(tmp_path / "load.svg", a_load(), title="t", facts={})
    ElementTree.parse(tmp_path / "load.svg")
    message = r"--timeline .*load\.png: only \.svg can be written, this name ends in '\.png'; try load\.svg"
    with pytest.raises(OptionError, match=message):
        write_timeline(tmp_path / "load.png", a_load(), title="t", facts={})
    assert [path.name for path in tmp_path.iterdir()] == ["load.svg"]
