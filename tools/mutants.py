"""Faults put into the product on purpose, and the tests that must fail: what `tools/mutate.py` runs.

Each is a piece of text of one file, what stands there instead, and the tests that have to find it. The text must occur
exactly once, so that a mutant which the code has outgrown is noticed.
"""

from dataclasses import dataclass

TORCH, TRITON = "not triton", "triton"


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    select: str = TORCH
    """For `pytest -k`."""


VERIFY = ("tests/test_verify.py", "tests/test_traces.py")
DUMMY = ("tests/test_dummy_rows.py", "tests/test_clamping.py")
FOLD = ("tests/test_commit.py", "tests/test_flush_drain.py", "tests/test_align.py")
STATE = ("tests/test_state_machine.py",)
STAGE = ("tests/capture/test_inputs.py", "tests/kernels/test_stage.py")
STEP = ("tests/capture/test_decode_step.py",)
RUNNER = ("tests/capture/test_runner.py",)
CUTE_ORDER = ("tests/kernels/cute/test_order.py",)
CUTE_VARIANTS = ("tests/kernels/cute/test_fp32_variants.py",)
CUTE_HOST = ("tests/kernels/cute/test_cute_compile.py", "tests/test_build_faults.py")

REFERENCE, PLAN = "kernels/reference.py", "kernels/reference_plan.py"
CUTE = "kernels/cute/"

