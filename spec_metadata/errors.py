"""The errors of this package."""

from reprlib import repr as shortened

from torch import Tensor


class InvalidStepError(ValueError):
    """A step, tree, table or capacity whose values cannot be right: what was wrong, with the values."""


def describe(value: object) -> str:
    """What was given, for a refusal: shape and type of a tensor, anything else as it prints itself, cut short."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else shortened(value)
