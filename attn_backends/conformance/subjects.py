"""Subjects of a run: a backend by name, as a class, an instance or a factory, and its kernels that run here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from attn_backends.backend import AttentionBackend
from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.compressed_worlds import is_compressed
from attn_backends.conformance.exercise import setup_of, world_of
from attn_backends.conformance.foreign import foreign_backend
from attn_backends.conformance.foreign.driver import ForeignBackend, exemptions
from attn_backends.conformance.outcomes import Outcome, Row
from attn_backends.contract import CONTRACT
from attn_backends.contract.kernel import Kernel
from attn_backends.errors import BackendUnavailableError, UnsupportedStepError
from attn_backends.registry import get_backend, list_backends
from spec_metadata import CacheGeometry, Capacity

PAGE = 256  # a multiple of what any backend asks for

Backend = str | type[AttentionBackend] | AttentionBackend | Callable[..., AttentionBackend]
"""A registered name, another project's (`foreign.FOREIGN`) or module:Class, a class, an instance, or a factory:
(capacity, geometry, device, **options), of the same options as `AttentionBackend`.
"""


def resolve(backend: Backend) -> type[AttentionBackend]:
    """The class of a backend; of an instance or a factory, one that is made as that was. Refuses what is none."""
    if isinstance(backend, str):
        return foreign_backend(backend) or get_backend(backend)
    if inspect.isclass(backend) and issubclass(backend, AttentionBackend):
        return backend
    if isinstance(backend, AttentionBackend):
        return _with_options(type(backend), _own_options(backend))
    if isinstance(backend, partial) and inspect.isclass(backend.func) and issubclass(backend.func, AttentionBackend):
        return _with_options(backend.func, backend.keywords)
    if callable(backend) and not inspect.isclass(backend):
        return _of_factory(backend)
    raise BackendUnavailableError(
        f"backend {backend!r}",
        ["it is no subclass of attn_backends.AttentionBackend, no instance of one, and no factory of them"],
    )


def _with_options(backend: type[AttentionBackend], options: Mapping[str, Any]) -> type[AttentionBackend]:
    """A backend whose constructor is given further arguments by name."""
    if not options:
        return backend

    def made(self: Any, *args: Any, **given: Any) -> None:
        backend.__init__(self, *args, **{**options, **given})

    return type(backend.__name__, (backend,), {"__init__": made, "__module__": backend.__module__})


def _own_options(backend: AttentionBackend) -> dict[str, Any]:
    """The arguments that a backend's constructor takes beyond those of `AttentionBackend`, from its attributes of the
    same names.
    """
    common = inspect.signature(AttentionBackend.__init__).parameters
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    asked = inspect.signature(type(backend).__init__).parameters.values()
    own = [each.name for each in asked if each.kind in named and each.name not in common]
    if missing := [name for name in own if not hasattr(backend, name)]:
        raise BackendUnavailableError(
            f"an instance of {type(backend).__name__}",
            [f"its constructor takes {', '.join(missing)}, and it has no attribute of that name to make more like it"],
            "Keep what it is given under the same name, or pass a factory: (capacity, geometry, device, **options).",
        )
    return {name: getattr(backend, name) for name in own}


def _of_factory(factory: Callable[..., Any]) -> type[AttentionBackend]:
    """The class of what a factory makes, whose instances it makes."""
    made = factory(Capacity(1, PAGE, PAGE), CacheGeometry(2, PAGE), "cpu")
    if not isinstance(made, AttentionBackend):
        reason = f"it made a {type(made).__name__}, not a backend"
        raise BackendUnavailableError(f"factory {factory!r}", [reason])
    if is_compressed(type(made)):
        reason = "the suite runs compressed keys in a subclass of their backend, with a smaller window and ratios"
        raise BackendUnavailableError(
            f"factory {factory!r}", [reason], "Give it the class, or a functools.partial of it."
        )
    backend: Any = type(made)

    def make(cls: type, *args: Any, **given: Any) -> Any:
        return factory(*args, **given)

    return type(backend.__name__, (backend,), {"__new__": make, "__module__": backend.__module__})


def resolve_subjects(backend: Backend, kernel: str = "auto", device: str = "cpu") -> tuple[list[Subject], list[Row]]:
    """The kernels of a backend that run here, and a not_run row for each that does not. "auto" asks for all of them. Of
    a backend of another contract none runs.
    """
    found, place = resolve(backend), torch.device(device)
    known = {each.name: each for each in found.kernels}
    if kernel not in ("auto", *known):
        raise BackendUnavailableError(
            f"{found.name} kernel {kernel!r}", ["unknown name"], f"It has {', '.join(known)}."
        )
    asked = found.kernels if kernel == "auto" else (known[kernel],)
    if other := _contract_reason(found):
        return [], [Row(found.name, each.name, "*", None, "", Outcome.NOT_RUN, other) for each in asked]
    reasons = {each.name: each.unavailable_reasons(place) for each in asked}
    subjects = [Subject(found, each.name, device) for each in asked if not reasons[each.name]]
    ran = {known[subject.kernel].source for subject in subjects} - {""}
    absent = []
    for each in (each for each in asked if reasons[each.name]):
        excused = not _is_built_for(each, place) or each.source in ran
        reason = "; ".join(reasons[each.name])
        absent.append(Row(found.name, each.name, "*", None, "", Outcome.NOT_RUN, reason, excused=excused))
    absent += [
        Row(found.name, subject.kernel, ", ".join(each.checks), None, "", Outcome.NOT_RUN, each.reason, excused=True)
        for subject in subjects
        for each in exemptions(found)
    ]
    return subjects, absent


def _contract_reason(backend: type[AttentionBackend]) -> str:
    """Why a backend's contract, its class attribute `contract`, is not that of the suite; empty if it is, or if it
    declares none.
    """
    declared: str = getattr(backend, "contract", CONTRACT)
    if declared.partition(".")[0] == CONTRACT.partition(".")[0]:
        return ""
    return (
        f"it declares contract {declared}, and this suite checks contract {CONTRACT}: docs/contract.md lists "
        "the promises that changed"
    )


def check_constructor(subject: Subject, cases: Sequence[Case]) -> None:
    """Refuse a backend that can't even be made; a foreign one is made in its own process, where its cases report it."""
    here = cases[:1] if not issubclass(subject.backend, ForeignBackend) else ()
    try:
        for case in here:
            world_of(setup_of(subject, case))
    except UnsupportedStepError:  # of that case, whose row says so
        return
    except Exception as error:
        reason = f"its constructor raised {type(error).__name__}: {error}"
        hint = f"Backends here: {', '.join(list_backends())}."
        raise BackendUnavailableError(f"backend {subject.backend.name!r}", [reason], hint) from error


def _is_built_for(kernel: Kernel[Any], device: torch.device) -> bool:
    """Whether a device is of an architecture that a kernel was built for, present or not."""
    if not kernel.architectures:
        return True
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] in kernel.architectures
