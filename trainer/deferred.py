"""Packages that are imported when something in them is used, so that a rank starts quickly.

torchtune's packages import each other, datasets, pandas and torchao; torch's sharded tensors
import sympy, and torch's optimizers import its compiler. A rank uses almost nothing of that, and
on a network filesystem hundreds of ranks open all these files at once.

The code of a deferred module runs at the first use of something that only the code can give.
Until then a few stand-ins answer for it, which are replaced by the real things afterwards. A name
that a package of torchtune takes from a submodule is fetched from that submodule alone.
"""

import ast
import operator
import sys
import threading
from collections.abc import Callable
from functools import cache, partial, reduce, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name, spec_from_loader
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

SYMBOLS, COMPILER = "torch.fx.experimental.symbolic_shapes", "torch._dynamo"
NF4 = "torchao.dtypes.nf4tensor"
# The packages whose parts are deferred, and which of their submodules can do without the code of
# the package itself. None: all can, and the packages only gather names of their submodules.
DEFERRED: dict[str, tuple[str, ...] | None] = {
    "torchtune": None,
    "torch.distributed.fsdp": None,
    "torchao": ("torchao.dtypes", NF4),
    COMPILER: (f"{COMPILER}.config",),
    SYMBOLS: (),
    "sympy": (),
}

_lock = threading.RLock()
_stand_ins: dict[str, dict[str, Any]] = {}
_afterwards: dict[str, list[Callable[[ModuleType], None]]] = {NF4: [], COMPILER: []}


class DeferredModule(ModuleType):
    """A module whose code has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _lock:
            source = _source(self, name) if type(self) is DeferredModule else None
            if source is None:
                return getattr(loaded(self.__name__), name)
            setattr(self, name, source)
            return source

    def __dir__(self) -> list[str]:
        return dir(loaded(self.__name__))


def _source(module: ModuleType, name: str) -> Any:
    """What `name` is by itself, without running the module's code; None if only that can tell."""
    full = f"{module.__name__}.{name}"
    if full in (DEFERRED.get(module.__name__) or ()):
        return import_module(full)
    root = _root(module.__name__)
    if root is None or DEFERRED[root] is not None or "__path__" not in vars(module):
        return None
    origin, own_name = _exports(module.__name__).get(name, (None, ""))
    if origin is not None and origin != module.__name__:
        return getattr(import_module(origin), own_name)
    return import_module(full) if PathFinder.find_spec(full, module.__path__) else None


def _root(name: str) -> str | None:
    return next((root for root in DEFERRED if f"{name}.".startswith(f"{root}.")), None)


