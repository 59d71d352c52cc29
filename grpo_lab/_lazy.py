"""Public names that load their module on first use, so that importing a package stays light."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) for `package`.

    Args:
        package: its `__name__`.
        homes: module of each public name.

    Returns:
        A function that imports the module of a name and returns what it finds there.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
