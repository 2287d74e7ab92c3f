"""KDA layers as the runtime sees them, and the tables through which one launch reaches all of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .checks import FLOATS, check_count, check_entries_apart, check_head_dim, check_is_tensor, check_lower_bound, fail
from .fixed import Fixed
from .overlap import check_apart
from .records import KDARecoverSSMRecords
from .steps import Geometry


class KDALayerLike(Protocol):
    """What a layer must have: an engine's own layer object can be passed as it is."""

    kv_cache: Any
    recoverssm_records: Any
    A_log: Tensor
    dt_bias: Tensor
    local_num_heads: int
    head_dim: int
    gate_lower_bound: float | None


@dataclass(eq=False)
class KDALayer:
    """One KDA layer's static tensors and parameters.

    Any object with the first seven attributes serves as well.

    kv_cache            convolution state [slots, conv_dim, C] (or [slots, C, conv_dim]) and checkpoint [slots, H, V, K]
    recoverssm_records  what `allocate_records` made for this layer
    A_log               [H], any floating dtype
    dt_bias             [H * K], any floating dtype
    local_num_heads     H, heads on this device
    head_dim            K = V, a power of two of at least 16
    gate_lower_bound    below zero for the bounded gate, None for the softplus gate
    conv_weight         [conv_dim, W]; `create` asks for its width, where it gets no `conv_width`, and for its dtype, to
                        compile the convolution (if it takes that dtype; else that of the state)
    conv_bias           [conv_dim], or None; `create` compiles the convolution with a bias if there is one
    """

    kv_cache: tuple[Tensor, Tensor]
    recoverssm_records: KDARecoverSSMRecords
    A_log: Tensor
    dt_bias: Tensor
    local_num_heads: int
    head_dim: int
    gate_lower_bound: float | None
    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None


