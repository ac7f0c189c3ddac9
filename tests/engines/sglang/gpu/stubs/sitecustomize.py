"""Packages that SGLang imports at its start and that our engines never call, where they are not installed.

A sitecustomize, because SGLang's processes are to have them too. Any name of them imports. To call one raises, but for
those in DECORATES, which SGLang's modules define kernels by when they are imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

FLASH_ATTENTION = "sgl_kernel.flash_ops"  # which is not carried: vLLM's build takes its place
DECORATES = ("cutlass",)
STUBBED = tuple(name for name in ("IPython", "flash_mla", *DECORATES) if importlib.util.find_spec(name) is None)


class Missing:
    """An attribute of a package that isn't there."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = self._name = name

    def __call__(self, *arguments, **named):
        if self._name.partition(".")[0] not in DECORATES:
            raise NotImplementedError(f"{self._name} is not installed here")
        decorated = len(arguments) == 1 and not named and callable(arguments[0])
        return arguments[0] if decorated else Missing(f"{self._name}()")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __or__


class Stub(types.ModuleType):
    """A package of which nothing is there."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


def imported_by_sglang():
    """Whether the import stands in a module of SGLang's. Others, such as FlashInfer, try these and go on without."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sglang"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them as empty packages."""

    def find_spec(self, name, path=None, target=None):
        if name == FLASH_ATTENTION:
            return importlib.machinery.ModuleSpec(name, self)
        if name.partition(".")[0] in STUBBED and imported_by_sglang():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        if module.__name__ == FLASH_ATTENTION:
            from tests.engines.sglang.gpu import fa3_of_vllm

            fa3_of_vllm.install()


sys.meta_path.append(Finder())
