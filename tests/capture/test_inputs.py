"""Static inputs: what is staged arrives, what is not is padding, and nothing waits, allocates or is rebound."""

import dataclasses
import random
from array import array

import numpy as np
import pytest
import torch
from engine import int32

from graphrt import error_counts, reset_errors
from graphrt.capture import CaptureError, StepInputs, driver, dummy_inputs, record
from graphrt.capture.pinned import GROUP, LONG, NUM_BLOCKS, PinnedBlock, PinnedRing
from graphrt.capture.static import allocate_rows
from graphrt.errors import error_counter
from graphrt.kernels.stage import stage_header
from graphrt.steps import SOURCES

FIELDS = (
    "state_indices", "record_rows", "query_start_loc", "num_accepted_tokens", "eager", "num_computed_tokens",
    "block_table", "generation",
)  # fmt: skip


def contents(inputs):
    return {name: getattr(inputs, name).tolist() for name in FIELDS}


def padding(rows, width=0):
    return {
        "state_indices": [0] * rows,
        "record_rows": [-1] * rows,
        "query_start_loc": [0] * (rows + 1),
        "num_accepted_tokens": [0] * rows,
        "eager": [0] * rows,
        "num_computed_tokens": [0] * rows,
        "block_table": [[0] * width] * rows,
        "generation": [0] * rows,
    }


def expected(rows, width, a):
    """What `stage(**a)` must leave, from plain lists."""
    want, n = padding(rows, width), a["num_reqs"]
    request = a.get("request_indices") or list(range(n))
    for b in range(n):
        want["state_indices"][b] = a["state_indices"][b]
        want["record_rows"][b] = a["record_rows"][b]
        want["num_accepted_tokens"][b] = a["num_accepted_tokens"][request[b]]
        want["num_computed_tokens"][b] = a["num_computed_tokens"][request[b]]
        want["generation"][b] = a["generation"][b]
        want["eager"][b] = int(a["eager"][b])
        want["block_table"][b] = (a["block_table"][request[b]] + [0] * width)[:width]
    want["query_start_loc"] = [a["query_start_loc"][min(b, n)] for b in range(rows + 1)]
    return want


def random_arguments(rng, rows, source_width):
    n = rng.randint(1, rows)
    requests = n + 2
    lengths = [rng.randint(0, 4) for _ in range(n)]
    return {
        "num_reqs": n,
        "state_indices": [rng.randint(1, 50) for _ in range(n)],
        "record_rows": rng.sample(range(rows), n),
        "query_start_loc": [sum(lengths[:b]) for b in range(n + 1)],
        "num_accepted_tokens": [rng.randint(0, 4) for _ in range(requests)],
        "eager": [rng.random() < 0.5 for _ in range(n)],
        "request_indices": rng.sample(range(requests), n),
        "num_computed_tokens": [rng.randint(0, 99) for _ in range(requests)],
        "block_table": [[rng.randint(1, 50) for _ in range(source_width)] for _ in range(requests)],
        "generation": [rng.randint(0, 1) for _ in range(n)],
    }


def as_tensor(name, values, device):
    return torch.tensor(values, dtype=torch.bool if name == "eager" else torch.int32, device=device)


def strided(t):
    """The same values as every third entry of a tensor that is otherwise poison (B51)."""
    wide = torch.full((t.shape[0] * 3, *t.shape[1:]), 77, dtype=torch.int32).to(t.device, t.dtype)
    wide[::3] = t
    return wide[::3]


