"""A runtime's states in a file, and back: between two steps, with nothing folded, so that a run goes on bit for bit.

The file is safetensors, format version 2. Tensors: per layer `checkpoint.i`, `conv_state.i`, `correction.i` and
`key_gate.i`; `pending` and `generation`. Metadata: the sizes and dtypes, the fingerprint of the weights, the slots,
who owns which record row, a CRC-32 of every tensor's bytes, and one of all that metadata. What does not fit, and a file
with a bit that is not as it was written, is refused before anything is written. Version 1 had no checksums, and is
refused.
"""

import ctypes
import hashlib
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .call_order import check_committed, check_unflushed, forget, read
from .checks import check_kind, check_path, check_several, fail, plain_int
from .context import KDARecoverSSMCommitContext
from .launch import refuse_in_recording
from .slots import RecordSlots

FORMAT = "graphrt-state"
VERSION = 2


def weights_fingerprint(context: KDARecoverSSMCommitContext, weights: str = "") -> str:
    """SHA-256 of the parameters that a fold uses, A_log, dt_bias and the gate's bound of every layer. Synchronises.

    Args:
        weights: the engine's own name for the rest of its weights; another name gives another fingerprint.
    """
    check_kind("context", context, KDARecoverSSMCommitContext)
    check_kind("weights", weights, str)
    bound = None if context.lower_bound is None else float(context.lower_bound)
    digest = hashlib.sha256(f"{weights}\n{bound}\n".encode(errors="surrogatepass"))
    for parameter in (*context.stack.A_logs, *context.stack.dt_biases):
        digest.update(str(parameter.dtype).encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def save_state(
    path: str | os.PathLike[str],
    context: KDARecoverSSMCommitContext,
    ledger: RecordSlots,
    *,
    slots: Sequence[int] | None = None,
    weights: str = "",
) -> None:
    """Write checkpoints, convolution states, records, pending counts and the ledger to a file. Synchronises.

    Between a commit and the next verify only. What is pending stays pending. The file appears whole or not at all, also
    if the machine stops in the middle, and is on the disk at the return. It takes the place of what had its name: a
    symbolic link is replaced too, and what it leads to stays as it was.

    Args:
        slots: the state slots to save, each once; all of them by default.
        weights: the engine's own name for its weights, part of the fingerprint.

    Raises:
        ValueError: for a slot that is not there or is given twice, a ledger of another size, a request id that is
            neither str nor int, or a path that leads to a folder, a pipe or a device, or is no UTF-8.
        RuntimeError: in checked mode, if the last verify or flush of a record row was not committed.
        OSError: if it cannot be written; an earlier file of that name is as it was, unless only the last sync of its
            folder failed.
    """
    refuse_in_recording("save_state")
    target = _checked_path(path)
    _check_ledger(context, ledger)
    stack = context.stack
    every = range(stack.geometry.num_slots)
    chosen: list[int] = []
    for slot in check_several("slots", every if slots is None else slots, "state slots"):
        number = plain_int(slot)
        if number is None or number not in every:
            fail("slots", f"state slots below {stack.geometry.num_slots}", repr(slot))
        chosen.append(number)
    if len(set(chosen)) < len(chosen):
        fail("slots", "each state slot once", chosen)
    contents = ledger.contents()
    for request_id in (*contents["requests"], *contents["preempted"]):
        if type(request_id) not in (str, int):
            fail("ledger", "requests whose ids are str or int, which a file can hold", repr(request_id))
    rows = range(stack.geometry.num_rows)
    check_committed(rows, stack.corrections)
    check_unflushed(rows, read(ledger.pending), stack.corrections)

    index = None if slots is None else torch.tensor(chosen, dtype=torch.int64, device=stack.device)
    tensors = {name: t if index is None or not by_slot else t[index] for name, t, by_slot in _tensors(context)}
    tensors |= {"pending": ledger.pending, "generation": ledger.generation}
    own = {name: _own(t) for name, t in tensors.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "sizes": json.dumps(_sizes(context)),
        "weights": weights_fingerprint(context, weights),
        "slots": json.dumps(chosen),
        "ledger": json.dumps({**contents, "requests": list(contents["requests"].items())}),
        "checksums": json.dumps(_checksums(own)),
    }
    _write_whole(target, own, metadata | {"checksum": _seal(metadata)})


def _write_whole(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file that has its name only when all of it is on the disk, so that a crash leaves this one or the last.

    It grows under a name of its own in the same folder, which only a crash leaves behind.
    """
    part = target.parent / f".{secrets.token_hex(8)}.part"
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        save_file(tensors, part, metadata)
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
        os.fsync(folder)
    except SafetensorError as error:
        raise OSError(f"{target}: cannot be written ({error})") from error
    finally:
        part.unlink(missing_ok=True)
        os.close(folder)


def load_state(
    path: str | os.PathLike[str], context: KDARecoverSSMCommitContext, ledger: RecordSlots, *, weights: str = ""
) -> None:
    """Put a saved run into a context and a ledger without requests; their tensors stay where they are. Synchronises.

    Slots that are not in the file keep their contents. A ledger that had requests before gives the rows generations of
    their own, so that no step staged for those meets the owners now: ask it for `generations` anew.

    Args:
        weights: as it was given to `save_state`.

    Raises:
        ValueError: for a file that is not such a file, or of another version, size, dtype or weights, in one sentence
            with both values, or damaged, down to a single bit; nothing is written then. Also for a ledger that has
            requests, and a path as in `save_state`.
        OSError: if it cannot be read.
    """
    refuse_in_recording("load_state")
    source = _checked_path(path)
    _check_ledger(context, ledger)
    if len(ledger) or ledger.num_preempted:
        fail("ledger", "one without requests", f"one with {len(ledger) + ledger.num_preempted}", "reset() it")
    try:
        with safe_open(source, framework="pt") as file:
            _load(source, file, context, ledger, weights)
    except SafetensorError as error:
        raise ValueError(f"{source}: not a {FORMAT} file ({error})") from error


def _load(path: Path, file: Any, context: KDARecoverSSMCommitContext, ledger: RecordSlots, weights: str) -> None:
    saved = file.metadata() or {}
    if saved.get("format") != FORMAT:
        raise ValueError(f"{path}: not a {FORMAT} file: its format is {saved.get('format', 'not named')}")
    if saved.get("version") != str(VERSION):
        way_out = "load it with the release of graphrt that wrote it, or start its requests anew"
        _refuse(path, "version", saved.get("version"), VERSION, f" ({way_out})")
    theirs, theirs_of_weights, slots, contents, sums = _metadata(path, saved)
    for name, here in _sizes(context).items():
        if theirs.get(name) != here:
            _refuse(path, name, theirs.get(name), here)
    fingerprint = weights_fingerprint(context, weights)
    if theirs_of_weights != fingerprint:
        what = " (of weights=, A_log, dt_bias and the gate's bound: load it into the model that it was saved from)"
        _refuse(path, "weights fingerprint", theirs_of_weights, fingerprint, what)
    strange = any(type(slot) is not int or not 0 <= slot < context.stack.geometry.num_slots for slot in slots)
    if strange or len(set(slots)) < len(slots):
        _refuse_damaged(path, f"slots {slots}")
    targets = [(name, t, slots if by_slot else None) for name, t, by_slot in _tensors(context)]
    targets += [("pending", ledger.pending, None)]
    present = set(file.keys())
    for name, t, rows in targets:
        shape = [*t.shape] if rows is None else [len(rows), *t.shape[1:]]
        found = file.get_slice(name).get_shape() if name in present else "absent"
        if found != shape:
            _refuse(path, f"shape of {name}", found, shape)
        dtype = file.get_slice(name)[:0].dtype
        if dtype != t.dtype:
            _refuse(path, f"dtype of {name}", dtype, t.dtype)
    pending, window = file.get_tensor("pending"), context.stack.spec_query_len
    if bool(((pending < 0) | (pending > window)).any()):
        _refuse_damaged(path, f"pending {pending.tolist()}, in a window of {window}")
    found_sums = _checksums({name: file.get_tensor(name) for name in present})
    for name in sorted(present | sums.keys()):
        if found_sums.get(name) != sums.get(name):
            _refuse_damaged(path, f"checksum of {name} {found_sums.get(name)}, written as {sums.get(name)}")

    try:
        ledger.restore(contents)
    except ValueError as error:
        _refuse_damaged(path, error)
    for name, t, rows in targets:
        with torch.inference_mode():  # pools may come from there
            _put(t, rows, file.get_tensor(name))
    forget(context.stack.corrections)


def _put(t: Tensor, rows: list[int] | None, value: Tensor) -> None:
    """All of a tensor, or its rows."""
    value = value.to(t.device)
    if rows is None:
        t.copy_(value)
    else:
        t[torch.tensor(rows, dtype=torch.int64, device=t.device)] = value


def _metadata(path: Path, saved: dict[str, str]) -> tuple[dict[str, Any], str, list[int], Any, dict[str, int]]:
    """Sizes, fingerprint, slots, contents of the ledger, checksums; which ledger it is, is for the ledger to say."""
    if saved.get("checksum") != _seal(saved):
        _refuse_damaged(path, f"checksum of its metadata {_seal(saved)}, written as {saved.get('checksum')}")
    try:
        sizes, slots, contents, sums = (json.loads(saved[name]) for name in ("sizes", "slots", "ledger", "checksums"))
        contents = {**contents, "requests": dict(map(tuple, contents["requests"]))}
        fingerprint = saved["weights"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        _refuse_damaged(path, repr(error))
    if not isinstance(sizes, dict) or not isinstance(slots, list) or not isinstance(sums, dict):
        _refuse_damaged(path, "sizes, slots or checksums of another kind")
    return sizes, fingerprint, slots, contents, sums


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """CRC-32 of the bytes of each host tensor: about 1 GB/s a thread."""
    with ThreadPoolExecutor(max_workers=8) as threads:
        return dict(zip(tensors, threads.map(lambda t: zlib.crc32(_memory(t)), tensors.values()), strict=True))


def _seal(metadata: Mapping[str, str]) -> str:
    """CRC-32 of everything that a file says beside its tensors."""
    told = sorted((name, text) for name, text in metadata.items() if name != "checksum")
    return str(zlib.crc32(json.dumps(told).encode()))


def _refuse_damaged(path: Path, what: object) -> NoReturn:
    raise ValueError(f"{path}: damaged, a {FORMAT} file never holds this ({what})")


def _refuse(path: Path, what: str, saved: object, here: object, way_out: str = "") -> NoReturn:
    raise ValueError(f"{path}: {what} is {saved} in the file and {here} here{way_out}")


def _tensors(context: KDARecoverSSMCommitContext) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, tensor, and whether its rows are state slots (else record rows)."""
    stack = context.stack
    for kind, tensors, by_slot in (
        ("checkpoint", stack.checkpoints, True),
        ("conv_state", stack.conv_states, True),
        ("correction", stack.corrections, False),
        ("key_gate", stack.key_gates, False),
    ):
        for i, t in enumerate(tensors):
            yield f"{kind}.{i}", t, by_slot


def _sizes(context: KDARecoverSSMCommitContext) -> dict[str, Any]:
    """What must be the same on both sides, under the names of a message."""
    stack = context.stack
    _, heads, head_dim, _ = stack.checkpoints[0].shape
    return {
        "number of layers": len(stack.checkpoints),
        "number of state slots": stack.geometry.num_slots,
        "number of record rows": stack.geometry.num_rows,
        "spec_query_len": stack.spec_query_len,
        "local_num_heads": heads,
        "head_dim": head_dim,
        "conv_dim": stack.conv_states[0].shape[1],
        "columns of a convolution state": stack.conv_states[0].shape[2],
        "conv_width": stack.hist + 1,
        "dtype of the checkpoints": str(stack.checkpoints[0].dtype),
        "dtype of the convolution states": str(stack.conv_states[0].dtype),
        "dtype of the records' corrections": str(stack.corrections[0].dtype),
        "dtype of the records' keys": str(stack.key_gates[0].dtype),
    }


def _checked_path(path: object) -> Path:
    name = check_path("path", path, "a str or a path of one")
    if "\0" in name:
        fail("path", "the name of a file", repr(name))
    try:
        name.encode()
    except UnicodeEncodeError:
        fail("path", "a name that is UTF-8, which the library that writes the files needs", repr(name))
    path = Path(name)
    # A pipe would be waited on for ever, and a device is not to be replaced by a file.
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        fail("path", "the name of a file", f"{name!r}, which is a folder, a pipe or a device")
    return path


def _check_ledger(context: KDARecoverSSMCommitContext, ledger: RecordSlots) -> None:
    check_kind("context", context, KDARecoverSSMCommitContext)
    check_kind("ledger", ledger, RecordSlots)
    num_rows, rows = context.stack.geometry.num_rows, ledger.pending.shape[0]
    if rows != num_rows:
        fail("ledger", f"{num_rows} rows, as the records have", rows)


def _own(t: Tensor) -> Tensor:
    """On the host, in memory of its own: a file takes no tensors that share theirs."""
    host = t.detach().contiguous().cpu()
    return host.clone() if host.data_ptr() == t.data_ptr() else host


def _bytes(t: Tensor) -> bytes:
    host = t.detach().cpu().contiguous()
    return bytes(_memory(host))


def _memory(host: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, which must live as long."""
    return memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).cast("B")