@dataclass(frozen=True)
class LayerStack(Fixed):
    """The tensors of L layers and int64 tables of their addresses and strides (in elements), on the device.

    The lists keep the tensors alive, the tables are what kernels read. Nothing is copied: a weight update in place
    is seen by the next fold.
    """

    conv_states: list[Tensor]
    """[slots, conv_dim, C] views, whatever the storage order."""
    checkpoints: list[Tensor]
    corrections: list[Tensor]
    key_gates: list[Tensor]
    A_logs: list[Tensor]
    dt_biases: list[Tensor]
    conv_addrs: Tensor
    conv_strides: Tensor
    conv_dim_strides: Tensor
    conv_column_strides: Tensor
    checkpoint_addrs: Tensor
    checkpoint_strides: Tensor
    correction_addrs: Tensor
    correction_strides: Tensor
    key_gate_addrs: Tensor
    key_gate_strides: Tensor
    A_log_addrs: Tensor
    dt_bias_addrs: Tensor
    lower_bound: float | None
    spec_query_len: int
    hist: int
    """W - 1 columns of committed convolution history."""
    conv_keeps_history: bool
    """C = hist + Q (a step may accept nothing), or C = hist + Q - 1 (it may not)."""
    aligned: bool
    """Every address is a multiple of 16 bytes and every row stride one of 16 elements."""
    conv_packed: bool
    """Convolution states are contiguous within a slot, in one storage order, and slots start on 16 bytes."""
    conv_kinds: frozenset[tuple[torch.dtype, bool]]
    """Of the layers' convolutions, as far as they are known: dtype of the weights, and whether there is a bias."""
    tensors_now: Callable[[], dict[str, Tensor]]
    """By name, what the layers hold now: the tensors above, until an owner replaces one."""

    @property
    def device(self) -> torch.device:
        return self.checkpoints[0].device

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            num_slots=self.checkpoints[0].shape[0],
            num_rows=self.corrections[0].shape[0],
            spec_query_len=self.spec_query_len,
            conv_keeps_history=self.conv_keeps_history,
        )

    @classmethod
    def build(
        cls,
        layers: Sequence[KDALayerLike],
        *,
        spec_query_len: int,
        max_num_reqs: int,
        conv_dim_first: bool = True,
        conv_width: int | None = None,
    ) -> "LayerStack":
        """Check that the layers agree with each other and with the sizes, and make their tables.

        Raises:
            ValueError: naming the layer, what was expected and what came.
        """
        try:
            layers = list(layers)
        except TypeError:
            fail("layers", "a sequence of KDA layers", type(layers).__name__)
        if not layers:
            raise ValueError("layers: expected at least one KDA layer, got none")
        for index, layer in enumerate(layers):
            _check_layer(index, layer, layers[0], spec_query_len, max_num_reqs)
        check_apart(written for index, layer in enumerate(layers) for written in _written(index, layer))
        conv_states = [layer.kv_cache[0] for layer in layers]
        if not conv_dim_first:
            conv_states = [state.transpose(1, 2) for state in conv_states]
        hist, keeps = conv_history(layers[0], conv_states[0].shape[2], spec_query_len, conv_width)
        tensors: dict[str, list[Tensor]] = {
            "conv": conv_states,
            "checkpoint": [layer.kv_cache[1] for layer in layers],
            "correction": [layer.recoverssm_records.correction for layer in layers],
            "key_gate": [layer.recoverssm_records.key_gate for layer in layers],
            "A_log": [layer.A_log for layer in layers],
            "dt_bias": [layer.dt_bias for layer in layers],
        }
        device = tensors["checkpoint"][0].device

        def table(name: str, entry: Callable[[Tensor], int]) -> Tensor:
            return torch.tensor([entry(t) for t in tensors[name]], dtype=torch.int64, device=device)

        rows = tensors["checkpoint"] + tensors["correction"] + tensors["key_gate"]
        return cls(
            conv_states=conv_states,
            checkpoints=tensors["checkpoint"],
            corrections=tensors["correction"],
            key_gates=tensors["key_gate"],
            A_logs=tensors["A_log"],
            dt_biases=tensors["dt_bias"],
            conv_addrs=table("conv", Tensor.data_ptr),
            conv_strides=table("conv", lambda t: t.stride(0)),
            conv_dim_strides=table("conv", lambda t: t.stride(1)),
            conv_column_strides=table("conv", lambda t: t.stride(2)),
            checkpoint_addrs=table("checkpoint", Tensor.data_ptr),
            checkpoint_strides=table("checkpoint", lambda t: t.stride(0)),
            correction_addrs=table("correction", Tensor.data_ptr),
            correction_strides=table("correction", lambda t: t.stride(0)),
            key_gate_addrs=table("key_gate", Tensor.data_ptr),
            key_gate_strides=table("key_gate", lambda t: t.stride(0)),
            A_log_addrs=table("A_log", Tensor.data_ptr),
            dt_bias_addrs=table("dt_bias", Tensor.data_ptr),
            lower_bound=layers[0].gate_lower_bound,
            spec_query_len=spec_query_len,
            hist=hist,
            conv_keeps_history=keeps,
            conv_packed=_is_packed(conv_states),
            conv_kinds=frozenset(kind for layer in layers for kind in _conv_kinds(layer)),
            aligned=all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in rows),
            tensors_now=lambda: {
                f"layers[{index}].{field}": t
                for index, layer in enumerate(layers)
                for field, t in _tensors_of(layer).items()
            },
        )


def _is_packed(conv_states: list[Tensor]) -> bool:
    _, channels, columns = conv_states[0].shape
    orders = {t.stride()[1:] for t in conv_states}
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in conv_states)
    return aligned and orders in ({(columns, 1)}, {(1, channels)})


