"""What the CPU tape refuses: host reads, host data, shapes that depend on values, rebinding. One case a call.

Each case is a call inside a recording and a piece of the error: the call as the user wrote it.
"""

import copy
import io
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from graphrt.capture import CaptureError, record

HOST_READS = {
    ".item()": lambda s: s["n"].item(),
    ".tolist()": lambda s: s["x"].tolist(),
    ".cpu()": lambda s: s["x"].cpu(),
    ".numpy()": lambda s: s["x"].numpy(),
    'to("cpu")': lambda s: s["x"].to("cpu"),
    '.to("cpu")': lambda s: s["x"].to(device="cpu", dtype=torch.float64),
    "bool(tensor)": lambda s: bool(s["n"]),
    "a tensor as a condition": lambda s: 1 if s["x"].sum() > 0 else 2,
    "or a tensor as a condition": lambda s: s["n"] and 1,
    "int(tensor)": lambda s: int(s["n"]),
    "float(tensor)": lambda s: float(s["n"]),
    "complex(tensor)": lambda s: complex(s["n"]),
    "range(tensor)": lambda s: range(s["n"]),
    "list[tensor]": lambda s: [1, 2, 3][s["n"]],
    "numpy.asarray(tensor)": lambda s: np.asarray(s["x"]),
    "numpy.asarray": lambda s: np.add(s["x"], 1),
    "__dlpack__()": lambda s: np.from_dlpack(s["x"]),
    "printing a tensor": lambda s: print(s["x"]),
    "repr": lambda s: repr(s["x"]),
    "f-string": lambda s: f"{s['n']}",
    "copy.deepcopy": lambda s: copy.deepcopy(s["x"]),
    "`in` on a tensor": lambda s: 5 in s["x"],
    "saving a tensor (pickle": lambda s: pickle.dumps(s["x"]),
    "saving a tensor (pickle, torch.save": lambda s: torch.save({"x": [s["x"]]}, io.BytesIO()),
    "torch.save, safetensors, copy.copy": lambda s: copy.copy(s["x"]),
    "torch.save, safetensors": lambda s: safetensors.torch.save({"x": s["x"]}),
    ".is_nonzero()": lambda s: s["n"].is_nonzero(),
    "torch.is_nonzero": lambda s: torch.is_nonzero(s["n"]),
    "torch.equal": lambda s: torch.equal(s["x"], s["x"]),
    "torch.allclose": lambda s: torch.allclose(s["x"], s["x"]),
    ".allclose()": lambda s: s["x"].allclose(s["x"]),
    "one_hot": lambda s: F.one_hot(s["i"], 5),
    "tensor[...] (an implicit .item())": lambda s: s["x"][s["n"]],
    "tensor[...] = ... (an implicit .item())": lambda s: s["x"].__setitem__(s["n"], 1.0),
    "an implicit .item()": lambda s: s["x"][: s["n"]],
    "torch.arange (an implicit .item())": lambda s: torch.arange(s["n"]),
    "torch.full (an implicit .item())": lambda s: torch.full((2,), s["n"]),
    "torch.linspace": lambda s: torch.linspace(s["n"], s["n"], 4),
    "masked_fill with a tensor as value": lambda s: s["x"].masked_fill(s["mask"], s["x"][0]),
    "masked_fill_ with a tensor as value": lambda s: s["x"].masked_fill_(s["mask"], s["x"][0]),
    "index_fill with a tensor as value": lambda s: s["x"].index_fill(0, s["i"], s["x"][0]),
    "tensor_split": lambda s: torch.tensor_split(s["x"], s["i"]),
    ".map_()": lambda s: s["x"].map_(s["x"], lambda a, b: a),
    ".apply_()": lambda s: s["x"].apply_(lambda a: a),
    "linalg.inv (its check": lambda s: torch.linalg.inv(s["x"].view(2, 2)),
}

