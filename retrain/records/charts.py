"""Charts as SVG text: lines with bands, dots with intervals, histograms; a page of ``record.html`` adds ``charts.css``.

Colours are the page's palette (``--c1`` … ``--c8``), so that a chart follows dark mode and paper. No series is marked
by colour alone: each has its marker and dash, and its name stands at the end of its line. Labels are plain text and
are escaped here; numbers that are None are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from retrain.util.text import escape, minus, percent

WIDTH = 560  # Units of a chart's view box; the page scales it to its column
LETTER = 6.7  # Width of a letter at the charts' 12 px, for room and collisions; real fonts differ by some 10 %
BOLD = 1.15 * LETTER  # Width of a bold letter
COLOURS = 8
LINES_HEIGHT = 260.0
BINS = 24  # Bars of a histogram
DASHES = ("", "6 3", "2 3", "9 3 2 3")
MARKS: tuple[Callable[[float, float, float], str], ...] = (
    lambda x, y, r: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"',
    lambda x, y, r: f'<rect x="{x - r * 0.9:.1f}" y="{y - r * 0.9:.1f}" width="{r * 1.8:.1f}" height="{r * 1.8:.1f}"',
    lambda x, y, r: f'<path d="M{x:.1f} {y - r * 1.2:.1f}L{x + r * 1.15:.1f} {y + r * 0.85:.1f}H{x - r * 1.15:.1f}Z"',
    lambda x, y, r: (
        f'<path d="M{x:.1f} {y - r * 1.3:.1f}l{r * 1.3:.1f} {r * 1.3:.1f}l-{r * 1.3:.1f} {r * 1.3:.1f}'
        f'l-{r * 1.3:.1f} -{r * 1.3:.1f}Z"'
    ),
)


@dataclass
class Series:
    """One line: ``points`` (x, y), a band of (x, low, high), and thin lines behind it (one for each seed).

    ``index`` chooses colour, marker and dash. ``dots`` marks each point; thin lines get small ones. ``loose`` are
    evaluations of a part of the problems, small and open; no line connects them.
    """

    name: str
    index: int
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()
    thin: Sequence[Sequence[tuple[float, float]]] = ()
    dots: bool = False
    loose: Sequence[tuple[float, float]] = ()


@dataclass
class Row:
    """One row of a dot chart: a dot for each value (with what to say of it), their centre and its interval, and a wider
    one around it."""

    name: str
    index: int
    values: Sequence[tuple[float, str]] = ()
    centre: float | None = None
    interval: Sequence[float] | None = None
    note: str = ""
    wider: Sequence[float] | None = None


@dataclass(frozen=True)
class Axis:
    """A linear axis from ``low`` to ``high`` over pixels, with ticks at round numbers."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...] = field(default=())

    @classmethod
    def around(
        cls, values: Sequence[float], start: float, end: float, *, wanted: int = 5, limits: tuple | None = None
    ) -> Axis:
        """The axis for these values: its ends are ticks. ``limits`` (low, high, either None) are never passed."""
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if high - low < 1e-12 * max(1.0, abs(high)):
            pad = abs(high) * 0.1 or 0.5
            low, high = low - pad, high + pad
        step = nice_step((high - low) / wanted)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if limits and limits[0] is not None:
            first = max(first, math.ceil(limits[0] / step - 1e-9))
        if limits and limits[1] is not None:
            last = min(last, math.floor(limits[1] / step + 1e-9))
        ticks = tuple(step * i for i in range(first, max(last, first + 1) + 1))
        floor, ceiling = limits or (None, None)
        low, high = min(ticks[0], low), max(ticks[-1], high)
        low = low if floor is None else max(low, floor)
        high = high if ceiling is None else min(high, ceiling)
        return cls(low, high, start, end, ticks)

    def __call__(self, value: float) -> float:
        """Where the value stands, in pixels; values outside are held at the ends."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def nice_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def tick_text(value: float, step: float, unit: str = "") -> str:
    """A tick's number with as many decimals as the step needs; ``%`` takes shares, ``points`` differences of shares."""
    if unit in ("%", "points"):
        value, step = 100.0 * value, 100.0 * step
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6
    text = f"{value:,.{decimals}f}"
    text = f"+{text}" if unit == "points" and value > step / 2 else text
    return minus(text) + ("%" if unit == "%" else "")


def colour(index: int) -> str:
    return f"var(--c{index % COLOURS + 1})"


