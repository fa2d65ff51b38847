"""Classes of other packages, or of a file, that are found by name."""

import runpy
from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from pathlib import Path
from typing import Generic, TypeVar

from torch_pi2.base.fields import argument

T = TypeVar("T")


class Plugins(Generic[T]):
    """Subclasses of ``base`` by their attribute ``name``: registered ones, those of the entry points ``group``, and any
    class as ``FILE.py:CLASS``. ``built_in`` gives names that are taken. ``bases``: what users derive from, if it is not
    ``base``. Methods raise ConfigError.
    """

    def __init__(self, base: type[T], group: str, built_in: Callable[[], Collection[str]], bases: str = "") -> None:
        self._base, self._group, self._built_in, self._bases = base, group, built_in, bases or base.__name__
        self._known: dict[str, type[T]] = {}

    def register(self, made: type[T]) -> type[T]:
        """Let ``made`` be found by its ``name``, in place of an earlier one; returns it, as a decorator does."""
        self._check(made, "class to register")
        name = argument(getattr(made, "name", None), f"name of {made.__name__}", "Set its attribute name.").text()
        if name in self._built_in() or not name.replace("-", "_").isidentifier():
            argument(name, f"name of {made.__name__}").wrong("letters, digits and -, and no built-in's name")
        self._known[name] = made
        return made

    def names(self) -> list[str]:
        return sorted({*self._known, *entry_points(group=self._group).names})

    def find(self, name: str, files: bool = True) -> type[T] | None:
        """The class ``name``, or None. Code of its file or package runs. ``files``: also ``FILE.py:CLASS``; not for
        names that come from the folder of a model.
        """
        path, colon, attribute = name.rpartition(":")
        if files and colon and path.endswith(".py"):
            if not Path(path).is_file():
                argument(name, "class of a file", "Check the file's name.").wrong(f"a file {path}", "none of that name")
            return self._check(runpy.run_path(path).get(attribute), name)
        for point in () if name in self._known else entry_points(group=self._group, name=name):
            self._known[name] = self._check(point.load(), f"entry point {name} of {self._group}")
        return self._known.get(name)

    def _check(self, made: object, what: str) -> type[T]:
        if not isinstance(made, type) or not issubclass(made, self._base):
            argument(made, what).wrong(f"a class that derives from {self._bases}")
        return made
