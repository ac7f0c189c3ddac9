"""Selection of kernels: the search for vendors' packages, and the choice of `auto`."""
