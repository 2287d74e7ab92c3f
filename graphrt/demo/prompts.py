"""Prompts for the demo: the beginnings of classes and functions in the running interpreter's standard library."""

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .serve import Request


@dataclass(frozen=True)
class Excerpt:
    """Where a prompt comes from: a top-level definition of a file, to the end of the line at `size` bytes."""

    file: str
    definition: str
    """How its first line begins; the first definition of the file serves if there is none such."""
    size: int
    share: float
    """New tokens of this request as a share of the longest request's."""


# Files of every supported Python version, with something to look up in what follows; lengths differ on purpose.
EXCERPTS = (
    Excerpt("operator.py", "def lt", 200, 1.0),
    Excerpt("calendar.py", "class _localized_day", 200, 0.6),
    Excerpt("queue.py", "class Queue", 120, 0.8),
    Excerpt("heapq.py", "def heappop", 150, 0.3),
    Excerpt("stat.py", "def S_ISCHR", 200, 0.9),
    Excerpt("pprint.py", "def pprint", 150, 0.5),
    Excerpt("configparser.py", "class Error", 220, 0.7),
    Excerpt("mailbox.py", "class Mailbox", 230, 0.4),
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
    source = (Path(sysconfig.get_path("stdlib")) / excerpt.file).read_bytes()
    starts = [match.start() for match in re.finditer(rb"^(?:class|def) ", source, re.MULTILINE)]
    named = [source.startswith(excerpt.definition.encode(), start) for start in starts]
    first = named.index(True) if any(named) else 0
    start = starts[(first + index // len(EXCERPTS)) % len(starts)]
    end = source.find(b"\n", start + excerpt.size) + 1 or len(source)
    return Request(
        name=f"{index + 1} {excerpt.file}",
        prompt=source[start:end],
        new_tokens=max(1, round(excerpt.share * most_new_tokens)),
    )
