"""The matrix of cosines as SVG: for the page of a probe, and as a picture of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from retrain.record.charts import LETTER
from retrain.record.html import escape
from retrain.record.numbers import minus

CELL, HEIGHT = 46.0, 26.0
LEAST_TEXT = 8
"""Characters that the column of names has room for at least."""
MOST_TEXT = 34
LIGHT = {
    "ink": "#1d2129", "raised": "#ffffff", "muted": "#676d76", "c1": "#2f6db5", "c5": "#b8443c",
}  # fmt: skip
"""The page's light palette, for a picture without a page."""

Interval = dict[str, float | None]


def matrix_svg(
    labels: Sequence[str],
    cosines: Sequence[Sequence[Interval | None]],
    alone: bool = False,
    sampled: Sequence[int] = (),
) -> str:
    """One square for each pair, coloured by the angle (full: the same direction; none: a right angle; red: beyond).

    The diagonal, framed, is the noise floor: two batches under one condition. ``alone`` gives a file of its own.
    ``sampled``: whose rollouts each condition has; pairs that do not share them have a * instead of a cosine.
    """
    sampled = sampled or [0] * len(labels)
    names = [name if len(name) <= MOST_TEXT else f"{name[: MOST_TEXT - 1]}…" for name in labels]
    left = max(LEAST_TEXT, *(len(name) + 3 for name in names)) * 1.12 * LETTER + 8
    width, height = left + CELL * len(names) + 4, 24 + HEIGHT * len(names) + 4
    parts = []
    for i, name in enumerate(names):
        y = 24 + HEIGHT * i
        parts.append(f'<text class="name" x="0" y="{y + 17:.1f}">{i + 1} {escape(name)}</text>')
        parts.append(f'<text class="cell-text" x="{left + CELL * (i + 0.5):.1f}" y="16">{i + 1}</text>')
        for j, cell in enumerate(cosines[i]):
            if sampled[i] != sampled[j]:
                parts.append(_empty(left + CELL * j, y, "*"))
                continue
            parts += _cell(left + CELL * j, y, cell, f"{labels[i]} and {labels[j]}" if i != j else labels[i], i == j)
    style, attributes = "", 'class="chart"'
    if alone:
        variables = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
        style = (
            f"<style>svg{{{variables}font:12px system-ui,sans-serif;background:#fff}}.name{{font-weight:600}}"
            ".cell-text{text-anchor:middle}.floor{fill:none;stroke:var(--muted);stroke-width:1.4;stroke-dasharray:3 2}"
            "</style>"
        )
        attributes = f'xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
    label = "cosines of the conditions' updates on the same rollouts; on the diagonal those of two batches"
    return (
        f'<svg {attributes} viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(label)}">{style}{"".join(parts)}</svg>'
    )


def _cell(x: float, y: float, cell: Interval | None, names: str, floor: bool) -> list[str]:
    value = None if cell is None else cell["estimate"]
    if cell is None or value is None:
        return [_empty(x, y, "-")]
    closeness = 1.0 - math.acos(max(-1.0, min(1.0, value))) / (math.pi / 2)
    colour = "c1" if closeness >= 0 else "c5"
    place = f'x="{x:.1f}" y="{y:.1f}" width="{CELL:.1f}" height="{HEIGHT:.1f}"'
    ends = "" if cell["low"] is None or cell["high"] is None else f" [{cell['low']:.3f}, {cell['high']:.3f}]"
    hint = f"{names}{', two batches' if floor else ''}: {value:.4f}{ends}"
    parts = [
        f'<rect class="cell" {place} fill="var(--{colour})" fill-opacity="{0.85 * abs(closeness):.3f}">'
        f"<title>{escape(hint)}</title></rect>",
        f'<text class="cell-text" x="{x + CELL / 2:.1f}" y="{y + 17:.1f}">{_short(value)}</text>',
    ]
    if floor:
        inner = f'x="{x + 2:.1f}" y="{y + 2:.1f}" width="{CELL - 4:.1f}" height="{HEIGHT - 4:.1f}"'
        parts.append(f'<rect class="floor" {inner}/>')
    return parts


def _empty(x: float, y: float, sign: str) -> str:
    """A cell without a number."""
    return f'<text class="cell-text" x="{x + CELL / 2:.1f}" y="{y + 17:.1f}">{sign}</text>'


def _short(value: float) -> str:
    """Two digits, three close to 1."""
    return minus(f"{value:.3f}" if 0.985 <= value < 0.9995 else f"{value:.2f}")


def point_matrix(point: dict[str, Any], alone: bool = False) -> str:
    """The matrix of a point of a probe's report."""
    conditions = point["conditions"]
    sampled = [each["rollouts"] for each in conditions]
    return matrix_svg([each["label"] for each in conditions], point["cosines"], alone, sampled)
