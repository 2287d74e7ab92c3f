"""The few machine instructions the FP32 kernels are written in, one small function each.

Addresses are plain integers: Int32 in shared memory, Int64 in global memory. A kernel whose thread mapping is laid out
by hand reads best so, and an added constant lands in the instruction's immediate field.

Two rules of this file:
- Whatever orders memory (mbarrier, bulk copy, fence) is volatile with a memory clobber, so nothing crosses it.
- Products and sums keep IEEE rounding and are never contracted behind our back; where a fused multiply-add is meant,
  `fma` says so. Fold and verify must round alike (bit-equal checkpoints).
"""

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector
from cutlass._mlir.dialects import math as math_dialect
from cutlass.cutlass_dsl import T, dsl_user_op

LOG2_E = 1.4426950408889634
_SMEM, _GMEM = 3, 1


def _asm(result, operands, text, constraints, loc, ip):
    """Volatile inline PTX."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _pointer(address, space, loc, ip):
    return llvm.inttoptr(llvm.PointerType.get(space), address.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)


def _load(address, space, dtype, count, volatile, loc, ip):
    """`count` neighbouring values in one access, naturally aligned."""
    pointer = _pointer(address, space, loc, ip)
    element = dtype.mlir_type
    if count == 1:
        return dtype(llvm.load(element, pointer, alignment=dtype.width // 8, volatile_=volatile, loc=loc, ip=ip))
    vector_type, alignment = ir.VectorType.get([count], element), count * dtype.width // 8
    packed = llvm.load(vector_type, pointer, alignment=alignment, volatile_=volatile, loc=loc, ip=ip)
    return [dtype(vector.extract(packed, [], [i], loc=loc, ip=ip)) for i in range(count)]


def _store(address, space, values, loc, ip):
    pointer = _pointer(address, space, loc, ip)
    width = type(values[0]).width // 8
    raw = [value.ir_value(loc=loc, ip=ip) for value in values]
    if len(raw) == 1:
        llvm.store(raw[0], pointer, alignment=width, loc=loc, ip=ip)
        return
    packed = vector.from_elements(ir.VectorType.get([len(raw)], raw[0].type), raw, loc=loc, ip=ip)
    llvm.store(packed, pointer, alignment=width * len(raw), loc=loc, ip=ip)


@dsl_user_op
def load_shared(address, dtype=Float32, count=1, *, loc=None, ip=None):
    """One value, or a list of `count` values."""
    return _load(Int32(address), _SMEM, dtype, count, False, loc, ip)


@dsl_user_op
def store_shared(address, *values, loc=None, ip=None):
    _store(Int32(address), _SMEM, values, loc, ip)


@dsl_user_op
def load_global(address, dtype=Float32, count=1, *, loc=None, ip=None):
    """One value, or a list of `count` values."""
    return _load(Int64(address), _GMEM, dtype, count, False, loc, ip)


@dsl_user_op
def load_fresh(address, dtype=Float32, count=1, *, loc=None, ip=None):
    """As `load_global`, past L1 (`ld.volatile`, a relaxed load): nothing is seen that L1 kept from launches before."""
    return _load(Int64(address), _GMEM, dtype, count, True, loc, ip)


@dsl_user_op
def store_global(address, *values, loc=None, ip=None):
    _store(Int64(address), _GMEM, values, loc, ip)


@dsl_user_op
def fetch_add_global(address, value, *, loc=None, ip=None):
    """Atomic add to an int32 among the threads of the device, also in host memory; what was there before."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(value).ir_value(loc=loc, ip=ip)]
    text = "atom.relaxed.gpu.global.add.s32 $0, [$1], $2;"
    return Int32(_asm(T.i32(), operands, text, "=r,l,r,~{memory}", loc, ip))


