"""save_state and load_state: a run goes on bit for bit, with nothing folded, and what does not fit is refused."""

import errno
import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from rig import Pool, Snapshot, Target, same_bytes
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from steps import Batch, Row, commit, core_verify, verify
from truth import start

from graphrt import Owners, RecordSlots, load_state, persist, save_state, weights_fingerprint

CPU = Target("torch", "cpu")


def running(target, **shape):
    """A pool and ledger in mid-service: `first` has three records pending, 7 has none, `waits` is preempted."""
    pool = Pool(target, target.shape(**({"layers": 2, "heads": 1} | shape)))
    ledger = RecordSlots(pool.shape.rows, torch.device(pool.device))
    pool.pending = ledger.pending
    for name in ("waits", "first", 7):
        ledger.admit(name)
    rows = ledger.rows(["first", 7])
    start(pool, dict(zip(rows, (4, 5), strict=True)))
    one_step(pool, rows, [3, 0])
    ledger.preempt("waits")
    return pool, ledger


def one_step(pool, rows, accepted, tokens=None):
    """A deferred step of the requests in slots 4 and 5; returns its outputs and tokens."""
    batch = Batch(pool, [Row(4, rows[0], 4), Row(5, rows[1], 4)], tokens=tokens)
    results = verify(batch)
    commit(batch, accepted)
    return results, batch.tokens


def empty(pool):
    """Another pool with the same weights, and a ledger without requests."""
    other = Pool(pool.target, pool.shape, params=pool.params)
    ledger = RecordSlots(pool.shape.rows, torch.device(pool.device))
    other.pending = ledger.pending
    return other, ledger


@pytest.mark.parametrize("slots", [None, [4, 5]], ids=["all slots", "two slots"])
def test_a_loaded_run_goes_on_bit_for_bit(backend_device, tmp_path, slots):
    """Outputs, states, records and counts of the next steps are those of the run that was saved."""
    backend_device.spare(slots is None)
    pool, ledger = running(backend_device)
    before, path = Snapshot(pool), tmp_path / "run.safetensors"
    save_state(path, pool.context, ledger, slots=slots)
    assert before.changed() == [] and [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]
    other, loaded = empty(pool)
    addresses = [t.data_ptr() for t in (*other.tensors().values(), loaded.generation)]
    load_state(path, other.context, loaded)
    assert [t.data_ptr() for t in (*other.tensors().values(), loaded.generation)] == addresses
    assert loaded.pending.tolist() == ledger.pending.tolist() and loaded.pending.sum() == 3
    assert loaded.generation.tolist() == ledger.generation.tolist()
    assert loaded.contents() == ledger.contents()
    rows = ledger.rows(["first", 7])
    assert loaded.rows(["first", 7]) == rows
    for accepted in ([2, 4], [0, 1]):
        want, tokens = one_step(pool, rows, accepted)
        got, _ = one_step(other, rows, accepted, tokens)
        for a, b in zip(want, got, strict=True):
            assert same_bytes(a.out, b.out) and same_bytes(a.conv, b.conv)
    for which in (pool, other):
        which.context.drain(which.int32([4, 5]), which.int32(rows), which.pending)
    for layer in range(2):
        for slot in (4, 5):
            for mine, theirs in zip(pool.state(slot, layer), other.state(slot, layer), strict=True):
                assert same_bytes(mine, theirs)
    assert loaded.resume("waits") == ledger.resume("waits")


