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
_SECONDS: Final = (-6e10, 2.5e11)  # epoch seconds of almost all years that `datetime` has


def decoded(kind: Any, value: Any) -> Any:
    """Convert plain JSON data to a value of type `kind`: undo `dataclasses.asdict`.

    Raises ValueError for a value of another type, and for a number that is too large or NaN.
    """
    origin, params = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # only `X | None` is supported
        return None if value is None and type(None) in params else decoded(params[0], value)
    if origin is Any:
        return value
    if origin in (tuple, list) and isinstance(value, (tuple, list)):
        has_fixed_length = origin is tuple and Ellipsis not in params
        kinds = params if has_fixed_length else params[:1] * len(value)
        return origin(decoded(of, each) for of, each in zip(kinds, value, strict=True))
    if isinstance(value, dict):
        return _decoded_object(origin, params, value)
    return _checked_scalar(origin, value)


def of_schema(kind: type[_Result], data: Any, schema: str) -> _Result:
    """Convert a JSON object to dataclass `kind`. Raises ValueError, also for another schema."""
    actual = data.get("schema", schema) if isinstance(data, Mapping) else None  # may be missing
    if actual != schema:
        raise ValueError(f"its schema is {actual!r:.40}, not {schema!r}")
    return typing.cast(_Result, decoded(kind, data))


def _decoded_object(kind: Any, params: tuple[Any, ...], value: dict[str, Any]) -> Any:
    """Convert a JSON object to a mapping or a dataclass; ignore keys that are not its fields."""
    if not hasattr(kind, "__dataclass_fields__"):
        if not issubclass(kind, Mapping):
            raise ValueError(f"a value is an object, not of type {kind.__name__}")
        return {decoded(params[0], key): decoded(params[1], item) for key, item in value.items()}
    fields = {name: decoded(of, value[name]) for name, of in _fields(kind).items() if name in value}
    try:
        return kind(**fields)
    except TypeError as error:  # a required field is missing
        raise ValueError(str(error)) from error


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _checked_scalar(kind: Any, value: Any) -> Any:
    """Return a checked string, number or bool; a float may be a time, and must suit `datetime`."""
    if issubclass(kind, (Enum, str)) and kind is not str:  # an Enum or JobId checks it itself
        return kind(value)
    is_float = kind is float and type(value) in (int, float)  # JSON may have 1 instead of 1.0
    low, high = _SECONDS if is_float else (-LARGEST, LARGEST)
    if type(value) is not kind and not is_float:
        raise ValueError(f"a value is of type {type(value).__name__}, not {kind.__name__}")
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise ValueError("a number is out of range or NaN")
    return value
