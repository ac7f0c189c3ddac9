"""A target and a draft as a worker sees them: tokens in, hidden states out, attention passed in.

transformers' models hold the weights and compute everything but attention, by their own forward: of targets that of
the whole model, of drafts that of its layers. It has fixed shapes and reads nothing on the host, so it can be recorded
into a graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from attn_backends.backend import AttentionBackend
from attn_backends.cache import CacheFormat, PagedCache, PagedKV, PagedLatent, allocate_caches
from attn_backends.compressed_cache import CompressedFormat, allocate_compressed
from attn_backends.compressed_layer import CompressedLayer
from attn_backends.errors import CheckpointError, UnsupportedStepError
from attn_backends.layer import AttentionLayer
from attn_backends_reference.models.attention import Attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attn_backends.backends.dsv4 import DSV4Backend
    from attn_backends_reference.models.deepseek_v4_mtp import V4Mtp
    from attn_backends_reference.models.draft import DraftHead, EagleDraft
    from attn_backends_reference.models.eagle1 import Eagle1Draft
    from attn_backends_reference.models.eagle3 import Eagle3Draft


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture that can be served.

    architecture, draft_architecture, mtp_architecture: as config.json names them; the last two are None if its EAGLE
    drafts of our own or MTP modules can't be loaded. cache_format: what its attention layers store. attach: make
    transformers' decoder layers of a configuration attend through an `Attention` passed as `attention=`; returns their
    attention layers. target, draft: the classes of its models. renamed: whether checkpoints name tensors otherwise than
    transformers' modules, experts aside. experts: how they name an MLP of experts, and an expert's gate, up and down
    projections; None if they hold those of all experts together.
    """

    architecture: str
    draft_architecture: str | None
    cache_format: CacheFormat | CompressedFormat
    attach: Callable[[Iterable[Any], Any], tuple[AttentionLayer, ...]]
    target: type[TargetModel]
    draft: type[EagleDraft]
    mtp_architecture: str | None = None
    renamed: bool = False
    experts: tuple[str, str, str, str] | None = ("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class MultimodalRows:
    """Embeddings that came with a prompt, such as those of an image. multimodal_embeddings: [T, hidden_size] in the
    model's dtype. is_multimodal: [T] bool, the rows that take them; of the others they mean nothing.
    """

    multimodal_embeddings: Tensor
    is_multimodal: Tensor


class PagedModel:
    """Base of targets and drafts: attention layers over a paged cache, an embedding and an output head."""

    def __init__(
        self, family: Family, config: Any, blocks: Iterable[Any], embedding: nn.Embedding, head: nn.Linear
    ) -> None:
        self.family = family
        self.layers: tuple[AttentionLayer, ...] = family.attach(blocks, config)
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self.embedding = embedding
        self.head = head

    @property
    def cache_format(self) -> CacheFormat | CompressedFormat:
        """The format of the layers' caches."""
        return self.family.cache_format

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and hidden states."""
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.head.weight.device

    def allocate_caches(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> list[PagedCache]:
        """A zeroed cache for each attention layer as the backend pages it. dtype: of entries, None for the model's.
        Raises `MemoryLimitError`, before any is allocated, where not all of them fit, and `UnsupportedStepError` for a
        format that the backend does not take.
        """
        if self.cache_format not in backend.formats:
            takes = f"{backend.name} takes {' or '.join(sorted(backend.formats))}"
            raise UnsupportedStepError(f"a cache of {self.cache_format}", [takes], "another backend")

        def make(device: torch.device) -> list[PagedCache]:
            return [self._allocate_cache(layer, backend, dtype or self.dtype, device) for layer in self.layers]

        return allocate_caches(backend.geometry, make, self.device)

    def cache_bytes(self, backend: AttentionBackend, dtype: torch.dtype) -> int:
        """Bytes that `allocate_caches` would take."""
        meta = torch.device("meta")
        return sum(self._allocate_cache(layer, backend, dtype, meta).num_bytes for layer in self.layers)

    def embed(self, tokens: Tensor, multimodal: MultimodalRows | None) -> Tensor:
        """[T, hidden_size], what rows begin with: the embeddings of their tokens, or those given in place of them.

        tokens: [T] int64.
        """
        own = self.embedding(tokens)
        if multimodal is None:
            return own
        return torch.where(multimodal.is_multimodal.unsqueeze(1), multimodal.multimodal_embeddings, own)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, [T, vocab_size] in the model's dtype. hidden: [T, hidden_size]."""
        return self.head(hidden)

    def _allocate_cache(
        self, layer: AttentionLayer, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ) -> PagedCache:
        geometry = backend.geometry
        if isinstance(layer, CompressedLayer):
            ring = cast("DSV4Backend", backend).ring(layer)
            return cast("PagedCache", allocate_compressed(geometry, layer, ring, dtype, device))
        size = geometry.num_pages, geometry.page_size
        if self.cache_format is CacheFormat.LATENT:
            return PagedLatent(torch.zeros(*size, layer.head_dim, dtype=dtype, device=device), layer.v_head_dim)
        heads = layer.num_kv_heads, layer.head_dim
        return PagedKV(*(torch.zeros(*size, *heads, dtype=dtype, device=device) for _ in range(2)))


class TargetModel(PagedModel):
    """A causal language model of a family. Takes over `model`, a transformers model whose attention it replaces.

    eos_token_ids: the end-of-text tokens that its folder names, beside its tokenizer's.
    """

    feature_layers: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, family: Family, model: PreTrainedModel) -> None:
        from attn_backends_reference.models.interface import IMPLEMENTATION

        model.eval().requires_grad_(False)
        model.set_attn_implementation(IMPLEMENTATION)
        model.set_experts_implementation(IMPLEMENTATION)
        self._decoder: Any = model.get_decoder()
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        super().__init__(family, model.config, self._decoder.layers, embedding, head)

    def tapped(self, layers: Sequence[int]) -> TargetModel:
        """This model, whose features are the hidden states after some of its layers, side by side; none for the last
        one after the final norm.
        """
        tapped = copy.copy(self)
        tapped.feature_layers = tuple(layers)
        return tapped

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, hidden_size] after the final norm. tokens, positions: [T] int64."""
        return self.forward_features(tokens, positions, attention)[0]

    def forward_features(
        self, tokens: Tensor, positions: Tensor, attention: Attention, multimodal: MultimodalRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states as `forward` gives, and features [T, F], what a draft takes of them (see `tapped`).

        multimodal: what takes the place of the embeddings of some tokens.
        """
        rows = {"input_ids": tokens} if multimodal is None else {"inputs_embeds": self.embed(tokens, multimodal)}
        batched = {name: value.unsqueeze(0) for name, value in (rows | {"position_ids": positions}).items()}
        with _outputs([self._decoder.layers[index] for index in self.feature_layers]) as taken:
            hidden = self._decoder(**batched, use_cache=False, attention=attention).last_hidden_state.squeeze(0)
        return hidden, torch.cat(taken, dim=-1) if taken else hidden


