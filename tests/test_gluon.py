"""Our kernels for Hopper: what can be said of them without one. Their numbers are the conformance suite's, on a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends.backends.dsv4 import DSV4Backend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.backends.flashinfer_mla import FlashInferMLABackend
from attn_backends.backends.trtllm_mla import TrtllmMLABackend
from attn_backends.kernels import paged_operators
from attn_backends.kernels.paged_operators import FEW_ROWS, latent_attention, paged_attention
from attn_backends.kernels.prefill_operator import prefill_attention
from attn_backends.kernels.sparse_operators import sparse_attention, sparse_attention_sm90
from attn_backends.layer import AttentionLayer
from attn_backends.selection import providers
from attn_backends.selection.choose import Workload, choose_kernels
from spec_metadata import StepKind
from tests.compressed_arguments import blocks_scene
from tests.gluon_compile import CASES, QUICK, compiled, fetch
from tests.gluon_compile import SIZES as COMPILED_SIZES
from tests.paged_arguments import FORMS, Sizes, arguments

BACKENDS = (FlashInferMLABackend, TrtllmMLABackend)
SIZES = Sizes(lens=(20, 5, 9), num_heads=2, num_kv_heads=1, dim=576, v_dim=512, latent=True)
CUDA = torch.device("cuda")

PRODUCTS = {
    576: ["m64n256k16", "m64n64k16"],
    512: ["m64n256k16", "m64n64k16"],
    256: ["m64n256k16", "m64n64k16"],
    192: ["m64n128k16"],
    128: ["m64n128k16"],
    64: ["m64n128k16", "m64n64k16"],
}


@pytest.fixture(scope="module")
def gluon_triton(pytestconfig: pytest.Config) -> Path:
    """The triton that our Gluon kernels are for, kept with pytest's cache; it fails where there is none."""
    return fetch(pytestconfig.cache.mkdir("gluon"))


OTHERS = pytest.param([name for name in CASES if name not in QUICK], marks=pytest.mark.full, id="others")


@pytest.mark.parametrize("names", [pytest.param(list(QUICK), id="quick"), OTHERS])
def test_a_kernel_compiles_for_hopper_once_and_without_spills(names, gluon_triton, tmp_path):
    """One kernel for all batches and widths of a type, page size and form: no later step compiles."""
    for name, found in compiled(names, gluon_triton, tmp_path).items():
        print(f"{name}: {found}")  # seconds among it, which depend on the machine
        case = CASES[name]
        assert found["triton"].startswith(f"{providers.GLUON_TRITON}."), name
        assert (found["STACK"], found["LOCAL"]) == (0, 0), f"{name} spilled"
        assert found["variants"] == found["forms"], f"{name} is compiled anew for other batches"
        assert found["forms"] == 1 or case.dim == 576, f"{name} has a form for each width of prompts"
        assert found["plain"], f"{name}: no launch by the driver"
        assert found["shared"] <= 227 * 1024, name
        assert 32 * found["num_warps"] * found["REG"] <= 2**16, name
        assert found["products"] == PRODUCTS[case.dim], name
        assert 0 < found["merges"] < len(COMPILED_SIZES) or case.dim < 512, (
            "no request's keys were divided, or all were"
        )


def test_a_triton_that_cannot_be_fetched_is_said_in_words(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"pip could not fetch triton 3\.6, .* is the package registry reached"):
        fetch(tmp_path)
    assert not list(tmp_path.iterdir())


