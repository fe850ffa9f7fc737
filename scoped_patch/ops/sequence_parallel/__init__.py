"""Sequence parallelism: collectives with gradients, layouts of heads and lengths. Usable without any patch."""

from .collectives import CollectiveLog, all_gather, all_reduce_sum, all_to_all, count_collectives, reduce_scatter_sum
from .exchange import (
    gather_sequence,
    heads_from_sequence,
    join_gradients,
    scale_gradient,
    sequence_from_heads,
    shard_sequence,
)
from .failures import RankFailedError, begin_step, report_failure
from .layout import HeadLayout, pad_sequence, shard_bounds, shard_length

__all__ = [
    "CollectiveLog",
    "HeadLayout",
    "RankFailedError",
    "all_gather",
    "all_reduce_sum",
    "all_to_all",
    "begin_step",
    "count_collectives",
    "gather_sequence",
    "heads_from_sequence",
    "join_gradients",
    "pad_sequence",
    "reduce_scatter_sum",
    "report_failure",
    "scale_gradient",
    "sequence_from_heads",
    "shard_bounds",
    "shard_length",
    "shard_sequence",
]
