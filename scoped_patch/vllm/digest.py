"""A digest of named tensors that does not depend on their order, bucket or device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from .graph import raw_bytes

_PERIOD = 65521  # prime, so that exchanged blocks of any power-of-two size are noticed
_CHUNK = 1 << 20


class Digest:
    """Collects tensors; sender and receiver get the same digest exactly when they saw the same names and bytes."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        head = f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|{_checksum(tensor)}"
        one = hashlib.blake2b(head.encode(), digest_size=16).digest()
        self._sum = (self._sum + int.from_bytes(one, "little")) % (1 << 128)

    def hexdigest(self) -> str:
        return f"{self._sum:032x}"


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of a whole update, to compare with `ReloadReport.digest`; guards against mix-ups, not against attack."""
    digest = Digest()
    for name, tensor in weights:
        digest.add(name, tensor)
    return digest.hexdigest()


def _checksum(tensor: torch.Tensor) -> str:
    data = raw_bytes(tensor)
    tail = data[data.numel() // 4 * 4 :]
    words = data[: data.numel() // 4 * 4]
    if words.storage_offset() % 4:
        words = words.clone()
    words = words.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].long()
        at = torch.arange(start, start + part.numel(), device=part.device) % _PERIOD + 1
        total += int((part * at).sum())
    return f"{total % (1 << 64):x}.{bytes(tail.tolist()).hex()}"