def runs_with(triton: str, capability: tuple[int, int] = (9, 0)) -> bool:
    """Whether it runs on a GPU with a version of Triton; if not, it says what it needs and what is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(providers, "version_of", lambda distribution: triton)
        reasons = providers.runs_on_gluon(CUDA)
    allowed = ["needs SM90; this GPU is SM", f"needs the Gluon of triton {providers.GLUON_TRITON}"]
    assert all(reason.startswith(tuple(allowed)) for reason in reasons)
    return not reasons


def test_where_it_runs():
    assert runs_with("3.6.0")
    assert runs_with("3.6.1+git")
    assert not runs_with("3.60.0")
    assert not runs_with("3.9.0")
    assert not runs_with("3.6.0", (10, 0))
    assert not runs_with("3.6.0", (8, 9))
    assert providers.runs_on_gluon(torch.device("cpu")) == ["runs on CUDA devices, not on cpu"]


@pytest.mark.parametrize(("backend", "name"), [*((each, "gluon") for each in BACKENDS), (FA3Backend, "gluon_mla")])
def test_it_comes_before_triton_and_takes_what_it_declares(backend, name):
    names = [kernel.name for kernel in backend.kernels]
    assert names[-3:] == [name, "triton", "torch"]
    gluon, triton, _ = backend.kernels[-3:]
    assert gluon.capabilities.keys() == triton.capabilities.keys()
    layer = AttentionLayer(0, 128, 1, 576, 512, 0.1, k_scale=0.5, v_scale=0.5)
    for kind, able in gluon.capabilities.items():
        alike: dict[str, Any] = {"dtypes": frozenset(), "cache_dtypes": frozenset()}
        alike |= {"window": False, "tree_window": False, "sinks": False}
        assert replace(able, head_sizes=None, **alike) == replace(triton.capabilities[kind], **alike)
        for dtype in (torch.bfloat16, torch.float16):
            assert able.layer_reasons(layer, dtype, dtype) == []
            assert able.layer_reasons(layer, dtype, torch.float8_e4m3fn) == []
            assert able.layer_reasons(replace(layer, head_dim=320, v_head_dim=256), dtype, dtype)
        assert able.layer_reasons(layer, torch.float32, torch.float32)


def test_of_keys_and_values_it_takes_prompts():
    *_, gluon, _, triton, _ = FA3Backend.kernels
    assert (gluon.name, triton.name, set(gluon.capabilities)) == ("gluon", "triton", {StepKind.PREFILL})
    able = gluon.capabilities[StepKind.PREFILL]
    layer = AttentionLayer(0, 32, 8, 128, 128, 0.1, k_scale=0.5, v_scale=0.5)
    assert able.layer_reasons(layer, torch.bfloat16, torch.bfloat16) == []
    for other in (replace(layer, window=64), replace(layer, sinks=torch.zeros(32)), replace(layer, head_dim=96)):
        assert able.layer_reasons(other, torch.bfloat16, torch.bfloat16)
    assert able.layer_reasons(replace(layer, head_dim=192), torch.bfloat16, torch.bfloat16) == []
    assert able.layer_reasons(layer, torch.bfloat16, torch.float8_e4m3fn) == []


def latents(form: str, causal: bool = True, dtype: torch.dtype = torch.bfloat16) -> list:
    """The arguments of `latent_attention`, dense: of each, whose elements lie apart, a copy."""
    q, k, _, *given = arguments(SIZES, form, causal, dtype)
    return [q.contiguous(), k.squeeze(2).contiguous(), *given]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=str)
def test_the_operator_is_attention_over_one_kv_head(form, dtype, cache):
    q, entries, *given = latents(form, form != "csr", dtype)
    entries = entries.to(cache or dtype)
    pages = entries.unsqueeze(2)
    torch.testing.assert_close(
        latent_attention(q, entries, *given), paged_attention(q, pages, pages[..., :512], *given), rtol=0, atol=0
    )


def test_opcheck():
    given = [x.nan_to_num() if torch.is_tensor(x) and x.is_floating_point() else x for x in latents("csr")]
    operator = torch.ops.attn_backends.latent_attention.default
    assert set(torch.library.opcheck(operator, tuple(given)).values()) == {"SUCCESS"}
    assert [each.name for each in operator._schema.arguments if each.is_write] == ["partial_out", "partial_lse"]


def sparse(num_heads: int = 3, *, bytes: bool = True) -> list:
    """The arguments of `sparse_attention_sm90`."""
    q, sources = blocks_scene(num_heads, bytes=bytes)
    return [q, *sources, 0.1, torch.randn(num_heads)]


@pytest.mark.parametrize("bytes", [False, True], ids=["bfloat16", "bytes"])
def test_the_sparse_operator_is_attention_over_slots(bytes):
    q, rows, entries, *rest = sparse(bytes=bytes)
    for given in ([q, rows, entries, *rest], [q, rows, None, *rest]):
        torch.testing.assert_close(sparse_attention_sm90(*given), sparse_attention(*given), rtol=0, atol=0)


def test_opcheck_of_the_sparse_operator():
    q, rows, entries, *rest = sparse()
    operator = torch.ops.attn_backends.sparse_attention_sm90.default
    assert set(torch.library.opcheck(operator, (q, *rows, *entries, *rest)).values()) == {"SUCCESS"}


def test_sparse_rows_that_do_not_fit_are_refused():
    q, rows, entries, *rest = sparse()
    floats = sparse(bytes=False)
    apart = torch.zeros(5, rows.pages.shape[1] + 8, dtype=torch.uint8)[:, : rows.pages.shape[1]]
    for wrong in (
        [q.half(), rows, entries, *rest],
        [q, rows._replace(pages=apart), entries, *rest],
        [floats[0][..., :40], *(each._replace(pages=each.pages[..., :40]) for each in floats[1:3]), *rest],
        [floats[0], *(each._replace(pages=each.pages.half()) for each in floats[1:3]), *rest],
    ):
        with pytest.raises(ValueError, match=r"sparse_attention_sm90: .* do not fit together; needed are q"):
            sparse_attention_sm90(*wrong)


def test_auto_takes_sparse_rows_where_it_knows_the_layers():
    names = [kernel.name for kernel in DSV4Backend.kernels]
    assert names == ["flashmla_sparse", "gluon", "triton", "torch"]
    layer = AttentionLayer(0, 128, 1, 512, 512, 0.1, window=128, sinks=torch.zeros(128))
    ours = [replace(kernel, unavailable_reasons=lambda device: []) for kernel in DSV4Backend.kernels[1:]]
    for cache in (torch.bfloat16, torch.float8_e4m3fn):
        workload = Workload(256, [layer], torch.bfloat16, cache)
        for kind, chosen in choose_kernels("dsv4", ours, "auto", CUDA, workload).items():
            assert (chosen.kernel.name, chosen.passed_over) == ("gluon", ()), kind
        for chosen in choose_kernels("dsv4", ours, "gluon", CUDA, workload).values():
            assert (chosen.kernel.name, chosen.passed_over) == ("gluon", ())
    unknown = choose_kernels("dsv4", ours, "auto", CUDA, Workload(256))[StepKind.DECODE]
    assert unknown.kernel.name == "triton"
    able = ours[0].by_name().capabilities[StepKind.DECODE]
    assert able.layer_reasons(layer, torch.float16, torch.float16)
    assert able.layer_reasons(replace(layer, head_dim=256, v_head_dim=256), torch.bfloat16, torch.bfloat16)


UNFIT = {
    "elements": (0, lambda q: q[..., 1:]),
    "type": (0, lambda q: q.half()),
    "8 bits of another format": (1, lambda entries: entries.to(torch.float8_e5m2)),
    "strided elements": (0, lambda q: q.repeat_interleave(2, dim=2)[..., ::2]),
    "strides of 8": (1, lambda entries: torch.zeros(9, 4, 584, dtype=entries.dtype)[..., :576]),
    "address": (1, lambda entries: torch.zeros(9, 4, 592, dtype=entries.dtype)[..., 1:577]),
    "dimensions": (1, lambda entries: entries.unsqueeze(2)),
}


@pytest.mark.parametrize(("position", "wrong"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused(position, wrong):
    given = latents("csr")
    given[position] = wrong(given[position])
    with pytest.raises(ValueError, match=r"do not fit together; needed are q \[num_tokens, num_heads, 576\]"):
        latent_attention(*given)


def test_float32_is_refused():
    with pytest.raises(ValueError, match="both bfloat16 or float16"):
        latent_attention(*latents("csr", dtype=torch.float32))


def test_few_rows_of_a_request_run_on_triton(monkeypatch):
    """Query rows times heads: most of a tile would be empty."""
    ran = []
    gluon = SimpleNamespace(latent_attention=lambda q, *given: ran.append(("gluon", q.shape[0])))
    monkeypatch.setitem(sys.modules, "attn_backends.kernels.gluon_mla", gluon)
    monkeypatch.setattr(paged_operators, "paged_attention", lambda q, *given: ran.append(("triton", q.shape[0])))
    for width in (FEW_ROWS // 2, FEW_ROWS // 2 + 1):
        q, entries, *given = latents("block table")
        given[4], q = width, q[:1].repeat(3 * width, 1, 1)
        paged_operators._latent_attention_cuda(q, entries, *given)
    assert ran == [("triton", 3 * FEW_ROWS // 2), ("gluon", 3 * FEW_ROWS // 2 + 3)]


def test_a_misfit_of_lists_does_not_reach_the_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "attn_backends.kernels.gluon_mla", SimpleNamespace())
    q, entries, *given = latents("csr")
    given[3] = given[3].long()
    with pytest.raises(ValueError, match="dense int32 lists"):
        paged_operators._latent_attention_cuda(q.repeat(1, FEW_ROWS, 1), entries, *given)


def test_auto_passes_it_over_in_words(monkeypatch):
    """`info` and `backend.choices` say why: here another Triton."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(providers, "version_of", lambda distribution: "3.9.0")
    ours = TrtllmMLABackend.kernels[-3:]
    choice = choose_kernels("trtllm_mla", ours, "auto", CUDA, Workload(64))[StepKind.DECODE]
    assert choice.kernel.name == "triton"
    assert choice.passed_over == ("gluon: needs the Gluon of triton 3.6, which no other version keeps; this is 3.9.0",)
    monkeypatch.setattr(providers, "version_of", lambda distribution: "3.6.0")
    choice = choose_kernels("trtllm_mla", ours, "auto", CUDA, Workload(64))[StepKind.DECODE]
    assert choice.kernel.name == "gluon"


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_takes_it_for_8_bit_latents_too(backend):
    layer = AttentionLayer(0, 128, 1, 576, 512, 0.1, k_scale=0.5, v_scale=0.5)
    workload = Workload(64, [layer], torch.bfloat16, torch.float8_e4m3fn)
    ours = [replace(kernel, unavailable_reasons=lambda device: []) for kernel in backend.kernels[-3:]]
    for each in (workload, replace(workload, cache_dtype=None)):
        chosen = choose_kernels("mine", ours, "auto", CUDA, each)[StepKind.DECODE]
        assert (chosen.kernel.name, chosen.passed_over) == ("gluon", ())


