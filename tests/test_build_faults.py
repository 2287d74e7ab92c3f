"""The CuTe DSL installation and its target: mixed wheels, other devices, architectures nobody knows."""

import base64
import hashlib

import pytest
import torch

from graphrt import backends, wheels
from graphrt.backends import Facts


def install(folder, package, files):
    """A wheel in fake site-packages; what is unpacked last wins."""
    info = folder / f"{package.replace('-', '_')}-4.8.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 4.8.1\n")
    lines = []
    for name, text in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")


BASE, CU13 = "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"


@pytest.mark.parametrize("order", [(BASE, CU13), (CU13, BASE)], ids=["base first", "cu13 first"])
def test_two_wheels_over_one_path_are_named(tmp_path, order):
    """Whichever was unpacked last, the report names both, the file, and whose it is (B93)."""
    for package in order:
        same = {"nvidia_cutlass_dsl/same.py": b"pass"}
        install(tmp_path, package, same | {"nvidia_cutlass_dsl/lib/runtime.so": package.encode()})
    text = wheels.mixed_wheels([str(tmp_path)])
    assert BASE in text and CU13 in text and "runtime.so" in text and f"that of {order[1]} is there" in text


def test_wheels_that_agree_are_no_mix(tmp_path):
    """Equal files, files of one wheel alone, and other packages over the same path say nothing (B93)."""
    install(tmp_path, BASE, {"nvidia_cutlass_dsl/a.py": b"a", "nvidia_cutlass_dsl/b.py": b"b"})
    install(tmp_path, CU13, {"nvidia_cutlass_dsl/a.py": b"a"})
    install(tmp_path, "something-else", {"nvidia_cutlass_dsl/b.py": b"c"})
    assert wheels.mixed_wheels([str(tmp_path)]) == ""


def test_the_installation_of_this_machine_is_no_mix():
    """The wheels that pip chose for this environment do not overwrite each other."""
    assert wheels.mixed_wheels() == ""


def facts_of(device):
    return Facts(torch.device(device), torch.float32, 128, True, -5.0, 4, torch.bfloat16)


@pytest.fixture
def two_devices(monkeypatch):
    """A machine with a Hopper and a Blackwell, as far as their capability goes."""
    pytest.importorskip("cutlass")
    monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
    capability = {0: (9, 0), 1: (10, 0), 2: (99, 9)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[torch.device(device).index])


def test_the_target_is_the_device_in_use(two_devices, monkeypatch):
    """Each device has its own architecture, whatever device 0 is; what the user chose is kept (B95)."""
    from graphrt.kernels.cute import build

    assert build.target(torch.device("cuda:1")) == "sm_100a" and build.target(torch.device("cuda:0")) == "sm_90a"
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_103a")
    assert build.target(torch.device("cuda:1")) == "sm_103a"


def test_an_unknown_architecture_falls_back_with_its_name(two_devices, monkeypatch):
    """A device newer than the DSL is refused by name before anything is traced, and Triton takes over; so is a value
    of CUTE_DSL_ARCH that is no architecture (B95).
    """
    support = backends.supports("fp32_deferred", facts_of("cuda:2"))
    assert not support and "does not know sm_999a" in support.reason
    choice = backends.choose("auto", facts_of("cuda:2"))
    assert choice.backend.name == "triton" and "sm_999a" in choice.reason
    assert backends.supports("fp32_deferred", facts_of("cuda:1"))
    monkeypatch.setenv("CUTE_DSL_ARCH", "banana")
    support = backends.supports("fp32_deferred", facts_of("cuda:1"))
    assert not support and "does not know banana, which CUTE_DSL_ARCH asks for" in support.reason


def test_a_mixed_installation_falls_back_with_one_sentence(two_devices, monkeypatch):
    """`fp32_deferred` is refused and Triton runs; the reason names the packages (B93)."""
    monkeypatch.setattr(backends, "_mixed_wheels", lambda: f"{BASE} and {CU13} both install runtime.so")
    monkeypatch.setattr(backends, "_choices", {})
    choice = backends.choose("fp32_deferred", facts_of("cuda:1"))
    assert choice.backend.name == "triton" and BASE in choice.reason and CU13 in choice.reason


def test_a_variant_is_compiled_once_in_a_process(monkeypatch):
    """By facts and architecture; a process that compiles says once how long it took (`create`), for the DSL's own
    cache on disk does not serve compiles that are asked for (B94).
    """
    pytest.importorskip("cutlass")
    from graphrt.kernels.cute import build

    compiled = []
    monkeypatch.setattr(build.cute, "compile", lambda *args, **options: compiled.append(options) or object())
    kernels = build.Kernels(lambda *facts: facts, (), "q")
    first = kernels.compile((8, 4), "sm_90a")
    assert kernels.compile((8, 4), "sm_90a") is first and len(compiled) == 1
    kernels.compile((8, 4), "sm_100a")
    kernels.compile((8, 8), "sm_90a")
    assert len(compiled) == 3 and "--gpu-arch=sm_100a" in compiled[1]["options"]


@pytest.mark.parametrize("module, kernel", [("commit", "FoldF32"), ("deferred", "VerifyF32")])
def test_a_variant_that_a_capture_would_compile_is_named(monkeypatch, module, kernel):
    """The launch raises before anything is compiled, with the kernel's name and what to do."""
    kernels = pytest.importorskip(f"graphrt.kernels.cute.{module}").KERNELS
    monkeypatch.setattr("graphrt.kernels.cute.build.is_capturing", lambda: True)
    monkeypatch.setattr(kernels, "compile", lambda *_: pytest.fail("compiled in a capture"))
    with pytest.raises(RuntimeError, match=rf"^{kernel}, variant \(99, .*build a context of this shape first"):
        kernels.launch((99, 8), torch.device("cuda", 0))
