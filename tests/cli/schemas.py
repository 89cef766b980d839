"""Checks JSON against the TypedDict or dataclass that documents it."""

import dataclasses
import inspect
import types
from typing import Union, get_args, get_origin, get_type_hints, is_typeddict


def is_record(kind):
    return is_typeddict(kind) or dataclasses.is_dataclass(kind)


def assert_documented(kind):
    """Every field of a record, and of those it holds, has its line in a docstring."""
    described = inspect.getdoc(kind).split("Attributes:")[1]
    for name, hint in get_type_hints(kind).items():
        assert f"    {name}: " in described, f"{kind.__name__}.{name} is not described"
        for inner in (hint, *get_args(hint)):
            if is_record(inner):
                assert_documented(inner)


def assert_matches(value, kind, where="$"):
    """The value has exactly the fields and types of ``kind``."""
    if is_record(kind):
        hints = get_type_hints(kind)
        assert isinstance(value, dict), where
        assert set(value) == set(hints), f"{where}: {set(value) ^ set(hints)}"
        for name, hint in hints.items():
            assert_matches(value[name], hint, f"{where}.{name}")
    elif get_origin(kind) is list:
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            assert_matches(item, get_args(kind)[0], f"{where}[{index}]")
    elif get_origin(kind) in (Union, types.UnionType):
        options = get_args(kind)
        if value is None:
            assert type(None) in options, f"{where} is null"
        else:
            assert_matches(value, next(o for o in options if o is not type(None)), where)
    else:
        accepted = (int, float) if kind is float else kind
        assert isinstance(value, accepted), f"{where}: {value!r} is no {kind}"
        assert kind is bool or not isinstance(value, bool), f"{where}: {value!r} is no {kind}"