def mark(index: int, x: float, y: float, radius: float, hint: str = "", empty: bool = False) -> str:
    """One marker in the shape and colour of its series, with what is shown when a pointer is over it; ``empty``: its
    outline alone."""
    shape = MARKS[index % len(MARKS)](x, y, radius)
    title = f"<title>{escape(hint)}</title>" if hint else ""
    paint = f'fill="none" stroke="{colour(index)}"' if empty else f'class="dot" fill="{colour(index)}"'
    return f"{shape} {paint}>{title}</{shape[1:].split(' ', 1)[0]}>"


def chart(height: float, label: str, parts: Sequence[str]) -> str:
    """The SVG element around its parts; ``label`` says in words what is drawn."""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}" '
        f'preserveAspectRatio="xMinYMin meet">{"".join(parts)}</svg>'
    )


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_title: str,
    unit: str = "",
    limits: tuple[float | None, float | None] | None = None,
) -> str:
    """Lines over steps: each with its band, its seeds as thin lines, and its name at its end."""
    names = max((len(shortened(each.name)) for each in series), default=0) * BOLD if len(series) > 1 else 0
    x, y = _axes(series, names, unit, limits)
    parts = _ticks(y, unit, x.start - 6, (x.start, x.end), upright=True) + _ticks(x, "", LINES_HEIGHT - 20)
    parts.append(_text((x.start + x.end) / 2, LINES_HEIGHT - 4, x_title, "middle"))
    for each in series:
        parts += _spread_of(each, x, y)
    for each in series:
        parts += _mean_line(each, x, y, unit)
    if len(series) > 1:
        ends = [(y(each.points[-1][1]), each) for each in series if each.points]
        for at, each in spread_labels(ends, 14, LINES_HEIGHT - 34):
            parts.append(_name(WIDTH - 8 - names, at + 4, shortened(each.name), colour=colour(each.index)))
    return chart(LINES_HEIGHT, label, parts)


def _axes(
    series: Sequence[Series], names: float, unit: str, limits: tuple[float | None, float | None] | None
) -> tuple[Axis, Axis]:
    """Return the axes of a line chart with a margin of the width ``names`` on the right."""
    spots = [spot for each in series for line in (each.points, each.loose, *each.thin) for spot in line]
    ends = [end for each in series for _, low, high in each.band for end in (low, high)]
    xs, ys = [x for x, _ in spots], [y for _, y in spots] + ends
    y = Axis.around(ys, LINES_HEIGHT - 36, 12, limits=limits)
    x = Axis.around(xs, _room(y, unit), WIDTH - 14 - names, wanted=6)
    if xs:
        low, high = min(xs), max(xs)
        x = Axis(low, max(high, low + 1e-9), x.start, x.end, tuple(t for t in x.ticks if low <= t <= high))
    return x, y


def _spread_of(series: Series, x: Axis, y: Axis) -> list[str]:
    """Return the band of a line, and its seeds as thin lines."""
    parts = []
    if series.band:
        edge = [(x(a), y(high)) for a, _, high in series.band] + [(x(a), y(low)) for a, low, _ in reversed(series.band)]
        parts.append(f'<path class="band" fill="{colour(series.index)}" d="{_path(edge)}Z"/>')
    for thin in series.thin:
        spots = [(x(a), y(b)) for a, b in thin]
        parts.append(f'<path class="thin" stroke="{colour(series.index)}" d="{_path(spots)}"/>')
        parts += [mark(series.index, *spot, 1.7) for spot in spots if series.dots]
    return parts


def _mean_line(series: Series, x: Axis, y: Axis, unit: str) -> list[str]:
    parts = []
    for a, b in series.loose:
        hint = f"{series.name}: {tick_text(b, 1e-3, unit)} at {a:g}, of a part of the problems"
        parts.append(mark(series.index, x(a), y(b), 2.4, hint, empty=True))
    dash = DASHES[series.index % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    spots = [(x(a), y(b)) for a, b in series.points]
    parts.append(f'<path class="line" stroke="{colour(series.index)}"{dashed} d="{_path(spots)}"/>')
    if series.dots or len(spots) == 1:
        for spot, (a, b) in zip(spots, series.points, strict=True):
            parts.append(mark(series.index, *spot, 3.6, f"{series.name}: {tick_text(b, 1e-3, unit)} at {a:g}"))
    return parts


def shortened(name: str, most: int = 26) -> str:
    """A name short enough for the margin, without its middle: conditions of a campaign often begin with the same modes,
    and differ at their ends."""
    head = (most - 1) // 3
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def spread_labels(ends: Sequence[tuple[float, Series]], top: float, bottom: float) -> list[tuple[float, Series]]:
    """Places for labels at these heights so that none covers another: pushed down, then back up from the bottom."""
    placed = sorted(ends, key=lambda end: end[0])
    heights = [max(top, at) for at, _ in placed]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + 14)
    for i in range(len(heights) - 1, -1, -1):
        most = bottom if i == len(heights) - 1 else heights[i + 1] - 14
        heights[i] = min(heights[i], most)
    return [(at, each) for at, (_, each) in zip(heights, placed, strict=True)]


