"""What the author of a backend declares: kernels, and what each of them can do; and of which contract.

The contract between backends and engines has a version of its own, `CONTRACT`. Its first number changes when a promise
does: a backend that was right under another may be wrong under this one. docs/contract.md lists what changed.
"""

CONTRACT = "2.0"
