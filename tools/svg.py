"""Small SVG pictures for light and dark pages: shapes with classes, and a sheet that knows both modes."""

from pathlib import Path
from xml.sax.saxutils import escape

# class: (property, on a light page, on a dark page)
_SHEET = {
    "page": [("fill", "#ffffff", "#0d1117")],
    "card": [("fill", "#f6f8fa", "#151b23"), ("stroke", "#d1d9e0", "#3d444d")],
    "ink": [("fill", "#1f2328", "#f0f6fc")],
    "muted": [("fill", "#59636e", "#9198a1")],
    "rule": [("stroke", "#d1d9e0", "#3d444d")],
    "flow": [("stroke", "#1f2328", "#d1d7e0")],
    "tip": [("fill", "#1f2328", "#d1d7e0")],
    "stage": [("fill", "#4285f4", "#4c8df6")],
    "verify": [("fill", "#2da44e", "#3fb950")],
    "commit": [("fill", "#d4a000", "#e3b341")],
    "flush": [("fill", "#db6d00", "#f0883e")],
    "fold": [("fill", "#cf222e", "#f85149")],
    "other": [("fill", "#9aa0a6", "#6e7681")],
    "store": [("fill", "#ddf4ff", "#12263a"), ("stroke", "#54aeff", "#388bfd")],
    "kernel": [("fill", "#dafbe1", "#12261e"), ("stroke", "#4ac26b", "#2ea043")],
}


class Picture:
    """Shapes in order; `write` makes the file.

    Colours are attributes, for viewers that know no style sheet, and a sheet overrides them on a dark page.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []
        self.rect(0, 0, width, height, "page", round=8)

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, *, round: float = 0, tip: str = ""
    ) -> None:
        """A box; `tip` shows under the mouse."""
        shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{round}" {_look(kind)}'
        self._parts.append(f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>")

    def text(self, x: float, y: float, text: str, *, kind="ink", size=13, anchor="start", bold=False) -> None:
        """One line; y is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}"{weight} {_look(kind)}>'
            f"{escape(text)}</text>"
        )

    def line(self, points: list[tuple[float, float]], *, kind="flow", dashed=False, arrow=False, width=1.5) -> None:
        """Straight pieces through points."""
        path = "M" + " L".join(f"{x:.2f} {y:.2f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path d="{path}" fill="none" stroke-width="{width}"{dash} {_look(kind)}/>')
        if arrow:
            self._tip(points[-2], points[-1])

    def _tip(self, before: tuple[float, float], at: tuple[float, float]) -> None:
        dx, dy = at[0] - before[0], at[1] - before[1]
        length = (dx * dx + dy * dy) ** 0.5
        dx, dy = dx / length, dy / length
        back = (at[0] - 8 * dx, at[1] - 8 * dy)
        corners = (at, (back[0] - 4 * dy, back[1] + 4 * dx), (back[0] + 4 * dy, back[1] - 4 * dx))
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in corners)
        self._parts.append(f'<polygon points="{points}" {_look("tip")}/>')

    def write(self, path: Path) -> None:
        """The whole file."""
        dark = "".join(f".{kind}{{{';'.join(f'{p}:{d}' for p, _, d in rules)}}}" for kind, rules in _SHEET.items())
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>\n"
        )
        path.write_text(head + "\n".join(self._parts) + "\n</svg>\n", encoding="utf-8")


def _look(kind: str) -> str:
    """Class, and the colours of a light page as attributes."""
    return f'class="{kind}" ' + " ".join(f'{name}="{light}"' for name, light, _ in _SHEET[kind])
