"""What bounds the FP32 kernels: one launch each of verify and fold under Nsight Compute's counters. On the GPU machine.

4 layers, 12 heads, Q = 8, n = 4 records pending; each launch alone and from a cold cache, so its time is not that of a
step, where the next verify's loads overlap the last one's end. Read the shares of peak, and what a warp waits for.

    ncu --clock-control=none --profile-from-start=off --kernel-name=regex:graphrt --metrics=$(python
        tools/count_kernels.py --metrics) python tools/count_kernels.py
"""

import argparse

METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "smsp__average_warp_latency_per_inst_issued.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "launch__registers_per_thread",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 16, 1])
    parser.add_argument(
        "--metrics", action="store_true", help="print the names of the counters, for ncu, and nothing else"
    )
    args = parser.parse_args()
    if args.metrics:
        print(",".join(METRICS))
        return
    import torch
    from step_model import Model

    for batch in args.batch:
        model = Model(layers=4, heads=12, q=8, batch=batch, n=4)
        layers, model.layers = model.layers, model.layers[:1]
        launches = {
            "deferred verify": lambda model=model: model.verifies(True),
            "deferred verify, convolution inside": lambda model=model: model.verifies(True, "inside"),
            f"fold of {len(layers)} layers": model.fold,
        }
        for name, launch in launches.items():
            launch()
            torch.cuda.synchronize()
            print(f"{batch} requests, {name}:", flush=True)
            torch.cuda.profiler.start()
            launch()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
