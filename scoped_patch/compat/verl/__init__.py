"""verl's patching functions: the same names and signatures, reversible, and on the one model that is given.

`apply_monkey_patch` and `apply_qat_patches` return a session; its `restore()` takes everything back, and a program that
never calls it runs patched to its end, as under verl. The interfaces are those of verl 0.9; no code is taken from it.
"""

from .models import apply_monkey_patch
from .qat import apply_qat_patches, manual_process_weights_after_loading, prepare_qat_for_load_weights
from .ulysses import (
    FSDPUlyssesShardingManager,
    all_gather_tensor,
    all_to_all_tensor,
    gather_heads_scatter_seq,
    gather_outputs_and_unpad,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    set_ulysses_sequence_parallel_group,
    slice_input_tensor,
    ulysses_pad,
    ulysses_pad_and_slice_inputs,
    validate_ulysses_config,
)

__all__ = [
    "FSDPUlyssesShardingManager",
    "all_gather_tensor",
    "all_to_all_tensor",
    "apply_monkey_patch",
    "apply_qat_patches",
    "gather_heads_scatter_seq",
    "gather_outputs_and_unpad",
    "gather_seq_scatter_heads",
    "get_ulysses_sequence_parallel_group",
    "get_ulysses_sequence_parallel_rank",
    "get_ulysses_sequence_parallel_world_size",
    "manual_process_weights_after_loading",
    "prepare_qat_for_load_weights",
    "set_ulysses_sequence_parallel_group",
    "slice_input_tensor",
    "ulysses_pad",
    "ulysses_pad_and_slice_inputs",
    "validate_ulysses_config",
]
