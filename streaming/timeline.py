"""The picture of a load: spans as an SVG with a lane per stage over one axis of seconds, drawn without any library.

Reading and computing at the same time is seen at a glance: bars of different lanes above each other. Bars are tinted
alternately by layer; the forward pass's stalls lie in its own lane, hatched in red; marks ("first token") are vertical
lines. Spans too thin to be seen are merged until the file is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from streaming.errors import OptionError
from streaming.trace import MARK, Span, busy_seconds, lane_rows, lanes_in_order, write_whole

_LIMIT_NBYTES = 450_000
_MAX_ROWS = 6  # of one lane: more parallel threads than this share the last row
_WIDTH, _LEFT, _RIGHT = 1200, 118, 92
_ROW_HEIGHT, _ROW_GAP, _LANE_GAP = 20, 2, 12
_TEXT, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_FONTS = "system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif"
_STALL_FILL = "url(#stall)"
_STYLE = f"""<style>
.lane, .mark {{ font-weight: 600 }}
.faint {{ fill: {_FAINT} }}
.bar {{ font-size: 10.5px; text-anchor: middle }}
</style>
<defs><pattern id="stall" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#fbd5d5"/><rect width="2.4" height="6" fill="#d64545"/>
</pattern></defs>"""

_TINTS = {
    "import": ("#8d99a6", "#8d99a6"),
    "read": ("#2f6fb0", "#86b4e0"),
    "slice": ("#16858a", "#74c4c7"),
    "quantize": ("#d9730d", "#f4b06a"),
    "post-process": ("#8f5aa8", "#c5a0d6"),
    "publish": ("#7a5b45", "#bfa28d"),
    "forward": ("#2e8b4a", "#8ccb9c"),
}
_OTHER_TINTS = ("#52606d", "#9aa5b1")


@dataclass(frozen=True)
class Scale:
    """How seconds lie on the picture: [start_s, end_s] on the pixels [left, right]."""

    start_s: float
    end_s: float
    left: float = _LEFT
    right: float = _WIDTH - _RIGHT

    @property
    def pixels_per_s(self) -> float:
        """Pixels of one second."""
        return (self.right - self.left) / max(self.end_s - self.start_s, 1e-9)

    def x(self, at_s: float) -> float:
        """The pixel of a point in time, kept inside the picture."""
        return min(max(self.left + (at_s - self.start_s) * self.pixels_per_s, self.left), self.right)


@dataclass(frozen=True)
class Bar:
    """What is drawn for one span, or for `count` neighbours that are too thin to be told apart.

    `busy_s` is the spans' own time: less than the bar's length where there are gaps too thin to be drawn.
    """

    lane: str
    layer: str
    name: str
    start_s: float
    end_s: float
    busy_s: float
    count: int = 1
    thin: bool = False


def write_timeline(
    path: Path,
    spans: Sequence[Span],
    *,
    title: str,
    facts: Mapping[str, str],
    origin_s: float | None = None,
    end_s: float | None = None,
) -> None:
    """Write `render_timeline`'s picture; the file appears whole or not at all. OptionError for other than .svg."""
    check_timeline_path(path)
    write_whole(path, render_timeline(spans, title=title, facts=facts, origin_s=origin_s, end_s=end_s))


def check_timeline_path(path: Path) -> None:
    """Refuse, before anything is read, a name whose format cannot be written."""
    if path.suffix.lower() != ".svg":
        raise OptionError(
            f"--timeline {path}: only .svg can be written, this name ends in {path.suffix or 'nothing'!r}; "
            f"try {path.with_suffix('.svg').name}, which every browser opens"
        )


