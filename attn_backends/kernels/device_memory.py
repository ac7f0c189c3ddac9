"""Room on a device: how many bytes are free, and refusals before something larger is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Of a control group of either version: its limit, what is in use, and of that the cached files, which give way.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@contextmanager
def room_for(num_bytes: int, device: torch.device, refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, num_bytes are allocated on a device. refusal: "cpu has 100 bytes free" -> the error that is raised where
    they do not fit, before they are allocated if the device tells, else when that fails.
    """
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise refusal(f"{device} has {free:,} free")
    try:
        yield
    except RuntimeError as error:  # PyTorch has a class of its own for a GPU alone
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise refusal(f"{device} has less") from error


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a GPU, PyTorch's own cache included, or on the CPU without the system ending a
    process; None of another device, and where the system does not tell.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return host_free_bytes() if device.type == "cpu" else None


def host_free_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Free bytes of the host as Linux tells them, within a container's limit; None elsewhere."""
    known = [_number(proc / "meminfo", "MemAvailable:")]
    free = [kilobytes * 1024 for kilobytes in known if kilobytes is not None]
    for limit_file, used_file, stat_file, cached_key in _GROUPS:
        limit, used = _number(groups / limit_file), _number(groups / used_file)
        if limit is not None and used is not None:
            free.append(max(0, limit - used + (_number(groups / stat_file, cached_key) or 0)))
    return min(free, default=None)


def _number(path: Path, key: str = "") -> int | None:
    """The number in a file, in its line that begins with a key if one is given; None where there is none."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return None
    words = next((line[1:] if key else line for line in lines if line and key in ("", line[0])), [])
    return int(words[0]) if words and words[0].isdecimal() else None
