"""The drafter and the acceptance against naive Python, on any text."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphrt.capture import record
from graphrt.demo.draft import accept_greedily, propose

COLUMNS = 24

# Few different bytes, so that matches of every length occur.
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=COLUMNS), min_size=1, max_size=4)


def naive_proposal(text, num_tokens, longest, shortest):
    """The longest match wins, then the latest; None where nothing matches."""
    for size in range(longest, shortest - 1, -1):
        for position in range(len(text) - 1, size - 1, -1):
            if len(text) >= size and text[position - size : position] == text[-size:]:
                copied = text[position:]
                return [copied[i % len(copied)] for i in range(num_tokens)]
    return None


def padded(texts, fill):
    rows = [text + [fill] * (COLUMNS - len(text)) for text in texts]
    lengths = torch.tensor([len(text) for text in texts])
    return torch.tensor(rows, dtype=torch.uint8), lengths


@given(TEXTS, st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_proposals_equal_those_of_a_naive_search(texts, num_tokens, longest, more):
    text, length = padded(texts, fill=0)
    tokens, found = propose(text, length, num_tokens, longest=longest + more, shortest=longest)
    for row, one in enumerate(texts):
        expected = naive_proposal(one, num_tokens, longest + more, longest)
        assert found[row].item() == (expected is not None)
        if expected is not None:
            assert tokens[row].tolist() == expected


@given(TEXTS)
def test_what_follows_the_text_does_not_matter(texts):
    zeros, ones = (propose(*padded(texts, fill), 5) for fill in (0, 1))
    assert torch.equal(zeros[1], ones[1])
    assert torch.equal(zeros[0][zeros[1]], ones[0][ones[1]])


def test_a_loop_is_continued_as_a_loop():
    text = torch.tensor([list(b"xxababab")], dtype=torch.uint8)
    tokens, found = propose(text, torch.tensor([8]), 5)
    assert found.item() and bytes(tokens[0].tolist()) == b"ababa"


def test_drafting_can_be_recorded_and_reads_the_live_text():
    text = torch.tensor([list(b"abcd_abc")], dtype=torch.uint8)
    length = torch.tensor([8])
    out = torch.zeros(1, 3, dtype=torch.uint8)
    recording = record(lambda: out.copy_(propose(text, length, 3)[0]), device="cpu")
    text.copy_(torch.tensor([list(b"wxyz_wxy")], dtype=torch.uint8))
    recording.replay()
    assert bytes(out[0].tolist()) == b"z_w"


def naive_acceptance(window, choice, known, window_len):
    accepted = 0
    while accepted < window_len:
        if accepted >= known and window[accepted] != choice[accepted - 1]:
            break
        accepted += 1
    return accepted


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=4, max_size=4),
            st.lists(st.integers(0, 1), min_size=4, max_size=4),
            st.integers(1, 6),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_acceptance_equals_a_naive_walk(rows):
    windows, choices, known, window_len = (torch.tensor(column) for column in zip(*rows, strict=True))
    accepted = accept_greedily(windows.to(torch.uint8), choices, known, window_len)
    assert accepted.tolist() == [naive_acceptance(*row) for row in rows]