def _conv_kinds(layer: KDALayerLike) -> Iterator[tuple[torch.dtype, bool]]:
    """A layer without weights that a convolution takes may have those of its state's dtype, with and without a bias."""
    weight = getattr(layer, "conv_weight", None)
    if isinstance(weight, Tensor) and weight.dtype in FLOATS:
        yield weight.dtype, getattr(layer, "conv_bias", None) is not None
    else:
        yield from ((layer.kv_cache[0].dtype, bias) for bias in (False, True))


def _written(index: int, layer: KDALayerLike) -> Iterator[tuple[str, Tensor, int]]:
    """What a step writes of a layer: name, tensor, and rows before its first."""
    name, records = f"layers[{index}]", layer.recoverssm_records
    yield f"{name}.kv_cache[0]", layer.kv_cache[0], 0
    yield f"{name}.kv_cache[1]", layer.kv_cache[1], 0
    for field in ("correction", "key_gate"):
        rows = getattr(records, field)
        # An engine's stock records start with their allocation: the memory before them is somebody else's.
        yield f"{name}.recoverssm_records.{field}", rows, int(rows.storage_offset() >= rows.stride(0))


def _tensors_of(layer: KDALayerLike) -> dict[str, Tensor]:
    """All that the tables of a stack point to, by field."""
    return {
        "kv_cache[0]": layer.kv_cache[0],
        "kv_cache[1]": layer.kv_cache[1],
        "recoverssm_records.correction": layer.recoverssm_records.correction,
        "recoverssm_records.key_gate": layer.recoverssm_records.key_gate,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
    }


def conv_history(layer: KDALayerLike, columns: int, spec_query_len: int, conv_width: int | None) -> tuple[int, bool]:
    """History columns `hist = W - 1`, and whether a verify keeps them (C = hist + Q) or shifts (C = hist + Q - 1).

    W is `conv_width`, else the layer's `conv_weight.shape[1]`, else the rule of the engine's layout,
    `hist = C - Q + 1`.
    """
    if conv_width is not None:
        conv_width = check_count("conv_width", conv_width, 2)
    weight = getattr(layer, "conv_weight", None)
    if conv_width is None and weight is not None:
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            fail("conv_weight", "[conv_dim, W]", shape, "or give conv_width")
        conv_width = weight.shape[1]
    if conv_width is None:
        conv_width = columns - spec_query_len + 2
    if conv_width < 2:
        fail(
            "conv_width", "at least 2", conv_width, f"convolution state has {columns} columns, window {spec_query_len}"
        )
    hist = conv_width - 1
    if columns not in (hist + spec_query_len, hist + spec_query_len - 1):
        fail(
            "kv_cache[0]",
            f"{hist + spec_query_len} columns (hist + Q) or {hist + spec_query_len - 1} (hist + Q - 1)",
            f"{columns}",
            f"conv_width {conv_width}, spec_query_len {spec_query_len}; conv_dim_first says which dimension they are",
        )
    return hist, columns == hist + spec_query_len


_FIELDS = (
    "kv_cache",
    "recoverssm_records",
    "A_log",
    "dt_bias",
    "local_num_heads",
    "head_dim",
    "gate_lower_bound",
)


def _check_layer(index: int, layer: KDALayerLike, first: KDALayerLike, spec_query_len: int, max_num_reqs: int) -> None:
    name = f"layers[{index}]"
    _check_fields(name, layer)
    _check_shapes(name, layer, spec_query_len, max_num_reqs)
    _check_same(name, layer, first)