@dsl_user_op
def take_ticket(address, last, *, loc=None, ip=None):
    """What a counter says; it goes on by one, and from `last` back to 0."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(last).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r,~{memory}", loc, ip))


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    """a * b + c with one rounding."""
    return Float32(math_dialect.fma(*(Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)), loc=loc, ip=ip))


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    """2^x by the special function unit, at most 2 ulp off; results below 2^-126 are 0."""
    raw = Float32(x).ir_value(loc=loc, ip=ip)
    return Float32(_asm(T.f32(), [raw], "ex2.approx.ftz.f32 $0, $1;", "=f,f", loc, ip))


@dsl_user_op
def reciprocal(x, *, loc=None, ip=None):
    """1 / x, at most 1 ulp off; 1 / infinity is 0."""
    raw = Float32(x).ir_value(loc=loc, ip=ip)
    return Float32(_asm(T.f32(), [raw], "rcp.approx.ftz.f32 $0, $1;", "=f,f", loc, ip))


@dsl_user_op
def divide(x, y, *, loc=None, ip=None):
    """x / y, at most 2 ulp off: what Triton's division is."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (x, y)]
    return Float32(_asm(T.f32(), operands, "div.full.f32 $0, $1, $2;", "=f,f,f", loc, ip))


@dsl_user_op
def rsqrt(x, *, loc=None, ip=None):
    """1 / sqrt(x), at most 2 ulp off."""
    raw = Float32(x).ir_value(loc=loc, ip=ip)
    return Float32(_asm(T.f32(), [raw], "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", loc, ip))


def exp(x):
    return exp2(x * Float32(LOG2_E))


def sigmoid(x):
    """1 / (1 + e^-x); right at both ends: e^-x overflows to infinity and the quotient to 0."""
    return reciprocal(Float32(1.0) + exp2(x * Float32(-LOG2_E)))


