"""A module of the package with one mistake in it, put in place for the time of a check that must turn red."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

# A check turns red by its own assertion or by a complaint of torch on the way there; never by a NameError.
RED = (AssertionError, pytest.fail.Exception, RuntimeError)


@contextmanager
def mutated(module: ModuleType, old: str, new: str, folder: Path) -> Iterator[None]:
    """Run with `old` replaced by `new` in the module's source, for every user of its functions and classes."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}, not once"
    path = folder / "mutant.py"  # a file, since triton reads the source of its kernels
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(module.__name__, path)
    mutant = importlib.util.module_from_spec(spec)
    # Classes look their module up by name while they are made; the original comes back at once.
    sys.modules[module.__name__] = mutant
    try:
        spec.loader.exec_module(mutant)
    finally:
        sys.modules[module.__name__] = module
    own = {
        id(value): name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, user in list(sys.modules.items()):
            if name.startswith(("grpo_lab", "tests")):
                for attribute, value in list(vars(user).items()):
                    if id(value) in own:
                        patch.setattr(user, attribute, vars(mutant)[own[id(value)]])
        yield


def assert_caught(module: ModuleType, old: str, new: str, check: Callable[[], object], folder: Path) -> None:
    """The check passes on the module as it is, and turns red on the mutant."""
    check()
    with mutated(module, old, new, folder), pytest.raises(RED):
        check()
