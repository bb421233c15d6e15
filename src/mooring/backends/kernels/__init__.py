"""GPU kernels generated from rules in PyTorch."""
