"""JSON without the words NaN and Infinity, which other parsers refuse."""

import json
import math

import pytest

from mla_ops.diagnostics.json_text import json_text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_null(value):
    text = json_text({"a": [value, {"b": (value, 1.5)}], "c": "NaN"})
    assert json.loads(text) == {"a": [None, {"b": [None, 1.5]}], "c": "NaN"}


def test_the_rest_is_as_json_writes_it():
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert json_text(value) == json.dumps(value, indent=2)
