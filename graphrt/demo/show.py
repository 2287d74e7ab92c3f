"""How a report looks on a terminal, or as plain text where there is none."""

from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .run import DemoReport
from .serve import Completion

BAR_WIDTH = 40


def show(report: DemoReport, console: Console) -> None:
    """Print the whole report: texts, acceptance, memory, times, verdicts."""
    marked = "green" if console.is_terminal else "between {+ and +}"
    console.print(f"Prompts are dim, accepted drafts {marked}.\n")
    for completion in report.completions:
        console.print(_text_panel(completion, plain=not console.is_terminal))
    console.print(_acceptance(report))
    console.print(_memory(report))
    if report.step_us:
        console.print(_times(report))
    console.print(_summary(report), soft_wrap=True)


def _text_panel(completion: Completion, plain: bool) -> Panel:
    text = Text()
    prompt_len = len(completion.request.prompt)
    text.append(_readable(completion.request.prompt), style="dim")
    marks = completion.drafted[prompt_len:]
    for drafted, pairs in groupby(zip(marks, completion.generated, strict=True), key=lambda pair: pair[0]):
        part = _readable(bytes(byte for _, byte in pairs))
        text.append(f"{{+{part}+}}" if drafted and plain else part, style="bold green" if drafted else "")
    accepted = sum(marks)
    title = f"{completion.request.name}: {prompt_len} + {len(marks)} bytes, {accepted} of them accepted drafts"
    return Panel(text, title=Text(title), title_align="left", subtitle=f"record row {completion.record_row}")


def _readable(part: bytes) -> str:
    return part.decode("ascii", "backslashreplace")


def _acceptance(report: DemoReport) -> RenderableType:
    table = Table(title="Accepted drafts per window", title_justify="left")
    table.add_column("drafts", justify="right")
    table.add_column("windows", justify="right")
    table.add_column("")
    most = max(*report.accepted_drafts, 1)
    for drafts, windows in enumerate(report.accepted_drafts):
        table.add_row(str(drafts), str(windows), "#" * round(BAR_WIDTH * windows / most))
    generated = sum(len(completion.generated) for completion in report.completions)
    return Group(
        table,
        f"mean {report.mean_accepted:.2f} accepted drafts a window; {generated} tokens in {report.num_steps} steps, "
        f"one token of every row a step needs {report.num_one_token_steps}\n",
    )


def _memory(report: DemoReport) -> RenderableType:
    table = Table(title="Memory of the decode state", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for what, size_bytes in report.memory_bytes.items():
        table.add_row(what, f"{size_bytes:,}")
    window = report.options.spec_query_len
    per_token_bytes = window * report.memory_bytes["checkpoints"]
    return Group(table, f"a checkpoint per window token instead of records: {per_token_bytes:,} bytes\n")


def _times(report: DemoReport) -> RenderableType:
    table = Table(title="Time per step: model, sampling and graphrt together, median", title_justify="left")
    table.add_column("backend")
    table.add_column("mode")
    table.add_column("us", justify="right")
    for mode, step_us in report.step_us.items():
        table.add_row(report.backend, mode, f"{step_us:.1f}")
    for backend, step_us in report.backend_us.items():
        if backend != report.backend:
            table.add_row(backend, "replay, deferred commit", f"{step_us:.1f}")
    fastest = min(report.backend_us, key=report.backend_us.__getitem__)
    return Group(table, f"of the backends that run here {fastest} is the fastest in replay with deferred commit\n")


def _summary(report: DemoReport) -> RenderableType:
    lines = [
        Text(f"device {report.device_name}; backend {report.backend}: {report.backend_reason}"),
        Text(
            f"{len(report.completions)} requests on {report.num_record_rows} record rows; "
            f"one recorded step replays {report.num_launches} launches; {report.seconds:.1f} s in all"
        ),
    ]
    for verdict in report.verdicts:
        word, style = ("PASS", "bold green") if verdict.passed else ("FAIL", "bold red")
        lines.append(Text.assemble((word, style), f"  {verdict.claim} ({verdict.detail})"))
    return Group(*lines)
