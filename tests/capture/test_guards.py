"""The guards of a CUDA capture, with the stream and the compiler played by fakes."""

import threading
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from graphrt import launch
from graphrt.capture import CaptureError, driver
from graphrt.capture.bindings import Bindings
from graphrt.capture.guards import CaptureWatch, explain, no_compiling, offending_call
from graphrt.capture.pool import Memory


class Stream:
    """A capture in which each launch makes `growth` nodes."""

    def __init__(self, capturing=True, growth=2):
        self.capturing, self.growth, self.nodes = capturing, growth, 0

    def run(self, *args):
        self.nodes += self.growth

    def watch(self, **kwargs):
        return CaptureWatch("step", is_capturing=lambda: self.capturing, num_nodes=lambda: self.nodes, **kwargs)


def test_a_launch_on_a_stream_that_does_not_capture_is_refused_before_it_runs():
    """It would change state now and be missing from the replay; the error names the entry point (B63)."""
    stream = Stream(capturing=False)
    watch = stream.watch()
    with (
        launch.record_into(watch),
        pytest.raises(CaptureError, match=r"^recording 'step': graphrt.commit was called on a stream"),
    ):
        launch.launch("graphrt.commit", stream.run)
    assert stream.nodes == 0 and watch.refusal is not None
    assert not launch.is_recording()


def test_a_launch_that_leaves_no_node_is_refused():
    """A launcher that remembers a stream of an earlier call is found at its own launch (B63)."""
    stream = Stream(growth=0)
    with (
        launch.record_into(stream.watch()),
        pytest.raises(CaptureError, match=r"graphrt.fold left nothing in the graph"),
    ):
        launch.launch("graphrt.fold", stream.run)


def test_launches_are_run_and_their_nodes_noted():
    """A watch changes nothing about a launch; it knows which nodes came from it, and binds its tensors."""
    stream, x, bindings = Stream(), torch.zeros(3), Bindings()
    watch = stream.watch(bindings=bindings)
    with launch.record_into(watch):
        launch.launch("graphrt.verify", stream.run, x)
        stream.nodes += 1
        launch.launch("graphrt.commit", stream.run, [x])
    assert watch.stages == [("graphrt.verify", 0, 2), ("graphrt.commit", 3, 5)]
    bindings.check("step")
    x.data = torch.zeros(3)
    with pytest.raises(CaptureError, match=r"the memory of graphrt.verify argument 0"):
        bindings.check("step")


def test_a_driver_that_does_not_count_nodes_refuses_nothing():
    """Where the number of nodes is unknown a launch passes."""
    watch = CaptureWatch("step", is_capturing=lambda: True, num_nodes=lambda: None)
    with launch.record_into(watch):
        launch.launch("graphrt.fold", lambda: None)
    assert watch.stages == []


def compile_info(name="graphrt_fold_kernel"):
    return {
        "key": "k",
        "repr": f"{name}[num_warps=4](x: *fp32)",
        "fn": SimpleNamespace(module="m", name=name, jit_function=None),
        "compile": {},
        "is_manual_warmup": False,
        "already_compiled": False,
    }


def test_a_kernel_that_would_compile_is_refused_by_name():
    """Triton asks the hook before it compiles a variant; the error has kernel, variant and the way out (B64, B66)."""
    watch = Stream().watch()
    with (
        no_compiling(watch),
        pytest.raises(CaptureError, match=r"graphrt_fold_kernel is not ready: .*num_warps=4.*warmup"),
    ):
        knobs.runtime.jit_cache_hook(**compile_info())
    assert "graphrt_fold_kernel" in str(watch.refusal)


def test_machine_code_that_would_be_loaded_is_refused():
    """A kernel compiled but never run would load its module in the capture."""
    with no_compiling(Stream().watch()), pytest.raises(CaptureError, match="kernel k1 is not ready: its machine code"):
        knobs.runtime.kernel_load_start_hook(None, None, "k1", {}, "hash")


def test_the_hooks_are_put_back(monkeypatch):
    """A hook of the user's own is there before and after, also when the block raises, and works meanwhile."""
    seen = []

    def mine(**info):
        seen.append(info["fn"].name)

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", mine)
    loads = list(knobs.runtime.kernel_load_start_hook.calls)
    with pytest.raises(KeyError), no_compiling(Stream().watch()):
        assert knobs.runtime.jit_cache_hook is not mine
        raise KeyError
    assert knobs.runtime.jit_cache_hook is mine and knobs.runtime.kernel_load_start_hook.calls == loads


