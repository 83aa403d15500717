"""DeepInfer on NVIDIA GPUs of compute capability 9.0 (Hopper) and 10.x (Blackwell)."""