@contextmanager
def _outputs(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """What decoder layers return from now on, in the order in which they run: [T, ...] flattened to [T, F]."""
    taken: list[Tensor] = []

    def take(layer: nn.Module, inputs: object, output: Tensor) -> None:
        taken.append(output.squeeze(0).flatten(1))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(take).remove)
        yield taken


class DraftModel(PagedModel):
    """A draft of a target, with the target's embedding and output head: an EAGLE draft, or one MTP module.

    Takes over `draft`, which must have its target's dtype and device (`CheckpointError`). family: of its attention, the
    target's if None. feature_layers, feature_size: which features of its target it takes (`TargetModel.tapped`), and
    how many columns they have. target_hidden_size: columns of a hidden state of its target. has_own_cache: whether its
    cache may be of another format than its target's.
    """

    feature_layers: tuple[int, ...] = ()
    has_own_cache: bool = False

    def __init__(
        self, draft: DraftHead | Eagle1Draft | Eagle3Draft | V4Mtp, target: TargetModel, family: Family | None = None
    ) -> None:
        draft.eval().requires_grad_(False)
        weight = next(draft.parameters())
        if (weight.dtype, weight.device) != (target.dtype, target.device):
            raise CheckpointError(
                f"a draft's weights are {weight.dtype} on {weight.device}, its target's {target.dtype} on "
                f"{target.device}; both must be the same: draft.to({target.dtype}) changes them, draft.to(device) moves"
            )
        super().__init__(family or target.family, draft.config, draft.layers, target.embedding, target.head)
        self._draft, self.has_own_cache = draft, family is not None
        self.feature_size = self.target_hidden_size = self.hidden_size

    def misfits(self, target: TargetModel) -> list[str]:
        """The reasons why it can't draft for a target; empty if it can. A family of its own has its own cache."""
        own_cache = (self.cache_format, self.cache_format if self.has_own_cache else target.cache_format)
        of_models = {
            "cache format": own_cache,
            "hidden size": (self.target_hidden_size, target.hidden_size),
            "vocabulary": (self.vocab_size, target.vocab_size),
            "dtype": (self.dtype, target.dtype),
            "device": (self.device, target.device),
        }
        return [
            f"a draft of {what} {own} (the target's is {its})" for what, (own, its) in of_models.items() if own != its
        ]

    def fuse(self, features: Tensor) -> Tensor:
        """The `hidden` of `forward`, [T, hidden_size], from the target's features of the rows, [T, feature_size]."""
        return features

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of those that `logits` scores, in any shape."""
        return ids

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attention: Attention,
        multimodal: MultimodalRows | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden_size], both what `logits` reads and the `hidden` of the next drafted rows.

        tokens: [T] int64, the token after each row's position; of MTP module k the one k positions further. hidden:
        [T, hidden_size], the target's at the row's position (`fuse`), the parent row's own output, or that of the MTP
        module before at the same row. positions: [T] int64. multimodal: what takes the place of the embeddings of some
        tokens, the target's own input there.
        """
        embeds = self.embed(tokens, multimodal).unsqueeze(0)
        rows = self._draft(embeds, hidden.unsqueeze(0), positions.unsqueeze(0), attention=attention)
        return rows.squeeze(0)
