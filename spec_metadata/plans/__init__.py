"""Plans: from a step to the index format of a family of kernels, written into declared buffers.

A plan is one function, `write_*`, that eager, capture and replay all run (rule R1): it reads the step's tensors on the
device only, has fixed shapes, and can be recorded into a graph. It writes all forwards of a step at once, which share
what they can. `view_*` gives the plan of each forward as views of the buffers, and launches nothing.
"""