def test_fa3_reads_latents_on_gluon_where_layers_say_that_they_are():
    """And keys and values on Triton, as it does where no layers are named."""
    ours = [replace(kernel, unavailable_reasons=lambda device: []) for kernel in FA3Backend.kernels[-4:]]
    mla, gqa = AttentionLayer(0, 128, 1, 576, 512, 0.1), AttentionLayer(0, 32, 8, 128, 128, 0.1)
    workloads = {"mla": Workload(64, [mla], torch.bfloat16), "gqa": Workload(64, [gqa], torch.bfloat16)}
    workloads |= {"unknown": Workload(64), "untyped": Workload(64, [mla])}
    found = {name: choose_kernels("fa3", ours, "auto", CUDA, workload) for name, workload in workloads.items()}
    of_decode = {name: chosen[StepKind.DECODE].kernel.name for name, chosen in found.items()}
    assert of_decode == {"mla": "gluon_mla", "gqa": "triton", "unknown": "triton", "untyped": "triton"}
    assert found["mla"][StepKind.PREFILL].kernel.name == "gluon_mla"
    assert found["gqa"][StepKind.PREFILL].kernel.name == "gluon"
    (said,) = found["unknown"][StepKind.DECODE].passed_over
    assert said == "gluon_mla: takes some of the backend's layers and caches alone, and no layers of a type are named"
    by_name = choose_kernels("fa3", ours, "gluon_mla", CUDA, Workload(64))[StepKind.DECODE]
    assert (by_name.kernel.name, by_name.passed_over) == ("gluon_mla", ())


PROMPTS = Sizes(lens=(90, 70, 130), num_heads=4, num_kv_heads=2, dim=64, v_dim=64)


def prompts(form: str, causal: bool = True) -> list:
    """The arguments of `prefill_attention`, dense: of each, whose elements lie apart, a copy."""
    q, k, v, *given = arguments(PROMPTS, form, causal, torch.bfloat16)
    return [q.contiguous(), k.contiguous(), v.contiguous(), *given]


@pytest.mark.parametrize("form", FORMS)
def test_the_operator_of_prompts_is_attention_over_pages(form):
    given = prompts(form, form != "csr")
    torch.testing.assert_close(prefill_attention(*given), paged_attention(*given), rtol=0, atol=0)


def test_the_operator_of_prompts_refuses_what_it_would_misread():
    q, k, v, *given = prompts(FORMS[0])
    apart = torch.zeros(*k.shape[:-1], 2 * k.shape[-1], dtype=k.dtype)[..., ::2]
    for wrong in ((q, k.float(), v.float()), (q, apart, v), (q[..., :32].contiguous(), k, v), (q.float(), k, v)):
        with pytest.raises(ValueError, match="do not fit together; needed are q"):
            prefill_attention(*wrong, *given)
