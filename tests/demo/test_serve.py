"""The decode loop: rows, modes, and what one recorded step promises."""

from dataclasses import replace

import pytest
import torch

from graphrt.demo.model import load_model
from graphrt.demo.serve import DecodeLoop, Mode, Request, decode
from graphrt.demo.step import Texts
from graphrt.demo.verdicts import same_tokens

WINDOW = 4


@pytest.fixture(scope="module")
def model():
    return load_model()


def finished(model, requests, *, batch=2, mode=None, spec_query_len=WINDOW):
    loop = DecodeLoop(model, requests, batch=batch, spec_query_len=spec_query_len, mode=mode)
    decode(loop)
    loop.close()
    return loop


def test_every_request_gets_its_prompt_and_exactly_its_tokens(model, short_requests):
    loop = finished(model, short_requests)
    for request in short_requests:
        done = loop.completions[request.name]
        assert done.text[: len(request.prompt)] == request.prompt
        assert len(done.generated) == request.new_tokens


def test_record_rows_of_finished_requests_are_used_again(model, short_requests):
    loop = finished(model, short_requests)
    assert {c.record_row for c in loop.completions.values()} == {0, 1}
    # Four requests came to two rows and left them.
    assert loop.slots.generation.sum().item() == 2 * 4
    assert loop.slots.pending.tolist() == [0, 0]


def test_drafts_are_accepted_and_counted_where_they_are_marked(model, short_requests):
    loop = finished(model, short_requests)
    counted = sum(n * windows for n, windows in enumerate(loop.texts.accepted_drafts.tolist()))
    assert counted == sum(sum(c.drafted) for c in loop.completions.values()) > 0


@pytest.mark.parametrize("spec_query_len", [1, 2, 5])
def test_tokens_do_not_depend_on_the_window(model, short_requests, spec_query_len):
    wide = finished(model, short_requests, spec_query_len=8)
    narrow = finished(model, short_requests, spec_query_len=spec_query_len)
    assert same_tokens("", wide.completions, narrow.completions).passed


def test_a_request_decodes_alike_alone_and_in_company(model, short_requests):
    together = finished(model, short_requests, batch=4)
    alone = finished(model, short_requests[:1], batch=1)
    assert together.completions["long"].text == alone.completions["long"].text


def test_replays_equal_the_same_launches_made_anew(model, short_requests):
    recorded = finished(model, short_requests)
    direct = finished(model, short_requests, mode=Mode(recorded=False))
    assert recorded.num_steps == direct.num_steps
    for name, done in recorded.completions.items():
        assert done.text == direct.completions[name].text
        assert all(map(torch.equal, done.states, direct.completions[name].states))


def test_a_loop_of_padding_rows_changes_nothing(model):
    loop = DecodeLoop(model, [Request("waits", b"ab", 2)], batch=2, spec_query_len=WINDOW)
    before = [t.clone() for layer in loop.layers for t in layer.kv_cache]
    loop.run(2)
    assert all(map(torch.equal, before, [t for layer in loop.layers for t in layer.kv_cache]))
    assert loop.texts.length.tolist() == [0, 0] and not loop.texts.accepted_drafts.any()


def test_empty_prompts_and_empty_answers_are_refused(model):
    for request in (Request("a", b"", 3), Request("b", b"x", 0)):
        with pytest.raises(ValueError, match="expected a prompt and at least one new token"):
            DecodeLoop(model, [request], batch=1, spec_query_len=WINDOW)


def test_buffers_cannot_be_rebound():
    texts = Texts.allocate(1, 8, WINDOW, torch.device("cpu"))
    with pytest.raises(AttributeError):
        texts.text = texts.drafted


def test_a_difference_is_excused_only_where_the_model_was_undecided(model, short_requests):
    done = finished(model, short_requests[3:], batch=1).completions
    mine = done["last"]
    other = {"last": replace(mine, text=mine.text[:-1] + bytes([mine.text[-1] ^ 1]))}
    gaps = {"last": replace(mine, gaps=(*mine.gaps[:-1], 5e-4))}
    undecided = {"last": replace(other["last"], gaps=gaps["last"].gaps)}
    failed = same_tokens("claim", done, other)
    assert not failed.passed and "top two logits" in failed.detail
    assert same_tokens("claim", gaps, undecided).passed
    unknown = {"last": replace(other["last"], gaps=(*mine.gaps[:-1], float("nan")))}
    assert not same_tokens("claim", {"last": replace(mine, gaps=unknown["last"].gaps)}, unknown).passed
