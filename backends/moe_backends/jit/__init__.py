"""Compiling CUDA code at first use, for every backend that does: the compiler, the GPU's architecture, the cache."""
