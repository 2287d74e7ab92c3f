"""The weights and the two forms of the model."""

import json
from importlib import resources

import pytest
import torch
from safetensors import safe_open

from graphrt.demo import step
from graphrt.demo.model import load_model
from graphrt.demo.sequence import chunk_kda, l2_normalise, sequence_mix
from graphrt.demo.serve import DecodeLoop, Mode, Request, decode

MOST_BYTES = 4_000_000
FILES = resources.files("graphrt.demo")
PROMPT = b'def lt(a, b):\n    "Same as a < b."\n    return a < b\n\ndef le(a, b):\n'


def test_weights_are_small_bfloat16_and_match_their_record():
    path = str(FILES / "weights.safetensors")
    record = json.loads((FILES / "weights.json").read_text())
    with safe_open(path, framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - not a dict
    assert (FILES / "weights.safetensors").stat().st_size <= MOST_BYTES
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert sum(t.numel() for t in tensors) == record["model"]["parameters"]
    assert record["loss"]["validation bits per byte"] < 1.5


def test_missing_weights_say_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tools/train_demo\.py"):
        load_model(path=tmp_path / "none.safetensors")


def test_chunks_equal_the_token_by_token_recurrence():
    batch, length, heads, dim = 2, 41, 2, 16
    q, k, v, raw_g = (torch.randn(batch, length, heads, dim, dtype=torch.float64) for _ in range(4))
    q, k, g = l2_normalise(q), l2_normalise(k), -5 * torch.sigmoid(2 * raw_g - 2)
    beta = torch.rand(batch, length, heads, dtype=torch.float64)
    state = torch.zeros(batch, heads, dim, dim, dtype=torch.float64)
    expected = []
    for t in range(length):
        state = state * g[:, t].exp()[:, :, None, :]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhv,bhk->bhvk", u, k[:, t])
        expected.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    torch.testing.assert_close(chunk_kda(q, k, v, g, beta), torch.stack(expected, 1))


@pytest.mark.parametrize(("activations", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
def test_decoding_by_windows_gives_the_logits_of_the_whole_sequence(monkeypatch, activations, atol):
    """Every token the loop chose is the FP32 sequence form's best, as far above the next best.

    With FP32 activations exactly, with 16-bit ones as far as their rounding allows.
    """
    monkeypatch.setattr(step, "ACTIVATIONS", activations)
    model = load_model()
    loop = DecodeLoop(model, [Request("lt", PROMPT, 16)], batch=1, spec_query_len=8, mode=Mode(recorded=False))
    decode(loop)
    done = loop.completions["lt"]
    logits = model(torch.tensor([list(done.text)]), sequence_mix)[0, len(PROMPT) - 1 : -1]
    assert bytes(logits.argmax(-1).tolist()) == done.generated
    best, second = logits.topk(2).values.unbind(-1)
    torch.testing.assert_close(best - second, torch.tensor(done.gaps[len(PROMPT) :]), atol=atol, rtol=0)


def test_the_model_predicts_python_far_better_than_chance():
    tokens = torch.tensor([list(PROMPT)])
    logits = load_model()(tokens, sequence_mix)
    loss = torch.nn.functional.cross_entropy(logits[0, 16:-1], tokens[0, 17:])
    assert loss.item() / torch.log(torch.tensor(2.0)).item() < 2.0
