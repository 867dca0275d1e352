"""Puts off `torch._dynamo` until something really compiles.

The first optimizer step of a process imports torch's compiler, 1.0 to 1.3 s of modules, only to call two functions that
do nothing outside of a compilation: `graph_break()` and `disable(fn)`. A replaced rank has to do that step before
training can go on, so it is worth avoiding.

`install()` puts a finder in front of the import system, so that `import torch._dynamo` yields a light module with
those functions. Whatever else is asked of it, an attribute or a submodule, makes the real package's code run *in the
same module object*, as `importlib.util.LazyLoader` does; so references taken before stay valid, and a program that
compiles behaves as if the package had been there from the start. A function that was disabled in the light time
becomes really disabled then.

The light module has no `__path__`: the import system reads it from a package before it imports a submodule, and that
read loads the real package. EVERTRAIN_LAZY_DYNAMO=0 switches all of this off.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

SWITCH = "EVERTRAIN_LAZY_DYNAMO"
PACKAGE = "torch._dynamo"

_lock = threading.RLock()


def install() -> bool:
    """Make `torch._dynamo` lazy in this process; False if it is switched off or too late. Doesn't import torch."""
    if os.environ.get(SWITCH, "1") == "0" or PACKAGE in sys.modules:
        return False
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return True


def is_light() -> bool:
    """Has nobody needed the real package yet?"""
    return isinstance(sys.modules.get(PACKAGE), _LightModule) or PACKAGE not in sys.modules


class _LightModule(ModuleType):
    """The package before its first real use. `__getattr__` is only asked for what the module's dict doesn't have."""

    _real_spec: importlib.machinery.ModuleSpec
    _loading_thread: int | None = None

    def __getattr__(self, name: str) -> Any:
        # Tools that walk over sys.modules (inspect, warnings, pickle) probe for such names in every module.
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        _load(self, name)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        _load(self, "__dir__")
        return list(ModuleType.__dir__(self))


def _load(module: _LightModule, wanted: str) -> None:
    """Run the real package's code in the light module. Other threads wait; a failed attempt leaves it light."""
    with _lock:
        if type(module) is not _LightModule:
            return
        state = module.__dict__
        if state.get("_loading_thread") == threading.get_ident():
            # A circular import inside the package: what isn't there yet isn't there, as in any half-imported module.
            raise AttributeError(f"partially initialized module {PACKAGE!r} has no attribute {wanted!r}")
        light = dict(state)
        spec = state["_real_spec"]
        for name in _LIGHT_NAMES:
            state.pop(name, None)
        state.update(
            _loading_thread=threading.get_ident(),
            __spec__=spec,
            __package__=PACKAGE,
            __path__=list(spec.submodule_search_locations),
            __cached__=spec.cached,
        )
        try:
            spec.loader.exec_module(module)
            # The wrappers below run under a compiled caller; the compiler has nothing to find in them.
            state["trace_rules"].add(__name__)
        except BaseException:
            state.clear()
            state.update(light)
            raise
        module.__class__ = ModuleType  # type: ignore[assignment]
        del state["_loading_thread"], state["_real_spec"]


# --- what the light module offers ------------------------------------------------------------------------------------


def _graph_break(msg: str = "") -> None:
    """Only means something to the compiler."""


def _disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True) -> Any:
    """`torch._dynamo.disable` in all its call shapes: disable(fn), disable(fn, False), disable(recursive=False)."""
    module = sys.modules[PACKAGE]
    if fn is None:
        return functools.partial(_disable, recursive=recursive, reason=reason, wrapping=wrapping)
    if type(module) is not _LightModule or not isinstance(fn, FunctionType | MethodType | BuiltinFunctionType):
        # Classes and modules are disabled by changing them: leave that to the real thing.
        if type(module) is _LightModule:
            _load(module, "disable")
        return module.disable(fn, recursive, reason=reason, wrapping=wrapping)
    return _disabled(fn, module, recursive, reason, wrapping)


def _disabled(fn: Callable, module: ModuleType, recursive: bool, reason: str | None, wrapping: bool) -> Callable:
    really_disabled: Callable | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal really_disabled
        if really_disabled is not None:
            return really_disabled(*args, **kwargs)
        if type(module) is _LightModule:
            # Nothing can be compiling.
            return fn(*args, **kwargs)
        really_disabled = module.disable(fn, recursive, reason=reason, wrapping=wrapping)
        return really_disabled(*args, **kwargs)

    if wrapping:
        functools.update_wrapper(call, fn)
    # What the compiler looks for in a function before it traces into it.
    call.__dict__.update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg=reason,
        _torchdynamo_orig_callable=fn,
        _torchdynamo_wrapper_id=id(call),
        _torchdynamo_disable_recursive=recursive,
    )
    return call


class _LightTraceRules:
    """`init_process_group` clears a cache of this submodule if the package is there at all; nothing is cached yet."""

    def clear_lru_cache(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{PACKAGE}.trace_rules"), name)


def _light_names() -> dict[str, Any]:
    return {"graph_break": _graph_break, "disable": _disable, "trace_rules": _LightTraceRules()}


_LIGHT_NAMES = tuple(_light_names())


# --- import system ---------------------------------------------------------------------------------------------------


class _Finder:
    """First in sys.meta_path; answers for the package itself and, in one case, for its submodules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == PACKAGE:
            real = importlib.machinery.PathFinder.find_spec(name, path)
            if real is None or real.loader is None or target is not None:
                return real
            # Not marked as a package, or the import system would give it a __path__.
            return importlib.machinery.ModuleSpec(name, _LightLoader(real), origin=real.origin)
        if name.startswith(PACKAGE + ".") and name in sys.modules:
            # `import torch._dynamo.x` read __path__ of the light package, which loaded it and with it this submodule.
            # The import system doesn't look again and would execute it a second time.
            return importlib.machinery.ModuleSpec(name, _ExistingLoader(sys.modules[name]))
        return None


class _LightLoader(Loader):
    def __init__(self, real: importlib.machinery.ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(
            _light_names(),
            _real_spec=self._real,
            __package__=PACKAGE,
            __loader__=self._real.loader,
            __file__=self._real.origin,
        )
        # Only now: the import system itself probed for __path__ while it set the module up.
        module.__class__ = _LightModule


class _ExistingLoader(Loader):
    """Hands out a module that is already there, untouched."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put its own spec there. Not by attribute: the package's config modules refuse new ones.
        module.__dict__["__spec__"] = self._spec
