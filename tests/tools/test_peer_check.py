"""The comparison with peers: it passes a peer that does the same, and finds every fault that a peer could have."""

import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench_peers
import peer_check
import peers
import pytest
import torch
from peer_followers import Shape

import graphrt

SHAPE = Shape(
    torch.device("cpu"), layers=1, heads=1, dim=16, window=4, requests=3, block=0, steps=4, state=torch.float32,
    act=torch.bfloat16, conv_dim_first=True,
)  # fmt: skip


class TwinContext:
    """graphrt's own context under the peer's names, with one fault or none."""

    def __init__(self, twin, layers, spec_query_len, max_num_reqs):
        self.twin, sizes = twin, {"spec_query_len": spec_query_len, "max_num_reqs": max_num_reqs}
        kind = graphrt.KDARecoverSSMCommitContext
        self.context = kind.create(layers, **sizes, backend="torch", conv_dim_first=twin.dim_first)

    def commit(self, counts, slots, loc, request_indices, **align):
        if self.twin.fault == "commits one token less":
            counts = (counts - 1).clamp(min=0)
        if self.twin.fault == "forgets the boundary" and align:
            align = {}
        if self.twin.fault == "commits to the wrong request":
            request_indices = request_indices.flip(0)
        self.context.commit(counts, slots, loc, request_indices, **align)


class Twin:
    """What `peers` hands out, made of graphrt's torch backend."""

    def __init__(self, fault: str = ""):
        self.fault, self.dim_first = fault, True
        self.records = SimpleNamespace(allocate=graphrt.allocate_records)
        self.context = SimpleNamespace(create=self.create)

    def create(self, layers, *, spec_query_len, max_num_reqs, backend):
        return TwinContext(self, layers, spec_query_len, max_num_reqs)

    def conv_dim_first(self, value):
        self.dim_first = value

    def verify(self, *arguments):
        out = graphrt.kda_recoverssm_verify(*arguments, backend="torch")
        if self.fault == "loses an output":
            out[0, 0] = float("nan")
        if self.fault == "records another gate":
            arguments[9].key_gate[0, 0, 0, -1] += 1
        return out

    def conv_update(self, x, state, weight, bias, *, conv_state_indices, query_start_loc, max_query_len, out, **_):
        where = (query_start_loc, conv_state_indices, max_query_len)
        graphrt.kda_conv_verify(x, state, weight, bias, *where, out=out, backend="torch")
        if self.fault == "shifts the convolution twice":
            state[conv_state_indices.long()] = state[conv_state_indices.long()].roll(-1, 2)
        return out


def failed(table):
    return {row["what"] for row in table if not row["ok"]}


@pytest.mark.parametrize("block", [0, 4], ids=["plain", "align"])
@pytest.mark.parametrize("dim_first", [True, False], ids=["dim first", "dim last"])
def test_a_peer_that_does_the_same_passes(block, dim_first):
    """Eager, crossed and deferred followers all stay within their limits, and every kind of figure is compared."""
    shape = replace(SHAPE, block=block, conv_dim_first=dim_first)
    table = peer_check.run(shape, Twin(), None, "torch")
    assert failed(table) == set()
    compared = {row["what"].partition(": ")[2] for row in table}
    assert {"corrections", "checkpoints", "whole pool at the end", "keys and gates, differing"} <= compared


FAULTS = {
    "commits one token less": {"eager: checkpoints", "deferred: whole pool at the end"},
    "commits to the wrong request": {"eager: checkpoints", "peer to the oracle: checkpoints"},
    "loses an output": {"eager: outputs, roundings", "deferred: outputs, roundings"},
    "records another gate": {"eager: keys and gates, differing", "deferred: keys and gates, differing"},
    "shifts the convolution twice": {"eager: convolution histories, differing"},
    "forgets the boundary": {"eager: checkpoints", "deferred: whole pool at the end"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_peer_with_a_fault_is_found_out(fault):
    """Each fault fails the comparison that is there for it."""
    shape = replace(SHAPE, block=4 if fault == "forgets the boundary" else 0)
    assert FAULTS[fault] <= failed(peer_check.run(shape, Twin(fault), None, "torch"))


def wheel_of(path: Path, modules: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in modules.items():
            archive.writestr(name, text)
    return path


def test_only_the_needed_files_leave_a_wheel(tmp_path):
    """The small wheel has the named modules and the version, and nothing else of the project."""
    modules = {name.replace(".", "/") + ".py": "" for name in peers.MODULES["fla"]}
    others = {"fla/__init__.py": "raise ImportError", "fla/layers.py": ""}
    metadata = {"fla_core-9.dist-info/METADATA": "Name: fla-core\nVersion: 9.1\n"}
    wheel = wheel_of(tmp_path / "whole.whl", modules | others | metadata)
    peers.slim("fla", wheel, tmp_path / "small.whl")
    with zipfile.ZipFile(tmp_path / "small.whl") as small:
        assert set(small.namelist()) == set(modules) | set(metadata)
    assert peers.unpack("fla", tmp_path / "small.whl", tmp_path / "out") == "9.1"


def test_a_wheel_of_something_else_is_refused_by_what_it_lacks(tmp_path):
    """The error names the wheel that was wanted and the first file that is not there."""
    wheel = wheel_of(tmp_path / "other.whl", {"fla/ops/kda/naive.py": ""})
    with pytest.raises(ValueError, match=r"fla-core==.*fla/ops/kda/fused_recurrent.py"):
        peers.unpack("fla", wheel, tmp_path)


def test_the_floor_counts_what_a_deferred_step_must_move():
    """FP32 state in and out 128 KiB, n + Q KiB of records and 1.25 Q KiB of tokens a request, head and layer."""
    model = SimpleNamespace(
        window=8, dim=128, heads=12, layers_count=2, pools={"float32": torch.zeros(1)}, device=torch.device("cpu"),
        bytes_per_request=lambda *_: (1, 2),
    )  # fmt: skip
    step = SimpleNamespace(layers=[0, 0], per_token=False, deferred=True)
    key, rate = ("float32", "graphrt"), 1e9
    found = {key: 100.0, ("float32", "vllm triton commit"): 250.0}
    row = bench_peers.row(model, step, key, found, 3, 4, rate)
    assert row["floor_us"] == pytest.approx(3 * 12 * 2 * (128 + 4 + 8 + 1.25 * 8) * 1024 / rate * 1e6)
    assert row["to_peer"] == 2.5


def test_the_main_points_are_measured_before_the_others():
    """When time runs out it is the side points that are missing."""
    args = SimpleNamespace(window=[4, 8], batch=[1, 64])
    found = bench_peers.points(args)
    assert found[:2] == [(8, 4, 1), (8, 4, 64)] and len(found) == len(set(found)) == 12
