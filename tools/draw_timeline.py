"""One decode step as it ran, kernel by kernel, a lane for each phase: deferred and eager commit below each other.

Reads what `graphrt profile --torch` writes and draws the step of median length of each trace, all on one time axis,
and below each the first microseconds of it enlarged.

    graphrt profile --batch 16 --commit deferred --torch deferred.json
    graphrt profile --batch 16 --commit eager --torch eager.json
    python tools/draw_timeline.py "deferred commit=deferred.json" "eager commit=eager.json" --out timeline.svg
"""

import argparse
import math
import sys
from pathlib import Path

from arguments import output_file
from svg import Picture

from graphrt.trace import PHASES, Slice, load_trace, rows_of, slices_of, steps_of

WIDTH, LEFT, RIGHT = 1000, 120, 24
LANE, GAP = 16, 4


def median_step(slices: list[Slice]) -> list[Slice]:
    """The step of median length, from its first launch at time 0.

    The first step is left out where there are more: it may have waited for the profiler.

    Raises:
        ValueError: if the trace holds no step.
    """
    steps = steps_of(slices)
    if not steps:
        raise ValueError("no staging launch (graphrt_stage_kernel) in it: was it made by graphrt profile --torch?")
    steps = sorted(steps[1:] or steps, key=length_of)
    step = steps[len(steps) // 2]
    return [Slice(s.name, s.phase, s.start - step[0].start, s.length) for s in step]


def length_of(step: list[Slice]) -> float:
    """Microseconds from the first launch to the last end."""
    return max(one.end for one in step) - step[0].start


def lanes_of(step: list[Slice]) -> list[tuple[str, list[Slice]]]:
    """Phase and slices of each lane; a phase has two where launches overlap."""
    return [(phase, row) for phase in PHASES for row in rows_of([one for one in step if one.phase == phase])]


def ticks(end: float) -> list[float]:
    """About eight round numbers from 0 to `end`."""
    unit = 10 ** math.floor(math.log10(end / 8))
    step = next(m * unit for m in (1, 2, 5, 10) if end / (m * unit) <= 10)
    return [i * step for i in range(int(end / step) + 1)]


def draw_panel(picture: Picture, top: float, step: list[Slice], end: float, heading: str) -> float:
    """Lanes and axis of one step's first `end` microseconds; where the next panel begins."""
    scale = (WIDTH - LEFT - RIGHT) / end
    picture.text(LEFT, top, heading, bold=True)
    y = top + 10
    bottom = y + len(lanes_of(step)) * (LANE + GAP)
    for tick in ticks(end):
        x = LEFT + tick * scale
        picture.line([(x, y), (x, bottom + 4)], kind="rule", width=1)
        picture.text(x, bottom + 17, f"{tick:,g}", kind="muted", size=11, anchor="middle")
    picture.text(LEFT - 10, bottom + 17, "µs", kind="muted", size=11, anchor="end")
    before = ""
    for phase, row in lanes_of(step):
        if phase != before:
            picture.text(LEFT - 10, y + 12, phase, kind="muted", size=12, anchor="end")
        before = phase
        for one in row:
            if one.start < end:
                width = min(one.end, end) - one.start
                tip = f"{one.name}: {one.length:.1f} µs from {one.start:.1f}"
                # A hair of space keeps neighbours apart; nothing vanishes.
                picture.rect(LEFT + one.start * scale, y, max(width * scale - 0.3, 0.4), LANE, phase, tip=tip)
        y += LANE + GAP
    return bottom + 50


def draw(steps: dict[str, list[Slice]], zoom: float, out: Path) -> None:
    """All steps below each other."""
    longest = max(length_of(step) for step in steps.values())
    height = 20 + sum(2 * 60 + 2 * len(lanes_of(step)) * (LANE + GAP) for step in steps.values())
    picture = Picture(WIDTH, height, "A decode step, kernel by kernel: " + ", ".join(steps))
    top = 28.0
    for name, step in steps.items():
        busy = f"{len(step)} launches, {length_of(step):,.0f} µs"
        top = draw_panel(picture, top, step, longest, f"{name}: {busy}")
        top = draw_panel(picture, top, step, min(zoom, longest), f"its first {min(zoom, longest):g} µs")
    picture.write(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--zoom", type=float, default=100.0, help="microseconds of the enlarged part")
    parser.add_argument("--out", type=output_file, default=Path("timeline.svg"))
    args = parser.parse_args()
    steps = {}
    for text in args.traces:
        name, _, file = text.rpartition("=")
        try:
            steps[name or Path(file).stem] = median_step(slices_of(load_trace(Path(file))))
        except (OSError, ValueError) as error:
            print(f"draw_timeline: {file}: {error}", file=sys.stderr)
            return 1
    draw(steps, args.zoom, args.out)
    print(f"{args.out}: " + ", ".join(f"{name} {length_of(step):,.1f} us" for name, step in steps.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
