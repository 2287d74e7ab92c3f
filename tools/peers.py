"""Peers to compare with: a few modules of another project's wheel, imported beside stand-ins for the rest of it.

    vllm 0.33.0      Triton verify and commit of its Kimi K3 layers, their convolution, and the CuTe commit (BF16 state)
    fla-core 0.6.0   the fused recurrence of KDA with one stored state per token, and its plain torch form

Nothing of either is in this repository. A wheel is given as a path or fetched by pip; the modules named below are read
out of it into a temporary folder and imported from there. What they import from the rest of their project is replaced
by the stand-ins below: constants, identity decorators, and facts about the device.

    python tools/peers.py --out FOLDER [--vllm WHEEL] [--fla WHEEL]

writes wheels with those modules alone, a few kilobytes each, for a machine without a network.
"""

import argparse
import contextlib
import importlib
import subprocess
import sys
import tempfile
import types
import zipfile
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl

_K3 = "vllm.models.kimi_k3.nvidia"
_PRIMITIVES = f"{_K3}.specialized_decode.cutedsl.common.primitives"
REQUIREMENTS = {"vllm": "vllm==0.33.0", "fla": "fla-core==0.6.0"}
MODULES = {
    "vllm": (
        "vllm.model_executor.layers.mamba.ops.causal_conv1d",
        f"{_K3}.ops.recoverssm",
        f"{_K3}.recoverssm.kernels",
        f"{_K3}.recoverssm.cutedsl.commit",
        _PRIMITIVES,
    ),
    "fla": ("fla.ops.kda.fused_recurrent", "fla.ops.kda.naive", "fla.ops.utils.op", "fla.ops.utils.softplus"),
}


def fetch(name: str, folder: Path) -> Path:
    """Download a peer's wheel with pip, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), REQUIREMENTS[name]], check=True)
    prefix = REQUIREMENTS[name].partition("==")[0].replace("-", "_")
    return next(folder.glob(f"{prefix}-*.whl"))


def members(name: str, archive: zipfile.ZipFile) -> list[str]:
    """The files of a wheel that are needed: the modules, and METADATA for the version."""
    wanted = [module.replace(".", "/") + ".py" for module in MODULES[name]]
    lacking = [member for member in wanted if member not in archive.namelist()]
    if lacking:
        raise ValueError(f"{archive.filename}: expected {REQUIREMENTS[name]}, got a wheel without {lacking[0]}")
    return wanted + [member for member in archive.namelist() if member.endswith(".dist-info/METADATA")]


def unpack(name: str, wheel: Path, folder: Path) -> str:
    """Put the needed files into `folder`; the version of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        found = members(name, archive)
        archive.extractall(folder, found)
        lines = archive.read(found[-1]).decode().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("Version: "))


def slim(name: str, wheel: Path, out: Path) -> None:
    """A wheel with the needed files alone."""
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as small:
        for member in members(name, archive):
            small.writestr(member, archive.read(member))


def _stand_ins(name: str, device: torch.device) -> dict[str, dict[str, object]]:
    """Module -> what the needed modules import from it."""
    on_gpu = device.type == "cuda"
    if name == "fla":
        known = {"IS_NVIDIA": on_gpu, "IS_NVIDIA_BLACKWELL": False, "IS_GATHER_SUPPORTED": hasattr(tl, "gather")}
        return {
            "fla.backends": {"dispatch": lambda _operation: _identity},
            "fla.utils": {"input_guard": _identity, **known},
            "einops": {"rearrange": None},
        }
    platform = types.SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: on_gpu, is_arch_support_pdl=lambda: False)
    return {
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: True},
    }


def _identity(function):
    return function


def _install(name: str, folder: Path, device: torch.device) -> None:
    """Packages without their own `__init__`, so that importing one module does not import the project."""
    for module in MODULES[name]:
        parents = module.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            package = types.ModuleType(".".join(parents[:depth]))
            package.__path__ = [str(folder.joinpath(*parents[:depth]))]
            sys.modules.setdefault(package.__name__, package)
    for module, attributes in _stand_ins(name, device).items():
        if module == "einops" and module in sys.modules:
            continue
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(attributes)


