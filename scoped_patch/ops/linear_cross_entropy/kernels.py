# mypy: ignore-errors
# (A kernel's arguments are pointers and scalars of another language: annotations would say nothing.)
"""Triton kernels of the fused head's forward.

Scores are kept in units of log 2 inside, because exp2 is the hardware's own exponential. A score is
z = row_scale * f(product + bias): without a softcap f is the identity and row_scale holds logit_scale / temperature; with
one, f(u) = tanh(pre * u), pre holds logit_scale / softcap and row_scale softcap / temperature. row_scale includes log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Read when the functions below are decorated: whether they run in triton's interpreter, on the CPU.
INTERPRETED = bool(triton.knobs.runtime.interpret)

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# In place of -inf, so that no inf - inf and no 0 * inf comes up; its exp2 is 0.
LOWEST = tl.constexpr(-1e30)
# Kept scores are float16 and relative to their tile's maximum: exact where it matters, and this far below it p is 0.
KEPT_LOWEST = tl.constexpr(-60000.0)


@triton.jit
def place_tile(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Walk the tiles in groups of GROUP rows, so that neighbours in time share rows and columns in the cache."""
    per_group = GROUP * column_tiles
    first = (tile // per_group) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = tile % per_group
    return first + within % size, within // size


@triton.jit
def _tanh(x):
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activate(product, scale, pre, bias, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """(scores, tanh or scores): `scale` broadcasts over columns, `bias` over rows."""
    u = product
    if HAS_BIAS:
        u += bias
    if SOFTCAP:
        u = _tanh(u * pre)
    z = u * scale
    # Written so that a NaN stays one.
    return tl.where(z < LOWEST, LOWEST, z), u


@triton.jit
def places(keep, r, found, n):
    """Where rows `r` out of `n` go that are numbered in order: those to keep (1, else 0) to the front, the others to the end.
    `found` are to be kept before them.
    """
    upto = found + tl.cumsum(keep, 0)
    return tl.where(keep != 0, upto - 1, n - 1 - (r - upto))


@triton.jit
def find_rows(
    LABELS, TEMPERATURE, PLACES, STATS, HIDDEN, GATHERED,
    n, per_program, ignore_index, vocab_start, numerator, temperature_stride, size, hidden_stride, column_stride,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, COLUMNS: tl.constexpr, PER_ROW: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Number the rows whose label is not ignored, in order, from the front, and the others from the end: in PLACES the row
    at each place [n], its label among this process's vocabulary rows [n], and how many count; (PER_ROW) its scale in STATS;
    (GATHER) its hidden state in GATHERED. Each program looks at all labels ahead of its own rows, AHEAD at a time.
    """
    first = tl.program_id(0) * per_program
    found = 0
    for start in range(0, first, AHEAD):
        r = start + tl.arange(0, AHEAD)
        y = tl.load(LABELS + r, mask=r < first, other=0)
        found += tl.sum(((r < first) & (y != ignore_index)).to(tl.int32), 0)
    for start in range(first, tl.minimum(first + per_program, n), BLOCK):
        r = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = r < n
        y = tl.load(LABELS + r, mask=inside, other=0)
        keep = (inside & (y != ignore_index)).to(tl.int32)
        to = places(keep, r, found, n)
        tl.store(PLACES + to, r, mask=inside)
        tl.store(PLACES + n + to, y - vocab_start, mask=inside)
        if PER_ROW:
            t = tl.load(TEMPERATURE + r * temperature_stride, mask=inside, other=1.0)
            tl.store(STATS + n + to, (numerator / t).to(tl.float32), mask=inside)
        if GATHER:
            for low in range(0, size, COLUMNS):
                c = (low + tl.arange(0, COLUMNS)).to(tl.int64)
                there = inside[:, None] & (c < size)[None, :]
                x = tl.load(HIDDEN + r[:, None] * hidden_stride + c[None, :] * column_stride, mask=there, other=0.0)
                tl.store(GATHERED + to[:, None] * size + c[None, :], x, mask=there)
        found += tl.sum(keep, 0)
    if first + per_program >= n:
        tl.store(PLACES + 2 * n, found.to(tl.int64))


@triton.jit
def _parts(STATS, TOPS, n, plane, ENTROPY: tl.constexpr, SUM_SQ: tl.constexpr, APART: tl.constexpr):
    """Where the statistics of the parts of rows are, [parts, stride] each: (sums, centred, squares, maxima).

    STATS starts with the labels' logits [n] and the rows' scales [n]; the rest follows, `plane` elements each and as far as
    asked for. The maxima may be APART.
    """
    total = STATS + 2 * n
    centred = total + plane if ENTROPY else total
    squares = centred + plane if SUM_SQ else centred
    top = TOPS if APART else squares + plane
    return total, centred, squares, top


@triton.jit
def forward_tiles(
    HIDDEN, WEIGHT, KEPT, PLACES, BIAS, STATS, TOPS,
    row0, rows, n, plane, partial_stride, vocab, size, pre, one_scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PER_ROW: tl.constexpr, ENTROPY: tl.constexpr, SUM_SQ: tl.constexpr,
    KEEP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Product tiles with a softmax epilogue: per row and tile of columns the maximum, the sum of e = exp(z - max), of
    e * (z - max) and of e * e, and the label's logit. HIDDEN, WEIGHT and KEPT are tensor descriptors; the scores are
    written only to KEPT, if at all, less their maximum, and the maxima to TOPS then. Rows that do not count are skipped.
    """
    TOTAL, CENTRED, SQUARES, TOP = _parts(STATS, TOPS, n, plane, ENTROPY, SUM_SQ, KEEP)
    count = tl.minimum(tl.load(PLACES + 2 * n).to(tl.int32) - row0, rows)
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(vocab, COLUMNS)
    steps = tl.cdiv(size, INNER)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        pm, pn = place_tile(tile, row_tiles, column_tiles, GROUP)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            x = HIDDEN.load([row0 + pm * ROWS, k * INNER])
            w = WEIGHT.load([pn * COLUMNS, k * INNER])
            acc = tl.dot(x, w.T, acc)
        r = pm * ROWS + tl.arange(0, ROWS)
        inside = r < count
        scale = one_scale
        if PER_ROW:
            scale = tl.load(STATS + n + row0 + r, mask=inside, other=1.0)[:, None]
        first = pn * COLUMNS
        c = first + tl.arange(0, COLUMNS)
        if HAS_BIAS or SOFTCAP:
            bias = 0.0
            if HAS_BIAS:
                bias = tl.load(BIAS + c, mask=c < vocab, other=0.0).to(tl.float32)[None, :]
            z, _ = activate(acc, scale, pre, bias, HAS_BIAS, SOFTCAP)
        else:
            z = acc * scale
        # Only the last tile of columns has any beyond the vocabulary.
        if first + COLUMNS > vocab:
            z = tl.where(c[None, :] < vocab, z, LOWEST)
        top = tl.max(z, 1)
        d = z - top[:, None]
        if KEEP:
            KEPT.store([row0 + pm * ROWS, first], tl.where(d < KEPT_LOWEST, KEPT_LOWEST, d).to(tl.float16))
        e = tl.exp2(d)
        total = tl.sum(e, 1)
        centred = tl.sum(e * d, 1) if ENTROPY else total
        squares = tl.sum(e * e, 1) if SUM_SQ else total
        y = tl.load(PLACES + n + row0 + r, mask=inside, other=-1)
        has_label = (y >= first) & (y < first + COLUMNS) & (y < vocab) & inside
        # Few tiles hold a label of their rows: the others skip the search. (Triton 3.6 cannot flatten a loop that ends
        # in a branch.)
        if tl.max(has_label.to(tl.int32), 0) > 0:
            tl.store(STATS + row0 + r, tl.sum(tl.where(c[None, :] == y[:, None], z, 0.0), 1), mask=has_label)
        out = pn.to(tl.int64) * partial_stride + r
        tl.store(TOP + out, top, mask=inside)
        tl.store(TOTAL + out, total, mask=inside)
        if ENTROPY:
            tl.store(CENTRED + out, centred, mask=inside)
        if SUM_SQ:
            tl.store(SQUARES + out, squares, mask=inside)


@triton.jit
def block_stats(
    PRODUCT, PLACES, BIAS, STATS,
    columns, product_stride, per_split, part0, n, plane, partial_stride, vocab0, pre, one_scale,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PER_ROW: tl.constexpr, ENTROPY: tl.constexpr,
    SUM_SQ: tl.constexpr,
):  # fmt: skip
    """The same statistics from a block of products in memory: one program per row and split of its columns."""
    TOTAL, CENTRED, SQUARES, TOP = _parts(STATS, STATS, n, plane, ENTROPY, SUM_SQ, False)
    r = tl.program_id(0)
    split = tl.program_id(1)
    low = split * per_split
    high = tl.minimum(low + per_split, columns)
    scale = one_scale
    if PER_ROW:
        scale = tl.load(STATS + n + r)
    base = PRODUCT + r.to(tl.int64) * product_stride
    top = LOWEST
    total = 0.0
    centred = 0.0
    squares = 0.0
    y = tl.load(PLACES + n + r) - vocab0
    for start in range(low, high, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = c < high
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(BIAS + vocab0 + c, mask=inside, other=0.0).to(tl.float32)
        z, _ = activate(tl.load(base + c, mask=inside, other=0.0).to(tl.float32), scale, pre, bias, HAS_BIAS, SOFTCAP)
        z = tl.where(inside, z, LOWEST)
        new_top = tl.maximum(top, tl.max(z, 0))
        step = top - new_top
        decay = tl.exp2(step)
        d = z - new_top
        e = tl.exp2(d)
        if ENTROPY:
            centred = decay * (centred + total * step) + tl.sum(e * d, 0)
        if SUM_SQ:
            squares = decay * decay * squares + tl.sum(e * e, 0)
        total = total * decay + tl.sum(e, 0)
        top = new_top
        if (y >= start) & (y < start + BLOCK) & (y < high):
            tl.store(STATS + r, tl.sum(tl.where(c == y, z, 0.0), 0))
    out = (part0 + split).to(tl.int64) * partial_stride + r
    tl.store(TOP + out, top)
    tl.store(TOTAL + out, total)
    if ENTROPY:
        tl.store(CENTRED + out, centred)
    if SUM_SQ:
        tl.store(SQUARES + out, squares)


@triton.jit
def combine_parts(
    PLACES, STATS, TOPS, OUT_0, OUT_1, OUT_2, OUT_3, OUT_4,
    row0, rows, n, plane, parts, partial_stride, vocab, label_low, label_high,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, ENTROPY: tl.constexpr, SUM_SQ: tl.constexpr, APART: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of each row and put the result where the row belongs; zeros for rows that do not count.

    FINAL: (log_prob, lse, entropy, sum of squares, is top 1). Else the running sums in natural units, for a merge over
    processes: (label logit, top, centred, squares, total).
    """
    TOTAL, CENTRED, SQUARES, TOP = _parts(STATS, TOPS, n, plane, ENTROPY, SUM_SQ, APART)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < tl.minimum(tl.load(PLACES + 2 * n).to(tl.int32) - row0, rows)
    top = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    centred = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, PARTS):
        p = start + tl.arange(0, PARTS)
        here = (p[:, None] < parts) & inside[None, :]
        at = p[:, None].to(tl.int64) * partial_stride + r[None, :]
        part_top = tl.load(TOP + at, mask=here, other=LOWEST)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        step = top - new_top
        decay = tl.exp2(step)
        part_step = part_top - new_top[None, :]
        part_decay = tl.exp2(part_step)
        part_total = tl.load(TOTAL + at, mask=here, other=0.0)
        if ENTROPY:
            part_centred = tl.load(CENTRED + at, mask=here, other=0.0)
            moved = part_decay * (part_centred + part_total * part_step)
            centred = decay * (centred + total * step) + tl.sum(moved, 0)
        if SUM_SQ:
            part_squares = tl.load(SQUARES + at, mask=here, other=0.0)
            squares = decay * decay * squares + tl.sum(part_decay * part_decay * part_squares, 0)
        total = decay * total + tl.sum(part_total * part_decay, 0)
        top = new_top
    # A row of nothing but -inf has no softmax. Without this it would be that of its tiles' columns, masked ones included.
    total = tl.where(top <= LOWEST, 0.0, total)
    squares = tl.where(top <= LOWEST, 0.0, squares)
    all_rows = r < rows
    y = tl.load(PLACES + n + row0 + r, mask=inside, other=0)
    z = tl.load(STATS + row0 + r, mask=inside & (y >= 0) & (y < vocab), other=0.0)
    z = tl.where(z <= LOWEST, float("-inf"), z)
    # Nothing can be raised from here: a label out of range makes its log-probability a NaN.
    z = tl.where((y < label_low) | (y >= label_high), float("nan"), z)
    to = tl.load(PLACES + row0 + r, mask=all_rows, other=0)
    if FINAL:
        log_total = tl.log2(total)
        tl.store(OUT_0 + to, tl.where(inside, (z - top - log_total) * LN2, 0.0), mask=all_rows)
        tl.store(OUT_1 + to, tl.where(inside, (top + log_total) * LN2, 0.0), mask=all_rows)
        if ENTROPY:
            tl.store(OUT_2 + to, tl.where(inside, (log_total - centred / total) * LN2, 0.0), mask=all_rows)
        if SUM_SQ:
            tl.store(OUT_3 + to, tl.where(inside, squares / (total * total), 0.0), mask=all_rows)
        tl.store(OUT_4 + to, (inside & (z >= top)).to(tl.int8), mask=all_rows)
    else:
        tl.store(OUT_0 + to, tl.where(inside, z * LN2, 0.0), mask=all_rows)
        tl.store(OUT_1 + to, tl.where(inside, top * LN2, 0.0), mask=all_rows)
        if ENTROPY:
            tl.store(OUT_2 + to, centred * LN2, mask=all_rows)
        if SUM_SQ:
            tl.store(OUT_3 + to, squares, mask=all_rows)
        # A logarithm is taken of this one.
        tl.store(OUT_4 + to, tl.where(inside, total, 1.0), mask=all_rows)


@triton.jit
def chosen_logits(
    HIDDEN, WEIGHT, BIAS, SCALE, IDS, OUT, ids_per_row, size, vocab, hidden_stride, weight_stride, pre,
    CHOSEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits (natural units) of a few vocabulary rows per row, each a dot product; 0 for ids that are not held here."""
    r = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * CHOSEN + tl.arange(0, CHOSEN)
    there = k < ids_per_row
    ids = tl.load(IDS + r * ids_per_row + k, mask=there, other=-1)
    held = there & (ids >= 0) & (ids < vocab)
    acc = tl.zeros((CHOSEN,), tl.float32)
    for start in range(0, size, INNER):
        c = start + tl.arange(0, INNER)
        x = tl.load(HIDDEN + r * hidden_stride + c, mask=c < size, other=0.0).to(tl.float32)
        at = ids[:, None] * weight_stride + c[None, :]
        w = tl.load(WEIGHT + at, mask=held[:, None] & (c < size)[None, :], other=0.0).to(tl.float32)
        acc += tl.sum(w * x[None, :], 1)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(BIAS + ids, mask=held, other=0.0).to(tl.float32)
    z, _ = activate(acc, tl.load(SCALE + r), pre, bias, HAS_BIAS, SOFTCAP)
    z = tl.where(z <= LOWEST, float("-inf"), z)
    tl.store(OUT + r * ids_per_row + k, tl.where(held, z * LN2, 0.0), mask=there)
