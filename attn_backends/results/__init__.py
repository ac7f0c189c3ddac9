"""Results as JSON: rows with a head that says where they come from."""

from attn_backends.results.files import Recording, Results, check_output, read, write, write_text
from attn_backends.results.heads import (
    COMMIT_VARIABLE,
    Head,
    commit,
    device_name,
    head,
    versions,
    without_folders,
    without_paths,
)

__all__ = [
    "COMMIT_VARIABLE",
    "Head",
    "Recording",
    "Results",
    "check_output",
    "commit",
    "device_name",
    "head",
    "read",
    "versions",
    "without_folders",
    "without_paths",
    "write",
    "write_text",
]
