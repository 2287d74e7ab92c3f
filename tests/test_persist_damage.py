"""A file that is not as it was written, and paths that lead to no file: refused in a sentence, nothing written."""

import os
import re
import stat

import pytest
import torch
from rig import Snapshot
from safetensors import safe_open
from safetensors.torch import save_file
from test_persist import CPU, empty, running

from graphrt import RecordSlots, load_state, save_state


def flip(path, at, bit=1):
    """Another bit in the byte there."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_found_before_anything_is_written(tmp_path):
    """In every kind of tensor, and all over the header: ValueError with the path, or the file is refused unread."""
    pool, ledger = running(CPU, head_dim=16)
    path = tmp_path / "run"
    save_state(path, pool.context, ledger, slots=[4, 5])
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    other, loaded = empty(pool)
    before, contents = Snapshot(other), loaded.contents()
    places = [*range(0, header, 37), *range(header, len(whole), max((len(whole) - header) // 60, 1)), len(whole) - 1]
    for at in places:
        flip(path, at, bit=at % 8)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: "):
            load_state(path, other.context, loaded)
        path.write_bytes(whole)
    assert before.changed() == [] and loaded.contents() == contents
    load_state(path, other.context, loaded)
    assert loaded.contents() == ledger.contents()


def test_a_damaged_tensor_is_named_with_both_checksums(tmp_path):
    """The last tensor that a load would write: the first are not written either."""
    pool, ledger = running(CPU)
    path = tmp_path / "run"
    save_state(path, pool.context, ledger)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["key_gate.1"].view(torch.int32).view(-1)[7] ^= 1
    save_file(tensors, path, metadata)
    other, loaded = empty(pool)
    before = Snapshot(other)
    with pytest.raises(ValueError, match=r"damaged, .*checksum of key_gate.1 \d+, written as \d+"):
        load_state(path, other.context, loaded)
    assert before.changed() == [] and len(loaded) == 0


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def link_to_pipe(folder):
    (folder / "link").symlink_to(pipe(folder))
    return folder / "link"


NO_FILES = {
    "pipe": pipe,
    "link to a pipe": link_to_pipe,
    "device": lambda folder: "/dev/null",
    "folder": lambda folder: folder,
    "bytes": lambda folder: os.fsencode(folder / "run"),
    "no UTF-8": lambda folder: os.fsdecode(os.fsencode(folder) + b"/\xff"),
    "nothing": lambda folder: "",
    "number": lambda folder: 3,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_path_that_leads_to_no_file_is_refused(tmp_path, kind):
    """Neither call waits for a pipe, replaces a pipe or device, or fails with an error of another library."""
    pool, ledger = running(CPU)
    path = NO_FILES[kind](tmp_path)
    left = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"^path: expected .*, got"):
        save_state(path, pool.context, ledger)
    with pytest.raises(ValueError, match=r"^path: expected .*, got"):
        load_state(path, pool.context, RecordSlots(6, "cpu"))
    assert sorted(tmp_path.iterdir()) == left
    if "pipe" in kind:
        assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
