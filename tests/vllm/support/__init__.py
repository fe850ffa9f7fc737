"""Tiny checkpoints, CPU stand-ins for CUDA-only operators, and the real engine around them."""
