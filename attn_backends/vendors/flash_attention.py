"""FlashAttention-3 on a ragged plan: one kernel, from whichever of three packages has it.

    flash_attn_interface   flash-attention's hopper folder, `flash_attn_with_kvcache`
    sgl_kernel             `sgl_kernel.flash_attn.flash_attn_with_kvcache`
    vllm_flash_attn        `vllm.vllm_flash_attn`, `flash_attn_varlen_func` with fa_version=3

They build the same CUDA source (hopper/flash_api.cpp) and name its arguments differently. MLA is the rotated part as q
and k of 64 elements, and the latent as `q_v` and v of 512. The log-sum-exp comes as [num_heads, num_tokens], natural,
and -inf where a row sees no key.

The scheduler metadata says how many splits each request's keys get and in which order tiles run. Where a package lets
us make it (`get_scheduler_metadata`), it is made once per forward and shape of layers into a declared buffer. That
saves each layer 1 µs on an H200. The launch that plans a captured step writes it along where the version is known
(`flash_attention_tiles`). Else the kernel prepares it before every launch, on the device too. All are right
under capture: the host sees only promises, the width of the step and the extent of the page table. From these it takes
the largest number of splits, by the same heuristic for the metadata and the launch (num_splits=0), and the device
shares splits out by the true lengths. So a graph can hold packed rows, too: max_seqlen_q is then a bound, and a request
without rows has no tile (vLLM captures mixed batches of it in the same way). Through CUDA graphs of vLLM's build on an
H200 all 10 packed draft extends of the conformance suite pass (conformance_fa3.json).

If a page is a whole number of its tiles of keys and a request has more rows than one tile (MLA, pages of 64), it reads
to the end of the last visible page. What it has and we do not declare:
- 8-bit caches, which it takes only under queries of the same type; rounding the caller's queries to three bits made
  outputs three times as wrong as the budget of a bfloat16 one (H200, vLLM 0.33).
- Sinks of other packages than vLLM's: later versions of SGLang's take them, within limits that are not known here.
vLLM's build takes sinks (`s_aux`) in bfloat16, of at most 64 heads, and counts them in the log-sum-exp. To take them
out again costs launches and digits: where the sink has 98 % of a row up to 3e-4, and all of them where it is 14 above
the keys. So none is declared beside sinks. Over a tree the join counts them, and the log-sum-exp is that of the keys.
A sliding window is one for all rows of a request, so that it takes none over a draft tree, where rows of other depths
begin at other keys of the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_backends.cache import PagedCache, PagedKV
from attn_backends.contract.capabilities import Capabilities, LseBase, of_dense
from attn_backends.contract.kernel import Kernel, LayerShape, Scheduled
from attn_backends.errors import UnsupportedStepError
from attn_backends.layer import AttentionLayer, AttentionOutput, LatentQuery, joined
from attn_backends.selection import providers
from attn_backends.vendors import flash_attention_tiles as tiles
from attn_backends.vendors.flash_attention_tiles import MLA_SIZES, TileSchedule
from spec_metadata import StepKind
from spec_metadata.capacity import ceil_div
from spec_metadata.plans.ragged import RaggedPlan

TILE_ROWS, NUM_SMS = 128, 132  # of the kernel for keys and values, and of the H200 that it was measured on
_SIZES = frozenset({(64, 64), (128, 128), (256, 256), MLA_SIZES})
_UNIFORM = Capabilities(
    page_sizes=None,
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    head_sizes=_SIZES,
    non_causal=True,
    lse=LseBase.NATURAL,
    over_read=True,
    window=True,
)
CAPABILITIES = of_dense(_UNIFORM)
PREFILL_OF_LATENTS = replace(
    CAPABILITIES[StepKind.PREFILL],
    page_sizes=frozenset({32, 64}),
    head_sizes=frozenset({MLA_SIZES}),
    non_causal=False,
    graph=False,
    window=False,
)
_BFLOAT16 = frozenset({torch.bfloat16})
_SINKS: dict[str, Any] = {"sinks": True, "sink_types": _BFLOAT16, "most_sinks": 64, "sinks_in_lse": True}


@dataclass(frozen=True, slots=True)
class Source:
    """A package that has FlashAttention-3; its calls are those of its entry in `providers.VENDOR_KERNELS`.

    names: what it calls an argument that we call otherwise, None for one that it does not take. chosen: what else it
    must be given. missing: path of a text that says why it was built without the kernel, None if it was not. known: how
    versions begin whose scheduler metadata our planners write, empty if none does.
    """

    name: str
    names: Mapping[str, str | None]
    chosen: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    known: str = ""

    @property
    def prepare(self) -> str:
        """The path of its function that makes scheduler metadata; empty if it has none."""
        calls = providers.VENDOR_KERNELS[self.name].calls
        return calls[1].path if len(calls) > 1 else ""

    def split_along(self, planner: object, plan: RaggedPlan, shape: LayerShape, buffers: Mapping[str, Tensor]) -> bool:
        """As `split_along` of tiles, if the installed version's metadata is known."""
        version = providers.version_of(providers.VENDOR_KERNELS[self.name].distribution) or ""
        is_known = bool(self.known) and version.startswith(self.known)
        return is_known and tiles.split_along(self.prepare, planner, plan, shape, buffers)

    def call(self, index: int, arguments: Mapping[str, Any]) -> Any:
        """Call one of its functions under its own names of the arguments."""
        function = providers.load(providers.VENDOR_KERNELS[self.name].calls[index].path)
        named = {self.names.get(name, name): value for name, value in arguments.items()}
        return function(**{name: value for name, value in named.items() if name is not None})

    def unavailable_reasons(self, device: torch.device) -> list[str]:
        """Reasons why it can't run on a device."""
        reasons = providers.vendor_reasons(self.name)(device)
        if not reasons and self.missing and providers.load(self.missing) is not None:
            vendor = providers.VENDOR_KERNELS[self.name]
            reasons = [f"{vendor.distribution} has no FlashAttention-3: {providers.load(self.missing)}"]
        return reasons


