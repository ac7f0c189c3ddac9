"""Plans: from a step to the index format of a family of kernels, written into declared buffers.

Each plan is one function that eager, capture and replay all run (rule R1); it reads the step's tensors on the device
only, has fixed shapes, and can be recorded into a graph.
"""
