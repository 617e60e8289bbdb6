"""A line plot as plain SVG: predictions as lines, measurements as dots, readable in light and dark pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 340, 64, 16, 40, 48
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #444; } .title { font-size: 14px; font-weight: 600; }
  .grid { stroke: #999; stroke-opacity: .25; } .predicted { fill: none; stroke: #b45309; stroke-width: 2; }
  .limit { fill: none; stroke: #888; stroke-width: 1.5; stroke-dasharray: 5 4; } .measured { fill: #1d4ed8; }
  @media (prefers-color-scheme: dark) {
    text { fill: #ccc; } .predicted { stroke: #f59e0b; } .measured { fill: #7aa2ff; } }
"""


@dataclass
class Series:
    """``kind`` is a class of the style sheet: predicted or limit (lines), measured (dots)."""

    name: str
    kind: str
    y: Sequence[float]


def write_plot(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    x: Sequence[float],
    series: Sequence[Series],
    limits: tuple[float, float] | None = None,
) -> None:
    """x is on a logarithmic axis to base 2, y on a linear one between ``limits``, without them from 0."""
    low, top = limits or (0.0, _nice(1.08 * max(max(s.y) for s in series)))
    first, last = math.log2(min(x)), math.log2(max(x))

    def place(a: float, b: float) -> tuple[float, float]:
        across = (math.log2(a) - first) / max(1e-9, last - first)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - (b - low) / (top - low) * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>']
    for i in range(5):
        value = low + (top - low) * i / 4
        _, y = place(x[0], value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for value in x:
        at, _ = place(value, low)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    for s in series:
        points = [place(a, b) for a, b in zip(x, s.y, strict=True)]
        if s.kind == "measured":
            parts += [f'<circle class="measured" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in points]
        else:
            parts.append(f'<polyline class="{s.kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
    for i, s in enumerate(series):
        at = LEFT + 10 + 150 * i
        mark = (
            f'<circle class="measured" cx="{at + 9}" cy="32" r="4"/>'
            if s.kind == "measured"
            else f'<line class="{s.kind}" x1="{at}" x2="{at + 18}" y1="32" y2="32"/>'
        )
        parts.append(f'{mark}<text x="{at + 24}" y="36">{escape(s.name)}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n", encoding="utf-8")


def _nice(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value)
