# mypy: ignore-errors
# (A kernel's arguments are pointers and scalars of another language: annotations would say nothing.)
"""Triton kernels of the fused head's backward; `kernels` says what a score is."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import LN2, LOG2E, LOWEST, activate, place_tile, places


@triton.jit
def scan_rows(
    LABELS, G_0, G_1, G_2, G_3, INDEX, COUNT, KEPT_ROW, n, ignore_index,
    stride_0, stride_1, stride_2, row_stride_3, stride_3, ids_per_row,
    BLOCK: tl.constexpr, HAS_0: tl.constexpr, HAS_1: tl.constexpr, HAS_2: tl.constexpr, HAS_3: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Number the rows that count, in order, from the front of INDEX, and the others from its end: those whose label is not
    ignored, and of which a gradient G of one of the outputs is not 0. COUNT is how many count, and how many have a label.
    (KEPT) The place that the forward gave a row goes to the same place of KEPT_ROW. One program does it all.
    """
    found = 0
    labelled = 0
    for start in range(0, n, BLOCK):
        r = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = r < n
        y = tl.load(LABELS + r, mask=inside, other=0)
        has_label = (inside & (y != ignore_index)).to(tl.int32)
        some = tl.zeros((BLOCK,), tl.int32)
        if HAS_0:
            some |= (tl.load(G_0 + r * stride_0, mask=inside, other=0.0) != 0).to(tl.int32)
        if HAS_1:
            some |= (tl.load(G_1 + r * stride_1, mask=inside, other=0.0) != 0).to(tl.int32)
        if HAS_2:
            some |= (tl.load(G_2 + r * stride_2, mask=inside, other=0.0) != 0).to(tl.int32)
        if HAS_3:
            for k in range(0, ids_per_row):
                g = tl.load(G_3 + r * row_stride_3 + k * stride_3, mask=inside, other=0.0)
                some |= (g != 0).to(tl.int32)
        keep = has_label & some
        to = places(keep, r, found, n)
        tl.store(INDEX + to, r, mask=inside)
        if KEPT:
            # A row whose label is ignored has no place: any that exists will do.
            place = labelled + tl.cumsum(has_label, 0)
            tl.store(KEPT_ROW + to, tl.maximum(place, 1) - 1, mask=inside)
        found += tl.sum(keep, 0)
        labelled += tl.sum(has_label, 0)
    tl.store(COUNT, found.to(tl.int64))
    tl.store(COUNT + 1, labelled.to(tl.int64))


