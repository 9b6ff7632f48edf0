"""Runs actions when a module is imported by other code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Calls an action with a module: now if the module is already imported, otherwise once it is. The module itself is
    unchanged."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    _finder.actions.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """A finder that finds nothing itself: it lets the finders after it find the module, and makes the loader call the actions,
    once."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for s in (f.find_spec(name, path, target) for f in others) if s is not None), None)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def then_act(module: ModuleType) -> None:
            del loader.exec_module  # restores the loader's own method
            execute(module)
            for action in self.actions.pop(name, []):
                action(module)
            if not self.actions and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = then_act  # type: ignore[method-assign]
        return spec


_finder = _Finder()
