"""No wrong argument of a public function does harm (`fuzz.py` has the calls and what is wrong in each kind)."""

import re

import pytest
import torch
from fuzz import GROUPS, World, calls_of, fuzz, fuzz_group
from rig import Target

import graphrt
from graphrt import capture

# Each dtype of each argument is a kernel to compile there.
LONG = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]
BACKENDS = [
    pytest.param("torch-cpu"),
    pytest.param("triton-cuda", marks=LONG),
    pytest.param("fp32_deferred-cuda", marks=[*LONG, pytest.mark.sm90]),
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("target", BACKENDS)
def test_a_wrong_argument_is_named_or_has_a_defined_result(group, target, monkeypatch):
    """Thousands of wrong types, dtypes, shapes, strides, devices and values: a ValueError or TypeError that names the
    argument, or a result; no other error, no endless call, and no byte of a stranger or between the slots changes.
    """
    monkeypatch.delenv("GRAPHRT_CHECK", raising=False)
    results = fuzz_group(group, Target(*target.split("-")))
    assert [fault for result in results for fault in result.faults] == []
    assert sum(result.tried for result in results) > 50
    torch.zeros(1, device=target.split("-")[1]).item()  # the device still works


# Public names that take no arguments worth spoiling, and why.
EXEMPT = {
    "FP32_DEFERRED": "a constant",
    "NULL_BLOCK_ID": "a constant",
    "SCRATCH_ROW": "a constant",
    "ErrorKind": "an enumeration",
    "CaptureError": "an exception",
    "Difference": "a result",
    "Edge": "a result",
    "BoundaryBlock": "a result",
    "ErrorReport": "a result",
    "GraphDiff": "a result",
    "GraphMemory": "a result",
    "GraphNode": "a result",
    "ReplayReport": "a result",
    "Topology": "a result",
    "KDALayer": "a record; `create` checks it: 'create over a layer's fields'",
    "KDARecoverSSMRecords": "a record; checked by `create` and the verifies",
    "Owners": "a record; the commits check it",
    "Sampled": "a record; the step checks it: test_decode_step.py",
    "StepRows": "what a step gives to the user's functions",
}


def test_every_public_name_is_fuzzed_or_has_a_reason():
    """A new public function is fuzzed from its first day."""
    fuzzed = set()
    for group in GROUPS:
        with calls_of(group, World(Target("torch", "cpu"))) as calls:
            fuzzed |= {re.split(r"\W", call.name)[0] for call in calls}
    public = set(graphrt.__all__) | set(capture.__all__)
    assert sorted(public - fuzzed - set(EXEMPT)) == []
    assert sorted(set(EXEMPT) - public) == []


def test_the_fuzzer_finds_a_call_that_forgets_its_checks():
    """An argument that is not named, a wrong exception and a changed stranger are faults."""
    world = World(Target("torch", "cpu"))
    good = GROUPS["helpers"](world)[1]
    function = good.function

    def careless(**arguments):
        try:
            return function(**arguments)
        except ValueError:
            raise RuntimeError("something") from None

    def silent(**arguments):
        try:
            return function(**arguments)
        except ValueError:
            raise ValueError("something is wrong") from None

    def harmful(**arguments):
        world.pool.checkpoint(0)[3].zero_()

    for bad in (careless, silent, harmful):
        good.function = bad
        assert fuzz(good).faults
    good.function = function
    assert fuzz(good).faults == []