MUTANTS = (
    # The specification in torch.
    Mutant(
        "the replay reads the records of the next row",
        REFERENCE,
        "fold_records(S, correction[entry],",
        "fold_records(S, correction[(entry + 1) % len(correction)],",
        VERIFY,
    ),
    Mutant(
        "a dummy row writes the checkpoint", REFERENCE, "    replayed = n > 0\n", "    replayed = slot > 0\n", DUMMY
    ),
    Mutant(
        "records go one row too far",
        REFERENCE,
        "torch.where(slot > 0, row + 1, 0) if scratch",
        "torch.where(slot > 0, row + 2, 0) if scratch",
        VERIFY,
    ),
    Mutant(
        "fold one record too few",
        REFERENCE,
        "        active = (t >= begin) & (t < end)\n",
        "        active = (t >= begin) & (t < end - 1)\n",
        FOLD,
    ),
    Mutant(
        "pending is not clamped", REFERENCE, "    return n.clamp(0, rows.spec_query_len)\n", "    return n\n", DUMMY
    ),
    Mutant(
        "a slot past the pool is not null",
        REFERENCE,
        "torch.where((slot > 0) & (slot < num_slots), slot, 0)",
        "torch.where(slot > 0, slot.clamp(max=num_slots - 1), 0)",
        DUMMY,
    ),
    Mutant(
        "a row out of range is row 0",
        REFERENCE,
        "    return slot, torch.where(stray, -1, row)\n",
        "    return slot, torch.where(stray, 0, row)\n",
        DUMMY,
    ),
    Mutant(
        "the history starts one column late",
        REFERENCE,
        "    start = n if keeps_history else (n - 1).clamp(min=0)\n",
        "    start = n + 1 if keeps_history else n\n",
        ("tests/test_conv.py", "tests/test_traces.py"),
    ),
    Mutant(
        "the shift of the engine's layout is left out",
        REFERENCE,
        "    shift = torch.zeros_like(length) if keeps_history else (length > 0).long()\n",
        "    shift = torch.zeros_like(length)\n",
        ("tests/test_conv.py", "tests/test_traces.py"),
    ),
    Mutant(
        "a dummy row writes the convolution state",
        REFERENCE,
        "    writes = (slot > 0) & (row >= 0) if rows.record_rows is not None else slot > 0\n",
        "    writes = slot > 0\n",
        DUMMY,
    ),
    Mutant(
        "outputs of no row are left as they were",
        REFERENCE,
        "    out.copy_(torch.where(covered, values[row, t], 0))\n",
        "    out.copy_(torch.where(covered, values[row, t], out))\n",
        VERIFY,
    ),
    Mutant(
        "a 16-bit pool does not round",
        REFERENCE,
        "    S = S.to(checkpoint.dtype)  #",
        "    S = S  #",
        ("tests/test_numerics.py", "tests/test_bit_equality.py"),
    ),
    Mutant(
        "rejected drafts enter the fold",
        REFERENCE,
        "        record = torch.where(active[:, None, None], key_gate[:, :, t], 0).to(S.dtype)\n",
        "        record = key_gate[:, :, t].to(S.dtype)\n        active = active | (end > 0)\n",
        FOLD,
    ),
    # The Triton kernels, in the interpreter.
    Mutant(
        "Triton: keys and gates are overwritten before the replay",
        "kernels/verify.py",
        "    block = block_v(value_dim)\n    graphrt_verify_kernel",
        "    block = block_v(value_dim)\n    graphrt_verify_key_gate_kernel[(batch, num_heads)](\n"
        "        k, raw_g, records.key_gate, rows.query_start_loc, rows.state_indices, record_rows, errors, **sizes,\n"
        "        k_stride=k.stride(1), g_stride=raw_g.stride(1),\n"
        "        key_gate_stride=records.key_gate.stride(0), **static,\n"
        "        num_warps=4, **NO_CONTRACTION,\n    )\n    graphrt_verify_kernel",
        VERIFY,
        TRITON,
    ),
    Mutant(
        "Triton: the address pending[-1] is formed",
        "kernels/verify.py",
        "    if (has_pending != 0) & (row >= 0):\n",
        "    if has_pending != 0:\n",
        DUMMY,
        TRITON,
    ),
    Mutant(
        "Triton: a dummy row writes the convolution state",
        "kernels/conv.py",
        "    if (has_rows != 0) & (row < 0):\n        return\n    tl.debug_barrier()\n",
        "    tl.debug_barrier()\n",
        DUMMY,
        TRITON,
    ),
    Mutant(
        "Triton: compaction is off by one",
        "kernels/conv.py",
        "    if KEEPS_HISTORY:\n        return n\n",
        "    if KEEPS_HISTORY:\n        return tl.maximum(n - 1, 0)\n",
        ("tests/test_commit.py", "tests/test_conv.py"),
        TRITON,
    ),
    Mutant(
        "Triton: the boundary is stored over the final block",
        "kernels/fold.py",
        "            tl.store(p_S + boundary * stride_S, b_S.to(p_S.dtype.element_ty))\n",
        "            tl.store(p_S + final * stride_S, b_S.to(p_S.dtype.element_ty))\n",
        ("tests/test_align.py",),
        TRITON,
    ),
    Mutant(
        "Triton: the fold starts anew after the boundary",
        "kernels/fold.py",
        "    b_S = fold_records(b_S, p_kg, p_u, done, n,",
        "    b_S = fold_records(b_S, p_kg, p_u, 0, n,",
        ("tests/test_align.py",),
        TRITON,
    ),
    Mutant(
        "Triton: tokens behind Q keep what the buffer held",
        "kernels/verify.py",
        "    clear_tokens(out_ptr, begin + length, end, out_stride, o_hv, mask_v, 16)\n    n = pending_of",
        "    n = pending_of",
        ("tests/test_clamping.py",),
        TRITON,
    ),
    Mutant(
        "Triton: accepted is not cut to the window",
        "kernels/plan.py",
        "    a = tl.minimum(tl.maximum(accepted, 0), length.to(tl.int32))\n",
        "    a = tl.minimum(tl.maximum(accepted, 0), Q)\n",
        ("tests/test_clamping.py",),
        TRITON,
    ),
    Mutant(
        "Triton: a null row of a live record row loses its count",
        "kernels/plan.py",
        "    live = live & has_row\n",
        "    live = mask & has_row\n",
        ("tests/test_commit.py", "tests/test_traces.py"),
        TRITON,
    ),
    # Plans.
    Mutant(
        "a boundary at the end of the window is missed",
        PLAN,
        "        reaches = folds & (to_boundary <= a)\n",
        "        reaches = folds & (to_boundary < a)\n",
        ("tests/test_state.py", "tests/test_align_service.py"),
    ),
    Mutant(
        "an exact landing goes to the next column",
        PLAN,
        "column = (computed + a - 1) // size",
        "column = (computed + a) // size",
        ("tests/test_align.py",),
    ),
    Mutant(
        "an eager row with a null destination loses its count",
        PLAN,
        "    if c.pending is not None:\n        _set_pending(c.pending, row, live, torch.where(folds, 0, a))\n",
        "    if c.pending is not None:\n        _set_pending(c.pending, row, live, torch.where(folds | must, 0, a))\n",
        ("tests/test_align.py", "tests/test_clamping.py"),
    ),
    Mutant(
        "an accepted count is not cut to the window",
        PLAN,
        "    a = torch.minimum(accepted.clamp(min=0), length)\n",
        "    a = accepted.clamp(0, window)\n",
        ("tests/test_clamping.py",),
    ),
    # Staging, recorded steps, ledger, files.
    Mutant(
        "staging leaves the tail of a larger batch",
        "kernels/reference_stage.py",
        "        padded[:num_reqs] = source[:num_reqs]\n",
        "        padded[: len(source)] = source[: len(padded)]\n",
        STAGE + RUNNER,
    ),
    Mutant(
        "a late row is not noticed",
        "kernels/reference_stage.py",
        "    slot, row = torch.where(stale, 0, slot), torch.where(stale, -1, row)\n",
        "",
        ("tests/test_generation.py", "tests/test_state_machine.py"),
    ),
    Mutant(
        "staging does not zero what it moved",
        "kernels/reference_stage.py",
        "    begin.pending.masked_fill_(moved, 0)\n",
        "",
        STEP,
    ),
    Mutant(
        "a finished row goes on",
        "kernels/reference_stage.py",
        "    keep = live if a.finished is None else live & (a.finished == 0)\n",
        "    keep = live\n",
        STEP + STATE,
    ),
    Mutant(
        "requests are taken for rows",
        "kernels/reference_stage.py",
        "    request = o_b if s.request_indices is None else _padded(s.request_indices, s.num_reqs, o_b, 0).long()\n",
        "    request = o_b\n",
        RUNNER,
    ),
    Mutant(
        "capture stages no dummy rows",
        "capture/runner.py",
        "lambda n: dummy_inputs(self.inputs, n, dcp=dcp)",
        "lambda n: None",
        RUNNER,
    ),
    Mutant(
        "capture does not put the staged step back",
        "capture/inputs.py",
        "            self._block.copy_(saved)\n",
        "            pass\n",
        RUNNER,
    ),
    Mutant(
        "an admitted row keeps what was pending",
        "graphrt/slots.py",
        "        self.pending[row].zero_()\n        self.generation",
        "        self.generation",
        ("tests/test_slots.py", "tests/test_lifecycle.py"),
    ),
    Mutant(
        "a reused row keeps its generation",
        "graphrt/slots.py",
        "        self._generations[row] = _after(self._generations[row])\n",
        "",
        ("tests/test_slots.py", "tests/test_generation.py"),
    ),
    Mutant(
        "drain leaves pending",
        "graphrt/context.py",
        'self._fold_pending("graphrt.drain", state_indices, record_rows, pending, owners, zero=True)',
        'self._fold_pending("graphrt.drain", state_indices, record_rows, pending, owners, zero=False)',
        ("tests/test_flush_drain.py",),
    ),
    Mutant(
        "a deferred commit folds as well",
        "graphrt/context.py",
        "        if commit.pending is not None and commit.eager is None and not commit.align:\n            return\n",
        "",
        ("tests/test_commit.py", "tests/capture/test_topology.py"),
    ),
    Mutant(
        "a copy is made before the drain",
        "graphrt/state.py",
        '        self._drain_one("source", source, row, pending)\n',
        "",
        ("tests/test_state.py", "tests/test_state_machine.py"),
    ),
    Mutant(
        "a file leaves the records out",
        "graphrt/persist.py",
        '        ("correction", stack.corrections, False),\n',
        "",
        ("tests/test_persist.py", "tests/test_state_machine.py"),
    ),
    Mutant(
        "expanded checkpoints are taken",
        "graphrt/verify.py",
        '    check_not_expanded("checkpoint_state", checkpoint)\n',
        "",
        ("tests/test_fuzz.py",),
    ),
    Mutant(
        "a sparse tensor is taken",
        "graphrt/checks.py",
        '    if t.layout is not torch.strided:\n        fail(name, "a dense tensor", t.layout)\n',
        "",
        ("tests/test_fuzz.py", "tests/test_errors.py"),
    ),
    # Recordings.
    Mutant(
        "the smallest recording is taken whether it fits or not",
        "capture/sizes.py",
        "next((r for size, r in by_size if size >= m), None)",
        "next((r for size, r in by_size), None)",
        RUNNER + STATE,
    ),
    Mutant(
        "an idle step does not put the staged one back",
        "capture/step.py",
        "        with self.inputs.kept(), _random_state_kept(self.inputs.device):\n            dummy_inputs(",
        "        with _random_state_kept(self.inputs.device):\n            dummy_inputs(",
        STEP,
    ),
    Mutant(
        "a step object flushes twice",
        "graphrt/context.py",
        "        self.flushed = True\n",
        "",
        ("tests/test_flush_drain.py", "tests/test_traces.py"),
    ),
    Mutant(
        "a recording drains rows that the mask leaves out",
        "capture/step.py",
        "torch.where(flushed, rows.record_rows, nobody, out=drained)",
        "torch.where(flushed | True, rows.record_rows, nobody, out=drained)",
        STEP,
    ),
    Mutant(
        "a clamped count is not counted",
        "kernels/reference_plan.py",
        "    add_errors(errors, ErrorKind.ACCEPTED, live & (a != accepted))\n",
        "",
        ("tests/test_clamping.py", *STATE),
    ),
    Mutant(
        "a copy leaves what its target had pending",
        "graphrt/state.py",
        "        self._forget_pending(target_row, pending)\n",
        "",
        ("tests/test_state.py",),
    ),
    Mutant(
        "a file is taken whatever weights it was made with",
        "graphrt/persist.py",
        "    if theirs_of_weights != fingerprint:\n",
        "    if False:\n",
        ("tests/test_persist.py",),
    ),
    Mutant(
        "checked mode forgets open steps",
        "graphrt/checked.py",
        "    layer.rows.update(live)\n",
        "",
        ("tests/test_checked.py",),
    ),
    # The FP32 kernels, as far as they show without a GPU: their host side, and the code they compile to.
    Mutant(
        "a verify reads early what the one before writes",
        CUTE + "order.py",
        "_meet(self.early, before.written) or ",
        "",
        CUTE_ORDER,
    ),
    Mutant(
        "a verify writes early what the one before reads",
        CUTE + "order.py",
        " or _meet(self.early[:1], before.early + before.late)",
        "",
        CUTE_ORDER,
    ),
    Mutant(
        "pieces of two pools in turn are taken as apart",
        CUTE + "order.py",
        "not (self.size <= ahead and ahead + other.size <= self.stride)",
        "not self.size <= ahead",
        CUTE_ORDER,
    ),
    Mutant(
        "a span leaves out the scratch row",
        CUTE + "order.py",
        "t.data_ptr() - before * stride, stride",
        "t.data_ptr(), stride",
        CUTE_ORDER,
    ),
    Mutant(
        "a verify reads early whatever stands before it",
        CUTE + "order.py",
        "position(stream) == last[0] and ",
        "",
        CUTE_ORDER,
    ),
    Mutant(
        "a launch outside a capture counts as the last one inside",
        CUTE + "order.py",
        "_last = None if here is None else (here, touched)",
        "_last = _last if here is None else (here, touched)",
        CUTE_ORDER,
    ),
    Mutant(
        "a verify behind a join is launched programmatically",
        CUTE + "deferred.py",
        "programmatic = order.has_one_predecessor(stream)",
        "programmatic = True",
        CUTE_ORDER,
    ),
    Mutant(
        "the order of launches does not know the convolution",
        CUTE + "deferred.py",
        "        written = (*written, conv_state)\n",
        "",
        CUTE_ORDER,
    ),
    Mutant(
        "the order of launches does not know the scratch row",
        CUTE + "deferred.py",
        "order.Span.of(t, 0, int(i > 0))",
        "order.Span.of(t, 0)",
        CUTE_ORDER,
    ),
    Mutant(
        "a verify that is not early waits for nothing",
        CUTE + "verify.py",
        "            # Nothing of global memory has been read so far.\n            cute.arch.griddepcontrol_wait()\n",
        "            pass\n",
        CUTE_ORDER,
    ),
    Mutant(
        "a verify lets the next one start before its own wait",
        CUTE + "verify.py",
        "            elif warp == 14:\n                cute.arch.griddepcontrol_wait()\n",
        "            elif warp == 14:\n",
        CUTE_ORDER,
    ),
    Mutant(
        "folds without record rows are not made in create",
        CUTE + "deferred.py",
        "product((False, True), repeat=2)",
        "product((False, True), (True,))",
        CUTE_VARIANTS,
    ),
    Mutant(
        "verifies of two blocks a head are not made in create",
        CUTE + "deferred.py",
        "    for split in (1, 2):\n",
        "    for split in (1,):\n",
        CUTE_VARIANTS,
    ),
    Mutant(
        "a convolution's layout makes variants of verifies without one",
        CUTE + "deferred.py",
        "bool(conv_width and keeps_history)",
        "keeps_history",
        CUTE_VARIANTS,
    ),
    Mutant(
        "a verify takes tokens off 16 bytes",
        CUTE + "deferred.py",
        "if t.data_ptr() % 16 or stride % 8:",
        "if t.data_ptr() % 16:",
        CUTE_HOST,
        "not spills",
    ),
    Mutant(
        "a convolution of any width is fused",
        CUTE + "deferred.py",
        "    if width > MAX_WIDTH:\n",
        "    if False:\n",
        CUTE_HOST,
        "not spills",
    ),
    Mutant(
        "a gate that leaves the range of FP32 is taken",
        CUTE + "commit.py",
        "if not -MAX_WINDOW_DECAY <= MAX_Q * lower_bound < 0:",
        "if not MAX_Q * lower_bound < 0:",
        CUTE_HOST,
        "not spills",
    ),
    Mutant("the fold runs below Hopper", CUTE + "commit.py", "capability < (9, 0)", "capability < (8, 0)", CUTE_ORDER),
    Mutant(
        "a launch packs its arguments in another order",
        CUTE + "commit.py",
        'q2q5qf4x"',
        'q2q5q4xf"',
        CUTE_HOST,
        "not spills",
    ),
    Mutant(
        "kernels are compiled for another device's architecture",
        CUTE + "build.py",
        "torch.cuda.get_device_capability(device)",
        "torch.cuda.get_device_capability(torch.device('cuda:0'))",
        CUTE_HOST,
        "not spills",
    ),
)
