"""Wrong arguments for every public function: what a call may do with them, and how many were tried.

A target is a good call. Each of its arguments in turn is replaced by everything that is wrong in its kind: other
Python types, dtypes, shapes, strides, devices, and values far outside. The call then has to raise a ValueError or
TypeError that names the argument, or to give a defined result; and no byte outside what the step owns may change.

    python tests/fuzz.py                            one line a function with the inputs it was given
    python tests/fuzz.py triton cpu verify          one group of functions on another backend
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from rig import Pool, Snapshot, Target, whole
from steps import Batch, Row, conv_verify, core_verify
from torch import Tensor
from truth import start

import graphrt
from graphrt import call_order, capture

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1

PYTHON = [None, "text", 7, 2.5, True, [1, 2], [], {}, {"a": 1}, object(), b"bytes", float("nan"), (1, "x")]
# What a machine may have no memory for is left out: the allocator refuses it, and knows no argument.
INTS = [None, "3", 2.5, True, [3], -1, 0, -(1 << 31), 1 << 31, 1 << 63, 10**30, float("nan"), float("inf"),
        torch.tensor(3), numpy.int32(-3), object()]  # fmt: skip
STRINGS = [None, "", "nonsense", 3, True, ["torch"], object(), "\0"]
DEVICES = [None, "", "nonsense", "cuda:99", -5, 2.5, object(), "meta:x"]


@dataclass(frozen=True)
class Named:
    """One wrong value of an argument."""

    label: str
    value: Any


def wrong_tensors(t: Tensor) -> Iterator[Named]:
    """What is wrong with a tensor argument in turn: type, dtype, shape, strides, device, values."""
    yield from (Named(f"{type(v).__name__} {v!r}", v) for v in PYTHON)
    yield Named("a list of its values", t.tolist())
    if t.dtype != torch.bfloat16:
        yield Named("numpy", t.detach().cpu().numpy())
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64,
                  torch.float16, torch.bfloat16, torch.complex64):  # fmt: skip
        if dtype != t.dtype:
            yield Named(str(dtype), t.to(dtype))
    yield from wrong_layouts(t)
    yield Named("meta", t.to("meta"))
    if t.is_cuda:
        yield Named("on the host", t.cpu())
    yield Named("sparse", t.to_sparse())
    yield from wrong_values(t)


def wrong_layouts(t: Tensor) -> Iterator[Named]:
    """Other shapes and strides of the same values."""
    yield Named("one dimension more", t[None])
    yield Named("one dimension less", t.flatten()[0] if t.ndim == 1 else t.flatten(0, 1))
    yield Named("nothing along the last", t[..., :0])
    yield Named("one less along the first", t[:-1])
    yield Named("one less along the last", t[..., :-1])
    yield Named("twice along the first", torch.cat((t, t)))
    yield Named("twice along the last", torch.cat((t, t), -1))
    yield Named("expanded", t[:1].expand(t.shape))
    yield Named("every second element", torch.stack((t, t), -1)[..., 0])
    yield Named("off by one element", torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape))
    if t.ndim > 1:
        yield Named("transposed", t.transpose(-1, -2))
        yield Named("another order in memory", t.transpose(0, -1).contiguous().transpose(0, -1))


def wrong_values(t: Tensor) -> Iterator[Named]:
    """Values far outside, all of them or the last alone. None names what belongs to somebody else."""
    kinds = (-1, -2, INT_MIN, 1 << 20, INT_MAX) if t.dtype == torch.int32 else ()
    if t.is_floating_point():
        kinds = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38)
    for value in kinds:
        yield Named(f"all {value}", torch.full_like(t, value))
        last = t.clone()
        last.view(-1)[-1] = value
        yield Named(f"last {value}", last)


def wrong(value: Any) -> Iterator[Named]:
    """Everything wrong for an argument that has this good value."""
    if isinstance(value, Tensor):
        yield from wrong_tensors(value)
        return
    if isinstance(value, bool) or value is None:
        kinds: list[Any] = PYTHON
    elif isinstance(value, int):
        kinds = INTS
    elif isinstance(value, (str, torch.device)):
        kinds = DEVICES if isinstance(value, torch.device) else STRINGS
    elif isinstance(value, list) and value and isinstance(value[0], int):
        kinds = [*PYTHON, ["x"], [None], [2.5], [1 << 40], [-(1 << 40)], [[1]], value[:-1], torch.tensor(value),
                 [True] * len(value), value * 3]  # fmt: skip
    else:
        kinds = PYTHON
    yield from (Named(f"{type(v).__name__} {v!r}"[:60], v) for v in kinds)


@dataclass
class Call:
    """A good call. `make` gives fresh arguments, `intact` the names of what changed and must not have."""

    name: str
    function: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    intact: Callable[[], list[str]] = list
    only: tuple[str, ...] = ()
    """Arguments to spoil; all by default."""
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names under which an error may speak of an argument."""
    errors: tuple[type[Exception], ...] = (ValueError, TypeError)