HOST_DATA = {
    "torch.tensor(data)": lambda s: torch.tensor([1.0, 2.0]),
    "torch.as_tensor(data)": lambda s: torch.as_tensor([1, 2]),
    "torch.asarray(data)": lambda s: torch.asarray(np.zeros(3)),
    ".new_tensor(data)": lambda s: s["x"].new_tensor([1.0]),
    "torch.from_numpy": lambda s: torch.from_numpy(np.zeros(3)),
    "torch.Tensor(data)": lambda s: torch.Tensor([1.0, 2.0]),
    "indexing by a Python list": lambda s: s["x"][[0, 1]],
}

SHAPES = {
    ".nonzero()": lambda s: s["x"].nonzero(),
    "torch.where (aten::nonzero)": lambda s: torch.where(s["mask"]),
    "torch.argwhere": lambda s: torch.argwhere(s["x"]),
    "tensor[...] (indexing by a mask)": lambda s: s["x"][s["mask"]],
    "indexing by a mask": lambda s: s["x"][s["mask"].to(torch.uint8)],
    "torch.masked_select": lambda s: torch.masked_select(s["x"], s["mask"]),
    ".unique()": lambda s: s["x"].unique(),
    "torch.functional.unique": lambda s: torch.unique(s["x"], dim=0),
    "unique_consecutive": lambda s: torch.unique_consecutive(s["i"]),
    "torch.bincount": lambda s: torch.bincount(s["i"]),
    "repeat_interleave with tensor repeats": lambda s: torch.repeat_interleave(s["x"], s["i"]),
    "assigning tensor values through a mask": lambda s: s["x"].__setitem__(s["mask"], s["y"][:2]),
    "tensor[...] = ... (assigning": lambda s: s["x"].__setitem__(s["mask"], s["y"][0]),
    ".index_put_()": lambda s: s["x"].index_put_((s["mask"],), s["y"][:2]),
}

MEMORY = {
    ".resize_()": lambda s: s["x"].resize_(9),
    ".set_()": lambda s: s["x"].set_(s["y"]),
    "assigning tensor.data": lambda s: setattr(s["x"], "data", s["y"]),
    ".share_memory_()": lambda s: s["x"].share_memory_(),
    ".unsqueeze_()": lambda s: s["x"].unsqueeze_(0),
    "out= of another shape": lambda s: torch.add(s["x"], s["y"], out=s["small"]),
    "writes an argument and returns a new tensor": lambda s: torch.ops.aten.rrelu_with_noise(
        s["x"], s["y"], 0.1, 0.3, True
    ),
    "leaves the device of the recording": lambda s: s["x"].to("meta"),
    "outside a CPU tape": lambda s: s["meta"] + 1,
    "torch.sparse_coo tensor": lambda s: s["sparse"] * 2,
    "gradients enabled": lambda s: torch.enable_grad()(lambda: s["x"] + 1)(),
}


def in_a_pool(s):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(s["x"].add_, 1).result()


THREADS = {
    "Thread.start() gives work to another thread": lambda s: threading.Thread(target=s["x"].add_, args=(1,)).start(),
    "ThreadPoolExecutor.submit() gives work": in_a_pool,
    "ThreadPoolExecutor.submit()": lambda s: running_pool.submit(s["x"].add_, 1).result(),
}

running_pool = ThreadPoolExecutor(1)
running_pool.submit(int).result()

REFUSED = {**THREADS, **HOST_READS, **HOST_DATA, **SHAPES, **MEMORY}


