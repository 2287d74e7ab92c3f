"""The CuTe DSL kernels compile ahead of time for every target, without a GPU, and their host side packs arguments."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
pytest.importorskip("cutlass")


@pytest.mark.slow
@pytest.mark.parametrize("kind, count", [("fold bf16 align indexed", 1), ("verify bf16 with convolution split", 2)])
def test_no_cute_kernel_spills(kind, count):
    """The largest variants of a kind compile for Hopper and Blackwell and use no local memory.

    Left to the tool alone: fp16, which differs in two conversions, folds and verifies that are parts of these, and the
    other layout of the convolution state.
    """
    command = [sys.executable, ROOT / "tools/compile_check.py", "--cute-only", "--only", kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sm_100a") == done.stdout.count("sm_90a") == count


def test_packed_arguments_are_those_of_the_dsl():
    """Our own packing of a launch's numbers gives the kernel the bytes that the DSL's conversion would."""
    from cutlass import Int64

    from graphrt.kernels.cute import commit

    facts = commit.fold_facts(2, 1, torch.bfloat16, torch.float32, torch.float32, False, False)
    compiled = commit.KERNELS.compile(facts, "sm_90a")
    addresses, strides, limits = [2**45 + 17 * i for i in range(15)], [1, 3], [9, 8, 7, 6, 132]
    typed = (tuple(map(Int64, addresses)), tuple(strides), tuple(limits), -5.0, 5)
    want, _ = compiled.execution_args.generate_execution_args(typed, {})
    got = commit.KERNELS.pack(*addresses, *strides, *limits, -5.0, 5)
    assert len(want) == len(got)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        size = 8 if i < 15 else 4
        if i < len(got) - 1:
            assert ctypes.string_at(a.value, size) == ctypes.string_at(b.value, size), i


@pytest.mark.parametrize(
    "shape, dtype, lower_bound, word",
    [
        ((4, 2, 128, 128), torch.bfloat16, -5.0, "FP32"),
        ((4, 2, 64, 64), torch.float32, -5.0, "128"),
        ((4, 2, 128, 128), torch.float32, None, "bounded"),
        ((4, 2, 128, 128), torch.float32, -20.0, "lower_bound"),
        ((4, 2, 128, 128), torch.float32, -5.0, "CUDA"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_the_reason(shape, dtype, lower_bound, word):
    """`supported` is false, and its reason names what was expected."""
    from graphrt.kernels.cute import commit

    support = commit.supported(torch.zeros(shape, dtype=dtype), lower_bound)
    assert not support and word in support.reason


def test_windows_and_dtypes_outside_the_kernels_reach_are_refused():
    """Q beyond 8, and FP32 activations."""
    from graphrt.kernels.cute import commit

    state = torch.zeros(4, 2, 128, 128)
    assert "9" in commit.supported(state, -5.0, spec_query_len=9).reason
    assert "float32" in commit.supported(state, -5.0, dtype=torch.float32).reason


@pytest.mark.parametrize(
    "name, change, word",
    [
        ("v", lambda t: t.float(), "v torch.float32"),
        ("raw_beta", lambda t: t.half(), "raw_beta"),
        ("k", lambda t: t.new_zeros(1, 3, 2, 130)[..., :128], "k with strides"),
        ("q", lambda t: t.new_zeros(1, 3, 2, 132)[..., 4:], "q with strides"),
        ("key_gate", lambda t: t.new_zeros(4, 2052)[:, :2048].view(t.shape), "records.key_gate with strides"),
    ],
    ids=[
        "another dtype",
        "beta in neither",
        "tokens apart by less",
        "tokens begin off 16 bytes",
        "records as well",
    ],
)
def test_activations_that_the_verify_cannot_load_are_refused(name, change, word):
    """Tokens on 16 bytes, one 16-bit dtype, and beta in it or in FP32; the reason names the first that is not."""
    from graphrt.kernels.cute import deferred

    tensors = {n: torch.zeros(1, 3, 2, 128, dtype=torch.bfloat16) for n in ("q", "k", "v", "raw_g")}
    tensors["raw_beta"] = torch.zeros(1, 3, 2)
    tensors |= {"out": tensors["q"].clone(), "key_gate": torch.zeros(4, 2, 4, 256, dtype=torch.bfloat16)}
    assert deferred.activations_supported(**tensors)
    support = deferred.activations_supported(**tensors | {name: change(tensors[name])})
    assert not support and word in support.reason


@pytest.mark.parametrize(
    "width, change, word",
    [
        (6, {}, "width up to 5, got 6"),
        (4, {"bias": torch.zeros(8)}, "bias torch.float32"),
        (4, {"weight": torch.zeros(8, 4)}, "weight torch.float32"),
        (4, {"weight": torch.zeros(4, 8, dtype=torch.bfloat16).t()}, "contiguous"),
    ],
)
def test_convolutions_that_the_verify_does_not_take_in_are_refused(width, change, word):
    """They have a launch of their own, and the log says why."""
    from graphrt.kernels.cute import deferred
    from graphrt.steps import Convolution

    k, state = torch.zeros(1, 3, 2, 128, dtype=torch.bfloat16), torch.zeros(2, 8, width + 3, dtype=torch.bfloat16)
    weight = torch.zeros(8, width, dtype=torch.bfloat16)
    whole = {"state": state, "weight": weight, "bias": None, "keeps_history": True}
    assert bool(deferred.conv_supported(Convolution(**whole), k)) == (width < 6)
    support = deferred.conv_supported(Convolution(**whole | change), k)
    assert not support and word in support.reason


def test_shared_memory_fits_for_every_window():
    """No variant asks for more than the 227 KiB a Hopper block gets."""
    from graphrt.kernels.cute import commit, deferred

    fp32 = torch.float32
    for q in range(1, 9):
        for dtype in (torch.bfloat16, torch.float16):
            for split in (1, 2):
                facts = deferred.verify_facts(12, q, dtype, fp32, fp32, 4, True, split)
                assert deferred.KERNELS.shared_bytes(facts) <= 227 * 1024
        for dtype in (torch.bfloat16, fp32):
            facts = commit.fold_facts(12, q, dtype, fp32, fp32, True, True)
            assert commit.KERNELS.shared_bytes(facts) <= 227 * 1024