@triton.jit
def prepare_rows(
    INDEX, LABELS, TEMPERATURE, LOG_PROBS, LSE, ENTROPY, SQUARES, TOPK_LOG_PROBS, TOPK_IDS, G_0, G_1, G_2, G_3,
    LOCAL, TERMS, OUT_TOPK, OUT_IDS, COUNT, n, vocab_start, numerator, factor, temperature_stride,
    stride_0, stride_1, stride_2, row_stride_3, stride_3, ids_per_row, topk_size,
    BLOCK: tl.constexpr, PER_ROW: tl.constexpr, HAS_0: tl.constexpr, HAS_1: tl.constexpr, HAS_2: tl.constexpr,
    HAS_3: tl.constexpr,
):  # fmt: skip
    """Per row that is computed, what its gradients are made from, in TERMS [7, n] and in units of log 2 where a score meets
    it: scale, lse, constant, on_log_p, on_p, label, log_prob (see `d_logits`); the same of the chosen ids in OUT_TOPK
    [2, n, K]: gradient, log_prob. Rows from COUNT on, which are only computed where the host cannot know it (while a CUDA
    graph is captured), get zeros and p = 0.
    """
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = r < n
    source = tl.load(INDEX + r, mask=inside, other=0)
    y = tl.load(LABELS + source, mask=inside, other=0)
    real = inside & (r < tl.load(COUNT))
    scale = tl.zeros((BLOCK,), tl.float32) + numerator
    share = tl.zeros((BLOCK,), tl.float32) + factor
    if PER_ROW:
        t = tl.load(TEMPERATURE + source * temperature_stride, mask=inside, other=1.0)
        scale = (numerator / t).to(tl.float32)
        share = (factor / t).to(tl.float32)
    constant = tl.zeros((BLOCK,), tl.float32)
    if HAS_0:
        g = tl.load(G_0 + source * stride_0, mask=real, other=0.0) * share
        constant -= g
        tl.store(TERMS + 5 * n + r, g, mask=inside)
    if HAS_1:
        g = tl.load(G_1 + source * stride_1, mask=real, other=0.0) * share
        constant -= g * tl.load(ENTROPY + source, mask=real, other=0.0)
        tl.store(TERMS + 3 * n + r, -g * LN2, mask=inside)
    if HAS_2:
        g = 2.0 * tl.load(G_2 + source * stride_2, mask=real, other=0.0) * share
        constant -= g * tl.load(SQUARES + source, mask=real, other=0.0)
        tl.store(TERMS + 4 * n + r, g, mask=inside)
    if HAS_3:
        for k in range(0, ids_per_row):
            g = tl.load(G_3 + source * row_stride_3 + k * stride_3, mask=real, other=0.0) * share
            constant -= g
            log_p = tl.load(TOPK_LOG_PROBS + source * ids_per_row + k, mask=real, other=0.0) * LOG2E
            ids = tl.load(TOPK_IDS + source * ids_per_row + k, mask=inside, other=0) - vocab_start
            to = r * ids_per_row + k
            tl.store(OUT_TOPK + to, g, mask=inside)
            tl.store(OUT_TOPK + topk_size + to, log_p, mask=inside)
            tl.store(OUT_IDS + to, ids, mask=inside)
    tl.store(TERMS + r, scale, mask=inside)
    lse = tl.load(LSE + source, mask=real, other=0.0) * LOG2E
    tl.store(TERMS + n + r, tl.where(real, lse, -LOWEST), mask=inside)
    tl.store(TERMS + 2 * n + r, constant, mask=inside)
    tl.store(TERMS + 6 * n + r, tl.load(LOG_PROBS + source, mask=real, other=0.0) * LOG2E, mask=inside)
    tl.store(LOCAL + r, y - vocab_start, mask=inside)


@triton.jit
def d_logits(log_p, constant, per_log_p, per_p, PER_LOG_P: tl.constexpr, PER_P: tl.constexpr):
    """p * (constant + per_log_p * log2 p + per_p * p) from log2 p."""
    p = tl.exp2(log_p)
    d = constant
    if PER_LOG_P:
        d += per_log_p * log_p
    if PER_P:
        d += per_p * p
    return p * d