def render_timeline(
    spans: Sequence[Span],
    *,
    title: str,
    facts: Mapping[str, str],
    origin_s: float | None = None,
    end_s: float | None = None,
) -> str:
    """The spans as an SVG document of less than 500 kB.

    The axis counts seconds from `origin_s` (the first span's start unless given) and ends at `end_s`: unless given,
    shortly after the last mark, or with the last span where there is none. `facts` (name -> value) stand below the
    title.
    """
    scale = _scale(spans, origin_s, end_s)
    merge_px = 0.5
    while True:
        document = _document(spans, scale, title, facts, merge_px)
        if len(document.encode()) <= _LIMIT_NBYTES or merge_px > _WIDTH:
            return document
        merge_px *= 2


def merged_bars(spans: Iterable[Span], *, pixels_per_s: float, merge_px: float) -> list[Bar]:
    """The bars of one row: neighbours closer than `merge_px` become one where they are of one layer, or thinner than
    `merge_px` themselves (then up to four times that). The number of bars is bounded by the picture's width, not by the
    number of spans."""
    bars: list[Bar] = []
    for span in spans:
        thin = span.seconds * pixels_per_s < merge_px
        bar = Bar(span.lane, span.layer, span.name, span.start_s, span.end_s, span.seconds, thin=thin)
        last = bars[-1] if bars else None
        if last and _merges(last, bar, merge_px / pixels_per_s):
            bars[-1] = _merge(last, bar)
        else:
            bars.append(bar)
    return bars


def tick_seconds(length_s: float) -> float:
    """The distance between two ticks, 1, 2 or 5 times a power of ten, so that an axis has between 5 and 13 of them."""
    rough = max(length_s, 1e-6) / 12
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough)


def _scale(spans: Sequence[Span], origin_s: float | None, end_s: float | None) -> Scale:
    start_s = origin_s if origin_s is not None else min((span.start_s for span in spans), default=0.0)
    if end_s is None:
        last_s = max((span.end_s for span in spans), default=start_s)
        marks = [span.start_s for span in spans if span.lane == MARK]
        end_s = min(last_s, start_s + (max(marks) - start_s) * 1.08) if marks else last_s
    return Scale(start_s, max(end_s, start_s + 1e-3))


def _document(spans: Sequence[Span], scale: Scale, title: str, facts: Mapping[str, str], merge_px: float) -> str:
    visible = [span for span in spans if span.start_s <= scale.end_s and span.end_s >= scale.start_s]
    layers = _layer_numbers(visible)
    fact_lines = _fact_lines(facts)
    top = 62 + 18 * len(fact_lines) + 16 * _mark_levels(visible, scale)
    lanes = _stalls_in_forward(lane_rows(visible))
    body: list[str] = []
    y = top
    for lane, rows in lanes.items():
        body += _lane(lane, rows, y, scale, layers, merge_px, busy_seconds(visible, lane))
        y += len(rows) * (_ROW_HEIGHT + _ROW_GAP) + _LANE_GAP
    height = y + 62
    return "\n".join([
        *_header(height, title, fact_lines),
        *_axis(scale, top - 6, y - 4),
        *body,
        *_marks(visible, scale, top - 6, y - 4),
        *_legend(lanes, visible, y + 44),
        "</svg>\n",
    ])  # fmt: skip


def _layer_numbers(spans: Sequence[Span]) -> dict[str, int]:
    """The layers in the order in which they first appear; a bar's tint is its layer's number modulo two."""
    names = dict.fromkeys(span.layer for span in sorted(spans, key=lambda span: span.start_s) if span.layer)
    return {name: number for number, name in enumerate(names)}


def _stalls_in_forward(lanes: dict[str, list[list[Span]]]) -> dict[str, list[list[Span]]]:
    """Few enough rows for every lane, and the stalls on top of the forward lane: the same thread waits and computes."""
    stalls = [span for row in lanes.pop("stall", []) for span in row]
    if stalls:
        forward = lanes.setdefault("forward", [[]])
        forward[0] = [*forward[0], *stalls]
    return {lane: _at_most_max_rows(lanes[lane]) for lane in lanes_in_order(lanes)}