def tensors():
    return {
        "x": torch.randn(4),
        "y": torch.randn(4),
        "n": torch.tensor(2),
        "i": torch.tensor([0, 1, 2, 0]),
        "mask": torch.tensor([True, False, True, False]),
        "small": torch.zeros(2),
        "meta": torch.empty(4, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
    }


@pytest.mark.parametrize(("call", "use"), REFUSED.items(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_call_that_a_graph_cannot_hold_is_refused_by_name(call, use):
    """The error names the recording, the call and a way out; tensors are as before and torch works on."""
    state = tensors()
    before = {key: (t.clone(), t.data_ptr()) for key, t in state.items() if key not in ("meta", "sparse")}

    def fn():
        state["y"].add_(1)
        use(state)

    with pytest.raises(CaptureError, match=rf"^recording 'step': .*{re.escape(call)}.*; \w") as caught:
        record(fn, device="cpu", warmup=0, name="step")
    assert len(str(caught.value)) < 300
    for key, (value, address) in before.items():
        assert torch.equal(state[key], value), key
        assert state[key].data_ptr() == address, key
        assert state[key].shape == value.shape, key
    assert_recording_is_over(state["y"])


def assert_recording_is_over(x):
    before = x.tolist()
    x.add_(1)
    assert x.tolist() != before


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s["x"].to(s["y"].device),
        lambda s: s["x"].to(torch.float32),
        lambda s: s["x"].data_ptr(),
        lambda s: (len(s["x"]), s["x"].shape[0], s["x"].numel(), s["x"].is_contiguous(), s["x"].dtype),
        lambda s: s["x"].untyped_storage().data_ptr(),
        lambda s: hash(s["x"]),
        lambda s: s["x"].is_set_to(s["y"]),
        lambda s: list(s["x"].unbind()),
    ],
)
def test_questions_about_metadata_are_answered(use):
    """Shapes, addresses, devices and no-op conversions are known without running anything."""
    state = tensors()

    def fn():
        state["y"].add_(1)
        use(state)

    assert record(fn, device="cpu", warmup=0).num_nodes == 1


def test_threads_record_side_by_side():
    """Two threads record at once; another starts threads meanwhile, and afterwards everybody may again (B68)."""
    sums, inside, go = {}, threading.Barrier(3, timeout=60), threading.Event()

    def work(number):
        x = torch.zeros(3)

        def step():
            inside.wait()
            go.wait(60)
            return x.add_(number)

        recording = record(step, device="cpu", warmup=0)
        for _ in range(4):
            recording.replay()
        sums[number] = x.tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    inside.wait()
    other = threading.Thread(target=sums.setdefault, args=(3, "started"))
    other.start()
    other.join()
    go.set()
    for thread in threads:
        thread.join()
    assert sums == {1: [4.0] * 3, 2: [8.0] * 3, 3: "started"}
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"
    assert threading.Thread.start.__module__ == "threading"


def test_a_refusal_that_the_function_swallows_still_fails_the_recording():
    """Catching the error inside the function does not make its host read legal."""
    x = torch.ones(2)

    def fn():
        x.add_(1)
        try:
            return x.sum().item()
        except RuntimeError:
            return 0.0

    with pytest.raises(CaptureError, match=re.escape(".item()")):
        record(fn, device="cpu", warmup=0)
    assert x.tolist() == [1, 1]


def test_an_operator_without_a_shape_rule_is_refused():
    """A custom operator that cannot say its result's shape is refused with the way to teach it."""
    with torch.library._scoped_library("graphrt_test", "FRAGMENT") as library:
        library.define("shapeless(Tensor x) -> Tensor")
        library.impl("shapeless", lambda x: x.clone(), "CPU")
        with pytest.raises(CaptureError, match=r"graphrt_test.shapeless.*register_fake"):
            record(lambda: torch.ops.graphrt_test.shapeless(torch.ones(2)), device="cpu", warmup=0)


def test_an_operator_that_lies_about_its_shape_fails_the_replay():
    """A result of another shape than the operator's rule said is an error, not a broadcast."""
    with torch.library._scoped_library("graphrt_test", "FRAGMENT") as library:
        library.define("liar(Tensor x) -> Tensor")
        library.impl("liar", lambda x: x[:1].clone(), "CPU")
        library.impl("liar", lambda x: torch.empty_like(x), "Meta")
        x = torch.ones(2)
        recording = record(lambda: torch.ops.graphrt_test.liar(x), device="cpu", warmup=0)
        with pytest.raises(RuntimeError, match=r"graphrt_test.liar.*replayed with shape \[1\], recorded with \[2\]"):
            recording.replay()


def test_seeding_inside_a_recording_is_refused():
    """`torch.manual_seed` in the function is refused, and the generator is put back."""
    state = torch.get_rng_state()

    def fn():
        torch.manual_seed(3)
        return torch.rand(2)

    with pytest.raises(CaptureError, match="random generator"):
        record(fn, device="cpu", warmup=0)
    assert torch.equal(torch.get_rng_state(), state)
