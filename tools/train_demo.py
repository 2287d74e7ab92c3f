"""Train the demo's byte model on the Python standard library's source.

The command that made the weights in the package, its data and its losses are in graphrt/demo/weights.json. Try it on
any machine with

    python tools/train_demo.py --steps 5 --device cpu --batch 2 --length 64 --out demo

The data are the .py files of one standard library, without its tests and its tables of encodings; one file in twenty,
picked by a checksum of its path, is held out. `--minutes` bounds the training by the clock: the learning rate then
falls with whichever of the two limits is nearer, and the number of steps taken is recorded.
"""

import argparse
import json
import math
import platform
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrt.demo.model import WEIGHTS_FILE, Block, ByteModel, ModelConfig, load_model, save_weights
from graphrt.demo.sequence import sequence_mix

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"})
HELD_OUT_ONE_IN = 20
WARMUP_STEPS = 200
PEAK_RATE = 3e-3
WEIGHT_DECAY = 0.05
CLIP_NORM = 1.0
BITS = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Corpus:
    """All files as one string of bytes each for training and validation, separated by a zero byte."""

    train: Tensor  # [bytes] uint8
    held_out: Tensor  # [bytes] uint8
    train_files: int
    held_out_files: int

    @classmethod
    def read(cls, stdlib: Path) -> "Corpus":
        """Read every .py file below `stdlib`; raises ValueError if there are too few to hold some out."""
        kept: tuple[list[bytes], list[bytes]] = ([], [])
        for path in sorted(stdlib.rglob("*.py")):
            name = path.relative_to(stdlib)
            if LEFT_OUT.isdisjoint(name.parts):
                held_out = zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0
                kept[held_out].append(path.read_bytes() + b"\0")
        if not all(kept):
            raise ValueError(f"--stdlib: expected a directory with many .py files, got {stdlib}")
        train, held_out = (torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8) for files in kept)
        return cls(train, held_out, len(kept[0]), len(kept[1]))


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    corpus = Corpus.read(args.stdlib)
    print(f"{corpus.train_files} files, {corpus.train.numel()} bytes for training", flush=True)
    model = ByteModel()
    model.initialise(torch.Generator().manual_seed(args.seed))
    model.to(args.device)
    started = time.monotonic()
    steps, loss = train(model, corpus.train, args)
    seconds = time.monotonic() - started
    args.out.mkdir(parents=True, exist_ok=True)
    save_weights(model, args.out / WEIGHTS_FILE)
    report = describe(args, corpus, steps, seconds, loss)
    (args.out / "weights.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["loss"]), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then")
    parser.add_argument("--batch", type=int, default=128, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="bytes a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, default=Path("graphrt/demo"), help="where weights and record go")
    return parser.parse_args()


def train(model: ByteModel, data: Tensor, args: argparse.Namespace) -> tuple[int, float]:
    """Returns the steps taken and a running mean of the training loss, in nats per byte."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
        fused=args.device.startswith("cuda"),
    )
    started = time.monotonic()
    mean = torch.zeros((), device=args.device)
    weight = 0.0
    for step, tokens in enumerate(random_windows(data, args)):
        minutes = (time.monotonic() - started) / 60
        progress = max(step / args.steps, minutes / args.minutes)
        if progress >= 1:
            return step, mean.item() / weight
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, progress)
        loss = sequence_loss(model, tokens).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        mean, weight = mean.lerp(loss.detach(), 0.01), weight + 0.01 * (1 - weight)
        if step % 200 == 0:
            print(f"step {step}  {minutes:.2f} min  {mean.item() / weight * BITS:.4f} bits/byte", flush=True)
    raise RuntimeError("the windows ended before the training")


def random_windows(data: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """Batches [batch, length + 1] int64 at random offsets, without end."""
    data = data.to(args.device)
    span = torch.arange(args.length + 1, device=args.device)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    while True:
        first = torch.randint(data.numel() - args.length, (args.batch, 1), generator=generator, device=args.device)
        yield data[first + span].long()


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up, then a cosine to nothing."""
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))


def sequence_loss(model: ByteModel, tokens: Tensor) -> Tensor:
    """Cross-entropy [batch, length] in nats; products in BF16 on a GPU, the KDA itself in FP32."""
    device = tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" and torch.is_grad_enabled()):
        logits = model(tokens[:, :-1], full_precision_mix)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(tokens[:, 1:])


def full_precision_mix(layer: int, block: Block, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor) -> Tensor:
    """The mix outside of autocast: running products of decays do not bear BF16."""
    with torch.autocast(qkv.device.type, enabled=False):
        return sequence_mix(layer, block, qkv, raw_g, raw_beta)


@torch.no_grad()
def bits_per_byte(model: ByteModel, data: Tensor, args: argparse.Namespace) -> float:
    """Mean over consecutive windows, each from an empty state, of at most a million bytes."""
    usable = min(data.numel() - 1, 1 << 20) // args.length * args.length
    data = data.to(args.device).long()
    tokens = torch.cat((data[:usable].view(-1, args.length), data[args.length : usable + 1 : args.length, None]), 1)
    if args.device == "cpu":
        tokens = tokens[:16]
    return torch.cat([sequence_loss(model, t) for t in tokens.split(128)]).mean().item() * BITS


def describe(args: argparse.Namespace, corpus: Corpus, steps: int, seconds: float, loss: float) -> dict:
    """The record kept beside the weights; both losses are of the weights as saved, in FP32."""
    model = load_model(args.device, args.out / WEIGHTS_FILE)
    cuda = args.device.startswith("cuda")
    return {
        "text": "Weights of graphrt's demo: a byte-level KDA language model, trained on the Python standard "
        "library's source code by tools/train_demo.py.",
        "command": command(args),
        "model": asdict(ModelConfig()) | {"parameters": sum(p.numel() for p in model.parameters())},
        "data": {
            "standard library": library_name(args.stdlib),
            "left out": sorted(LEFT_OUT),
            "train files": corpus.train_files,
            "train bytes": corpus.train.numel(),
            "validation files": corpus.held_out_files,
            "validation bytes": corpus.held_out.numel(),
        },
        "training": {
            "steps": steps,
            "bytes per step": args.batch * args.length,
            "seconds": round(seconds, 1),
            "seed": args.seed,
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "torch": torch.__version__,
        },
        "loss": {
            "training loss, running mean, bits per byte": round(loss * BITS, 4),
            "train bits per byte": round(bits_per_byte(model, corpus.train, args), 4),
            "validation bits per byte": round(bits_per_byte(model, corpus.held_out, args), 4),
        },
    }


def command(args: argparse.Namespace) -> str:
    """What to type to train so again, on the running interpreter's library, into the package."""
    sizes = f"--steps {args.steps} --batch {args.batch} --length {args.length} --seed {args.seed}"
    limit = f" --minutes {args.minutes}" if math.isfinite(args.minutes) else ""
    return f"python tools/train_demo.py {sizes}{limit}"


def library_name(stdlib: Path) -> str:
    own = stdlib == Path(sysconfig.get_path("stdlib"))
    return f"CPython {platform.python_version()}" if own else stdlib.name


if __name__ == "__main__":
    main()
