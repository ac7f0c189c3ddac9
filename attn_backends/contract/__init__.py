"""The contract for authors of backends: definitions, kernels and their capabilities.

The contract between backends and engines has a version of its own, `CONTRACT`. Its first number changes when a promise
does: a backend that was right under another may be wrong under this one. docs/contract.md lists what changed.
"""

CONTRACT = "2.0"
