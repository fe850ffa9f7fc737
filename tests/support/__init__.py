"""Code that several test files share: reference log-probs, gradient comparison, gloo groups, small odd models."""