def _at_most_max_rows(rows: list[list[Span]]) -> list[list[Span]]:
    if len(rows) <= _MAX_ROWS:
        return rows
    shared = sorted((span for row in rows[_MAX_ROWS - 1 :] for span in row), key=lambda span: span.start_s)
    return [*rows[: _MAX_ROWS - 1], shared]


def _merges(last: Bar, bar: Bar, gap_s: float) -> bool:
    if last.lane != bar.lane or bar.start_s - last.end_s >= gap_s:
        return False
    return last.layer == bar.layer or (last.thin and bar.thin and bar.end_s - last.start_s < 4 * gap_s)


def _merge(last: Bar, bar: Bar) -> Bar:
    return replace(
        last,
        end_s=max(last.end_s, bar.end_s),
        busy_s=last.busy_s + bar.busy_s,
        count=last.count + 1,
        thin=last.thin and bar.thin,
    )


def _lane(
    lane: str,
    rows: list[list[Span]],
    top: float,
    scale: Scale,
    layers: Mapping[str, int],
    merge_px: float,
    busy_s: float,
) -> list[str]:
    middle = top + (len(rows) * (_ROW_HEIGHT + _ROW_GAP) - _ROW_GAP) / 2 + 4
    parts = [
        f'<text x="{_LEFT - 12}" y="{middle:g}" text-anchor="end" class="lane">{escape(lane)}</text>',
        f'<text x="{_WIDTH - _RIGHT + 10}" y="{middle:g}" class="faint">{busy_s:.2f} s busy</text>',
    ]
    for number, row in enumerate(rows):
        y = top + number * (_ROW_HEIGHT + _ROW_GAP)
        bars = merged_bars(row, pixels_per_s=scale.pixels_per_s, merge_px=merge_px)
        for bar in bars:
            parts += _bar(bar, y, scale, layers)
    return parts


def _bar(bar: Bar, y: float, scale: Scale, layers: Mapping[str, int]) -> list[str]:
    left, right = scale.x(bar.start_s), scale.x(bar.end_s)
    width = max(right - left, 0.6)
    number = layers.get(bar.layer, 0)
    tooltip = f"{bar.lane}: {bar.layer or bar.name}, {bar.end_s - bar.start_s:.4f} s"
    if bar.count > 1:
        tooltip += f", {bar.count} spans"
    box = f'x="{left:.1f}" y="{y:g}" width="{width:.1f}" height="{_ROW_HEIGHT}"'
    fill = f'fill="{_fill(bar.lane, number)}"{_opacity(bar)}'
    parts = [f"<rect {box} {fill}><title>{escape(tooltip)}</title></rect>"]
    label = _label(bar, width)
    if label:
        ink = "#ffffff" if number % 2 == 0 else _TEXT
        parts.append(f'<text x="{left + width / 2:.1f}" y="{y + 14:g}" class="bar" fill="{ink}">{escape(label)}</text>')
    return parts


def _fill(lane: str, number: int) -> str:
    return _STALL_FILL if lane == "stall" else _TINTS.get(lane, _OTHER_TINTS)[number % 2]


def _opacity(bar: Bar) -> str:
    """Paler where a merged bar hides gaps."""
    share = bar.busy_s / max(bar.end_s - bar.start_s, 1e-9)
    return f' fill-opacity="{max(share, 0.25):.2f}"' if bar.count > 1 and share < 0.95 else ""


def _label(bar: Bar, width: float) -> str:
    """The layer's name where it fits, else its number, else nothing; 6.2 pixels a character."""
    if bar.lane == "stall":
        return ""
    name = bar.layer or bar.name
    return next((text for text in (name, name.rpartition(".")[2]) if len(text) * 6.2 + 6 <= width), "")


def _header(height: float, title: str, fact_lines: Sequence[str]) -> list[str]:
    size = f'width="{_WIDTH}" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONTS}" font-size="12" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect width="{_WIDTH}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="20" y="32" font-size="18" font-weight="600">{escape(title)}</text>',
        *(f'<text x="20" y="{54 + 18 * n}" class="faint">{escape(line)}</text>' for n, line in enumerate(fact_lines)),
    ]


