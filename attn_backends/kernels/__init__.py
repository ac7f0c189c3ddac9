"""Attention as functions of tensors. They know metadata formats, and no backend, step or cache object."""
