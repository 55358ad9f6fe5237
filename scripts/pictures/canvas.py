"""Draws shapes of SVG on a white background, which is readable on light and on dark pages."""

from __future__ import annotations

from html import escape

# One per group or rank; dark enough for white text.
COLOURS = ("#4c78a8", "#59a14f", "#b07a2b", "#9c5a8a", "#c44e52", "#3a8f8f", "#7a6bb0", "#8a6d3b")
FAINT, GREY, DARK = "#e6e6e6", "#777777", "#222222"


class Canvas:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []
        self.text(12, 24, title, size=15, bold=True)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 12,
        colour: str = DARK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        label: str = "",
        ink: str = "white",
        stroke: str = "none",
        size: int = 12,
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}" stroke="{stroke}"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + size * 0.36, label, size, ink, "middle")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.5, arrow: bool = False
    ) -> None:
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{width:g}"{head}/>'
        )

    def drawn(self) -> str:
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" font-family="sans-serif">',
                arrow,
                f'<rect width="{self.width}" height="{self.height}" fill="white"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )
