"""How the rules run: eagerly in chunks, or fused into GPU kernels."""
