"""Weight preparation for the TRTLLM kernels, and its inverse."""
