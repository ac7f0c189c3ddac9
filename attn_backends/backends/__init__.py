"""The backends, one file each: declared buffers, plan, kernels. None of them imports another."""
