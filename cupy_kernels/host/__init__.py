"""The CPU stand-in for the CUDA language: the kernels' own text runs on NumPy arrays, a fiber per CUDA thread."""