@dsl_user_op
def select(condition, a, b, *, loc=None, ip=None):
    """a where the condition holds, else b. Unlike a product with 0 or 1 it stops a NaN of the other side."""
    c = cutlass.Boolean(condition).ir_value(loc=loc, ip=ip)
    kind = type(a)
    return kind(arith.select(c, a.ir_value(loc=loc, ip=ip), kind(b).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def pack(low, high, *, loc=None, ip=None):
    """Two 16-bit values in one word."""
    bits = [llvm.bitcast(T.i16(), x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip) for x in (low, high)]
    return Int32(_asm(T.i32(), bits, "mov.b32 $0, {$1, $2};", "=r,h,h", loc, ip))


@dsl_user_op
def split_tf32(x, *, loc=None, ip=None):
    """x = hi + lo exactly, hi a TF32 number, both as bit patterns.

    The mask truncates: `cvt.rna.tf32` rounds better but runs at a quarter of the rate, and hi + lo loses nothing.
    """
    raw = Float32(x).ir_value(loc=loc, ip=ip)
    mask = arith.constant(T.i32(), ir.IntegerAttr.get(T.i32(), -8192), loc=loc, ip=ip)
    bits = arith.andi(llvm.bitcast(T.i32(), raw, loc=loc, ip=ip), mask, loc=loc, ip=ip)
    low = arith.subf(raw, llvm.bitcast(T.f32(), bits, loc=loc, ip=ip), loc=loc, ip=ip)
    return Int32(bits), Int32(llvm.bitcast(T.i32(), low, loc=loc, ip=ip))


@dsl_user_op
def mma_tf32(d, a, b, *, loc=None, ip=None):
    """d + a b with `mma.m16n8k8`: d 4 floats, a 4 and b 2 TF32 bit patterns. Returns the new d."""
    f32 = T.f32()
    out = _asm(
        llvm.StructType.get_literal([f32] * 4),
        [x.ir_value(loc=loc, ip=ip) for x in (*a, *b, *d)],
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$0,$1,$2,$3};",
        "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3",
        loc,
        ip,
    )
    return [Float32(llvm.extractvalue(f32, out, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def mbar_init(address, count, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Int32(count).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_init_fence(*, loc=None, ip=None):
    """Makes fresh barriers visible to the copy engine."""
    _asm(None, [], "fence.mbarrier_init.release.cluster;", "~{memory}", loc, ip)


@dsl_user_op
def mbar_arrive(address, *, loc=None, ip=None):
    operands = [Int32(address).ir_value(loc=loc, ip=ip)]
    text = "{\n.reg .b64 t;\nmbarrier.arrive.shared::cta.b64 t, [$0];\n}"
    _asm(None, operands, text, "r,~{memory}", loc, ip)


@dsl_user_op
def mbar_expect(address, size, *, loc=None, ip=None):
    """Arrive, and hold the phase open until `size` bytes have landed."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    text = "{\n.reg .b64 t;\nmbarrier.arrive.expect_tx.shared::cta.b64 t, [$0], $1;\n}"
    _asm(None, operands, text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_wait(address, parity, *, loc=None, ip=None):
    """Block until the phase of this parity has completed."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Int32(parity).ir_value(loc=loc, ip=ip)]
    text = (
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
        "@p bra DONE;\nbra AGAIN;\nDONE:\n}"
    )
    _asm(None, operands, text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_arrive_peer(address, rank, *, loc=None, ip=None):
    """Arrive at the barrier of the same address in block `rank` of the cluster."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Int32(rank).ir_value(loc=loc, ip=ip)]
    text = (
        "{\n.reg .b32 peer;\nmapa.shared::cluster.u32 peer, $0, $1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [peer];\n}"
    )
    _asm(None, operands, text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def mbar_wait_peer(address, parity, *, loc=None, ip=None):
    """As `mbar_wait`, for a barrier at which another block of the cluster arrives."""
    operands = [Int32(address).ir_value(loc=loc, ip=ip), Int32(parity).ir_value(loc=loc, ip=ip)]
    text = (
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], $1;\n"
        "@p bra DONE;\nbra AGAIN;\nDONE:\n}"
    )
    _asm(None, operands, text, "r,r,~{memory}", loc, ip)


@dsl_user_op
def copy_async(shared, source, *, loc=None, ip=None):
    """Start this thread's copy of 16 bytes, both ends 16-byte aligned, into shared memory, past L1."""
    operands = [Int32(shared).ir_value(loc=loc, ip=ip), Int64(source).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", loc, ip)


@dsl_user_op
def copies_arrive(barrier, *, loc=None, ip=None):
    """Arrive when this thread's copies so far have landed, at once if it has none."""
    operands = [Int32(barrier).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r,~{memory}", loc, ip)


@dsl_user_op
def bulk_load(shared, source, size, barrier, *, loc=None, ip=None):
    """Start a copy of `size` bytes (a multiple of 16, both ends 16-byte aligned) into shared memory."""
    operands = [
        Int32(shared).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
        Int32(barrier).ir_value(loc=loc, ip=ip),
    ]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(None, operands, text, "r,l,r,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_prefetch(source, size, *, loc=None, ip=None):
    """Start a copy of `size` bytes (a multiple of 16, on 16 bytes) into L2; nobody hears of its end."""
    operands = [Int64(source).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    _asm(None, operands, "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_store(target, shared, size, *, loc=None, ip=None):
    """Add a copy of `size` bytes out of shared memory to this thread's open group."""
    operands = [
        Int64(target).ir_value(loc=loc, ip=ip),
        Int32(shared).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
    ]
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(None, operands, text, "l,r,r,~{memory}", loc, ip)


@dsl_user_op
def bulk_commit(*, loc=None, ip=None):
    """Close this thread's group of bulk stores."""
    _asm(None, [], "cp.async.bulk.commit_group;", "~{memory}", loc, ip)


@dsl_user_op
def bulk_wait_read(*, loc=None, ip=None):
    """Until this thread's bulk stores have read shared memory, so that it can be filled again."""
    _asm(None, [], "cp.async.bulk.wait_group.read 0;", "~{memory}", loc, ip)


@dsl_user_op
def bulk_wait(*, loc=None, ip=None):
    """Until this thread's bulk stores are complete and visible."""
    _asm(None, [], "cp.async.bulk.wait_group 0;", "~{memory}", loc, ip)


@dsl_user_op
def fence_async_shared(*, loc=None, ip=None):
    """Orders this thread's ordinary shared stores before the copy engine's reads."""
    _asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}", loc, ip)
