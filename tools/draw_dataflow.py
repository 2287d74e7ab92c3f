"""The data flow of a deferred step: what each launch reads and writes of the static memory. The README's picture.

python tools/draw_dataflow.py --out docs/dataflow.svg
"""

import argparse
from itertools import pairwise
from pathlib import Path

from arguments import output_file
from svg import Picture

WIDTH, HEIGHT = 900, 524
# The launches of a step from left to right: x, width, heading, two lines, whether graphrt's own.
TOP, TALL = 112, 88
LAUNCHES = {
    "stage": (28, 130, "stage", ("one launch copies", "the step's metadata"), True),
    "conv": (182, 146, "convolution", ("of the window,", "from its history"), True),
    "verify": (352, 180, "verify", ("replay pending records,", "then the whole window"), True),
    "sample": (578, 120, "sample", ("the model's part:", "how many stand"), False),
    "commit": (722, 146, "commit", ("writes one number", "for each request"), True),
}
# The stores below: x, width, heading, two lines.
BELOW, HIGH = 336, 78
STORES = {
    "inputs": (28, 130, "static inputs", ("slots, record rows,", "offsets")),
    "history": (182, 146, "convolution state", ("W - 1 + Q columns", "a channel and slot")),
    "checkpoint": (352, 158, "checkpoint S", ("64 KiB a head,", "FP32, one a request")),
    "records": (534, 164, "records u, k, g", ("1 KiB a token and head,", "those of one window")),
    "pending": (722, 146, "pending", ("a count a request:", "accepted, not in S")),
}


def box(picture: Picture, x: float, y: float, width: float, height: float, kind: str, heading: str, lines) -> None:
    """A titled box with small lines."""
    picture.rect(x, y, width, height, kind, round=8)
    picture.text(x + width / 2, y + 24, heading, anchor="middle", bold=True, size=14)
    for i, line in enumerate(lines):
        picture.text(x + width / 2, y + 45 + 17 * i, line, kind="muted", anchor="middle", size=12)


def draw(out: Path) -> None:
    """Write the picture."""
    p = Picture(WIDTH, HEIGHT, "Data flow of a deferred decode step")
    p.text(28, 36, "A deferred step is one recording: the state is read and written once", bold=True, size=16)
    p.rect(16, 78, 868, 134, "card", round=10)
    p.text(182, 98, "for every KDA layer", kind="muted", size=12)
    p.line([(180, 104), (534, 104)], kind="rule", width=2)
    for x, width, heading, lines, own in LAUNCHES.values():
        box(p, x, TOP, width, TALL, "kernel" if own else "page", heading, lines)
    middle = TOP + TALL / 2
    ends = [(x, x + width) for x, width, *_ in LAUNCHES.values()]
    for (_, right), (left, _) in pairwise(ends):
        p.line([(right + 2, middle), (left - 2, middle)], arrow=True)
    p.line([(795, TOP - 2), (795, 62), (93, 62), (93, TOP - 3)], arrow=True)
    p.text(788, 57, "k steps are k replays", kind="muted", size=12, anchor="end")

    for x, width, heading, lines in STORES.values():
        box(p, x, BELOW, width, HIGH, "store", heading, lines)
    p.text(28, BELOW + HIGH + 22, "static memory: allocated once, never moved", kind="muted", size=12)
    p.text(28, BELOW + HIGH + 40, "sizes for K = V = 128, 16-bit activations", kind="muted", size=12)

    def down(x: float, label: str, y: float, *, right: bool = True) -> None:
        p.line([(x, TOP + TALL + 2), (x, BELOW - 2)], arrow=True)
        p.text(x + (6 if right else -6), y, label, size=12, anchor="start" if right else "end")

    def up(x: float, label: str, y: float, *, right: bool = True) -> None:
        p.line([(x, BELOW - 2), (x, TOP + TALL + 2)], arrow=True)
        p.text(x + (6 if right else -6), y, label, size=12, anchor="start" if right else "end")

    down(60, "write", 282)
    up(222, "read", 282, right=False)
    down(288, "compact,", 256)
    p.text(294, 272, "append", size=12)
    up(396, "64 KiB", 314, right=False)
    down(438, "64 KiB,", 256)
    p.text(444, 272, "folded", size=12)
    # The records lie to the right of the verify: their arrows turn.
    p.line([(560, BELOW - 2), (560, 278), (510, 278), (510, TOP + TALL + 2)], arrow=True)
    p.text(566, 294, "n pending", size=12)
    p.line([(524, TOP + TALL + 2), (524, 240), (660, 240), (660, BELOW - 2)], arrow=True)
    p.text(652, 258, "Q new", size=12, anchor="end")
    p.line([(752, BELOW - 2), (752, 308), (496, 308), (496, TOP + TALL + 2)], arrow=True)
    p.text(738, 302, "n", size=12)
    down(810, "accepted", 282)

    # Everybody else's way to a state that is up to date.
    y = BELOW + HIGH + 60
    p.rect(352, y - 20, 346, 48, "card", round=8)
    p.text(525, y, "flush, drain, eager rows", anchor="middle", bold=True)
    p.text(525, y + 17, "fold records into S outside a verify", kind="muted", anchor="middle", size=12)
    p.line([(640, BELOW + HIGH + 2), (640, y - 22)], dashed=True, arrow=True)
    p.line([(795, BELOW + HIGH + 2), (795, y + 4), (700, y + 4)], dashed=True, arrow=True)
    p.line([(430, y - 22), (430, BELOW + HIGH + 2)], dashed=True, arrow=True)
    p.write(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file, default=Path("docs/dataflow.svg"))
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
