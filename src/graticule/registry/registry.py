"""Registries: the names in specs, with their classes and options."""

from __future__ import annotations

import difflib
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from graticule.registry.checks import check_numbers, known_name
from graticule.registry.fields import as_kind
from graticule.registry.plugins import Definition, check_class, note_file, replaces, source_of
from graticule.registry.specs import Spec, parse_sum

T = TypeVar("T", bound=type)
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D", bound=Definition)


@dataclass(frozen=True)
class Option:
    """An option of a name: its type and its default (`inspect.Parameter.empty` where it must be given)."""

    kind: Any
    default: Any


class NameTable(UserDict[K, V]):
    """Things by name. Every file of its rooms, which register them, is imported when the table is first read.

    Args:
        kind: what a thing is, in messages, such as 'recipe'.
        rooms: names of packages or modules.
        definition: returns the class or function of a thing; by default it is the thing.
    """

    def __init__(self, kind: str, *rooms: str, definition: Callable[[Any], Definition] = lambda thing: thing) -> None:
        super().__init__()
        self.kind = kind
        self.rooms = rooms
        self._definition = definition
        self._complete = False

    def discover(self) -> None:
        """Import the files of the rooms, once; while they are imported, the table has what is registered so far."""
        if self._complete:
            return
        self._complete = True
        try:
            for room in self.rooms:
                package = import_module(room)
                for file in iter_modules(getattr(package, "__path__", [])):
                    import_module(f"{room}.{file.name}")
        except BaseException:
            self._complete = False
            raise

    def register(
        self: NameTable[str, V], name: str, make: Callable[[Any], V] = lambda definition: definition
    ) -> Callable[[D], D]:
        """Return a decorator that registers a class or a function as `name`.

        Args:
            name: an identifier.
            make: checks the class or function, and returns the thing that the table has for it; by default itself.

        Raises:
            ValueError: if `name` is not an identifier, or another class or function has it.
            TypeError: if a class does not define its abstract methods.
        """
        if not (isinstance(name, str) and name.isidentifier()):
            new = _with_article(self.kind)
            usage = f"; write @graticule.register_{self.kind}('my_{self.kind}') above it"
            raise ValueError(
                f"`name` of {new} must be an identifier, such as my_{self.kind}, got {name!r}"
                f"{'' if isinstance(name, str) else usage}."
            )

        def add(definition: D) -> D:
            item = make(definition)
            if not str(definition.__module__).startswith("graticule."):  # None for a function of executed code
                self.discover()  # so that a plugin cannot take a name of the library
            known = self._definition(self.data[name]) if name in self.data else None
            if known is not None and not replaces(definition, known):
                place = source_of(known) or known.__module__ or "executed code"
                raise ValueError(
                    f"`name` must be new, got {name!r}, which is the {self.kind} {known.__qualname__} of {place}."
                )
            note_file(definition)
            if lacking := sorted(getattr(definition, "__abstractmethods__", ())):
                raise TypeError(f"the {self.kind} {name!r} must define {', '.join(lacking)}.")
            self.data[name] = item
            return definition

        return add

    def __getitem__(self, name: K) -> V:
        if name not in self.data:
            self.discover()
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            self.discover()
        return name in self.data

    def __iter__(self) -> Iterator[K]:
        self.discover()
        return iter(self.data)

    def __len__(self) -> int:
        self.discover()
        return len(self.data)


#: All registries, to find the kind of a name that was given for another one.
_REGISTRIES: list[Registry[Any]] = []


def registered(kind: str) -> dict[str, Any]:
    """Return name -> class of a registry, of those that are imported so far."""
    return {name: cls for registry in _REGISTRIES if registry.kind == kind for name, cls in registry.data.items()}


def _other_kind(kind: str, name: str) -> str:
    """Return what a name that is not of this kind is, and how it is given; empty if it is of no other kind."""
    kinds = [registry.kind for registry in _REGISTRIES if registry.kind != kind and name in registry]
    return f"{name} is {_with_article(kinds[0])}: use {kinds[0]}={name!r}, or --{kinds[0]} {name}" if kinds else ""


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


