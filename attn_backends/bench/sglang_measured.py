"""What SGLang 0.5.23 took on an H200, measured apart: on another day, in a process of its own, by its own classes.

Three drafted tokens, topk 1, a verify of four, replays (of FlashInfer's draft extend, which has none, the eager call);
at most 128 requests of 131,072 tokens. Hosts differ by a factor of two, so a share of these times is a rough figure.
"""

from __future__ import annotations

from typing import NamedTuple


class MeasuredCycle(NamedTuple):
    """Metadata of a cycle. host_us: the median until the host goes on, least_us: the least. gpu_us: of all that ran on
    the device. launches, copies: of it.
    """

    host_us: float
    least_us: float
    gpu_us: float
    launches: int
    copies: int


# By backend, page size, requests and context.
CYCLES = {
    ("flashinfer_mla", 1, 1, 4096): MeasuredCycle(1900, 1608, 130, 18, 11),
    ("flashinfer_mla", 1, 32, 4096): MeasuredCycle(2371, 1873, 129, 18, 11),
    ("flashinfer_mla", 1, 128, 4096): MeasuredCycle(2501, 2051, 143, 18, 11),
    ("flashinfer_mla", 1, 32, 32768): MeasuredCycle(2351, 2024, 192, 18, 11),
    ("trtllm_mla", 64, 1, 4096): MeasuredCycle(190, 173, 9.5, 8, 1),
    ("trtllm_mla", 64, 32, 4096): MeasuredCycle(191, 168, 10.7, 8, 1),
    ("trtllm_mla", 64, 128, 4096): MeasuredCycle(187, 166, 18.2, 8, 1),
    ("trtllm_mla", 64, 32, 32768): MeasuredCycle(191, 167, 11.1, 8, 1),
    ("fa3", 64, 1, 4096): MeasuredCycle(346, 306, 19.1, 13, 3),
    ("fa3", 64, 32, 4096): MeasuredCycle(357, 319, 29.4, 13, 3),
    ("fa3", 64, 128, 4096): MeasuredCycle(361, 321, 52.1, 13, 3),
    ("fa3", 64, 32, 32768): MeasuredCycle(359, 323, 29.6, 13, 3),
    ("fa3", 1, 1, 4096): MeasuredCycle(345, 317, 20.8, 13, 3),
    ("fa3", 1, 32, 4096): MeasuredCycle(366, 322, 134.8, 13, 3),
    ("fa3", 1, 128, 4096): MeasuredCycle(380, 330, 475.0, 13, 3),
    ("fa3", 1, 32, 32768): MeasuredCycle(379, 328, 136.8, 13, 3),
}
