"""Which capture a stream is in: told by the driver's number, for captures that are not graphrt's as well."""

from types import SimpleNamespace

import pytest
import torch

from graphrt import KDARecoverSSMDeferred, capturing, cuda_types, launch
from graphrt.capture import record

STREAM, REFUSED = 5, 13


class Driver:
    """Stands in for the CUDA driver, and for torch where it would ask it: `number` of the capture under way, or 0."""

    def __init__(self):
        self.number, self.stream, self.questions = 0, STREAM, []
        self.cuStreamGetCaptureInfo_v2 = lambda *args: self.answer("v2", 2, *args)
        self.cuStreamGetCaptureInfo_v3 = lambda *args: self.answer("v3", 3, *args)

    def is_capturing(self):
        self.questions.append("torch")
        return self.number > 0

    def answer(self, version, unused, stream, status, number, graph, *rest):
        assert stream.value == STREAM and rest == (None,) * unused
        self.questions.append(version)
        status._obj.value, number._obj.value, graph._obj.value = int(self.number > 0), self.number, 4096
        return 901 if self.number == REFUSED else 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    for module in (capturing, cuda_types):
        monkeypatch.setattr(module, "library", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=driver.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", driver.is_capturing)
    return driver


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_a_capture_has_the_number_and_graph_that_the_driver_says(driver, version):
    """By the newest question that the driver has."""
    if version == "v2":
        del driver.cuStreamGetCaptureInfo_v3
    assert capturing.capture_of(STREAM) is None
    driver.number = 7
    assert capturing.capture_of(STREAM) == (7, 4096) and capturing.current_capture() == 7
    assert set(driver.questions) == {version, "torch"}


def test_a_driver_that_refuses_is_told(driver):
    """With its number of the error."""
    driver.number = REFUSED
    with pytest.raises(RuntimeError, match=r"^cuStreamGetCaptureInfo_v3 failed with CUDA driver error 901$"):
        capturing.capture_of(STREAM)


def test_the_legacy_stream_is_never_asked(driver):
    """The question alone would spoil a capture of a stream that waits for it."""
    driver.number, driver.stream = 7, 0
    assert not capturing.is_capturing() and capturing.current_capture() == 0 and launch.runs_at_once()
    assert driver.questions == []


def test_whether_anything_captures_is_asked_without_the_driver(driver):
    """That is what a launch asks; the number is for who compares."""
    assert launch.runs_at_once()
    driver.number = 7
    assert capturing.is_capturing() and not launch.runs_at_once()
    assert set(driver.questions) == {"torch"}
    assert launch.execution() == (None, 7)


def test_a_step_object_is_flushed_once_in_every_capture_of_somebody_elses(driver):
    """And once at once; whatever comes between, a place that has its flush gets no second one (B01)."""
    flushes = []
    context = SimpleNamespace(flush=lambda *_: flushes.append(driver.number))
    row = torch.zeros(1, dtype=torch.int32)
    step = KDARecoverSSMDeferred(row, row, None, context, row)
    for driver.number in (0, 0, 7, 7, 8, 0, 8, 7):
        step.flush()
    assert flushes == [0, 7, 8]


def test_two_recordings_of_ours_are_two_places():
    """On a tape there is no driver to ask."""
    x, places = torch.zeros(1), []
    for _ in range(2):
        record(lambda: places.append((launch.execution(), x.add_(1))[0]), device="cpu", warmup=0)
    assert len({id(place) for place, _ in places}) == 2 and {number for _, number in places} == {0}
