"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509): transparent, for any attention implementation."""

from .patch import Ulysses

__all__ = ["Ulysses"]
