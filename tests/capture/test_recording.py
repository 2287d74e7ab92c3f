"""The life of a recording: made, replayed, dumped, closed, and the errors when the order is wrong."""

import json

import pytest
import torch

from graphrt import launch
from graphrt.capture import CaptureError, Recording, record


def add_one(x):
    return record(lambda: x.add_(1), device="cpu", warmup=0, name="add")


def test_replay_after_close_raises():
    """A closed recording says so and runs nothing."""
    x = torch.zeros(2)
    recording = add_one(x)
    recording.close()
    with pytest.raises(RuntimeError, match=r"^replay after close: recording 'add' is closed"):
        recording.replay()
    assert x.tolist() == [0, 0]


def test_close_is_idempotent_and_drops_the_results():
    """Closing twice is harmless; the results' memory is no longer held."""
    recording = record(lambda: torch.zeros(2), device="cpu")
    recording.close()
    recording.close()
    assert recording.outputs is None


def test_an_empty_recording_is_an_error():
    """A function that launches nothing is refused, whatever views and memory it makes."""
    x = torch.zeros(2)
    with pytest.raises(CaptureError, match=r"^recording 'nothing' is empty"):
        record(lambda: (x.view(1, 2), torch.empty(3)), device="cpu", name="nothing")


def test_recordings_do_not_nest():
    """A recording started inside another is refused, and the outer one fails with it."""
    x = torch.zeros(2)
    with pytest.raises(CaptureError, match=r"'add' was started inside recording 'outer'"):
        record(lambda: add_one(x), device="cpu", warmup=0, name="outer")
    add_one(x).replay()
    assert x.tolist() == [1, 1]


def test_a_launcher_replays_and_stays_checked():
    """What an owner calls in place of `replay` does the same; in check mode it still finds a tensor that has moved."""
    x = torch.zeros(2)
    add_one(x).launcher()()
    assert x.tolist() == [1, 1]
    launcher = record(lambda: x.add_(1), device="cpu", warmup=0, check=True).launcher()
    launcher()
    x.data = torch.zeros(2)
    with pytest.raises(CaptureError, match="has other memory now"):
        launcher()


def test_replay_inside_a_recording_is_refused():
    """A recording holds launches, not replays; nothing runs."""
    x = torch.zeros(2)
    inner = add_one(x)
    with pytest.raises(CaptureError, match=r"replay of 'add' inside recording 'outer'"):
        record(inner.replay, device="cpu", warmup=0, name="outer")
    assert x.tolist() == [0, 0]
    inner.replay()
    assert x.tolist() == [1, 1]


def test_a_failing_function_leaves_nothing_open():
    """An error in the function comes as CaptureError from that error; tensors and torch are as before."""
    x = torch.zeros(2)

    def fn():
        x.add_(1)
        raise KeyError("layer 3")

    with pytest.raises(CaptureError, match=r"^recording 'broken'.*KeyError.*layer 3") as caught:
        record(fn, device="cpu", warmup=0, name="broken")
    assert isinstance(caught.value.__cause__, KeyError)
    assert x.tolist() == [0, 0]
    assert not launch.is_recording()
    assert x.add_(1).tolist() == [1, 1]


def test_an_interrupt_leaves_nothing_open():
    """An interrupt comes through as it is, with all hooks removed."""

    def fn():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(fn, device="cpu", warmup=0)
    assert not launch.is_recording()
    assert torch.ones(1).item() == 1


def test_an_error_of_the_warmup_is_the_functions_own():
    """The warm-up is ordinary execution, so its error is not wrapped."""
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "meta"}, r"^device: expected cpu or cuda, got meta"),
        ({"warmup": -1}, r"^warmup: expected at least 0, got -1"),
        ({"warmup": True}, r"^warmup: "),
        ({"fn": 3}, r"^fn: expected a function, got int"),
    ],
)
def test_a_bad_argument_is_named(change, message):
    """ValueError names the argument, what was expected and what came."""
    arguments = {"fn": lambda: torch.zeros(1), "device": "cpu", **change}
    with pytest.raises(ValueError, match=message):
        record(arguments.pop("fn"), **arguments)


def test_gradients_are_off_in_warmup_and_recording():
    """The function sees gradient mode off, and the caller's mode comes back."""
    seen = []
    record(lambda: (seen.append(torch.is_grad_enabled()), torch.zeros(1)), device="cpu")
    assert seen == [False, False]
    assert torch.is_grad_enabled()


def test_a_recording_is_named_after_its_function():
    """Without a name the function's own is used."""

    def commit():
        return torch.zeros(1)

    assert record(commit, device="cpu").name == "commit"


def mixed(x, y):
    def fn():
        z = x.t() + 1
        launch.launch("graphrt.fold", lambda a: None, y)
        y.copy_(z)

    return record(fn, device="cpu", warmup=0, name="mixed")


def test_dump_writes_json_with_nodes_and_shared_memory(tmp_path):
    """The JSON names each launch and its tensors; tensors of one memory carry one number."""
    recording = mixed(torch.randn(2, 3), torch.randn(3, 2))
    recording.dump(tmp_path / "mixed.json")
    dump = json.loads((tmp_path / "mixed.json").read_text())
    assert [node["name"] for node in dump["nodes"]] == [
        "aten.add.Tensor",
        "graphrt.fold",
        "aten.copy_.default",
    ]
    assert (dump["name"], dump["num_nodes"], dump["pool_bytes"]) == ("mixed", 3, 24)
    add, fold, copy = dump["nodes"]
    assert add["inputs"][0]["shape"] == [3, 2] and add["inputs"][0]["stride"] == [1, 3]
    assert copy["outputs"][0]["memory"] == fold["inputs"][0]["memory"] != add["outputs"][0]["memory"]


def test_dumps_of_the_same_program_are_equal(tmp_path):
    """A dump holds no addresses, so two recordings of one program compare as text."""
    texts = []
    for file in ("a.json", "b.json"):
        mixed(torch.randn(2, 3), torch.randn(3, 2)).dump(tmp_path / file)
        texts.append((tmp_path / file).read_text())
    assert texts[0] == texts[1]


def test_dump_writes_dot(tmp_path):
    """The DOT form has a node for each launch and the edges of their order."""
    mixed(torch.randn(2, 3), torch.randn(3, 2)).dump(str(tmp_path / "mixed.dot"))
    text = (tmp_path / "mixed.dot").read_text()
    assert text.startswith("digraph") and text.count("label=") == 3 and text.count("->") == 2


def test_dump_refuses_an_unknown_suffix(tmp_path):
    """A suffix that is neither .json nor .dot is an error of the argument."""
    with pytest.raises(ValueError, match=r"^path: expected a name that ends in .json or .dot"):
        add_one(torch.zeros(1)).dump(tmp_path / "graph.txt")


def test_every_recording_is_a_recording():
    """What `record` returns is the public type."""
    assert isinstance(add_one(torch.zeros(1)), Recording)
