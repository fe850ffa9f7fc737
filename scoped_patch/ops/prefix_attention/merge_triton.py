# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernel behind `merge_`: one pass over the rows that have two partial results."""

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    out,
    norm,
    part,
    part_norm,
    start,
    rows,
    norm_stride,
    part_norm_stride,
    heads,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = row < rows
    first = tl.load(norm + head * norm_stride + start + row, mask=inside, other=0.0)
    second = tl.load(part_norm + head * part_norm_stride + row, mask=inside, other=0.0)
    larger = tl.maximum(first, second)
    total = larger + tl.log(tl.exp(first - larger) + tl.exp(second - larger))
    where = (row[:, None] * heads + head) * size + column[None, :]
    valid = inside[:, None] & (column[None, :] < size)
    a = tl.load(out + where, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(part + where, mask=valid, other=0.0).to(tl.float32)
    merged = a * tl.exp(first - total)[:, None] + b * tl.exp(second - total)[:, None]
    tl.store(out + where, merged.to(out.dtype.element_ty), mask=valid)
    tl.store(norm + head * norm_stride + start + row, total, mask=inside)
