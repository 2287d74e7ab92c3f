"""What racecheck makes of one lane that arrives at an mbarrier for its warp: the smallest kernel that does it.

Warp 0 stores 32 floats to shared memory, synchronises the warp, and arrives: one lane for all, or all 32 lanes. Warp 1
waits at the barrier and reads them, each lane that of another. The order is the same: a warp barrier orders the stores
of all lanes before what any lane does behind it, and the arrival releases all that came before it. `tools/racecheck.py`
runs both forms under racecheck: it reports hazards in the first and none in the second.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from graphrt.kernels.cute import ptx
from graphrt.kernels.cute.build import target


class HandOver:
    """The kernel; `lanes` of warp 0 arrive."""

    def __init__(self, lanes):
        self.lanes = lanes

    @cute.jit
    def __call__(self, out: Int64, stream):
        self.kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1], smem=256, stream=stream)

    @cute.kernel
    def kernel(self, out: Int64):
        thread, _, _ = cute.arch.thread_idx()
        lane = thread & 31
        shared = Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        barrier = shared + 128
        if thread == 0:
            ptx.mbar_init(barrier, self.lanes)
            ptx.mbar_init_fence()
        cute.arch.sync_threads()
        if thread < 32:
            ptx.store_shared(shared + 4 * lane, Float32(lane))
            cute.arch.sync_warp()
            if lane < self.lanes:
                ptx.mbar_arrive(barrier)
        else:
            ptx.mbar_wait(barrier, 0)
            ptx.store_global(out + Int64(4 * lane), ptx.load_shared(shared + 4 * (lane ^ 1)))


def run(lanes: int) -> None:
    """Compile and run one form, and check that every value arrived."""
    out = torch.full((32,), -1.0, device="cuda")
    options = f"--gpu-arch={target(out.device)}"
    kernel = cute.compile(HandOver(lanes), Int64(0), make_fake_stream(), options=options)
    kernel(Int64(out.data_ptr()), torch.cuda.current_stream().cuda_stream)
    assert out.tolist() == [lane ^ 1 for lane in range(32)]
