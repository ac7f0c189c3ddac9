"""The errors of this package."""


class InvalidStepError(ValueError):
    """A step, tree, table or capacity whose values cannot be right: what was wrong, with the values."""
