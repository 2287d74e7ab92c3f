"""The demo's work: decode the same requests in several ways, compare, measure, and report what was seen."""

import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

from graphrt import reset_errors
from graphrt.backends import BACKENDS, Facts, choose, supports

from .model import ByteModel, ModelConfig, load_model
from .prompts import make_requests
from .serve import LOOK_EVERY, Completion, DecodeLoop, Mode, Request, decode
from .step import ACTIVATIONS
from .verdicts import BitComparison, Verdict, no_device_errors, same_tokens

DEFERRED = Mode()
EAGER_COMMIT = Mode(deferred=False)
LAUNCHED = Mode(recorded=False)
ONE_TOKEN = Mode(drafting=False)
TIMED_MODES = {
    "eager launches": LAUNCHED,
    "replay, eager commit": EAGER_COMMIT,
    "replay, deferred commit": DEFERRED,
}

# progress(phase, finished requests, all requests)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DemoOptions:
    """What to decode, and where. Raises ValueError for numbers below 1 and a backend that cannot run there."""

    device: torch.device
    backend: str = "auto"
    num_requests: int = 6
    batch: int = 4
    new_tokens: int = 64
    """Of the longest request."""
    spec_query_len: int = 8

    def __post_init__(self) -> None:
        for name in ("num_requests", "batch", "new_tokens", "spec_query_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        choose(self.backend, self.facts)

    @property
    def facts(self) -> Facts:
        """What the choice of a backend depends on."""
        config = ModelConfig()
        checkpoint = torch.empty(1, config.num_heads, config.head_dim, config.head_dim, device=self.device)
        return Facts.of(checkpoint, config.gate_lower_bound, self.spec_query_len, ACTIVATIONS)


@dataclass(frozen=True)
class DemoReport:
    """Everything the demo shows; `as_json` is what `--json` writes."""

    options: DemoOptions
    device_name: str
    backend: str
    backend_reason: str
    completions: list[Completion]
    num_steps: int
    num_one_token_steps: int
    num_launches: int
    """Launches in the recording of one step, deferred."""
    accepted_drafts: list[int]
    """[Q]: windows that accepted 0, 1, ... Q - 1 drafts."""
    memory_bytes: dict[str, int]
    verdicts: list[Verdict]
    step_us: dict[str, float]
    """Median time of one step of the backend in microseconds, by mode; empty without a GPU."""
    backend_us: dict[str, float]
    """The same of a replayed step with deferred commit, by backend: all that run here."""
    seconds: float = field(default=0.0)

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted drafts in a window after the prompt."""
        windows = sum(self.accepted_drafts)
        return sum(n * count for n, count in enumerate(self.accepted_drafts)) / max(windows, 1)

    @property
    def num_record_rows(self) -> int:
        return len({completion.record_row for completion in self.completions})

    def as_json(self) -> dict[str, Any]:
        """Plain values only; texts as Latin-1 strings, one character a byte."""
        return {
            "options": asdict(self.options) | {"device": str(self.options.device)},
            "device": self.device_name,
            "torch": torch.__version__,
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "requests": [_request_json(completion) for completion in self.completions],
            "record_rows_used": self.num_record_rows,
            "steps": self.num_steps,
            "one_token_steps": self.num_one_token_steps,
            "launches_per_step": self.num_launches,
            "accepted_drafts_histogram": self.accepted_drafts,
            "mean_accepted_drafts": self.mean_accepted,
            "memory_bytes": self.memory_bytes,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "step_us": self.step_us,
            "backend_us": self.backend_us,
            "seconds": self.seconds,
            "passed": self.passed,
        }


def _request_json(completion: Completion) -> dict[str, Any]:
    return {
        "name": completion.request.name,
        "prompt": completion.request.prompt.decode("latin-1"),
        "generated": completion.generated.decode("latin-1"),
        "accepted_draft": [int(drafted) for drafted in completion.drafted[len(completion.request.prompt) :]],
        "record_row": completion.record_row,
    }


def run_demo(options: DemoOptions, progress: Progress | None = None) -> DemoReport:
    """Decode, compare and (on a GPU) time; see `DemoReport`."""
    started = perf_counter()
    # TF32 would blur the logits by more than the gap below which tokens may differ.
    torch.set_float32_matmul_precision("highest")
    with _one_thread():
        reset_errors(options.device)
        demo = _Demo(options, progress or (lambda phase, done, total: None))
        return demo.report(started)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The operations on the CPU are so small that a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Demo:
    """The model, the requests, and the ways in which they are decoded."""

    def __init__(self, options: DemoOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.model: ByteModel = load_model(options.device)
        self.requests: list[Request] = make_requests(options.num_requests, options.new_tokens)

    def report(self, started: float) -> DemoReport:
        """Run everything; `started` is the clock at the start."""
        deferred, eager, launched = (self.loop(mode) for mode in (DEFERRED, EAGER_COMMIT, LAUNCHED))
        with closing(deferred), closing(eager), closing(launched):
            recording = deferred.step.recording(self.options.batch)
            num_launches = recording.num_nodes if recording else 0
            bits = self.compare(
                BitComparison("deferred commit is bit-identical to eager commit", deferred, eager),
                BitComparison("replayed steps are bit-identical to the same launches made anew", deferred, launched),
            )
        with closing(self.loop(ONE_TOKEN)) as one_token:
            decode(one_token, self.show_progress("one token a step"))
        claim = "tokens are those of one-token greedy decoding"
        verdicts = [same_tokens(claim, deferred.completions, one_token.completions), *bits]
        step_us, backend_us = {}, {}
        if self.options.device.type == "cuda":
            mine = deferred.context.backend
            others = [name for name in BACKENDS if name != mine and supports(name, self.options.facts)]
            runs = {name: (self.options.backend, mode) for name, mode in TIMED_MODES.items()}
            times, verdict = self.time_runs(runs | {name: (name, DEFERRED) for name in others}, deferred)
            verdicts.append(verdict)
            step_us = {name: times[name] for name in TIMED_MODES}
            backend_us = {mine: times["replay, deferred commit"]} | {name: times[name] for name in others}
        return DemoReport(
            options=self.options,
            device_name=device_name(self.options.device),
            backend=deferred.context.backend,
            backend_reason=deferred.context.backend_reason,
            completions=[deferred.completions[request.name] for request in self.requests],
            num_steps=deferred.num_steps,
            num_one_token_steps=one_token.num_steps,
            num_launches=num_launches,
            accepted_drafts=deferred.texts.accepted_drafts.tolist(),
            memory_bytes=memory_bytes(deferred),
            verdicts=[*verdicts, no_device_errors(self.options.device)],
            step_us=step_us,
            backend_us=backend_us,
            seconds=perf_counter() - started,
        )

    def loop(self, mode: Mode, backend: str | None = None) -> DecodeLoop:
        o = self.options
        return DecodeLoop(
            self.model,
            self.requests,
            batch=o.batch,
            spec_query_len=o.spec_query_len,
            backend=backend or o.backend,
            mode=mode,
        )

    def show_progress(self, phase: str) -> Callable[[DecodeLoop], None]:
        """What to call at every look of the host."""
        return lambda loop: self.progress(phase, len(loop.completions), len(self.requests))

    def compare(self, *comparisons: BitComparison) -> list[Verdict]:
        """All loops in lockstep until all are finished, even if a fault parts them; `mine` is the same loop in all."""
        mine = comparisons[0].mine
        loops = [mine, *(c.other for c in comparisons)]
        show = self.show_progress("one recorded step, three ways")
        while any([loop.look() for loop in loops]):
            show(mine)
            for _ in range(LOOK_EVERY):
                for loop in loops:
                    loop.run()
                for comparison in comparisons:
                    comparison.after_step()
        show(mine)
        return [comparison.verdict() for comparison in comparisons]

    def time_runs(self, runs: dict[str, tuple[str, Mode]], reference: DecodeLoop) -> tuple[dict[str, float], Verdict]:
        """Median step time of each backend and mode over a whole decode, whose texts must be those of `reference`."""
        times: dict[str, float] = {}
        failed: list[Verdict] = []
        for name, (backend, mode) in runs.items():
            with closing(self.loop(mode, backend)) as loop:
                times[name] = self.time_steps(name, loop)
            verdict = same_tokens(name, reference.completions, loop.completions)
            failed += [] if verdict.passed else [verdict]
        detail = "; ".join(f"{v.claim}: {v.detail}" for v in failed) or ", ".join(runs)
        return times, Verdict("timed decodes gave the same tokens", not failed, detail)

    def time_steps(self, phase: str, loop: DecodeLoop) -> float:
        """Median microseconds from the start of a step to the start of the next, while steps queue up."""
        spans: list[float] = []
        show = self.show_progress(phase)
        while loop.look():
            show(loop)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(LOOK_EVERY + 1)]
            events[0].record()
            for event in events[1:]:
                loop.run()
                event.record()
            events[-1].synchronize()
            spans += [1e3 * before.elapsed_time(after) for before, after in pairwise(events)]
        show(loop)
        return median(spans)


def memory_bytes(loop: DecodeLoop) -> dict[str, int]:
    """Bytes of the static tensors by what they are for, scratch rows and the null slot included."""
    context, layers = loop.context, loop.layers
    plan = (
        context.commit_lens,
        context.final_state_indices,
        context.boundary_state_indices,
        context.boundary_recovery_lens,
    )
    records = [layer.recoverssm_records for layer in layers]
    allocations = [t.untyped_storage() for r in records for t in (r.correction, r.key_gate)]
    return {
        "checkpoints": sum(layer.kv_cache[1].nbytes for layer in layers),
        "convolution states": sum(layer.kv_cache[0].nbytes for layer in layers),
        "records": sum(allocation.nbytes() for allocation in allocations),
        "pending and generation": loop.slots.pending.nbytes + loop.slots.generation.nbytes,
        "plan": sum(t.nbytes for t in plan),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
