"""The rows of a `Service` step: live requests, what stands between them, and the bad values among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..state import RequestState

INT32_MAX = (1 << 31) - 1

Pick = Callable[[int, int], int]
"""Choose an integer from low to high, both included: hypothesis draws it, or a random generator does."""

FAULTS = ("slot", "row", "accepted", "query_len", "request", "stale_generation")
"""Bad values that a step may get; each is counted under this name (`graphrt.ErrorKind`)."""


@dataclass(slots=True)
class Request:
    """A request that owns a record row and a state slot."""

    name: int
    row: int
    slot: int
    generation: int
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Parked:
    """A preempted request: what its slot held, and its truth."""

    name: int
    state: RequestState
    truth: tuple[Tensor, Tensor]


@dataclass
class Counts:
    """What a run has done."""

    steps: int = 0
    replays: int = 0
    captures: int = 0
    rows: int = 0
    tokens: int = 0
    events: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    def inject(self, faults: Sequence[str]) -> None:
        for fault in faults:
            self.faults[fault] = self.faults.get(fault, 0) + 1

    def note(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1


@dataclass(slots=True)
class Member:
    """One row of a step. `request` is None for padding, dummies, and rows with a bad slot or record row."""

    slot: int
    row: int
    length: int
    request: Request | None = None
    given: int = 0
    """The accepted count that the step is told."""
    accepted: int = 0
    """What it must make of it."""
    next_length: int = 0
    """Tokens of its window in the steps that follow without the host."""
    eager: bool = False
    finished: bool = False
    spoilt: bool = False
    """Rejected drafts are NaN: the outputs of this window mean nothing."""
    stray: bool = False
    """Its request index leads nowhere."""
    generation: int = 0
    """Of its record row, as it was when the row was staged; 0 is not compared."""
    late: bool = False
    """Its record row has another owner by now: padding."""

    @property
    def later_length(self) -> int:
        """Tokens in the steps after the first of a row of replays."""
        return self.next_length if self.request is not None and not self.finished else 0

    @property
    def unspecified(self) -> bool:
        """Whether outputs of this row may be anything: a dummy reads a checkpoint that others may be writing."""
        return self.spoilt or (self.request is None and self.slot > 0 and not self.late)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sizes that members keep to."""

    window: int
    max_rows: int
    num_slots: int
    num_rows: int


def draw_members(pick: Pick, live: Sequence[Request], bounds: Bounds) -> list[Member]:
    """Some of the living in random order, with padding, dummies and null slots between them."""
    rest, members = list(live), []
    for _ in range(pick(1, min(len(rest), bounds.max_rows))):
        request = rest.pop(pick(0, len(rest) - 1))
        length = pick(0, bounds.window)
        accepted = pick(0, length)
        member = Member(request.slot, request.row, length, request, accepted, accepted)
        member.generation = request.generation
        member.next_length, member.eager, member.finished = pick(0, bounds.window), pick(0, 3) == 3, pick(0, 3) == 3
        member.spoilt = accepted < length and pick(0, 7) == 7
        members.append(member)
    for _ in range(pick(0, bounds.max_rows - len(members))):
        members.insert(pick(0, len(members)), _filler(pick, rest, bounds))
    return members


def _filler(pick: Pick, absent: Sequence[Request], bounds: Bounds) -> Member:
    """Padding, a dummy on any slot, or a null slot with the record row of somebody who is absent."""
    kind, length = pick(0, 2), pick(0, bounds.window)
    if kind == 0:
        return Member(0, -1, length)
    if kind == 1 and absent:
        return Member(0, absent[pick(0, len(absent) - 1)].row, length)
    return Member(pick(1, bounds.num_slots - 1), -1, length)


def inject(fault: str, members: list[Member], live: Sequence[Request], pick: Pick, bounds: Bounds) -> bool:
    """Put a bad value into a step; False where it finds no place.

    The row that gets a bad count, offset or request index is live, and `accepted` is what must come of it. A bad slot
    or record row gets a row of its own.
    """
    if fault in ("slot", "row", "stale_generation"):
        if len(members) == bounds.max_rows:
            return False
        bad = _late_row(live, pick, bounds) if fault == "stale_generation" else _bad_row(fault, pick, bounds)
        members.insert(pick(0, len(members)), bad)
        return True
    honest = [m for m in members if m.request is not None and m.given == m.accepted and not m.stray]
    if not honest:
        return False
    member = honest[pick(0, len(honest) - 1)]
    if fault == "accepted":
        high, far = bool(pick(0, 1)), pick(1, 1 << 20)
        # A row may already be longer than Q: what stands of it is a window.
        standing = min(member.length, bounds.window)
        member.given, member.accepted = (member.length + far, standing) if high else (-far, 0)
        member.spoilt = False
    elif fault == "request":
        member.stray, member.accepted, member.given = True, 0, 0
    else:
        room = len(members) * bounds.window - sum(m.length for m in members)
        if room < 1 or member.length < bounds.window:
            return False
        member.length += pick(1, room)
    return True


def _late_row(live: Sequence[Request], pick: Pick, bounds: Bounds) -> Member:
    """The slot and record row of somebody, staged for an owner whom that row does not have."""
    owner, length = live[pick(0, len(live) - 1)], pick(0, bounds.window)
    late = Member(owner.slot, owner.row, length, given=length, next_length=length, eager=bool(pick(0, 1)))
    late.generation, late.late = owner.generation - 1 or owner.generation + 2, True
    return late


def _bad_row(fault: str, pick: Pick, bounds: Bounds) -> Member:
    far, length = (1, 1 << 20, INT32_MAX)[pick(0, 2)], pick(0, bounds.window)
    if fault == "slot":
        return Member(min(bounds.num_slots - 1 + far, INT32_MAX), -1, length)
    row = min(bounds.num_rows - 1 + far, INT32_MAX) if pick(0, 1) else -1 - far
    return Member(pick(1, bounds.num_slots - 1), row, length)


def zero_tokens(
    members: Sequence[Member], lengths: Sequence[int], begins: Sequence[int], end: int, window: int
) -> list[bool]:
    """Which of the first `end` tokens belong to no live row, or lie behind Q in one: their outputs are zero."""
    zero = [True] * end
    for m, length, begin in zip(members, lengths, begins, strict=True):
        if m.request is not None or m.unspecified:
            span = min(length, window)
            zero[begin : begin + span] = [False] * span
    return zero
