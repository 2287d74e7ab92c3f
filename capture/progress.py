"""What a capture shows while it runs: how far it is, and how much device memory is left."""

import logging
from types import TracebackType
from typing import Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger("graphrt")


class CaptureProgress:
    """A progress bar over `total` recordings, or silence."""

    def __init__(self, total: int, device: torch.device, show: bool) -> None:
        self._device = device
        self._bar = Progress(
            TextColumn("capture"),
            BarColumn(bar_width=20),  # the free memory is seen in 80 columns too
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[free]}"),
            TimeElapsedColumn(),
            disable=not show,
        )
        self._task = self._bar.add_task("", total=total, free="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, doing: str) -> None:
        """Say what is recorded now, and the free memory before it."""
        self._bar.update(self._task, description=doing, free=self._free())

    def advance(self) -> None:
        self._bar.advance(self._task)

    def finish(self, count: int, seconds: float, pool_bytes: int, device_bytes: int) -> None:
        """The last line: recordings, seconds and MiB."""
        text = f"{count} recordings in {seconds:.1f} s, {pool_bytes / 2**20:.1f} MiB in their pool"
        if self._device.type == "cuda":
            text += f", {device_bytes / 2**20:.1f} MiB of device memory"
        self._bar.update(self._task, description="done", free=self._free())
        if not self._bar.disable:
            self._bar.console.print(f"captured {text}", soft_wrap=True, highlight=False)
        log.info("graphrt: captured %s", text)

    def _free(self) -> str:
        if self._device.type != "cuda":
            return ""
        return f"{torch.cuda.mem_get_info(self._device)[0] / 2**20:.0f} MiB free"
