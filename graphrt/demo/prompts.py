"""Prompts for the demo: the beginnings of classes and functions in the running interpreter's standard library."""

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .serve import Request


@dataclass(frozen=True)
class Excerpt:
    """Where a prompt comes from: the n-th top-level definition of a file, to the end of the line at `size` bytes."""

    file: str
    definition: int
    size: int
    share: float
    """New tokens of this request as a share of the longest request's."""


# Files of every supported Python version, with something to look up in what follows; lengths differ on purpose.
EXCERPTS = (
    Excerpt("operator.py", 0, 200, 1.0),
    Excerpt("calendar.py", 3, 250, 0.6),
    Excerpt("queue.py", 1, 120, 0.8),
    Excerpt("heapq.py", 1, 200, 0.3),
    Excerpt("stat.py", 3, 280, 0.9),
    Excerpt("pprint.py", 0, 150, 0.5),
    Excerpt("configparser.py", 0, 220, 0.7),
    Excerpt("mailbox.py", 0, 230, 0.4),
)


def make_requests(count: int, most_new_tokens: int) -> list[Request]:
    """`count` requests with up to `most_new_tokens` new tokens each; past the list, later definitions of its files.

    Raises:
        ValueError: if either number is below 1.
    """
    for name, number in (("requests", count), ("tokens", most_new_tokens)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")
    return [_make_request(index, most_new_tokens) for index in range(count)]


def _make_request(index: int, most_new_tokens: int) -> Request:
    excerpt = EXCERPTS[index % len(EXCERPTS)]
    definition = excerpt.definition + index // len(EXCERPTS)
    source = (Path(sysconfig.get_path("stdlib")) / excerpt.file).read_bytes()
    starts = [match.start() for match in re.finditer(rb"^(?:class|def) ", source, re.MULTILINE)]
    start = starts[definition % len(starts)]
    end = source.find(b"\n", start + excerpt.size) + 1 or len(source)
    return Request(
        name=f"{index + 1} {excerpt.file}",
        prompt=source[start:end],
        new_tokens=max(1, round(excerpt.share * most_new_tokens)),
    )
