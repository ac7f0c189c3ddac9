"""Packages that SGLang imports and a text model does not need: any of their names imports, and raises when called.

A sitecustomize, because SGLang's processes are to have them too.
"""

import importlib.abc
import importlib.machinery
import sys
import types

from sgl_missing import Missing

STUBBED = ("torchvision", "torchaudio")


class Stub(types.ModuleType):
    """A package of which nothing is there."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


def asked_whether_installed():
    """Whether it is importlib.util.find_spec that looks: these packages are not installed."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("importlib/util.py") or "importlib.util" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them as empty packages."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STUBBED and not asked_whether_installed():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Stub(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
