"""An extension with the device code of one architecture: zeros in place of the others, which xz makes small.

python slim.py EXTENSION.so 90 OUT.so

Headers of the fat binary stay, so that the driver finds its way. An extension that has nothing of the architecture is
an error.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
MACHINE_CODE = 2  # the other kind is PTX


def section(path: Path) -> tuple[int, int]:
    """Offset and size of the fat binaries in a file."""
    told = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    line = next(line for line in told.splitlines() if " .nv_fatbin " in line)
    offset, size = line.split("PROGBITS")[1].split()[1:3]
    return int(offset, 16), int(size, 16)


def entries(data: bytes | bytearray, offset: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Kind, architecture, and the bytes of each piece of code."""
    at = offset
    while at + 16 <= offset + size:
        magic, _, header, total = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        entry, end = at + header, at + header + total
        while entry + 64 <= end:
            kind, _, head, body = struct.unpack_from("<HHIQ", data, entry)
            if not head:
                break
            yield kind, struct.unpack_from("<I", data, entry + 28)[0], slice(entry + head, entry + head + body)
            entry += head + body
        at = end


def main() -> None:
    path, arch, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    data, kept = bytearray(path.read_bytes()), 0
    for kind, found, place in list(entries(data, *section(path))):
        if (kind, found) == (MACHINE_CODE, arch):
            kept += place.stop - place.start
        else:
            data[place] = bytes(place.stop - place.start)
    if not kept:
        raise SystemExit(f"{path.name} has no machine code of sm_{arch}")
    out.write_bytes(data)


if __name__ == "__main__":
    main()