def _mend_interpreter() -> None:
    """On a CPU: a scalar condition and a block's make a mask for Triton's compiler, but not for its interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def boolean(mask):
        return TensorHandle(mask.data.astype(bool), tl.int1)

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, boolean(mask), *rest)
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(
        self, ptrs, value, boolean(mask), *rest
    )


@contextlib.contextmanager
def peers(device: torch.device, vllm: Path | None = None, fla: Path | None = None):
    """The peers as namespaces (`.version`, and the names below), for as long as the temporary folder lives.

    vllm: verify, context, records, conv_update, layouts; `cute_commit()` prepares the context's "cute" backend.
    fla: recurrent, naive.
    """
    if device.type == "cpu":
        _mend_interpreter()
    with tempfile.TemporaryDirectory() as temporary:
        folder, loaded = Path(temporary), []
        for name, given in (("vllm", vllm), ("fla", fla)):
            wheel = given or fetch(name, folder)
            version = unpack(name, wheel, folder)
            _install(name, folder, device)
            loaded.append({"vllm": _vllm, "fla": _fla}[name](version))
        yield tuple(loaded)


def _vllm(version: str) -> types.SimpleNamespace:
    recoverssm = importlib.import_module(f"{_K3}.ops.recoverssm")
    conv = importlib.import_module("vllm.model_executor.layers.mamba.ops.causal_conv1d")

    def conv_dim_first(value: bool) -> None:
        recoverssm.is_conv_state_dim_first = lambda: value

    return types.SimpleNamespace(
        version=version,
        verify=recoverssm.kda_recoverssm_verify,
        context=recoverssm.KDARecoverSSMCommitContext,
        records=recoverssm.KDARecoverSSMRecords,
        conv_update=conv.causal_conv1d_update,
        conv_dim_first=conv_dim_first,
        cute_commit=_cute_commit,
    )


def _fla(version: str) -> types.SimpleNamespace:
    fused = importlib.import_module("fla.ops.kda.fused_recurrent")
    naive = importlib.import_module("fla.ops.kda.naive")
    return types.SimpleNamespace(
        version=version, recurrent=fused.fused_recurrent_kda_fwd, naive=naive.naive_recurrent_kda
    )


def _cute_commit() -> None:
    """Let the peer's context launch its CuTe commit without TVM-FFI: its kernel, our compile call and launch."""
    kernels = importlib.import_module(f"{_K3}.recoverssm.kernels")
    kernels._architecture = lambda device: "sm_{}{}a".format(*torch.cuda.get_device_capability(device))
    kernels._compile_commit = cute_commit_kernel


@cache
def cute_commit_kernel(heads: int, window: int, arch: str, param_dtype: torch.dtype, align: bool):
    """The peer's CuTe commit, compiled; called with its torch tensors, then the bound and the null slot."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor

    commit = importlib.import_module(f"{_K3}.recoverssm.cutedsl.commit")
    param = {torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16}[param_dtype]
    kinds = [(1, cutlass.Int64)] * 6 + [(2, param), (3, param)] + [(1, cutlass.Int32)] * 5
    fakes = []
    for rank, dtype in kinds:
        strides = (*(cute.sym_int(64) for _ in range(rank - 1)), 1)
        shape = tuple(cute.sym_int() for _ in range(rank))
        fakes.append(make_fake_tensor(dtype, shape, strides, assumed_align=16))
    stream, options = make_fake_stream(), f"--gpu-arch={arch}"
    scalars = (cutlass.Float32(0), cutlass.Int32(0))
    compiled = cute.compile(commit.KdaCommit(heads, window, align), *fakes, *scalars, stream, options=options)

    def run(*args):
        import cuda.bindings.driver as cuda

        tensors = [from_dlpack(t, assumed_align=16).mark_layout_dynamic(leading_dim=t.ndim - 1) for t in args[:-2]]
        compiled(*tensors, *args[-2:], cuda.CUstream(torch.cuda.current_stream().cuda_stream))

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the small wheels")
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--fla", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name, given in (("vllm", args.vllm), ("fla", args.fla)):
            out = args.out / f"{name}.whl"
            slim(name, given or fetch(name, Path(temporary)), out)
            print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
