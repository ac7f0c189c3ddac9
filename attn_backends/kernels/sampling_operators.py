"""The target's choice at every row as an operator of `torch.library`: `attn_backends::choose`.

`spec_metadata.choose` is the definition. It sorts the vocabulary of every row; here a row that is greedy costs an
argmax, told on the device, so that one graph serves greedy, sampled and mixed batches. On a CPU the other rows take the
definition, on a GPU one Triton launch that does not sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

import spec_metadata
from attn_backends.kernels.devices import on_its_device
from spec_metadata import SamplingParams
from spec_metadata.sampling import check_rows

_library = torch.library.Library("attn_backends", "FRAGMENT")
_library.define(
    "choose(Tensor logits, Tensor positions, Tensor temperature, Tensor top_p, Tensor top_k, Tensor seed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def choose(logits: Tensor, params: SamplingParams, positions: Tensor) -> Tensor:
    """`spec_metadata.choose`: [bs, width] int64, with its filters, its noise and its errors.

    On a GPU the kept tokens are the definition's, those of equal logits included, but for rounding where a token ends
    the mass of top_p. Races are run in float32: where two finish within its rounding, and by chance only there, another
    one may win than in float64. Logits in float64 take the definition.
    """
    check_rows(logits, params, positions)
    given = (params.temperature, params.top_p, params.top_k, params.seed)
    chosen: Tensor = torch.ops.attn_backends.choose(logits, positions, *given)
    return chosen


def _choose_cpu(
    logits: Tensor, positions: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor
) -> Tensor:
    tokens = logits.argmax(dim=-1)
    sampled = (temperature > 0).nonzero().squeeze(1)
    if len(sampled) > 0:
        params = SamplingParams(temperature[sampled], top_p[sampled], top_k[sampled], seed[sampled])
        tokens[sampled] = spec_metadata.choose(logits[sampled], params, positions[sampled])
    return tokens


@on_its_device
def _choose_cuda(
    logits: Tensor, positions: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, seed: Tensor
) -> Tensor:
    from attn_backends.kernels import triton_sampling

    params = SamplingParams(temperature, top_p, top_k, seed)
    if logits.dtype is torch.float64:
        return spec_metadata.choose(logits, params, positions)
    tokens = logits.argmax(dim=-1)
    triton_sampling.sample(logits, params, positions, tokens)
    return tokens


_library.impl("choose", _choose_cpu, "CPU")
_library.impl("choose", _choose_cuda, "CUDA")
torch.library.register_fake(
    "attn_backends::choose", lambda logits, positions, *_: positions.new_empty(positions.shape), lib=_library
)