def test_both_storage_orders_of_the_convolution_states_share_a_file(tmp_path):
    """The file holds states as [slots, conv_dim, C], whichever way a pool stores them."""
    pool, ledger = running(CPU)
    save_state(tmp_path / "run", pool.context, ledger)
    other = Pool(CPU, CPU.shape(layers=2, heads=1, conv_dim_first=False), params=pool.params)
    load_state(tmp_path / "run", other.context, RecordSlots(6, "cpu"))
    assert same_bytes(pool.conv(1), other.conv(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 1}, "number of layers is 2 in the file and 1 here"),
        ({"query_len": 3}, "spec_query_len is 4 in the file and 3 here"),
        ({"slots": 13}, "number of state slots is 12 in the file and 13 here"),
        ({"rows": 7}, "number of record rows is 6 in the file and 7 here"),
        ({"head_dim": 32}, "head_dim is 16 in the file and 32 here"),
        ({"heads": 2}, "local_num_heads is 1 in the file and 2 here"),
        ({"conv_dim": 24}, "conv_dim is 20 in the file and 24 here"),
        ({"engine_layout": True}, "columns of a convolution state is 7 in the file and 6 here"),
        (
            {"pool": torch.bfloat16},
            "dtype of the checkpoints is torch.float32 in the file and torch.bfloat16 here",
        ),
        (
            {"act": torch.bfloat16},
            "dtype of the convolution states is torch.float32 in the file and torch.bfloat16 here",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_file_of_another_runtime_is_refused_with_both_values(tmp_path, change, words):
    """Shape and dtype are compared before anything is written."""
    pool, ledger = running(CPU)
    save_state(tmp_path / "run", pool.context, ledger)
    other = Pool(CPU, CPU.shape(**({"layers": 2, "heads": 1} | change)))
    empty_ledger, before = RecordSlots(other.shape.rows, "cpu"), Snapshot(other)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'run'}: {words}")):
        load_state(tmp_path / "run", other.context, empty_ledger)
    assert before.changed() == [] and len(empty_ledger) == 0


def test_a_file_of_other_weights_is_refused(tmp_path):
    """What is pending only means something with the parameters under which it was accepted, and the engine's name."""
    pool, ledger = running(CPU)
    save_state(tmp_path / "run", pool.context, ledger, weights="step 4000")
    mine = weights_fingerprint(pool.context, "step 4000")
    other, empty_ledger = empty(pool)
    with pytest.raises(ValueError, match=f"weights fingerprint is {mine} in the file and [0-9a-f]{{64}} here"):
        load_state(tmp_path / "run", other.context, empty_ledger, weights="step 5000")
    load_state(tmp_path / "run", other.context, empty_ledger, weights="step 4000")
    pool.params[1].dt_bias[0] += 1
    with pytest.raises(ValueError, match="weights fingerprint is"):
        load_state(tmp_path / "run", pool.context, RecordSlots(6, "cpu"), weights="step 4000")


def rewritten(path, **metadata):
    """The same file with other metadata."""
    with safe_open(path, framework="pt") as file:
        tensors, old = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, old | metadata)


def sealed(metadata):
    """With the checksum that a file with these metadata would have been written with."""
    return metadata | {"checksum": persist._seal(metadata)}


def test_a_file_of_another_version_or_kind_is_refused(tmp_path):
    """A later version, somebody else's safetensors, and bytes that are no safetensors at all."""
    pool, ledger = running(CPU)
    path, other = tmp_path / "run", RecordSlots(6, "cpu")
    save_state(path, pool.context, ledger)
    for version in ("1", "3"):
        rewritten(path, version=version)
        with pytest.raises(ValueError, match=rf"version is {version} in the file and 2 here \(load it with"):
            load_state(path, pool.context, other)
    rewritten(path, format="pt")
    with pytest.raises(ValueError, match="not a graphrt-state file: its format is pt"):
        load_state(path, pool.context, other)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="its format is not named"):
        load_state(path, pool.context, other)
    path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a graphrt-state file"):
        load_state(path, pool.context, other)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "absent", pool.context, other)


