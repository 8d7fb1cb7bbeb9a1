"""The picture of a model under several schemes: SQNR by layer, a line for each scheme, and the totals, as an SVG drawn
without any library. [no-torch]

The upper panel shows the weights, the lower one the layers' outputs on the text. A mark at the upper panel's
right edge is a scheme's total. Where nothing differs (an infinite ratio) there is no point to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from pathlib import Path

from streaming.errors import OptionError
from streaming.quality_report import LayerQuality, Quality, SchemeQuality
from streaming.timeline import tick_seconds
from streaming.trace import write_whole

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 76, 60, 84
_PANEL, _PANEL_GAP, _ROW = 240, 62, 20
_TEXT, _FAINT, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_FONTS = "system-ui, 'DejaVu Sans', Helvetica, Arial, sans-serif"
_COLOURS = ("#2f6fb0", "#d9730d", "#2e8b4a", "#8f5aa8", "#d64545", "#16858a", "#7a5b45", "#52606d")
_DASHES = ("", "7 3", "2 3")  # of the first eight schemes, the next eight, ...
_COLUMNS = (_LEFT + 26, _LEFT + 330, _LEFT + 450, _LEFT + 570, _LEFT + 680, _LEFT + 800)  # of the table of totals


_Measure = Callable[[LayerQuality], float | None]


@dataclass(frozen=True)
class _Panel:
    """Where layers and decibels lie: `names` from left to right, [low, high] dB from the bottom up."""

    top: float
    names: Sequence[str]
    low: float
    high: float
    step: float  # of its ticks

    def x(self, name: str) -> float:
        step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(self.names) - 1)
        return _LEFT + self.names.index(name) * step

    def y(self, decibels: float) -> float:
        return self.top + _PANEL * (self.high - decibels) / (self.high - self.low)


def check_plot_path(path: Path) -> None:
    """Refuse, before anything is read, a name whose format cannot be written."""
    if path.suffix.lower() != ".svg":
        raise OptionError(
            f"--plot {path}: only .svg can be written, this name ends in {path.suffix or 'nothing'!r}; "
            f"try {path.with_suffix('.svg').name}, which every browser opens"
        )


def write_plot(path: Path, quality: Quality) -> None:
    """Write `render_plot`'s picture; the file appears whole or not at all. OptionError for other than .svg."""
    check_plot_path(path)
    write_whole(path, render_plot(quality))


def render_plot(quality: Quality) -> str:
    """The picture as an SVG document."""
    below = _TOP + 2 * _PANEL + 2 * _PANEL_GAP
    height = below + _ROW * (len(quality.schemes) + 2) + 12
    title = f"{quality.model}: {len(quality.schemes)} schemes against the wide weights ({quality.dtype})"
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONTS}" font-size="12" fill="{_TEXT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="32" font-size="18" font-weight="600">{escape(title)}</text>',
        f'<text x="20" y="54" fill="{_FAINT}">{escape(_facts(quality))}</text>',
        *_panel(quality, "weights", _TOP, attrgetter("weights_db"), totals=True),
        *_panel(quality, "outputs", _TOP + _PANEL + _PANEL_GAP, attrgetter("outputs_db"), totals=False),
        *_table(quality, below),
        "</svg>\n",
    ])  # fmt: skip


def _facts(quality: Quality) -> str:
    return f"{quality.positions:,} predicted tokens of {quality.text}; wide perplexity {quality.perplexity:.3f}"


def _panel(quality: Quality, what: str, top: float, measure: _Measure, *, totals: bool) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="{top - 8}" font-weight="600">SQNR of the {what}, dB</text>'
    lines = [_points(scheme, measure) for scheme in quality.schemes]
    values = [value for points in lines for value in points.values()]
    if not values:
        yield f'<text x="{_LEFT}" y="{top + 20}" fill="{_FAINT}">nothing differs</text>'
        return
    panel = _fitted(top, list(dict.fromkeys(name for points in lines for name in points)), values)
    yield from _axes(panel)
    for number, (scheme, points) in enumerate(zip(quality.schemes, lines, strict=True)):
        yield from _line(panel, scheme.quantization, number, what, points)
        if totals and points:
            yield _total(panel, scheme, number)


