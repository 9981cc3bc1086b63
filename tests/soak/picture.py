"""The figures of a soak as a picture: lines over time, with a mark where something was killed. SVG, of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, TOP = 900, 180, 70, 28
COLOURS = ("#1f6feb", "#d1570a", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#57606a")


def panel(
    title: str, lines: Mapping[str, Line], marks: Sequence[float], top: int, until_s: float
) -> str:
    """One chart: its lines in the same colours everywhere, their names beside it, minutes below."""
    highest = max((value for line in lines.values() for _, value in line), default=1.0) * 1.1 or 1.0

    def place(at_s: float, value: float) -> str:
        x = LEFT + at_s / max(until_s, 1.0) * WIDTH
        return f"{x:.1f},{top + HEIGHT - value / highest * HEIGHT:.1f}"

    parts = [
        f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d0d7de"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = top + HEIGHT - share * HEIGHT
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{share * highest:.0f}</text>'
        )
    for at_s in marks:
        x = LEFT + at_s / max(until_s, 1.0) * WIDTH
        parts.append(f'<path d="M{x:.1f} {top}v{HEIGHT}" stroke="#ccc" stroke-dasharray="2 3"/>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(*point) for point in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        y = top + 14 + 15 * number
        parts.append(f'<text x="{LEFT + WIDTH + 8}" y="{y}" fill="{colour}">{escape(name)}</text>')
    step = max(1, round(until_s / 60 / 10))
    for minute in range(0, round(until_s / 60) + 1, step):
        x = LEFT + minute * 60 / max(until_s, 1.0) * WIDTH
        parts.append(
            f'<text x="{x:.0f}" y="{top + HEIGHT + 15}" text-anchor="middle">{minute}</text>'
        )
    return "\n".join(parts)


def picture(
    panels: Mapping[str, Mapping[str, Line]], marks: Sequence[float], until_s: float
) -> str:
    """Charts, one below the other; the time is in minutes."""
    each = HEIGHT + 70
    drawn = [
        panel(title, lines, marks, TOP + number * each, until_s)
        for number, (title, lines) in enumerate(panels.items())
    ]
    size = f'width="{WIDTH + 260}" height="{len(panels) * each + 20}"'
    style = 'font-family="sans-serif" font-size="12"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', '<rect width="100%" height="100%" fill="#fff"/>',
         *drawn, "</svg>\n"]
    )  # fmt: skip