def test_a_file_whose_tensors_or_ledger_are_damaged_writes_nothing(tmp_path):
    """A missing tensor, a shape that metadata did not announce, impossible pending counts, a row that two own."""
    pool, ledger = running(CPU)
    path, before = tmp_path / "run", Snapshot(pool)
    save_state(path, pool.context, ledger)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file({k: v for k, v in tensors.items() if k != "key_gate.1"}, path, metadata)
    with pytest.raises(ValueError, match=r"shape of key_gate.1 is absent in the file and \[6, 1, 4, 32\] here"):
        load_state(path, pool.context, RecordSlots(6, "cpu"))
    save_file(tensors | {"pending": tensors["pending"][:3].clone()}, path, metadata)
    with pytest.raises(ValueError, match=r"shape of pending is \[3\] in the file and \[6\] here"):
        load_state(path, pool.context, RecordSlots(6, "cpu"))
    for count in (-7, 99):
        save_file(tensors | {"pending": torch.full_like(tensors["pending"], count)}, path, metadata)
        with pytest.raises(ValueError, match=rf"damaged.*pending \[{count}, .*window of 4"):
            load_state(path, pool.context, RecordSlots(6, "cpu"))
    contents = json.loads(metadata["ledger"])
    contents["requests"].append(["thief", contents["requests"][0][1]])
    save_file(tensors, path, sealed(metadata | {"ledger": json.dumps(contents)}))
    with pytest.raises(ValueError, match="each of 6 rows owned or free, once"):
        load_state(path, pool.context, RecordSlots(6, "cpu"))
    assert before.changed() == []


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": "{"},
        {"sizes": "[]"},
        {"sizes": None},
        {"weights": None},
        {"slots": None},
        {"slots": "[1, 12]"},
        {"slots": "[1, -1]"},
        {"slots": '["1", 2]'},
        {"slots": "[4, 4]"},
        {"slots": "3"},
        {"ledger": "[]"},
        {"ledger": None},
        {"ledger": '{"requests": [[1]]}'},
        {"slots": "[" * 100_000},
        {"checksums": None},
        {"checksums": "[]"},
        {"checksums": "{}"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_file_with_damaged_metadata_is_refused_in_a_sentence(tmp_path, change):
    """The kind and version are right and the rest is not: a ValueError with the path, and nothing is written."""
    pool, ledger = running(CPU)
    path, before, empty_ledger = tmp_path / "run", Snapshot(pool), RecordSlots(6, "cpu")
    save_state(path, pool.context, ledger, slots=[4, 5])
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | change
    save_file(tensors, path, sealed({k: v for k, v in metadata.items() if v is not None}))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*damaged"):
        load_state(path, pool.context, empty_ledger)
    assert before.changed() == [] and len(empty_ledger) == 0


def test_a_tensor_of_another_dtype_is_refused_before_anything_is_written(tmp_path):
    """The metadata announce float32, the last tensor is float16: the first ones are not loaded either."""
    pool, ledger = running(CPU)
    path, before, empty_ledger = tmp_path / "run", Snapshot(pool), RecordSlots(6, "cpu")
    save_state(path, pool.context, ledger)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors | {"key_gate.1": tensors["key_gate.1"].half()}, path, metadata)
    with pytest.raises(ValueError, match=r"dtype of key_gate.1 is torch.float16 in the file and torch.float32 here"):
        load_state(path, pool.context, empty_ledger)
    save_file(tensors | {"pending": tensors["pending"].double()}, path, metadata)
    with pytest.raises(ValueError, match=r"dtype of pending is torch.float64 in the file and torch.int32 here"):
        load_state(path, pool.context, empty_ledger)
    assert before.changed() == [] and len(empty_ledger) == 0


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    """The disk is full: an OSError, the file as it was, and no remains beside it."""
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    pool, ledger = running(CPU)
    path = tmp_path / "run"
    save_state(path, pool.context, ledger)
    whole, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            save_state(path, pool.context, ledger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == whole and [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("when", ["writing", "to the disk", "put in place", "stopped"])
def test_a_save_that_fails_half_way_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch, when):
    """A full disk, a device error, a folder that takes nothing, an interrupt: the earlier file loads as before."""
    pool, ledger = running(CPU)
    path = tmp_path / "run.safetensors"
    save_state(path, pool.context, ledger)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(errno.EIO, "the device failed")

    def half(tensors, part, metadata):
        Path(part).write_bytes(before[: len(before) // 2])
        raise KeyboardInterrupt if when == "stopped" else SafetensorError("no space left")

    where = {"to the disk": ("fsync", fail), "put in place": ("replace", fail)}.get(when)
    if where is None:
        monkeypatch.setattr(persist, "save_file", half)
    else:
        monkeypatch.setattr(persist.os, *where)
    with pytest.raises(KeyboardInterrupt if when == "stopped" else OSError):
        save_state(path, pool.context, ledger)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before
    other, loaded = empty(pool)
    load_state(path, other.context, loaded)
    assert loaded.pending.tolist() == ledger.pending.tolist()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """All of it is synced, then renamed, then the folder is synced: a crash leaves the old file or the new one."""
    pool, ledger = running(CPU)
    path, happened = tmp_path / "run.safetensors", []

    def fsync(descriptor):
        status = os.fstat(descriptor)
        happened.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)

    def replace(source, target):
        happened.append("renamed")
        return rename(source, target)

    rename = os.replace
    monkeypatch.setattr(persist.os, "fsync", fsync)
    monkeypatch.setattr(persist.os, "replace", replace)
    save_state(path, pool.context, ledger)
    assert happened == [path.stat().st_size, "renamed", "folder"]


def test_a_save_touches_no_file_but_its_own(tmp_path):
    """Whatever else is in the folder stays, also under a name such as programs give to parts of files."""
    pool, ledger = running(CPU)
    others = {name: tmp_path / name for name in ("run.safetensors.part", ".run.safetensors.part", "run.safetensors~")}
    for name, other in others.items():
        other.write_text(name)
    save_state(tmp_path / "run.safetensors", pool.context, ledger)
    assert {p.name for p in tmp_path.iterdir()} == {*others, "run.safetensors"}
    assert all(other.read_text() == name for name, other in others.items())


def test_a_symbolic_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    """A file appears whole under its name, which a write through the link could not promise."""
    pool, ledger = running(CPU)
    (tmp_path / "old").write_text("old")
    (tmp_path / "run").symlink_to("old")
    save_state(tmp_path / "run", pool.context, ledger)
    assert not (tmp_path / "run").is_symlink() and (tmp_path / "old").read_text() == "old"
    other, loaded = empty(pool)
    load_state(tmp_path / "run", other.context, loaded)
    assert loaded.contents() == ledger.contents()


def test_weights_may_have_any_name_that_a_path_can_have(tmp_path):
    """Bytes of a file name that are no UTF-8 come as lone surrogates."""
    pool, ledger = running(CPU)
    name = os.fsdecode(b"weights-\xff")
    save_state(tmp_path / "run", pool.context, ledger, weights=name)
    other, loaded = empty(pool)
    with pytest.raises(ValueError, match="weights fingerprint"):
        load_state(tmp_path / "run", other.context, loaded, weights="weights-")
    load_state(tmp_path / "run", other.context, loaded, weights=name)


def test_a_bound_that_is_a_whole_number_has_one_fingerprint():
    """-5 and -5.0 are the same gate: a configuration may have it either way."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1, lower_bound=-5.0))
    whole = Pool(CPU, CPU.shape(layers=1, heads=1, lower_bound=-5), params=pool.params)
    assert weights_fingerprint(whole.context) == weights_fingerprint(pool.context)


def test_ids_that_are_numpys_ints_go_into_a_file(tmp_path):
    """Owned and preempted ones; they are the same requests as Python's ints."""
    pool = Pool(CPU, CPU.shape(layers=1))
    ledger = RecordSlots(pool.context.stack.geometry.num_rows, "cpu")
    for name in (7, 8):
        ledger.admit(np.int64(name))
    ledger.preempt(np.int32(8))
    save_state(tmp_path / "run.safetensors", pool.context, ledger)
    other, loaded = empty(pool)
    load_state(tmp_path / "run.safetensors", other.context, loaded)
    assert loaded.row(7) == ledger.row(np.int64(7)) and loaded.num_preempted == 1
    assert loaded.resume(8) == ledger.resume(8)


@pytest.mark.parametrize("bound", [-4.0, None])
def test_another_bound_of_the_gate_has_another_fingerprint(bound):
    """Raw gates that are pending mean other decays under it, also under the softplus gate."""
    pool = Pool(CPU, CPU.shape(layers=1, heads=1, lower_bound=-5.0))
    other = Pool(CPU, CPU.shape(layers=1, heads=1, lower_bound=bound), params=pool.params)
    assert weights_fingerprint(other.context) != weights_fingerprint(pool.context)


def test_a_step_of_before_a_load_changes_nothing_of_who_was_loaded(tmp_path):
    """A service falls back to its file while a commit is under way: that commit is late."""
    pool, ledger = running(CPU)
    save_state(tmp_path / "run", pool.context, ledger)
    row = ledger.row("first")
    late = Batch(pool, [Row(4, row, 4)])
    owners = Owners(pool.int32(ledger.generations(["first"])), ledger.generation)
    verify(late)
    ledger.reset()
    load_state(tmp_path / "run", pool.context, ledger)
    before = Snapshot(pool)
    commit(late, [2], owners=owners)
    assert before.changed(pending=True) == [] and pool.errors() == {"stale_generation": 1}
    assert ledger.row("first") == row and pool.pending[row] == 3


def test_what_cannot_be_saved_or_loaded_is_named(tmp_path):
    """Requests that no file can name, ledgers that do not fit or are in use, and slots that are not there."""
    pool, ledger = running(CPU)
    with pytest.raises(ValueError, match=r"^ledger: expected 6 rows, as the records have, got 5"):
        save_state(tmp_path / "run", pool.context, RecordSlots(5, "cpu"))
    with pytest.raises(ValueError, match=r"^slots: expected state slots below 12, got 12"):
        save_state(tmp_path / "run", pool.context, ledger, slots=[4, 12])
    with pytest.raises(ValueError, match=r"^slots: expected each state slot once, got \[4, 5, 4\]"):
        save_state(tmp_path / "run", pool.context, ledger, slots=[4, 5, 4])
    save_state(tmp_path / "run", pool.context, ledger)
    with pytest.raises(ValueError, match=r"^ledger: expected one without requests, got one with 3 .*reset"):
        load_state(tmp_path / "run", pool.context, ledger)
    ledger.admit(("a", 1))
    with pytest.raises(ValueError, match=r"^ledger: .*str or int.*\('a', 1\)"):
        save_state(tmp_path / "run", pool.context, ledger)


class Nowhere:
    """A path whose name is a number."""

    def __fspath__(self):
        return 7


@pytest.mark.parametrize("path", ["", ".", "folder", "run\0", b"run", 3, None, Nowhere()])
def test_a_path_that_names_no_file_is_refused_by_name(tmp_path, monkeypatch, path):
    """On both ways, before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    pool, ledger = running(CPU)
    other, loaded = empty(pool)
    for call, arguments in ((save_state, (pool.context, ledger)), (load_state, (other.context, loaded))):
        with pytest.raises(ValueError, match=r"^path: expected "):
            call(path, *arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_an_open_step_is_not_saved(tmp_path):
    """Between verify and commit checked mode refuses: the records are those of a step that nobody accepted (B91)."""
    pool, ledger = running(CPU)
    row = ledger.row("first")
    core_verify(Batch(pool, [Row(4, row, 4)]), 0, deferred=True, check=True)
    with pytest.raises(RuntimeError, match=rf"^record row {row} was verified and not committed"):
        save_state(tmp_path / "run", pool.context, ledger)
    assert list(tmp_path.iterdir()) == []


def test_a_record_cannot_be_folded_with_a_window_of_another_length(tmp_path):
    """Pending 3, then Q changes from 4 to 6: the file is refused; drained first, its states may be moved (B88)."""
    pool, ledger = running(CPU)
    save_state(tmp_path / "run", pool.context, ledger)
    wider = Pool(CPU, CPU.shape(layers=2, heads=1, query_len=6), params=pool.params)
    with pytest.raises(ValueError, match="spec_query_len is 4 in the file and 6 here"):
        load_state(tmp_path / "run", wider.context, RecordSlots(6, "cpu"))
    row = ledger.row("first")
    wider.context.write_state(8, pool.context.read_state(4, row, ledger.pending), 2, wider.pending)
    for mine, theirs in zip(pool.state(4, 1), wider.state(8, 1), strict=True):
        assert same_bytes(mine, theirs)
