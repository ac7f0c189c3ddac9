"""Whether replays of our Gluon kernels give the bits of the first launch (`tests/gluon_replays.py`)."""

from tests.gluon_replays import rows

__all__ = ["rows"]