class Registry(NameTable[str, T]):
    """Classes by name, to which users can add: `register` adds one.

    The options of a name are the keyword arguments of its class, with their types and defaults.

    Args:
        argument: its name in messages, such as 'encoding'.
        base: the class that a registered class must be a subclass of.
        options: returns the options of a class.
        rooms: see `NameTable`; none if the classes are registered in the file of the registry.
    """

    def __init__(self, argument: str, base: Any, options: Callable[[Any], Mapping[str, Option]], *rooms: str) -> None:
        super().__init__(argument, *rooms)
        self.base = base
        self._options = options
        _REGISTRIES.append(self)

    def register(self, name: str, make: Callable[[Any], Any] = lambda cls: cls) -> Callable[[D], D]:
        """Return a decorator that registers a class as `name`, as `NameTable.register` does.

        Raises:
            TypeError: also if the class is not a subclass of the base.
        """

        def check(cls: Any) -> Any:
            check_class(self.kind, name, cls, self.base)
            return make(cls)

        return super().register(name, check)

    def __getitem__(self, name: str) -> T:
        hint = "" if name in self else _other_kind(self.kind, name)
        return super().__getitem__(known_name(self.kind, name, self, hint))

    def name_of(self, cls: type) -> str | None:
        """Return the first name of a class; None if it is not registered."""
        return next((name for name, known in self.items() if known is cls), None)

    def spec_of(self, cls: type, options: Mapping[str, object]) -> Spec:
        name = self.name_of(cls)
        if name is None:
            raise ValueError(f"{cls.__name__} must be registered: @graticule.register_{self.kind}('name').")
        return self.specs(Spec(name, options))[0]

    def options(self, name: str) -> Mapping[str, Option]:
        """Return the options of `name`."""
        return self._options(self[name])

    def specs(self, words: Any) -> tuple[Spec, ...]:
        """Read `words`, text as `a(b=1) + c`, a `Spec` or several, and check every name and option.

        Raises:
            ValueError: for an unknown name or option, listing the known ones, or for a value of another type, or a
                number that is not finite.
        """
        specs = (words,) if isinstance(words, Spec) else words
        if not (isinstance(specs, tuple) and specs and all(isinstance(spec, Spec) for spec in specs)):
            specs = parse_sum(words, self.kind)
        return tuple(check_spec(self.kind, spec, self.options(spec.name)) for spec in specs)


_EMPTY = inspect.Parameter.empty


def check_spec(argument: str, spec: Spec, options: Mapping[str, Option]) -> Spec:
    """Return a spec whose options are checked against the options of its name."""
    values = {}
    for name, value in spec.options.items():
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            known = f"the options are {', '.join(options)}" if options else "it has no options"
            hint = f"; did you mean {near[0]!r}? T{known[1:]}" if near else f": {known}"
            raise ValueError(f"`{argument}` {spec.name} must not have the option {name!r}{hint}.")
        values[name] = as_kind(options[name].kind, value, f"`{name}` of {argument} {spec.name}")
        check_numbers(name, values[name])
    missing = [name for name, option in options.items() if option.default is _EMPTY and name not in values]
    if missing:
        raise ValueError(f"`{argument}` {spec.name} must have the option {missing[0]!r}, got {str(spec)!r}.")
    return Spec(spec.name, values)


@cache
def parameters_of(function_or_class: Any) -> Mapping[str, tuple[Any, inspect.Parameter]]:
    """Return the parameters of a function or constructor that can be given by name, each with its function.

    A constructor's parameters include the ones that it passes to its base class as `**kwargs`.
    """
    kinds = function_or_class.__mro__ if inspect.isclass(function_or_class) else ()
    parameters_by_name: dict[str, tuple[Any, inspect.Parameter]] = {}
    for function in [vars(kind)["__init__"] for kind in kinds if "__init__" in vars(kind)] or [function_or_class]:
        parameters = list(inspect.signature(function).parameters.values())
        for parameter in parameters[1:] if kinds else parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                parameters_by_name.setdefault(parameter.name, (function, parameter))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return MappingProxyType(parameters_by_name)


def options_of(function_or_class: Callable[..., Any], context: frozenset[str]) -> dict[str, Option]:
    """Return the parameters of a function or constructor that can be given by name and are not in `context`."""
    return {
        name: Option(_hints(function).get(name, Any), parameter.default)
        for name, (function, parameter) in parameters_of(function_or_class).items()
        if name not in context
    }


@cache
def _hints(function: Any) -> dict[str, Any]:
    return get_type_hints(function, include_extras=True)