def test_other_threads_may_compile_during_a_capture(monkeypatch):
    """The hook is one for the process, the capture is this thread's (B68)."""
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **info: seen.append(info["fn"].name))
    with no_compiling(Stream().watch()):
        hook = knobs.runtime.jit_cache_hook
        thread = threading.Thread(target=lambda: hook(**compile_info("other")))
        thread.start()
        thread.join()
    assert seen == ["other"]


def test_the_offending_call_is_the_users_innermost_line():
    """An error from inside torch is reported at the call that the user wrote, with file and function."""

    def layer(x):
        return x.view(3) + x.reshape(5).sum()

    with pytest.raises(RuntimeError) as caught:
        layer(torch.zeros(3))
    text = offending_call(caught.value)
    assert text.startswith(" at `x.reshape(5)` (test_guards.py:") and text.endswith("in layer)")


@pytest.mark.parametrize(
    ("message", "way_out"),
    [
        ("CUDA error: operation not permitted when stream is capturing\nmore", "keep the value in a tensor"),
        ("operation would make the legacy stream depend on a capturing blocking stream", "default stream"),
        ("dependency created on uncaptured work in another stream", "order that before record"),
        ("capturing stream has unjoined work", "was not joined"),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "the default random generator only"),
    ],
)
def test_the_drivers_errors_say_what_to_do(message, way_out):
    """The first line of the error, and the way out of it."""
    text = explain(RuntimeError(message))
    assert way_out in text and "more" not in text


def test_an_error_of_a_tuning_run_names_the_kernel():
    """A kernel that tunes itself in a capture waits for the device; the error names it (B65)."""
    from triton.runtime import Autotuner

    class Tuner(Autotuner):
        def __init__(self):
            self.base_fn = SimpleNamespace(__name__="tuned_kernel")

        def run(self, *args, **kwargs):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError) as caught:
        Tuner().run()
    assert "kernel tuned_kernel tunes itself" in explain(caught.value)


def segment(address, sizes, pool=(0, 0), states=None):
    states = states or ["active_allocated"] * len(sizes)
    blocks = [{"size": size, "state": state} for size, state in zip(sizes, states, strict=True)]
    return {"address": address, "total_size": sum(sizes), "segment_pool_id": pool, "blocks": blocks}


class CudaTensor:
    """As much of a tensor as the memory check asks for."""

    is_cuda = True

    def __init__(self, address):
        self.address = address

    def numel(self):
        return 1

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.address)


def test_memory_allocated_during_the_capture_outside_the_pool_is_stray(monkeypatch):
    """Old memory, pool memory and memory that is not torch's pass; a new block elsewhere does not (B72, B73)."""
    now = [segment(1000, [100, 100], states=["active_allocated", "inactive"])]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: now)
    memory = Memory((0, 7))
    now[:] = [segment(1000, [100, 100]), segment(5000, [64], pool=(0, 7))]
    stray = {address: memory.is_stray(CudaTensor(address)) for address in (1000, 1100, 1150, 5000, 9000)}
    assert stray == {1000: False, 1100: True, 1150: True, 5000: False, 9000: False}


def test_a_launch_with_stray_memory_is_refused_by_argument():
    """The error names entry point, argument and shape, before the launch runs."""
    stream, x = Stream(), torch.zeros(2, 3)
    watch = stream.watch(memory=SimpleNamespace(is_stray=lambda t: t is x))
    with (
        launch.record_into(watch),
        pytest.raises(
            CaptureError, match=r"argument 1 of graphrt.verify \(\[2, 3\] torch.float32\) was allocated during"
        ),
    ):
        launch.launch("graphrt.verify", stream.run, torch.zeros(1), x)
    assert stream.nodes == 0
    with pytest.raises(CaptureError, match="result 0 of the function"):
        watch.check_results([x])


def test_kernel_names_are_readable():
    """C++ names are shown as written; others as they are."""
    assert driver.demangled("_ZN2at6native4fillEv") in ("at::native::fill()", "_ZN2at6native4fillEv")
    assert driver.demangled("graphrt_fold_kernel") == "graphrt_fold_kernel"