@triton.jit
def backward_tiles(
    HIDDEN, WEIGHT, OUT, SCALE, BIAS, LSE, CONSTANT, ON_LOG_P, ON_P, rows, columns, size, vocab0, vocab, pre,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PER_LOG_P: tl.constexpr, PER_P: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Product tiles turned into gradients of the products, without the labels' own term. HIDDEN, WEIGHT, OUT: descriptors."""
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(size, INNER)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        pm, pn = place_tile(tile, row_tiles, column_tiles, GROUP)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(steps):
            x = HIDDEN.load([pm * ROWS, k * INNER])
            w = WEIGHT.load([vocab0 + pn * COLUMNS, k * INNER])
            acc = tl.dot(x, w.T, acc)
        r = pm * ROWS + tl.arange(0, ROWS)
        inside = r < rows
        scale = tl.load(SCALE + r, mask=inside, other=0.0)[:, None]
        lse = tl.load(LSE + r, mask=inside, other=0.0)[:, None]
        constant = tl.load(CONSTANT + r, mask=inside, other=0.0)[:, None]
        on_log_p = 0.0
        on_p = 0.0
        if PER_LOG_P:
            on_log_p = tl.load(ON_LOG_P + r, mask=inside, other=0.0)[:, None]
        if PER_P:
            on_p = tl.load(ON_P + r, mask=inside, other=0.0)[:, None]
        if HAS_BIAS or SOFTCAP:
            bias = 0.0
            if HAS_BIAS:
                c = vocab0 + pn * COLUMNS + tl.arange(0, COLUMNS)
                bias = tl.load(BIAS + c, mask=c < vocab, other=0.0).to(tl.float32)[None, :]
            z, u = activate(acc, scale, pre, bias, HAS_BIAS, SOFTCAP)
            d = d_logits(z - lse, constant, on_log_p, on_p, PER_LOG_P, PER_P)
            if SOFTCAP:
                d *= 1.0 - u * u
        else:
            d = d_logits(acc * scale - lse, constant, on_log_p, on_p, PER_LOG_P, PER_P)
        OUT.store([pm * ROWS, pn * COLUMNS], d.to(OUT.dtype))


@triton.jit
def row_factors(ON_LOG_P, ON_P, r, there, PER_LOG_P: tl.constexpr, PER_P: tl.constexpr):
    """What the log2 p and the p of rows are multiplied by in `d_logits`."""
    on_log_p = 0.0
    on_p = 0.0
    if PER_LOG_P:
        on_log_p = tl.load(ON_LOG_P + r, mask=there, other=0.0)
    if PER_P:
        on_p = tl.load(ON_P + r, mask=there, other=0.0)
    return on_log_p, on_p


@triton.jit
def softcap_slope(u):
    """The derivative of tanh where it is u. From a row that does not count, or by rounding, u may lie outside of [-1, 1]."""
    u = tl.minimum(tl.maximum(u, -1.0), 1.0)
    return 1.0 - u * u


@triton.jit
def label_gradient(log_p, label_grad, scale, lse, constant, on_log_p, on_p, SOFTCAP, PER_LOG_P, PER_P):
    """The gradient at a row's label, one-hot term included. LOG_PROB and LSE in units of log 2."""
    log_p = tl.where(log_p < LOWEST, LOWEST, log_p)
    d = d_logits(log_p, constant, on_log_p, on_p, PER_LOG_P, PER_P) + label_grad
    if SOFTCAP:
        d *= softcap_slope((log_p + lse) / scale)
    return d


@triton.jit
def backward_block(
    SOURCE, OUT, BIAS, SCALE, LSE, CONSTANT, ON_LOG_P, ON_P,
    columns, source_stride, out_stride, vocab0, pre,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PER_LOG_P: tl.constexpr, PER_P: tl.constexpr,
):  # fmt: skip
    """The same from a block of products in memory. OUT may be SOURCE."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    x = tl.load(SOURCE + r * source_stride + c, mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(BIAS + vocab0 + c, mask=inside, other=0.0).to(tl.float32)
    z, u = activate(x, tl.load(SCALE + r), pre, bias, HAS_BIAS, SOFTCAP)
    on_log_p, on_p = row_factors(ON_LOG_P, ON_P, r, True, PER_LOG_P, PER_P)
    d = d_logits(z - tl.load(LSE + r), tl.load(CONSTANT + r), on_log_p, on_p, PER_LOG_P, PER_P)
    if SOFTCAP:
        d *= 1.0 - u * u
    tl.store(OUT + r * out_stride + c, d.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def kept_block(
    KEPT, OUT, KEPT_ROW, TOPS, COUNT, LABELS, LOG_PROB, LABEL_GRAD, SCALE, LSE, CONSTANT, ON_LOG_P, ON_P,
    columns, kept_stride, out_stride, top_stride, vocab0,
    TILES: tl.constexpr, COLUMNS: tl.constexpr, ZEROS: tl.constexpr, WHEN: tl.constexpr, HAS_LABEL: tl.constexpr,
    SOFTCAP: tl.constexpr, PER_LOG_P: tl.constexpr, PER_P: tl.constexpr,
):  # fmt: skip
    """The same, the label's own term included, from scores that the forward kept, at the rows KEPT_ROW: TILES of its tiles of
    COLUMNS. Rows from COUNT on need not exist: OUT gets zeros there (ZEROS) or nothing.

    WHEN: 0; or leave it unless (1), or if (2), all rows with a label count. Their order is that of the kept ones then, so that
    OUT may be KEPT.
    """
    r = tl.program_id(0).to(tl.int64)
    counted = tl.load(COUNT)
    if WHEN == 1:
        counted = tl.where(counted == tl.load(COUNT + 1), counted, 0)
    if WHEN == 2:
        counted = tl.where(counted == tl.load(COUNT + 1), 0, counted)
    there = tl.where(r < counted, columns, 0)
    source = tl.load(KEPT_ROW + r)
    # As [tiles, columns of a tile], so that a tile's maximum is loaded once and not for each of its columns.
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    top = TOPS + (vocab0 // COLUMNS + tile).to(tl.int64) * top_stride + source
    top = tl.load(top, mask=tile * COLUMNS < there, other=0.0)
    c = tile[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = c < there
    z = tl.load(KEPT + source * kept_stride + c, mask=inside, other=0.0).to(tl.float32) + top[:, None]
    scale = tl.load(SCALE + r)
    lse = tl.load(LSE + r)
    constant = tl.load(CONSTANT + r)
    on_log_p, on_p = row_factors(ON_LOG_P, ON_P, r, True, PER_LOG_P, PER_P)
    d = d_logits(z - lse, constant, on_log_p, on_p, PER_LOG_P, PER_P)
    if SOFTCAP:
        u = z / scale
        d *= 1.0 - u * u
    if HAS_LABEL:
        log_p, label_grad = tl.load(LOG_PROB + r), tl.load(LABEL_GRAD + r)
        own = label_gradient(log_p, label_grad, scale, lse, constant, on_log_p, on_p, SOFTCAP, PER_LOG_P, PER_P)
        d = tl.where(c == tl.load(LABELS + r) - vocab0, own, d)
    if ZEROS:
        inside = c < columns
    tl.store(OUT + r * out_stride + c, d.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def place_labels(
    OUT, LABELS, LOG_PROB, LABEL_GRAD, SCALE, LSE, CONSTANT, ON_LOG_P, ON_P, rows, low, high, out_stride,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, PER_LOG_P: tl.constexpr, PER_P: tl.constexpr,
):  # fmt: skip
    """Write the gradient at each row's label, rounded once."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < rows
    y = tl.load(LABELS + r, mask=inside, other=-1)
    here = inside & (y >= low) & (y < high)
    on_log_p, on_p = row_factors(ON_LOG_P, ON_P, r, here, PER_LOG_P, PER_P)
    d = label_gradient(
        tl.load(LOG_PROB + r, mask=here, other=0.0), tl.load(LABEL_GRAD + r, mask=here, other=0.0),
        tl.load(SCALE + r, mask=here, other=1.0), tl.load(LSE + r, mask=here, other=0.0),
        tl.load(CONSTANT + r, mask=here, other=0.0), on_log_p, on_p, SOFTCAP, PER_LOG_P, PER_P,
    )  # fmt: skip
    tl.store(OUT + r.to(tl.int64) * out_stride + y - low, d.to(OUT.dtype.element_ty), mask=here)


@triton.jit
def add_chosen(
    OUT, IDS, TOPK, SCALE, LSE, rows, ids_per_row, topk_size, low, high, out_stride,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add gradients at a few columns per row, one after the other, so that a repeated id adds up the same way each time.
    TOPK [2, rows, K]: gradients and log-probabilities.
    """
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = r < rows
    for k in range(0, ids_per_row):
        at = r * ids_per_row + k
        ids = tl.load(IDS + at, mask=inside, other=-1)
        here = inside & (ids >= low) & (ids < high)
        g = tl.load(TOPK + at, mask=here, other=0.0)
        if SOFTCAP:
            log_p = tl.load(TOPK + topk_size + at, mask=here, other=0.0)
            z = log_p + tl.load(LSE + r, mask=here, other=0.0)
            g *= softcap_slope(z / tl.load(SCALE + r, mask=here, other=1.0))
        to = OUT + r * out_stride + ids - low
        d = tl.load(to, mask=here, other=0.0).to(tl.float32) + g
        tl.store(to, d.to(OUT.dtype.element_ty), mask=here)
        tl.debug_barrier()