FORMS = {
    "lists": lambda name, values, device: values,
    "tuples": lambda name, values, device: values if name == "block_table" else tuple(values),
    "host tensors": lambda name, values, device: as_tensor(name, values, "cpu"),
    "strided host tensors": lambda name, values, device: strided(as_tensor(name, values, "cpu")),
    "device tensors": as_tensor,
    "strided device tensors": lambda name, values, device: strided(as_tensor(name, values, device)),
    "transposed table": lambda name, values, device: (
        as_tensor(name, values, device).t().contiguous().t() if name == "block_table" else values
    ),
    "numpy arrays": lambda name, values, device: (
        np.array(values, dtype=np.uint8 if name == "eager" else np.int32) if name != "block_table" else values
    ),
    "wide numpy arrays": lambda name, values, device: np.array(values, dtype=bool if name == "eager" else np.int64),
    "standard arrays": lambda name, values, device: (
        array("i", values) if name not in ("block_table", "eager") else values
    ),
    "mixed": lambda name, values, device: values if len(name) % 2 else as_tensor(name, values, device),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source_width", [2, 5, 0])
def test_every_kind_of_source_stages_the_same(device, form, source_width):
    """Lists, host and device tensors of any stride arrive alike, over batches that grow and shrink (B02, B05)."""
    rng, inputs = random.Random(form), StepInputs(6, 4, device, block_table_width=3)
    reset_errors(device)
    for _ in range(12):
        arguments = random_arguments(rng, 6, source_width)
        inputs.stage(
            **{k: v if k == "num_reqs" else FORMS[form](k, v, device) for k, v in arguments.items()},
        )
        assert contents(inputs) == expected(6, 3, arguments)
    assert not any(error_counts(device).values())


@pytest.mark.parametrize("form", [form for form in FORMS if "device" not in form])
def test_a_block_of_host_values_stages_the_same(form):
    """What the ring writes on a GPU, staged here by the interpreted kernel: values and header, growth included."""
    rng, block = random.Random(form), PinnedBlock(6, pin=False)
    for _ in range(12):
        arguments = random_arguments(rng, 6, rng.choice([0, 2, 5]))
        _, staged = allocate_rows(6, 3, torch.device("cpu"))
        values = [FORMS[form](name, arguments[name], "cpu") for name in SOURCES]
        block.write(arguments["num_reqs"], values, torch.device("cpu"), range(0))
        stage_header(staged, block.header, error_counter("cpu"))
        assert contents(staged) == expected(6, 3, arguments)
        addresses = block.header[4::3].tolist()
        assert all(address % 4 == 0 for name, address in zip(SOURCES, addresses, strict=True) if name != "eager")
    with pytest.raises(ValueError, match=r"^record_rows: expected a tensor or a sequence of 32-bit ints, got list"):
        block.write(1, [[1, "behind the step"], [2**31], *[None] * 7], torch.device("cpu"), range(0))


class FakeStream:
    """A stream whose work is done when somebody says so; one from elsewhere has its handle for a number, as torch's."""

    def __init__(self, handle, from_elsewhere):
        self.handle, self.from_elsewhere = handle, from_elsewhere
        self.stream_id = handle if from_elsewhere else handle + 1
        self.unread, self.launched, self.done = [], 0, 0

    def finish(self, up_to):
        while self.done < up_to:
            self.unread.pop(0)
            self.done += 1


class FakeRing(PinnedRing):
    """The ring without a GPU: streams that take their time, and a log of waits."""

    def __init__(self, monkeypatch):
        ring, self.log, self.capturing = self, [], set()

        class Event:
            def record(self, stream):
                assert stream is ring.stream or not stream.from_elsewhere, "the stream may be gone"
                assert stream.handle not in ring.capturing
                self.stream, self.mark = stream, stream.launched
                ring.log.append(f"record on {stream.handle}")

            def query(self):
                return self.stream.done >= self.mark

            def synchronize(self):
                ring.log.append("wait")
                self.stream.finish(self.mark)

        class Block:
            def __init__(self, number):
                self.number = number

            def write(self, *values):
                assert all(self.number not in stream.unread for stream in ring.streams), "nobody has read it yet"

            def launch(self):
                ring.stream.unread.append(self.number)
                ring.stream.launched += 1

        self.streams = [FakeStream(0, False), FakeStream(70, False), FakeStream(80, True), FakeStream(90, True)]
        self.stream = self.streams[0]
        self._blocks = [Block(i) for i in range(NUM_BLOCKS)]
        self._recordings, self._launches = [], [block.launch for block in self._blocks]
        self._handle_of = lambda device: self.stream.handle
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(driver, "capturing_graph", lambda handle: 1 if handle in self.capturing else None)
        self._begin(0)

    def use(self, number):
        """Go on with another stream, which waits for what this one has."""
        if self.stream is not self.streams[number]:
            self.stream.finish(self.stream.launched)
        self.stream = self.streams[number]

    def step(self):
        self.stage(1, [], torch.device("cuda"), range(0))


def test_a_block_is_written_only_after_its_last_reader(monkeypatch):
    """One event behind each group of steps; the host waits when it comes round to a group that is unread (B55)."""
    ring = FakeRing(monkeypatch)
    for _ in range(NUM_BLOCKS):
        ring.step()
    assert ring.log == ["record on 0"] * (NUM_BLOCKS // GROUP)
    ring.step()
    assert ring.log[2:] == ["wait"] and ring.stream.done == GROUP
    ring.stream.finish(ring.stream.launched)
    for _ in range(NUM_BLOCKS):
        ring.step()
        ring.stream.finish(ring.stream.launched)
    assert ring.log.count("wait") == 1


def test_no_block_is_overwritten_unread_whatever_the_streams_do(monkeypatch):
    """Random stagings on torch's streams and on others, which read late or at once, one of which captures at times."""
    ring, rng = FakeRing(monkeypatch), random.Random(5)
    for _ in range(3000):
        if rng.random() < 0.3:
            ring.use(rng.randrange(4))
        ring.capturing = {70} if ring.stream.handle != 70 and rng.random() < 0.2 else set()
        for _ in range(rng.randrange(12)):
            ring.step()
        ring.stream.finish(rng.randint(ring.stream.done, ring.stream.launched))
    assert "wait" in ring.log and {f"record on {handle}" for handle in (0, 70, 80, 90)} <= set(ring.log)
    assert all(len(events) <= len(ring.streams) for events in ring._read)


@pytest.mark.parametrize("earlier", [0, 2], ids=["of torch", "from elsewhere"])
def test_unread_blocks_of_an_earlier_stream_are_waited_for(monkeypatch, earlier):
    """Even if the new stream was not made to wait for it: what was staged on the old one has an event."""
    ring = FakeRing(monkeypatch)
    ring.stream = ring.streams[earlier]
    ring.step()
    ring.stream = ring.streams[1]
    for _ in range(NUM_BLOCKS):
        ring.step()
    handle = ring.streams[earlier].handle
    assert ring.streams[earlier].done == 1 and ring.log[:2] == [f"record on {handle}", "record on 70"]


def test_events_of_streams_that_are_gone_do_not_pile_up(monkeypatch):
    """A new stream for every step leaves no more events than the steps of a group need."""
    ring = FakeRing(monkeypatch)
    for handle in range(100, 200):
        ring.streams.append(FakeStream(handle, from_elsewhere=True))
        ring.use(len(ring.streams) - 1)
        ring.step()
    assert all(len(events) <= GROUP for events in ring._read)


@pytest.mark.parametrize("rows", [1, LONG - 1, LONG, 3 * LONG])
def test_lists_of_any_length_lie_in_the_block(rows):
    """Short lists are packed together and long ones each on its own; a bad int is found in both."""
    block, (_, staged) = PinnedBlock(rows, pin=False), allocate_rows(rows, 0, torch.device("cpu"))
    draw = random.Random(rows)
    lists = {
        "state_indices": [draw.randint(1, 2**31 - 1) for _ in range(rows + 1)],
        "record_rows": tuple(draw.randint(0, 2**31 - 1) for _ in range(rows)),
        "query_start_loc": [draw.randint(-(2**31), 2**31 - 1) for _ in range(rows + 1)],
        "num_accepted_tokens": [draw.randint(0, 8) for _ in range(rows + 3)],
    }
    values = [lists.get(name) for name in SOURCES]
    block.write(rows, values, torch.device("cpu"), range(0))
    stage_header(staged, block.header, error_counter("cpu"))
    for name, given in lists.items():
        assert getattr(staged, name).tolist() == list(given)[: rows + (name == "query_start_loc")]
    for bad in (2**31, -(2**31) - 1, 2**70, 1.0, "1", None):
        values[SOURCES.index("query_start_loc")] = [0] * rows + [bad]
        with pytest.raises(ValueError, match=r"^query_start_loc: expected a tensor or a seq.* got list"):
            block.write(rows, values, torch.device("cpu"), range(0))


@pytest.mark.parametrize("form", ["lists", "host tensors"])
def test_a_block_says_how_many_requests_it_has(form):
    """A request past the shortest of the values by request is out of range: it has none of them, and is counted."""
    block, (_, staged) = PinnedBlock(6, pin=False), allocate_rows(6, 3, torch.device("cpu"))
    values = dict.fromkeys(SOURCES) | {
        "state_indices": [4, 5], "record_rows": [0, 1], "request_indices": [2, 1], "num_accepted_tokens": [1, 2, 3],
        "num_computed_tokens": [7, 8],
    }  # fmt: skip
    given = [None if v is None else FORMS[form](name, v, "cpu") for name, v in values.items()]
    block.write(2, given, torch.device("cpu"), range(0))
    reset_errors("cpu")
    stage_header(staged, block.header, error_counter("cpu"))
    assert staged.num_accepted_tokens.tolist() == [0, 2, 0, 0, 0, 0]
    assert staged.num_computed_tokens.tolist() == [0, 8, 0, 0, 0, 0]
    assert error_counts("cpu")["request"] == 1


def test_nothing_of_a_larger_batch_stays(device):
    """After 4 rows, one row: offsets are constant from row 1 on, and rows 1 to 3 lead to the scratch row (B05)."""
    inputs = StepInputs(4, 4, device)
    inputs.stage(
        num_reqs=4, state_indices=[1, 2, 3, 4], record_rows=[0, 1, 2, 3], query_start_loc=[0, 4, 8, 12, 16],
        num_accepted_tokens=[4, 4, 4, 4], eager=[1, 1, 1, 1],
    )  # fmt: skip
    inputs.stage(
        num_reqs=1, state_indices=[5], record_rows=[0], query_start_loc=[0, 2, 9, 9, 9], num_accepted_tokens=[1, 3, 3]
    )
    assert inputs.state_indices.tolist() == [5, 0, 0, 0]
    assert inputs.record_rows.tolist() == [0, -1, -1, -1]
    assert inputs.query_start_loc.tolist() == [0, 2, 2, 2, 2]
    assert inputs.num_accepted_tokens.tolist() == [1, 0, 0, 0]
    assert inputs.eager.tolist() == [0, 0, 0, 0]


def test_what_is_omitted_is_padding_in_every_row(device):
    """Arguments left out do not keep their last values; new inputs and an empty batch are all padding."""
    inputs = StepInputs(3, 4, device, block_table_width=2)
    assert contents(inputs) == padding(3, 2)
    inputs.stage(**random_arguments(random.Random(1), 3, 2))
    inputs.stage(num_reqs=2, record_rows=[1, 0])
    assert contents(inputs) == padding(3, 2) | {"record_rows": [1, 0, -1]}
    inputs.stage(**random_arguments(random.Random(2), 3, 2))
    inputs.stage(num_reqs=0)
    assert contents(inputs) == padding(3, 2)


def test_a_padding_row_among_live_rows_gathers_nothing(device):
    """A row without slot and record row takes no count and no block, wherever its request points (B14)."""
    inputs = StepInputs(3, 4, device, block_table_width=2)
    inputs.stage(
        num_reqs=3, state_indices=[3, 0, 4], record_rows=[0, -1, 1], query_start_loc=[0, 1, 1, 2], eager=[1, 1, 0],
        num_accepted_tokens=[1, 2, 3], num_computed_tokens=[7, 8, 9], block_table=[[3, 3], [4, 4], [5, 5]],
    )  # fmt: skip
    assert inputs.num_accepted_tokens.tolist() == [1, 0, 3]
    assert inputs.num_computed_tokens.tolist() == [7, 0, 9]
    assert inputs.block_table.tolist() == [[3, 3], [0, 0], [5, 5]]
    assert inputs.eager.tolist() == [1, 0, 0]


def test_a_request_out_of_range_has_accepted_nothing(device):
    """A request index that no source covers gives zeros, never a stranger's values, and is counted."""
    inputs = StepInputs(2, 4, device, block_table_width=1)
    reset_errors(device)
    inputs.stage(
        num_reqs=2, state_indices=[1, 2], record_rows=[0, 1], query_start_loc=[0, 4, 8], request_indices=[2, -1],
        num_accepted_tokens=[3, 3], block_table=[[5], [6], [7]],
    )  # fmt: skip
    assert inputs.num_accepted_tokens.tolist() == [0, 0]
    assert inputs.block_table.tolist() == [[0], [0]]
    assert error_counts(device)["request"] == 2


def test_the_caller_may_overwrite_its_buffer_after_staging(device):
    """Staging takes the values in stream order: what the caller writes afterwards belongs to the next step (B54)."""
    inputs, accepted = StepInputs(2, 4, device), int32([3, 2], device)
    inputs.stage(num_reqs=2, state_indices=[1, 2], record_rows=[0, 1], num_accepted_tokens=accepted)
    accepted.fill_(0)
    assert inputs.num_accepted_tokens.tolist() == [3, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_steps_are_queued_without_a_wait(on_device):
    """Steps staged behind a busy device all arrive with their own values, far more than the ring has blocks (B55)."""
    inputs, rng, copies, want = StepInputs(6, 4, "cuda", block_table_width=3), random.Random(3), [], []
    steps = [random_arguments(rng, 6, 3) for _ in range(30)]
    keep = [{k: as_tensor(k, v, "cuda") for k, v in a.items() if k != "num_reqs"} if on_device else a for a in steps]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for number, (arguments, given) in enumerate(zip(steps, keep, strict=True)):
        inputs.stage(**{**given, "num_reqs": arguments["num_reqs"]})
        copies.append({name: getattr(inputs, name).clone() for name in FIELDS})
        want.append(expected(6, 3, arguments))
        if number == 6:
            assert not torch.cuda.current_stream().query(), "staging waited for the device"
    for got, wanted in zip(copies, want, strict=True):
        assert {name: t.tolist() for name, t in got.items()} == wanted


@pytest.mark.gpu
def test_steps_on_alternating_streams_arrive():
    """Queued behind a busy device on two streams in turn, ordered as their common buffers demand."""
    inputs, rng, copies, want = StepInputs(6, 4, "cuda", block_table_width=3), random.Random(4), [], []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda._sleep(100_000_000)
    before = torch.cuda.current_stream()
    for number in range(40):
        stream, arguments = streams[number // 3 % 2], random_arguments(rng, 6, 3)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            inputs.stage(**arguments)
            copies.append({name: getattr(inputs, name).clone() for name in FIELDS})
        before = stream
        want.append(expected(6, 3, arguments))
    torch.cuda.synchronize()
    for got, wanted in zip(copies, want, strict=True):
        assert {name: t.tolist() for name, t in got.items()} == wanted


@pytest.mark.gpu
def test_a_long_host_list_grows_its_block():
    """More requests than rows, and a block table from the host, fit as well, in every block of the ring."""
    inputs = StepInputs(2, 4, "cuda", block_table_width=2)
    for step in range(20):
        counts = list(range(step, step + 500))
        table = torch.arange(1000, dtype=torch.int32).view(500, 2) + step
        inputs.stage(
            num_reqs=1, state_indices=[1], record_rows=[0], request_indices=[499], num_accepted_tokens=counts,
            block_table=table,
        )  # fmt: skip
        assert inputs.num_accepted_tokens.tolist() == [499 + step, 0]
        assert inputs.block_table.tolist() == [[998 + step, 999 + step], [0, 0]]


def test_buffers_cannot_be_rebound(device):
    """The fields are frozen, and their addresses never change (B04)."""
    inputs = StepInputs(4, 4, device, block_table_width=2)
    before = {name: getattr(inputs, name).data_ptr() for name in FIELDS}
    with pytest.raises(dataclasses.FrozenInstanceError):
        inputs.state_indices = torch.zeros(4, dtype=torch.int32)
    for seed in range(3):
        inputs.stage(**random_arguments(random.Random(seed), 4, 2))
    assert {name: getattr(inputs, name).data_ptr() for name in FIELDS} == before


def test_rows_are_views_of_the_static_buffers(device):
    """Cut to n rows, the tensors share memory with the buffers and are the same objects every time."""
    inputs = StepInputs(4, 4, device, block_table_width=2)
    for n in (1, 3, 4):
        rows = inputs.rows(n)
        assert rows is inputs.rows(n)
        assert rows.query_start_loc.shape == (n + 1,) and rows.block_table.shape == (n, 2)
        for name in FIELDS:
            assert getattr(rows, name).data_ptr() == getattr(inputs, name).data_ptr()
    for n in (0, 5):
        with pytest.raises(ValueError, match=rf"^num_reqs: expected 1\.\.4 .*got {n}"):
            inputs.rows(n)


REFUSED = {
    "num_reqs: expected 0..3 (max_num_reqs), got 4": {"num_reqs": 4},
    "state_indices: expected at least 2 entries, got 1": {"num_reqs": 2, "state_indices": [1]},
    "query_start_loc: expected at least 3 entries, got 2": {"num_reqs": 2, "query_start_loc": [0, 1]},
    "num_accepted_tokens: expected at least 2 requests, got 1": {"num_reqs": 2, "num_accepted_tokens": [1]},
    "record_rows: expected [rows] int32, got [2] int64": {"num_reqs": 2, "record_rows": torch.tensor([0, 1])},
    "eager: expected [rows] bool or uint8, got [2] int32": {"num_reqs": 2, "eager": torch.zeros(2, dtype=torch.int32)},
    "block_table: expected [requests, width] int32, got [2] int32": {
        "num_reqs": 2,
        "block_table": torch.zeros(2, dtype=torch.int32),
    },
    "state_indices: expected a tensor or a sequence of 32-bit ints, got list": {"num_reqs": 1, "state_indices": [1.5]},
    "record_rows: expected a tensor or a sequence of 32-bit ints, got list": {"num_reqs": 1, "record_rows": [2**31]},
    "request_indices: expected a tensor or a sequence of 32-bit ints, got int": {"num_reqs": 1, "request_indices": 3},
    "num_reqs: expected 0..3 (max_num_reqs), got True": {"num_reqs": True},
    "num_reqs: expected 0..3 (max_num_reqs), got 1.0": {"num_reqs": 1.0},
    "num_reqs: expected 0..3 (max_num_reqs), got None": {"num_reqs": None},
    "state_indices: expected a tensor or a sequence of 32-bit ints, got set": {"num_reqs": 1, "state_indices": {1, 2}},
    "state_indices: expected a tensor or a sequence of 32-bit ints, got dict": {"num_reqs": 1, "state_indices": {0: 1}},
    "state_indices: expected a tensor or a sequence of 32-bit ints, got str": {"num_reqs": 1, "state_indices": "12"},
    "eager: expected a tensor or a sequence of 32-bit ints, got bytes": {"num_reqs": 1, "eager": b"1"},
    "eager: expected a tensor or a sequence of 32-bit ints, got list": {"num_reqs": 1, "eager": [256]},
    "record_rows: expected a tensor or a sequence of 32-bit ints, got list ('float'": {
        "num_reqs": 1,
        "record_rows": np.zeros(2),
    },
    "block_table: expected a tensor or a sequence of 32-bit ints, got list": {"num_reqs": 1, "block_table": [1]},
    "state_indices: expected a tensor or a sequence of 32-bit ints, got ndarray (memory": {
        "num_reqs": 1,
        "state_indices": np.array([1, None]),
    },
    "state_indices: expected a tensor or a sequence of 32-bit ints, got ndarray (cannot": {
        "num_reqs": 1,
        "state_indices": np.array(["2026-01-01"], dtype="datetime64[D]"),
    },
    "state_indices: expected a dense tensor": {
        "num_reqs": 1,
        "state_indices": torch.zeros(2, dtype=torch.int32).to_sparse(),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(device, message):
    """The error names the argument, what was expected and what came, and nothing is staged."""
    inputs = StepInputs(3, 4, device, block_table_width=2)
    arguments = random_arguments(random.Random(1), 3, 2)
    inputs.stage(**arguments)
    with pytest.raises(ValueError) as caught:
        inputs.stage(**REFUSED[message])
    assert str(caught.value).startswith(message)
    assert contents(inputs) == expected(3, 2, arguments)


@pytest.mark.parametrize("name", FIELDS)
def test_the_static_buffers_are_no_source(device, name):
    """A view of the buffers themselves is refused: rows would be read after they are overwritten."""
    inputs = StepInputs(3, 4, device, block_table_width=2)
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor of the caller's, got a view of the static"):
        inputs.stage(num_reqs=1, **{name: getattr(inputs, name)[1:]})


def test_bad_sizes_are_named(device):
    for name, value in (("max_num_reqs", 0), ("spec_query_len", 0), ("block_table_width", -1)):
        with pytest.raises(ValueError, match=f"^{name}: expected at least"):
            StepInputs(**{"max_num_reqs": 2, "spec_query_len": 2, "device": device, name: value})


def test_host_values_do_not_enter_a_recording(device):
    """Lists (and host tensors, on a GPU) would be frozen; the error says what to do instead."""
    inputs = StepInputs(3, 4, device)
    with pytest.raises(CaptureError, match="call stage before replay"):
        record(lambda: inputs.stage(num_reqs=1, state_indices=[1]), device=device, warmup=0)
    inputs.stage(num_reqs=1, state_indices=[2], record_rows=[1])
    assert inputs.state_indices.tolist() == [2, 0, 0]


def test_a_recorded_staging_reads_live_device_tensors(device):
    """From device tensors staging is one launch of a recording, which reads them at every replay (B01)."""
    inputs = StepInputs(3, 4, device)
    slots, rows, offsets = int32([1, 2], device), int32([0, 1], device), int32([0, 1, 2], device)

    def step():
        inputs.stage(num_reqs=2, state_indices=slots, record_rows=rows, query_start_loc=offsets)

    recording = record(step, device=device)
    assert recording.num_nodes == 1
    for values in ([3, 4], [5, 6]):
        slots.copy_(int32(values, device))
        inputs.stage(num_reqs=0)
        recording.replay()
        assert inputs.state_indices.tolist() == [*values, 0]
        assert inputs.query_start_loc.tolist() == [0, 1, 2, 2]


def test_dummies_are_padding_or_look_live(device):
    """Plain dummies are padding; with dcp they have slots 0, 1, ..., full windows and record rows -1."""
    inputs = StepInputs(4, 3, device, block_table_width=2)
    inputs.stage(**random_arguments(random.Random(1), 4, 2))
    dummy_inputs(inputs, 3)
    assert contents(inputs) == padding(4, 2)
    dummy_inputs(inputs, 3, dcp=True)
    assert contents(inputs) == padding(4, 2) | {
        "state_indices": [0, 1, 2, 0],
        "query_start_loc": [0, 3, 6, 9, 9],
    }


def test_a_kept_step_comes_back_even_after_an_error(device):
    inputs = StepInputs(4, 3, device, block_table_width=2)
    arguments = random_arguments(random.Random(1), 4, 2)
    inputs.stage(**arguments)
    with pytest.raises(KeyError), inputs.kept():
        dummy_inputs(inputs, 4, dcp=True)
        raise KeyError
    assert contents(inputs) == expected(4, 2, arguments)


@pytest.mark.parametrize("table", [[], [[]]], ids=["no requests", "no columns"])
def test_a_step_without_blocks_is_staged(table):
    """A block table given as an empty list is a table without requests or columns, and stages null blocks."""
    inputs = StepInputs(2, 4, torch.device("cpu"), 3)
    inputs.stage(num_reqs=len(table), state_indices=[1] * len(table), block_table=table)
    assert not inputs.block_table.any()


def test_an_empty_table_for_a_row_is_refused():
    """Fewer requests than rows name the argument, also when there are none."""
    inputs = StepInputs(2, 4, torch.device("cpu"), 3)
    with pytest.raises(ValueError, match="block_table: expected at least 1 requests, got 0"):
        inputs.stage(num_reqs=1, state_indices=[1], block_table=[])
