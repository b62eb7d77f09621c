"""Values of JSON that another party wrote, as the types of dataclasses; the rest is refused."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Final, TypeVar

LARGEST: Final = 1 << 53
_Result = TypeVar("_Result")
_SECONDS: Final = (-6e10, 2.5e11)  # the years that `datetime` has, almost


def decoded(kind: Any, value: Any) -> Any:
    """Return what `dataclasses.asdict` and JSON made plain as a value of a type again.

    Raises ValueError for a value of another type, and for a number that is too large or NaN.
    """
    outer, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if outer in (typing.Union, types.UnionType):
        return None if value is None and type(None) in inner else decoded(inner[0], value)  # X|None
    if outer is Any:
        return value
    if outer in (tuple, list) and isinstance(value, (tuple, list)):
        kinds = inner if outer is tuple and Ellipsis not in inner else inner[:1] * len(value)
        return outer(decoded(of, each) for of, each in zip(kinds, value, strict=True))
    if isinstance(value, dict):
        return _of_object(outer, inner, value)
    return _plain(outer, value)


def of_schema(kind: type[_Result], data: Any, schema: str) -> _Result:
    """Return an object of JSON as a value of a dataclass. Raises ValueError."""
    found = data.get("schema", schema) if isinstance(data, Mapping) else None
    if found != schema:
        raise ValueError(f"its schema is {found!r:.40}, not {schema!r}")
    return typing.cast(_Result, decoded(kind, data))


def _of_object(kind: Any, inner: tuple[Any, ...], value: dict[str, Any]) -> Any:
    """Return an object as a mapping, or as a dataclass, which ignores keys that are no fields."""
    if not hasattr(kind, "__dataclass_fields__"):
        if not issubclass(kind, Mapping):
            raise ValueError(f"an object is not of type {kind.__name__}")
        return {decoded(inner[0], key): decoded(inner[1], each) for key, each in value.items()}
    found = {name: decoded(of, value[name]) for name, of in _fields(kind).items() if name in value}
    try:
        return kind(**found)
    except TypeError as error:  # a field of the class is missing
        raise ValueError(str(error)) from error


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _plain(kind: Any, value: Any) -> Any:
    """Return a text, number or flag if it is of this type; floats have the limits of times."""
    if issubclass(kind, (Enum, str)) and kind is not str:  # they check the text themselves
        return kind(value)
    is_float = kind is float and type(value) in (int, float)
    low, high = _SECONDS if is_float else (-LARGEST, LARGEST)
    if type(value) is not kind and not is_float:
        raise ValueError(f"a value is of type {type(value).__name__}, not {kind.__name__}")
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise ValueError("a number is too large or none")
    return value