_KVCACHE = {"k": "k_cache", "v": "v_cache", "q_v": "qv", "seqused_k": "cache_seqlens", "max_seqlen_k": None}
SOURCES = (
    Source("flash_attn_interface", _KVCACHE),
    Source("sgl_kernel", _KVCACHE),
    Source(
        "vllm_flash_attn",
        {"page_table": "block_table", "sinks": "s_aux"},
        {"fa_version": 3},
        "vllm.vllm_flash_attn.flash_attn_interface:FA3_UNAVAILABLE_REASON",
        "0.33.",
    ),
)


def kernels(capabilities: Mapping[StepKind, Capabilities]) -> tuple[Kernel[RaggedPlan], ...]:
    """The kernel from each package, best first, for some kinds of step."""
    return tuple(_kernel(source, capabilities) for source in SOURCES)


def _kernel(source: Source, capabilities: Mapping[StepKind, Capabilities]) -> Kernel[RaggedPlan]:
    if "sinks" in source.names:  # latents, over which it takes no window, have none
        capabilities = {kind: replace(able, **_SINKS) if able.window else able for kind, able in capabilities.items()}
    return Kernel(
        source.name,
        partial(_launch, source),
        capabilities,
        source.unavailable_reasons,
        architectures=frozenset({9}),
        source="flash_attention_3",
        schedule=partial(TileSchedule, source.prepare) if source.prepare else None,
        workspaces=(tiles.METADATA,) if source.prepare else (),
        along=source.split_along,
        takes_parts=True,
        slower_mixed=slower_mixed,
    )


def slower_mixed(layer: AttentionLayer, num_running: int, num_prompt_rows: int) -> str:
    """`Kernel.slower_mixed`. Packed rows get the tiles of the longest query.

    Chunks of 512 and 2,048 tokens ran beside decodes and verifies of 4, at 4,096 tokens, on an H200. Where the reason
    is empty, one step took 0.67 to 1.00 times as long as two, and elsewhere 0.90 to 1.21 times (mixed.json). Another
    GPU is judged as if it had the H200's 132 SMs.
    """
    if (layer.head_dim, layer.v_head_dim) == MLA_SIZES:
        rows = layer.num_heads * num_running
        return "" if rows >= 2048 else f"{rows} rows of heads are few for its tiles of prompts (it needs 2048)"
    running = layer.num_kv_heads * num_running
    tiles = running + ceil_div(num_prompt_rows * layer.num_heads, TILE_ROWS)
    if tiles <= NUM_SMS or 256 <= running <= 512:
        return ""
    return f"{tiles} tiles, {running} of them of running requests (it takes {NUM_SMS} in all, or 256 to 512 of these)"


def _launch(
    source: Source,
    q: Tensor | LatentQuery,
    cache: PagedCache,
    planned: RaggedPlan | Scheduled[RaggedPlan],
    layer: AttentionLayer,
) -> AttentionOutput:
    if isinstance(planned, Scheduled):
        assert isinstance(planned.schedule, TileSchedule)
        plan, metadata = planned.plan, planned.schedule.metadata
    else:
        plan, metadata = planned, None
    _check(source, cache, layer)
    if isinstance(cache, PagedKV):
        k, v, q_v, q = cache.k, cache.v, None, joined(q)
    else:
        latent = cache.latent.unsqueeze(2)
        k, v = latent[..., cache.rank :], latent[..., : cache.rank]
        q_v, q = q if isinstance(q, LatentQuery) else q.split((cache.rank, q.shape[-1] - cache.rank), dim=-1)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "q_v": q_v,
        "cu_seqlens_q": plan.cu_seqlens_q,
        "seqused_k": plan.seqused_k,
        "page_table": plan.page_table,
        "max_seqlen_q": plan.max_seqlen_q,
        "max_seqlen_k": plan.max_seqlen_k,
        "softmax_scale": layer.scale,
        "causal": tiles.is_causal(plan, layer.window),
        "window_size": tiles.window_of(plan, layer.window),
        "return_softmax_lse": True,
        **({} if metadata is None else {"scheduler_metadata": metadata}),
        **({} if layer.sinks is None else {"sinks": layer.sinks.contiguous()}),
        **source.chosen,
    }
    out, lse = source.call(0, arguments)[:2]
    return AttentionOutput(out, lse.transpose(0, 1))


def _check(source: Source, cache: PagedCache, layer: AttentionLayer) -> None:
    """Refuse sizes that go with the other cache format, which the capabilities of a kernel for both can't say."""
    sizes = (layer.head_dim, layer.v_head_dim)
    if isinstance(cache, PagedKV) == (sizes == MLA_SIZES):
        raise UnsupportedStepError(
            f"kernel {source.name} layer {layer.id}", [f"head sizes {sizes} in a cache of {cache.format} entries"]
        )