def dot_chart(
    rows: Sequence[Row], *, label: str, x_title: str, unit: str = "", zero: bool = False, margin: float | None = None
) -> str:
    """One row for each condition: every seed a dot, the mean a large one, its interval a bar, a wider one a thin line.

    ``zero`` draws the line of "no difference", ``margin`` shades ± what does not matter.
    """
    pitch, top = max(46.0, min(80.0, 214.0 / max(1, len(rows)))), 10.0
    height = top + pitch * len(rows) + 36
    numbers = [value for row in rows for value, _ in row.values]
    numbers += [
        end for row in rows for end in (*(row.interval or ()), *(row.wider or ()), row.centre) if end is not None
    ]
    numbers += [0.0] if zero else []
    numbers += [margin, -margin] if margin else []
    x = Axis.around(numbers, 16, WIDTH - 16, wanted=6)
    bottom = height - 30
    parts = []
    if margin:
        hint = f"differences that do not matter: ±{tick_text(margin, 1e-3, unit)}"
        parts.append(_box(x(-margin), top, x(margin) - x(-margin), bottom - top, 'class="margin"', hint))
    parts += _ticks(x, unit, bottom + 14, (top, bottom))
    if zero:
        parts.append(_line(x(0), x(0), top, bottom, 'class="zero"'))
    for place, row in enumerate(rows):
        parts += _dots(row, x, top + pitch * place, pitch)
    parts.append(_text((x.start + x.end) / 2, height - 2, x_title, "middle"))
    return chart(height, label, parts)


def _dots(row: Row, x: Axis, top: float, pitch: float) -> list[str]:
    """Return one row of a dot chart, which begins at ``top``."""
    stroke, middle = f'stroke="{colour(row.index)}"', top + pitch / 2 + 7
    parts = [_name(16, top + 13, shortened(row.name, 44))]
    if row.note:
        parts.append(_text(WIDTH - 16, top + 13, shortened(row.note, 42), "end"))
    if row.wider:
        low, high = (x(end) for end in row.wider)
        parts.append(_line(low, high, middle, middle, f'{stroke} stroke-width="1.5" opacity=".7"'))
    if row.interval:
        low, high = (x(end) for end in row.interval)
        parts.append(_line(low, high, middle, middle, f'{stroke} stroke-width="5" stroke-linecap="butt" opacity=".38"'))
    for i, (value, hint) in enumerate(row.values):
        wobble = (i % 3 - 1) * 4.0 if len(row.values) > 1 else 0.0
        parts.append(mark(row.index, x(value), middle + wobble, 3.2, hint))
    if row.centre is not None:
        parts.append(_line(x(row.centre), x(row.centre), middle - 9, middle + 9, f'{stroke} stroke-width="3"'))
    return parts