def _points(scheme: SchemeQuality, measure: _Measure) -> dict[str, float]:
    """Decibels by layer, where there are any that can be drawn."""
    found = {layer.name: measure(layer) for layer in scheme.layers}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _fitted(top: float, names: Sequence[str], values: Sequence[float]) -> _Panel:
    """The panel that holds all of them, between whole ticks."""
    step = tick_seconds(max(max(values) - min(values), 1.0) * 2)
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
    return _Panel(top, names, low, max(high, low + step), step)


def _axes(panel: _Panel) -> Iterator[str]:
    for number in range(round((panel.high - panel.low) / panel.step) + 1):
        value = panel.low + number * panel.step
        y = panel.y(value)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{value:g}</text>'
    every = -(-len(panel.names) // 32)
    for name in panel.names[::every]:
        label = name.removeprefix("layers.")
        x, y = panel.x(name), panel.top + _PANEL + 18
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="{_FAINT}">{escape(label)}</text>'
    yield f'<text x="{_LEFT - 10}" y="{panel.top + _PANEL + 18}" text-anchor="end" fill="{_FAINT}">layer</text>'


def _line(panel: _Panel, scheme: str, number: int, what: str, points: Mapping[str, float]) -> Iterator[str]:
    if not points:
        return
    path = " ".join(f"{panel.x(layer):.1f},{panel.y(value):.1f}" for layer, value in points.items())
    name = escape(scheme)
    yield f'<polyline class="{what}" points="{path}" fill="none" {_stroke(number)}><title>{name}</title></polyline>'
    for layer, value in points.items():
        place = f'cx="{panel.x(layer):.1f}" cy="{panel.y(value):.1f}" r="2.6" fill="{_colour(number)}"'
        yield f"<circle {place}><title>{name}, {escape(layer)}: {value:.2f} dB</title></circle>"


def _total(panel: _Panel, scheme: SchemeQuality, number: int) -> str:
    decibels = scheme.sqnr_db or 0.0
    y = panel.y(decibels)
    place = f'x1="{_WIDTH - _RIGHT + 8}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"'
    title = f"{escape(scheme.quantization)}: {decibels:.2f} dB in total"
    return f'<line class="total" {place} {_stroke(number)}><title>{title}</title></line>'


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _stroke(number: int) -> str:
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{_colour(number)}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _table(quality: Quality, top: float) -> Iterator[str]:
    """The totals, which are the legend too."""
    heads = ("scheme", "weights, dB", "KL, nats", "top-1", "perplexity")
    yield from _cells(heads, top + 14, fill=_FAINT)
    yield from _cells(("wide", "", "", "", f"{quality.perplexity:.3f}"), top + 14 + _ROW)
    for number, scheme in enumerate(quality.schemes):
        y = top + 14 + _ROW * (number + 2)
        yield f'<line x1="{_LEFT}" x2="{_LEFT + 20}" y1="{y - 4:g}" y2="{y - 4:g}" {_stroke(number)}/>'
        db = scheme.sqnr_db
        yield from _cells(
            (
                scheme.quantization,
                "-" if db is None else f"{db:.2f}",
                f"{scheme.kl_divergence:.6f}",
                f"{scheme.top1_agreement:.2%}",
                f"{scheme.perplexity:.3f}",
            ),
            y,
        )


def _cells(cells: Sequence[str], y: float, *, fill: str = _TEXT) -> Iterator[str]:
    for number, (cell, x) in enumerate(zip(cells, _COLUMNS, strict=False)):
        anchor = "start" if number == 0 else "end"
        yield f'<text x="{x}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(cell)}</text>'