@contextmanager
def limited() -> Iterator[None]:
    """A call that does not come back is a fault, not the end of the run. On a GPU it may compile for half a minute."""
    seconds = 200 if torch.cuda.is_available() else 20

    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Result:
    """What came of the wrong inputs of one call."""

    name: str
    tried: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


def fuzz(call: Call) -> Result:
    """Try every wrong input of a call."""
    result = Result(call.name)
    names = call.only or tuple(call.make())
    for name in names:
        for bad in list(wrong(call.make()[name])):
            arguments = call.make() | {name: bad.value}
            result.tried += 1
            what = f"{call.name}({name}={bad.label})"
            try:
                with limited():
                    call.function(**arguments)
            except call.errors as error:
                result.refused += 1
                known = (name, *call.aliases.get(name, ()))
                if not any(word in str(error) for word in known):
                    result.faults.append(f"{what}: the error does not name it: {type(error).__name__}: {error}")
            except Exception as error:
                result.faults.append(f"{what}: {type(error).__name__}: {error}".partition("\n")[0])
            changed = call.intact()
            if changed:
                result.faults.append(f"{what}: changed {changed}")
    return result


# The calls. Slots 1 and 2 and record rows 0 and 1 belong to the step; slot 3 and row 2 to a stranger.


class World:
    """A pool with two requests in the step and a stranger, and the snapshot of what is not the step's."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pool = Pool(target, target.shape(layers=1, heads=1, conv_dim=6))
        start(self.pool, {0: 1, 1: 2, 2: 3})
        self.pool.pending[:3] = torch.tensor([2, 1, 3], dtype=torch.int32)
        for records in (self.pool.records(0).correction, self.pool.records(0).key_gate):
            records[:3] = torch.randn(records[:3].shape)
        self.batch = Batch(self.pool, [Row(1, 0, 4), Row(2, 1, 3)], tail=2)
        self.before = Snapshot(self.pool)
        self.stranger = int(self.pool.pending[2])

    def intact(self) -> list[str]:
        # A verify in checked mode, and none of its commits: the next one starts from anew.
        call_order._layers.clear()
        changed = self.before.changed(slots=[1, 2], rows=[0, 1], pending=True)
        changed += ["pending of a stranger"] * (int(self.pool.pending[2]) != self.stranger)
        if changed:
            for name, tensor in self.pool.tensors().items():
                whole(tensor).copy_(self.before.memory[name])
        return changed

    def int32(self, *values: int) -> Tensor:
        return self.pool.int32(values)

    def step(self) -> dict[str, Any]:
        b = self.batch
        return {"state_indices": b.state_indices.clone(), "record_rows": b.record_rows.clone()}


def verify_calls(world: World) -> list[Call]:
    pool, tokens, params = world.pool, world.batch.tokens[0], world.pool.params[0]

    def core() -> dict[str, Any]:
        parts = {name: getattr(tokens, name)[None].clone() for name in ("q", "k", "v", "raw_g", "raw_beta")}
        return {
            **parts, "A_log": params.A_log.clone(), "dt_bias": params.dt_bias.clone(),
            "lower_bound": params.lower_bound, "checkpoint_state": pool.checkpoint(0), "records": pool.records(0),
            "query_start_loc": world.batch.query_start_loc.clone(), "spec_query_len": 4,
            "out": torch.zeros_like(parts["v"]), "backend": pool.target.backend, "check": None, **world.step(),
        }  # fmt: skip

    def deferred() -> dict[str, Any]:
        return core() | {"pending": pool.pending}

    def conv() -> dict[str, Any]:
        return {
            "x": tokens.x.clone(), "conv_state": pool.conv(0), "conv_weight": params.conv_weight.clone(),
            "conv_bias": params.conv_bias.clone(), "query_start_loc": world.batch.query_start_loc.clone(),
            "spec_query_len": 4, "out": torch.zeros_like(tokens.x), "pending": pool.pending,
            "conv_dim_first": True, "backend": pool.target.backend, "check": None, **world.step(),
        }  # fmt: skip

    def fused(**fields: Any) -> None:
        arguments = {name: part for name, part in deferred().items() if name != "out"}
        graphrt.kda_deferred_verify(**arguments, conv=graphrt.FusedConv(**fields))

    def convolution() -> dict[str, Any]:
        width = 3 * tokens.q[0].numel()
        state = torch.zeros(pool.shape.slots, width, 7, dtype=tokens.q.dtype, device=pool.device)
        weight, bias = torch.ones_like(state[0, :, :4]), torch.ones_like(state[0, :, 0])
        return {"conv_state": state, "weight": weight, "bias": bias, "dim_first": True}

    # Sizes and windows follow from several arguments; the error names the one that does not fit the others.
    sizes = ("checkpoint_state", "records", "q", "k", "v", "raw_beta", "A_log", "dt_bias", "out")
    aliases = {
        "checkpoint_state": sizes, "records": ("raw_g", "k:"), "spec_query_len": ("records", "conv_state"),
        "q": ("k:", "out"), "v": ("out",), "state_indices": ("query_start_loc", "record_rows"), "pending": ("pending",),
        "record_rows": ("record_rows",), "backend": ("backend",), "x": ("out",),
        "conv_weight": ("conv_state",), "conv_dim_first": ("conv_state",),
    }  # fmt: skip
    share = {"intact": world.intact, "aliases": aliases}
    return [
        Call("kda_recoverssm_verify", graphrt.kda_recoverssm_verify, core, **share),
        Call("kda_deferred_verify", graphrt.kda_deferred_verify, deferred, **share),
        Call("kda_conv_verify", graphrt.kda_conv_verify, conv, **share),
        Call(
            "FusedConv of a verify",
            fused,
            convolution,
            intact=world.intact,
            aliases={"weight": ("conv_state",), "dim_first": ("conv_state",)},
        ),
    ]


def context_calls(world: World) -> list[Call]:
    pool, batch = world.pool, world.batch

    def commit() -> dict[str, Any]:
        return {
            "num_accepted_tokens": world.int32(2, 1), "query_start_loc": batch.query_start_loc.clone(),
            "request_indices": world.int32(1, 0), "pending": pool.pending,
            "eager": torch.tensor([0, 1], dtype=torch.uint8, device=pool.device), **world.step(),
        }  # fmt: skip

    def align() -> dict[str, Any]:
        return commit() | {
            "block_table": world.int32(1, 1, 2, 2).view(2, 2), "num_computed_tokens": world.int32(3, 5),
            "mamba_block_size": 16,
        }  # fmt: skip

    def fold() -> dict[str, Any]:
        return {"pending": pool.pending, **world.step()}

    def step_object(**arguments: Any) -> None:
        graphrt.KDARecoverSSMDeferred(eager=None, context=pool.context, **arguments).flush()

    rows = {"state_indices": ("query_start_loc", "record_rows", "eager", "num_accepted_tokens", "request_indices",
                              "block_table"),
            "request_indices": ("num_accepted_tokens", "block_table", "num_computed_tokens"),
            "block_table": ("align arguments",), "num_computed_tokens": ("align arguments",),
            "mamba_block_size": ("align arguments",)}  # fmt: skip
    share = {"intact": world.intact, "aliases": rows}
    return [
        Call("context.commit", pool.context.commit, commit, **share),
        Call("context.commit, align", pool.context.commit, align, **share),
        Call("context.flush", pool.context.flush, fold, **share),
        Call("context.drain", pool.context.drain, fold, **share),
        Call("KDARecoverSSMDeferred.flush", step_object, fold, **share),
    ]


def create_calls(world: World) -> list[Call]:
    pool = world.pool
    layer = pool.layers[0]

    def create() -> dict[str, Any]:
        return {
            "layers": pool.layers, "spec_query_len": 4, "max_num_reqs": 6, "backend": pool.target.backend,
            "conv_dim_first": True, "conv_width": 4, "check": None,
        }  # fmt: skip

    def fields() -> dict[str, Any]:
        parts = {f"kv_cache[{i}]": t for i, t in enumerate(layer.kv_cache)}
        records = layer.recoverssm_records
        parts |= {"correction": records.correction, "key_gate": records.key_gate}
        names = ("A_log", "dt_bias", "local_num_heads", "head_dim", "gate_lower_bound", "kv_cache", "conv_weight")
        return {**parts, "recoverssm_records": records, **{name: getattr(layer, name) for name in names}}

    def create_layer(**spoilt: Any) -> None:
        """A context over a layer with these fields."""
        good = fields()
        changed = {name: value for name, value in spoilt.items() if value is not good[name]}
        cache = [changed.pop(f"kv_cache[{i}]", part) for i, part in enumerate(layer.kv_cache)]
        records = graphrt.KDARecoverSSMRecords(
            changed.pop("correction", layer.recoverssm_records.correction),
            changed.pop("key_gate", layer.recoverssm_records.key_gate),
        )
        one = graphrt.KDALayer(tuple(cache), records, **{
            name: getattr(layer, name)
            for name in ("A_log", "dt_bias", "local_num_heads", "head_dim", "gate_lower_bound", "conv_weight")
        })  # fmt: skip
        for name, value in changed.items():
            setattr(one, name, value)
        graphrt.KDADeferredCommitContext.create([one], spec_query_len=4, max_num_reqs=6, backend=pool.target.backend)

    sizes = ("kv_cache", "correction", "key_gate", "A_log", "dt_bias", "conv_width")
    aliases = {
        "spec_query_len": ("correction", "kv_cache", "conv_width"), "max_num_reqs": ("correction",),
        "conv_dim_first": sizes, "conv_width": sizes, "head_dim": sizes, "local_num_heads": sizes,
        "kv_cache[1]": sizes, "conv_weight": sizes, "kv_cache": sizes, "recoverssm_records": sizes,
        "correction": sizes, "kv_cache[0]": sizes, "gate_lower_bound": ("lower_bound",),
    }  # fmt: skip
    share = {"intact": world.intact, "aliases": aliases}
    return [
        Call("KDADeferredCommitContext.create", graphrt.KDADeferredCommitContext.create, create, **share),
        Call("KDARecoverSSMCommitContext.create", graphrt.KDARecoverSSMCommitContext.create, create, **share),
        Call("create over a layer's fields", create_layer, fields, **share),
    ]


def helper_calls(world: World) -> list[Call]:
    device = torch.device(world.pool.device)

    def mask() -> dict[str, Any]:
        return {
            "num_computed_tokens": world.int32(3, 16), "query_start_loc": world.int32(0, 4, 5), "mamba_block_size": 16,
            "out": torch.zeros(2, dtype=torch.uint8, device=device), "request_indices": world.int32(1, 0),
        }  # fmt: skip

    def sources() -> dict[str, Any]:
        return {
            "block_table": world.int32(1, 2, 3, 4).view(2, 2), "num_computed_tokens": world.int32(3, 16),
            "mamba_block_size": 16, "out": world.int32(0, 0),
        }  # fmt: skip

    def records() -> dict[str, Any]:
        return {
            "max_num_reqs": 2, "num_heads": 1, "spec_query_len": 2, "head_dim": 16, "dtype": torch.float32,
            "device": device,
        }  # fmt: skip

    aliases = {
        "block_table": ("num_computed_tokens", "out"), "num_computed_tokens": ("block_table", "out"),
        "query_start_loc": ("num_computed_tokens", "out", "request_indices"), "device": ("device", "Device"),
    }  # fmt: skip
    share = {"intact": world.intact, "aliases": aliases}

    def programmatic(enabled: Any) -> None:
        with graphrt.programmatic_launches(enabled):
            pass

    return [
        Call("programmatic_launches", programmatic, lambda: {"enabled": True}, **share),
        Call("align_eager_mask", graphrt.align_eager_mask, mask, **share),
        Call("align_state_indices", graphrt.align_state_indices, sources, **share),
        Call("allocate_records", graphrt.allocate_records, records, **share),
        *(
            Call(name, getattr(graphrt, name), lambda: {"device": device}, **share)
            for name in ("error_counter", "error_counts", "error_report", "reset_errors")
        ),
    ]


def ledger_calls(world: World) -> list[Call]:
    """Every ledger is used up by its call."""
    device = torch.device(world.pool.device)

    def slots() -> graphrt.RecordSlots:
        ledger = graphrt.RecordSlots(2, device)
        ledger.admit("here")
        return ledger

    errors = {"errors": (ValueError, TypeError, KeyError), "intact": world.intact, "aliases": {"device": ("Device",)}}
    here = {"request_id": ("request", "record row")}
    return [
        Call("RecordSlots", graphrt.RecordSlots, lambda: {"max_num_reqs": 2, "device": device}, **errors),
        *(
            Call(
                f"RecordSlots.{name}",
                lambda request_id, name=name: getattr(slots(), name)(request_id),
                lambda name=name: {"request_id": "here" if name in ("row", "release", "preempt") else "there"},
                **errors | {"aliases": here},
            )
            for name in ("admit", "row", "release", "preempt", "resume")
        ),
        Call("RecordSlots.generations", lambda request_ids: slots().generations(request_ids),
             lambda: {"request_ids": ["here"]}, **errors | {"aliases": {"request_ids": ("request",)}}),
        Call("RecordSlots.restore", lambda contents: slots().restore(contents),
             lambda: {"contents": slots().contents()}, **errors | {"aliases": {}}),
        Call("RecordSlots.rows", lambda request_ids: slots().rows(request_ids), lambda: {"request_ids": ["here"]},
             **errors | {"aliases": {"request_ids": ("request",)}}),
    ]  # fmt: skip


def state_calls(world: World, folder: Path) -> list[Call]:
    """Whole states, and files of them."""
    context, pending = world.pool.context, world.pool.pending
    state = context.read_state(1, 0, pending)
    ledger = graphrt.RecordSlots(6, torch.device(world.pool.device))
    other = graphrt.RecordSlots(6, torch.device(world.pool.device))
    path = folder / "state.safetensors"
    graphrt.save_state(path, context, ledger)

    def spoilt_state(**lists: Any) -> None:
        context.write_state(1, graphrt.RequestState(**lists), 0, pending)

    share = {"intact": world.intact}
    files = {"only": ("context", "ledger", "slots", "weights"), **share}
    return [
        Call("context.read_state", context.read_state, lambda: {
            "slot": 1, "row": 0, "pending": pending, "num_computed_tokens": 3}, **share),
        Call("context.write_state", context.write_state, lambda: {
            "slot": 1, "state": state, "row": 0, "pending": pending}, **share),
        Call("RequestState", spoilt_state, lambda: {
            "checkpoints": state.checkpoints, "histories": state.histories, "num_computed_tokens": 3}, **share),
        Call("context.copy_state", context.copy_state, lambda: {
            "source": 1, "target": 2, "row": 0, "pending": pending, "target_row": 1}, **share,
            aliases={"row": ("target_row",)}),
        Call("context.zero_state", context.zero_state, lambda: {"slot": 1}, **share),
        Call("context.boundary_blocks", context.boundary_blocks, lambda: {"num_reqs": 2}, **share),
        Call("weights_fingerprint", graphrt.weights_fingerprint, lambda: {"context": context, "weights": "a"}, **share),
        Call("save_state", graphrt.save_state, lambda: {
            "path": folder / "other.safetensors", "context": context, "ledger": ledger, "slots": [1, 2],
            "weights": "a"}, **files),
        Call("load_state", graphrt.load_state, lambda: {
            "path": path, "context": context, "ledger": other, "weights": ""}, **files | {
            "only": ("context", "ledger", "weights")}),
    ]  # fmt: skip


class Recorded:
    """Static inputs, a runner and a decode step over a world, recorded for two rows."""

    def __init__(self, world: World) -> None:
        pool, device = world.pool, torch.device(world.pool.device)
        self.world = world
        self.inputs = capture.StepInputs(3, 4, device, 2)
        self.runner = capture.CommitRunner(pool.context, pool.pending, self.inputs, [2])
        self.runner.capture(progress=False)
        self.sampled = torch.zeros(2, 3, dtype=torch.int32, device=device)
        self.step = capture.DecodeStep(
            pool.context, pool.pending, self.inputs, self.verify, self.sample, capture_sizes=[2]
        )
        self.step.capture(progress=False)
        self.stage()

    def verify(self, rows: Any) -> None:
        core_verify(self.world.batch, 0, deferred=True, pending=rows.pending)
        conv_verify(self.world.batch, 0, deferred=True, pending=rows.pending)

    def sample(self, rows: Any, outputs: Any) -> capture.Sampled:
        count = rows.state_indices.shape[0]
        return capture.Sampled(self.sampled[0, :count], self.sampled[1, :count])

    def stage(self) -> None:
        self.inputs.stage(num_reqs=2, state_indices=[1, 2], record_rows=[0, 1], query_start_loc=[0, 4, 7])

    def staged(self) -> dict[str, Any]:
        return {
            "num_reqs": 2, "state_indices": [1, 2], "record_rows": self.world.int32(0, 1), "query_start_loc": [0, 4, 7],
            "num_accepted_tokens": self.world.int32(2, 1), "eager": [False, True], "request_indices": [1, 0],
            "num_computed_tokens": [3, 5], "block_table": [[1, 1], [2, 2]],
        }  # fmt: skip

    def staged_tensors(self) -> dict[str, Any]:
        """The same from host tensors."""
        lists = {name: value for name, value in self.staged().items() if isinstance(value, list)}
        kinds = {name: torch.uint8 if name == "eager" else torch.int32 for name in lists}
        return self.staged() | {name: torch.tensor(value, dtype=kinds[name]) for name, value in lists.items()}


def capture_calls(world: World) -> list[Call]:
    recorded = Recorded(world)
    inputs, runner, step = recorded.inputs, recorded.runner, recorded.step
    device, pool = torch.device(world.pool.device), world.pool
    parts = {"context": pool.context, "pending": pool.pending, "inputs": inputs}

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        """Stage the good step first: what a call before left staged does not matter."""

        def staged(**arguments: Any) -> Any:
            recorded.stage()
            return function(**arguments)

        return staged

    def built() -> dict[str, Any]:
        return parts | {"capture_sizes": [1, 2], "mamba_block_size": 16}

    def recorded_function() -> dict[str, Any]:
        spare = torch.zeros(2, device=device)
        return {"fn": lambda: spare.add_(1), "device": device, "warmup": 1, "name": "spare"}

    def checked() -> dict[str, Any]:
        spare = torch.zeros(2, device=device)
        recording = capture.record(lambda: spare.add_(1), device=device)
        return {
            "sequence": recording, "eager_fn": lambda: spare.add_(1), "inputs_of_step": lambda i: None, "steps": 2,
            "tensors": {"spare": spare},
        }  # fmt: skip

    def neutral(tensors: Any, values: Any) -> None:
        with capture.state_neutral(tensors, values=values):
            pass

    sizes = {"context": ("spec_query_len",)}
    share = {"intact": world.intact, "aliases": sizes}
    recording = capture.record(recorded_function()["fn"], device=device)
    return [
        Call("StepInputs", capture.StepInputs, lambda: {
            "max_num_reqs": 3, "spec_query_len": 4, "device": device, "block_table_width": 2}, **share),
        Call("StepInputs.rows", inputs.rows, lambda: {"num_reqs": 2}, **share),
        Call("StepInputs.stage", inputs.stage, recorded.staged, intact=world.intact,
             aliases={"num_reqs": ("entries", "requests"), "request_indices": ("requests",), "device": ("Device",)}),
        Call("StepInputs.stage, tensors", inputs.stage, recorded.staged_tensors, intact=world.intact,
             aliases={"num_reqs": ("entries",)}),
        Call("dummy_inputs", capture.dummy_inputs, lambda: {"inputs": inputs, "num_reqs": 2, "dcp": True}, **share),
        Call("CommitRunner", capture.CommitRunner, built, **share),
        Call("CommitRunner.capture", make(runner.capture), lambda: {
            "progress": False, "sizes": [1], "modes": ["commit"], "dcp": False}, **share),
        *(Call(f"CommitRunner.{mode}", make(getattr(runner, mode)), lambda: {"num_reqs": 2}, **share)
          for mode in ("commit", "flush", "drain")),
        Call("DecodeStep", capture.DecodeStep, lambda: built() | {
            "verify": recorded.verify, "sample": recorded.sample, "flush": False}, **share),
        Call("DecodeStep.capture", make(step.capture), lambda: {
            "progress": False, "sizes": [2], "dcp": False}, **share),
        Call("DecodeStep.replay", make(step.replay), lambda: {"num_reqs": 2, "steps": 1}, **share),
        Call("DecodeStep.replay_dummy", make(step.replay_dummy), lambda: {"num_reqs": 2, "dcp": False}, **share),
        Call("DecodeStep.run", make(step.run), lambda: {"num_reqs": 2}, **share),
        Call("record", capture.record, recorded_function, errors=(ValueError, TypeError, capture.CaptureError),
             aliases={"fn": ("function", "recording"), "device": ("Device", "device")}),
        Call("Recording.dump", recording.dump, lambda: {"path": "nowhere.txt"}),
        Call("check_replay", capture.check_replay, checked, errors=(ValueError, TypeError, capture.CaptureError),
             aliases={"sequence": ("replay",)}),
        Call("state_neutral", neutral, lambda: {"tensors": {"pending": pool.pending}, "values": True}),
        Call("diff", capture.diff, lambda: {"a": recording.topology(), "b": recording.topology()}),
    ]  # fmt: skip


GROUPS: dict[str, Callable[..., list[Call]]] = {
    "verify": verify_calls,
    "context": context_calls,
    "create": create_calls,
    "helpers": helper_calls,
    "ledger": ledger_calls,
    "state": state_calls,
    "capture": capture_calls,
}


def fuzz_group(group: str, target: Target) -> list[Result]:
    """All calls of a group over a world of their own."""
    with calls_of(group, World(target)) as calls:
        return [fuzz(call) for call in calls]


@contextmanager
def calls_of(group: str, world: World) -> Iterator[list[Call]]:
    """The calls of a group; files that they write are gone afterwards."""
    with TemporaryDirectory() as folder:
        more = (Path(folder),) if group == "state" else ()
        yield GROUPS[group](world, *more)


def main() -> int:
    backend = sys.argv[1] if len(sys.argv) > 1 else "torch"
    device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    total = refused = 0
    faults = []
    for group in sys.argv[3:] or GROUPS:
        for result in fuzz_group(group, Target(backend, device)):
            print(
                f"{result.name:36} {result.tried:5} tried, {result.refused:5} refused, {len(result.faults)} faults",
                flush=True,
            )
            total, refused = total + result.tried, refused + result.refused
            faults += result.faults
    print(f"{total} wrong inputs: {refused} refused by name, {total - refused - len(faults)} with a defined result")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:3] == ["triton", "cpu"] and os.environ.get("TRITON_INTERPRET") != "1":
        # Read by Triton when it is imported, which has happened above.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.exit(main())
