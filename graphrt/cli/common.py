"""What the subcommands share: devices, errors in one sentence, progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import torch


class Device(StrEnum):
    """Where to run; auto takes a GPU if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Backend(StrEnum):
    """Which kernels to run; auto and fp32_deferred fall back and say why."""

    AUTO = "auto"
    FP32_DEFERRED = "fp32_deferred"
    TRITON = "triton"
    TORCH = "torch"


DeviceOption = Annotated[Device, typer.Option(help="Where to run.")]
BackendOption = Annotated[Backend, typer.Option(help="Which kernels to run.")]


def torch_device(device: Device) -> "torch.device":
    """The device that is meant.

    Raises:
        typer.BadParameter: for a GPU that is not there.
    """
    import torch

    if device is Device.CPU or (device is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise option_error("--device", "expected a CUDA device for 'cuda', and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


# What an option sets, as the package's own messages name it.
_OPTIONS = {
    "accepted": "--accepted",
    "backend": "--backend",
    "head_dim": "--head-dim",
    "num_slots": "--slots",
    "tensor_parallel": "--tp",
}

NO_ROOM = "take fewer rows or layers; `graphrt plan` says what a shape needs"


@contextmanager
def user_errors() -> Iterator[None]:
    """What a user can put right comes as one sentence that names the option, without a traceback.

    A value that does not fit is a usage error (exit status 2); a step that cannot be recorded, or has no room, exit
    status 1.
    """
    import torch

    from graphrt.capture import CaptureError

    try:
        yield
    except ValueError as error:
        name, _, text = str(error).partition(": ")
        option = _OPTIONS.get(name.rpartition(".")[2])
        raise option_error(option, text) if option else typer.BadParameter(str(error)) from error
    except CaptureError as error:
        raise refusal(str(error)) from error
    except RuntimeError as error:
        # On the CPU torch has no class for it.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        told = str(error).partition("DefaultCPUAllocator: ")[2] or str(error)
        raise refusal(f"{told.partition('. ')[0]}: {NO_ROOM}") from error


def option_error(option: str, text: str) -> typer.BadParameter:
    """A usage error (exit status 2) about the value of an option."""
    return typer.BadParameter(text, param_hint=f"'{option}'")


def refusal(text: str) -> typer.Exit:
    """Say on standard error why nothing was done; the caller raises what comes back, exit status 1."""
    Console(stderr=True).print(Text(f"error: {text}", style="red"), soft_wrap=True)
    return typer.Exit(1)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something takes its time; nothing where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def in_bytes(count: float) -> str:
    """Bytes as one reads them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