def pair_chart(names: Sequence[str], lines: Sequence[tuple[str, Sequence[float | None]]], *, label: str, unit: str = "",
               limits: tuple[float | None, float | None] | None = None) -> str:  # fmt: skip
    """Conditions side by side, each seed a line through its values: what pairing by seed sees."""
    bottom = 224.0
    values = [value for _, row in lines for value in row if value is not None]
    y = Axis.around(values, bottom, 12, limits=limits)
    left = _room(y, unit)
    columns = [left + (WIDTH - left - 20) * (i + 0.5) / len(names) for i in range(len(names))]
    parts = _ticks(y, unit, left - 6, (left, WIDTH - 14), upright=True)
    marks = []
    for name, row in lines:
        spots = [(i, columns[i], y(value), value) for i, value in enumerate(row) if value is not None]
        path = _path([(across, up) for _, across, up, _ in spots])
        parts.append(f'<path class="pair" d="{path}"><title>{escape(name)}</title></path>')
        marks += [
            mark(i, across, up, 3.8, f"{names[i]}, {name}: {tick_text(value, 1e-3, unit)}")
            for i, across, up, value in spots
        ]
    parts += marks
    # Names too long to stand side by side take turns at several lines. Of a line's room the outermost names, which are
    # moved inwards, take a part: n turns leave each (2n + 1)/3 times the room of one.
    longest, room = max(map(len, names)), (WIDTH - left) / len(names) / BOLD
    turns = next((n for n in (1, 2, 3) if (2 * n + 1) / 3 * room >= longest), 4)
    for i, name in enumerate(names):
        text = shortened(name, max(6, int((2 * turns + 1) / 3 * room)))
        half = len(text) * BOLD / 2
        at = min(max(columns[i], half), WIDTH - half)
        parts.append(_name(at, bottom + 22 + 16 * (i % turns), text, "middle", colour(i)))
    return chart(bottom + 20 + 16 * turns, label, parts)


def histogram(groups: Sequence[tuple[str, int, Sequence[float]]], *, label: str, x_title: str) -> str:
    """The distribution of each condition, one under the other on the same axis: shares of its completions."""
    everything = [value for _, _, values in groups for value in values]
    pitch, top = 62.0, 4.0
    height = top + pitch * len(groups) + 34
    x = Axis.around(everything, 16, WIDTH - 16, wanted=6)
    width = (x.high - x.low) / BINS
    shares = []
    for _, _, values in groups:
        counts = [0] * BINS
        for value in values:
            counts[min(BINS - 1, int((value - x.low) / width))] += 1
        shares.append([count / max(1, len(values)) for count in counts])
    tallest = max((max(row) for row in shares), default=1.0) or 1.0
    parts = _ticks(x, "", height - 16, (top, height - 30))
    for place, ((name, index, values), row) in enumerate(zip(groups, shares, strict=True)):
        floor = top + pitch * (place + 1)
        for i, share in enumerate(row):
            if share > 0:
                tall = share / tallest * (pitch - 20)
                left, right = x(x.low + i * width), x(x.low + (i + 1) * width)
                hint = f"{name}: {percent(share, 1)} from {tick_text(x.low + i * width, width)}"
                fill = f'fill="{colour(index)}" opacity=".8"'
                parts.append(_box(left + 0.5, floor - tall, max(1.0, right - left - 1), tall, fill, hint))
        parts.append(_line(16, WIDTH - 16, floor, floor))
        mean = f", mean {sum(values) / len(values):.3g}" if values else ""
        parts.append(_name(16, floor - pitch + 16, shortened(name, 44), muted=mean))
    parts.append(_text(WIDTH / 2, height - 2, x_title, "middle"))
    return chart(height, label, parts)


def _step(axis: Axis) -> float:
    return axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 1.0


def _room(axis: Axis, unit: str) -> float:
    """Where the plot begins, right of the labels of an upright axis."""
    return 14 + max(len(tick_text(tick, _step(axis), unit)) for tick in axis.ticks) * LETTER


def _path(spots: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if i else 'M'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(spots))


def _line(x1: float, x2: float, y1: float, y2: float, attributes: str = 'class="grid"') -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {attributes}/>'


def _box(x: float, y: float, width: float, height: float, attributes: str, hint: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect {place} {attributes}><title>{escape(hint)}</title></rect>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _name(x: float, y: float, text: str, anchor: str = "start", colour: str = "", muted: str = "") -> str:
    """The name of a series or row in bold, with further words that are not."""
    style = f' style="fill:{colour}"' if colour else ""
    more = f'<tspan font-weight="400" fill="var(--muted)">{escape(muted)}</tspan>' if muted else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="name" {place}{style}>{escape(text)}{more}</text>'


def _ticks(
    axis: Axis, unit: str, label_at: float, lines: tuple[float, float] | None = None, *, upright: bool = False
) -> list[str]:
    """The labels of an axis, and where wanted a grid line at each from one end of ``lines`` to the other.

    ``label_at`` is the height of the labels, of an ``upright`` axis their right end.
    """
    parts = []
    for tick in axis.ticks:
        at, text = axis(tick), tick_text(tick, _step(axis), unit)
        if lines:
            parts.append(_line(*lines, at, at) if upright else _line(at, at, *lines))
        parts.append(_text(label_at, at + 4, text, "end") if upright else _text(at, label_at, text, "middle"))
    return parts
