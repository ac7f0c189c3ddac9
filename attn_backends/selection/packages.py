"""Whether other packages are there. Looking imports nothing."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported. A folder of its name is not it, such as a clone in the working
    directory, which Python would import as an empty package.
    """
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