@cache
def _exports(package: str) -> dict[str, tuple[str, str]]:
    """(module, name there) of each name that a package gathers from its submodules."""
    tree = ast.parse(Path(sys.modules[package].__spec__.origin).read_bytes())
    return {
        alias.asname or alias.name: (
            resolve_name("." * node.level + (node.module or ""), package),
            alias.name,
        )
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def loaded(name: str) -> ModuleType:
    """The module with this name, after its code has run."""
    module = import_module(name)
    with _lock:
        if type(module) is not DeferredModule:
            return module
        module.__class__ = ModuleType
        stand_ins = _stand_ins.get(name, {})
        for key in stand_ins:
            delattr(module, key)
        module.__loader__ = module.__spec__.loader = module.__spec__.loader.real
        module.__loader__.exec_module(module)
        for key, stand_in in stand_ins.items():
            for user in list(sys.modules.values()):
                if getattr(user, "__dict__", {}).get(key) is stand_in:
                    setattr(user, key, getattr(module, key))
        for task in _afterwards.get(name, ()):
            task(module)
    return module


class DeferredLoader(Loader):
    """Makes the module and keeps what runs its code."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_stand_ins.get(module.__name__, {}))


class ImportedLoader(Loader):
    """Gives a module that was imported by another one while it was being looked for."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class DeferringFinder(MetaPathFinder):
    """Finds what `DEFERRED` names; everything else is left to the other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = _root(name)
        if root is None:
            return None
        independent = DEFERRED[root]
        if name != root and independent is not None and name not in independent:
            loaded(root)
            if name not in sys.modules:
                return None
            module = sys.modules[name]
            spec = spec_from_loader(name, ImportedLoader(module))
            # importlib takes this one, as the module has come while it was looked for; the module's
            # own spec would run its code a second time.
            module.__spec__ = spec
            return spec
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        if spec.submodule_search_locations is not None or name in _stand_ins:
            spec.loader = DeferredLoader(spec.loader)
        return spec


_SAME = """expect_true guard_or_false guard_or_true guard_size_oblivious guarding_hint_or_throw
optimization_hint statically_known_true"""
# What these functions of symbolic_shapes give for plain flags, numbers and shapes; None: the
# same value.
PLAIN_ANSWERS = dict.fromkeys(_SAME.split()) | {
    "has_guarding_hint": True,
    "is_nested_int": False,
    "free_unbacked_symbols": frozenset(),
    "has_free_unbacked_symbols": False,
    "_iterate_exprs": (),
    "_iterate_nodes": (),
    "is_symbolic": False,
    "sym_and": operator.and_,
    "sym_eq": operator.eq,
    "sym_or": operator.or_,
}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    # A tensor, even a fake one, of a shape that is known.
    return type(value) in (bool, int) or not getattr(value, "_has_symbolic_sizes_strides", True)


def _plain(name: str, answer: Any) -> Callable[..., Any]:
    def call(*values: Any, **options: Any) -> Any:
        if not all(map(_is_plain, values)):
            return getattr(loaded(SYMBOLS), name)(*values, **options)
        if callable(answer):
            return reduce(answer, values)
        return values[0] if answer is None else answer

    return call


def _bindings(shape_env: Any, *arguments: Any, **options: Any) -> Any:
    if shape_env is None:
        return None
    return loaded(SYMBOLS).compute_unbacked_bindings(shape_env, *arguments, **options)


def _call(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(loaded(module), name)(*arguments, **options)


@cache
def _disable(function: Any = None, *arguments: Any, **options: Any) -> Any:
    """torch._dynamo.disable: before there is a compiler nothing must be kept from it."""
    if not isinstance(function, FunctionType):
        return loaded(COMPILER).disable(function, *arguments, **options)
    current = [function]

    def call(*values: Any, **named: Any) -> Any:
        return current[0](*values, **named)

    def disable(compiler: ModuleType) -> None:
        current[0] = compiler.disable(function, *arguments, **options)

    _afterwards[COMPILER].append(disable)
    return wraps(function)(call)


@cache
def _disallow(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch._dynamo.disallow_in_graph, once there is a compiler."""
    _afterwards[COMPILER].append(lambda compiler: compiler.disallow_in_graph(function))
    return function


def _implements(operations: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torchao's registration of an operation on its NF4 tensors, once there are such tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _afterwards[NF4].append(lambda module: module.implements(operations)(function))
        return function

    return register


def install() -> None:
    """Defer what is not imported yet."""
    _stand_ins[SYMBOLS] = {name: _plain(name, said) for name, said in PLAIN_ANSWERS.items()} | {
        "compute_unbacked_bindings": _bindings,
        "GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (RuntimeError,), {}),
    }
    _stand_ins[COMPILER] = {
        "disable": _disable,
        "disallow_in_graph": _disallow,
        "graph_break": lambda *_, **__: None,
        "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
    }
    _stand_ins["torch.distributed.fsdp._flat_param"] = {}
    _stand_ins["sympy"] = {"Basic": type("Basic", (), {})}
    _stand_ins[NF4] = {
        "NF4Tensor": type("NF4Tensor", (), {}),
        "implements": _implements,
        "linear_nf4": partial(_call, NF4, "linear_nf4"),
        "to_nf4": partial(_call, NF4, "to_nf4"),
    }
    if not any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeferringFinder())
