"""A long request among short ones, beside vendors' kernels (`tests/skewed_batches.py`)."""

from tests.skewed_batches import rows

__all__ = ["rows"]
