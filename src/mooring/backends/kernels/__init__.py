"""Rules as GPU kernels: what a rule says in PyTorch, written out and compiled where there is a compiler."""
