"""Lets a released SGLang run where it has no GPU: on the PYTHONPATH of the server, Python imports this before all else.

It owns stand-ins for what SGLang imports and the CPU path never calls, and nothing else: the server's processes,
signals, exit statuses, health states and log lines are SGLang's own.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# Compiled packages for a GPU. torchvision has CPU builds too, but the one that registries give does not load beside a
# CPU build of torch ("operator torchvision::nms does not exist").
ABSENT = ("sgl_kernel", "torchvision")
AUTO_CONFIG = "transformers.models.auto.configuration_auto"


class Nothing:
    """What a stand-in module holds under every name. Can be imported, subclassed and made; calling it is an error."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __call__(self, *_args: object, **_kwargs: object) -> Any:
        raise RuntimeError("the CPU harness was asked for a GPU function")

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class StandIn(types.ModuleType):
    __version__ = "0"  # transformers asks for it, and finds every feature too new

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class RegisterAgain(importlib.abc.MetaPathFinder):
    """SGLang 0.5.11 to 0.5.17 registers model configs that newer transformers have, and register() refuses that."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_loosen(module: Any) -> None:
            execute(module)
            mapping = type(module.CONFIG_MAPPING)
            register = mapping.register
            mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)  # noqa: ARG005

        loader.exec_module = execute_and_loosen
        return spec


sys.meta_path[:0] = [StandIns(), RegisterAgain()]