def _fact_lines(facts: Mapping[str, str]) -> list[str]:
    """The facts joined into lines that fit the picture's width (165 characters)."""
    lines: list[str] = []
    for name, value in facts.items():
        fact = f"{name} {value}"
        if lines and len(lines[-1]) + len(fact) < 165:
            lines[-1] += f"  ·  {fact}"
        else:
            lines.append(fact)
    return lines


def _axis(scale: Scale, top: float, bottom: float) -> list[str]:
    step = tick_seconds(scale.end_s - scale.start_s)
    count = int((scale.end_s - scale.start_s) / step + 1e-6) + 1
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    parts: list[str] = []
    for number in range(count):
        x = scale.x(scale.start_s + number * step)
        parts.append(f'<line x1="{x:.1f}" y1="{top:g}" x2="{x:.1f}" y2="{bottom:g}" stroke="{_GRID}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle" class="faint">'
            f"{number * step:.{decimals}f}</text>"
        )
    parts.append(f'<text x="{scale.right + 10:g}" y="{bottom + 16:g}" class="faint">seconds</text>')
    return parts


def _mark_levels(spans: Sequence[Span], scale: Scale) -> int:
    return max((level for _, level in _placed_marks(spans, scale)), default=-1) + 1


def _placed_marks(spans: Sequence[Span], scale: Scale) -> list[tuple[Span, int]]:
    """Each mark with the level of its words: level 0 lies lowest, and words on one level do not touch."""
    ends: list[float] = []
    placed: list[tuple[Span, int]] = []
    for span in sorted((span for span in spans if span.lane == MARK), key=lambda span: span.start_s):
        half = len(_mark_words(span, scale)) * 6.6 / 2 + 4
        x = min(max(scale.x(span.start_s), half), _WIDTH - half)
        level = next((level for level, end in enumerate(ends) if end <= x - half), len(ends))
        ends[level : level + 1] = [x + half]
        placed.append((span, level))
    return placed


def _mark_words(span: Span, scale: Scale) -> str:
    return f"{span.name} {span.start_s - scale.start_s:.2f} s"


def _marks(spans: Sequence[Span], scale: Scale, top: float, bottom: float) -> list[str]:
    parts: list[str] = []
    for span, level in _placed_marks(spans, scale):
        x, y = scale.x(span.start_s), top - 4 - 16 * level
        half = len(_mark_words(span, scale)) * 6.6 / 2 + 4
        words_x = min(max(x, half), _WIDTH - half)
        parts.append(
            f'<line x1="{x:.1f}" y1="{y + 3:g}" x2="{x:.1f}" y2="{bottom:g}" stroke="{_TEXT}" stroke-dasharray="4 3"/>'
        )
        parts.append(
            f'<text x="{words_x:.1f}" y="{y:g}" text-anchor="middle" class="mark">'
            f"{escape(_mark_words(span, scale))}</text>"
        )
    return parts


def _legend(lanes: Iterable[str], spans: Sequence[Span], y: float) -> list[str]:
    entries = [(lane, *_TINTS.get(lane, _OTHER_TINTS)) for lane in lanes]
    if any(span.lane == "stall" for span in spans):
        entries.append(("forward waits", _STALL_FILL, _STALL_FILL))
    parts: list[str] = []
    x = float(_LEFT)
    for words, first, second in entries:
        parts.append(f'<rect x="{x:g}" y="{y - 10:g}" width="11" height="11" fill="{first}"/>')
        parts.append(f'<rect x="{x + 11:g}" y="{y - 10:g}" width="11" height="11" fill="{second}"/>')
        parts.append(f'<text x="{x + 28:g}" y="{y:g}">{escape(words)}</text>')
        x += 28 + len(words) * 6.6 + 22
    parts.append(f'<text x="{x:g}" y="{y:g}" class="faint">two tints: layers in turn</text>')
    return parts