def _check_fields(name: str, layer: KDALayerLike) -> None:
    """Everything is there, and of the right kind."""
    lacking = [field for field in _FIELDS if not hasattr(layer, field)]
    if lacking:
        fail(name, f"an object with {', '.join(_FIELDS)}", f"a {type(layer).__name__} without {', '.join(lacking)}")
    check_lower_bound(f"{name}.gate_lower_bound", layer.gate_lower_bound)
    # An engine may keep tensors of its own behind the two.
    if not isinstance(layer.kv_cache, Sequence) or len(layer.kv_cache) < 2:
        fail(f"{name}.kv_cache", "(conv_state, checkpoint)", type(layer.kv_cache).__name__)
    for field in ("correction", "key_gate"):
        check_is_tensor(f"{name}.recoverssm_records.{field}", getattr(layer.recoverssm_records, field, None))
    tensors = _tensors_of(layer)
    wide = torch.float64 if getattr(layer.kv_cache[1], "dtype", None) == torch.float64 else torch.float32
    for field, tensor in tensors.items():
        check_is_tensor(f"{name}.{field}", tensor)
        dtypes = (wide,) if field == "recoverssm_records.correction" else FLOATS
        if tensor.dtype not in dtypes:
            fail(f"{name}.{field}", " or ".join(map(str, dtypes)), tensor.dtype)
        check_entries_apart(f"{name}.{field}", tensor)


def _check_shapes(name: str, layer: KDALayerLike, spec_query_len: int, max_num_reqs: int) -> None:
    heads = check_count(f"{name}.local_num_heads", layer.local_num_heads, 1)
    dim = check_head_dim(f"{name}.head_dim", layer.head_dim)
    conv_state, checkpoint, correction, key_gate, A_log, dt_bias = _tensors_of(layer).values()
    if conv_state.ndim != 3:
        fail(f"{name}.kv_cache[0]", "three dimensions [slots, conv_dim, C]", list(conv_state.shape))
    for field, tensor, least, row in (
        ("kv_cache[1]", checkpoint, 0, (heads, dim, dim)),
        ("recoverssm_records.correction", correction, max_num_reqs, (heads, spec_query_len, dim)),
        ("recoverssm_records.key_gate", key_gate, max_num_reqs, (heads, spec_query_len, 2 * dim)),
    ):
        rows_suffice = tensor.ndim == 4 and tensor.shape[0] >= least
        if not rows_suffice or tuple(tensor.shape[1:]) != row:
            rows = f">= {least}" if least else "any"
            fail(f"{name}.{field}", f"[{rows}, {', '.join(map(str, row))}]", list(tensor.shape))
        if not tensor[:1].is_contiguous():
            fail(
                f"{name}.{field}", "contiguous within a row (only the row stride is free)", f"strides {tensor.stride()}"
            )
    # The plan clamps slots to the checkpoints and rows to the corrections.
    if conv_state.shape[0] < checkpoint.shape[0]:
        fail(f"{name}.kv_cache[0]", f"at least {checkpoint.shape[0]} slots, as kv_cache[1]", conv_state.shape[0])
    if key_gate.shape[0] != correction.shape[0]:
        fail(f"{name}.recoverssm_records.key_gate", f"{correction.shape[0]} rows, as correction", key_gate.shape[0])
    for field, tensor, size in (("A_log", A_log, heads), ("dt_bias", dt_bias, heads * dim)):
        if tensor.numel() != size or not tensor.is_contiguous():
            fail(f"{name}.{field}", f"{size} contiguous values", f"{list(tensor.shape)} strides {tensor.stride()}")


def _check_same(name: str, layer: KDALayerLike, first: KDALayerLike) -> None:
    """One launch serves all layers, so they agree in everything but addresses and strides."""

    def facts(one: KDALayerLike) -> dict[str, object]:
        tensors = _tensors_of(one)
        seen: dict[str, object] = {k: f"{list(t.shape)} {t.dtype} on {t.device}" for k, t in tensors.items()}
        device = one.kv_cache[1].device
        stray = [k for k, t in tensors.items() if t.device != device]
        return {**seen, "gate_lower_bound": one.gate_lower_bound, "tensors off the checkpoint's device": stray}

    mine, expected = facts(layer), facts(first)
    expected["tensors off the checkpoint's device"] = []
    for key, value in mine.items():
        if value != expected[key]:
            fail(f"{name}.{key}", f"{expected[key]} (as layers[0])", value)
