"""Thousands of replays of random steps against the float64 oracle: does the recorded step ever leave it?

One `DecodeStep` is recorded for two sizes and replayed in chains of one to six steps without host work between them.
The host decides everything at random beforehand: who is in the step and where, who is absent, windows of 0 to Q tokens,
accepted counts, eager rows, rows that finish inside a chain, padding, null slots with tokens and dummy rows that look
live; between chains requests are admitted, drained, released or forgotten, and idle ranks' dummy steps run. What the
recording wrote is kept in a log on the device. About every 100 steps the oracle (`graphrt.testing`'s, batched, on the
same device) does the same steps in float64 and compares: every output token, checkpoints and histories of all that
live, of drained requests and of finished blocks, pending counts, and that memory which belongs to nobody is untouched.

The traffic is in `replay_traffic.py`, the recorded step in `replay_step.py`, the comparison in `replay_truths.py`.

    python tools/long_replay.py [--steps 10000] [--backend fp32_deferred] [--block-size 16] [--flush] [--json PATH]
"""

import argparse
import json
from dataclasses import asdict

import torch
from arguments import device_option, output_file
from replay_traffic import LongReplay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", type=device_option, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block-size", type=int, help="align mode with blocks of so many tokens")
    parser.add_argument("--flush", action="store_true", help="drain a random half of the rows inside the step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, metavar="PATH")
    args = parser.parse_args()
    replay = LongReplay(
        args.device, args.backend, batch=args.batch, block_size=args.block_size, flush=args.flush, seed=args.seed
    )
    report = asdict(replay.run(args.steps))
    replay.close()
    print("\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in report.items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
