"""`SamplingParams`: every value outside its range is refused where it is written, by name."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from deepinfer_core import RequestError, SamplingParams

HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, "an integer from 1 to 2147483647"),
        ("max_tokens", 2**31, "an integer from 1 to 2147483647"),
        ("top_k", -1, "an integer from 0 to 2147483647"),
        ("top_k", 2**63, "an integer from 0 to 2147483647"),
        ("top_k", True, "an integer from 0 to 2147483647"),
        ("temperature", HUGE, "0, or a number from 1e-06 to 100"),
        ("temperature", -HUGE, "0, or a number from 1e-06 to 100"),
        ("temperature", 1e-7, "0, or a number from 1e-06 to 100"),
        ("temperature", math.nan, "0, or a number from 1e-06 to 100"),
        ("temperature", math.inf, "0, or a number from 1e-06 to 100"),
        ("top_p", 0, "a number from 1e-06 to 1"),
        ("top_p", 1.5, "a number from 1e-06 to 1"),
        ("min_p", -0.5, "a number from 0 to 1"),
        ("repetition_penalty", 1e-46, "a number from 0.001 to 100"),
        ("repetition_penalty", "high", "a number from 0.001 to 100"),
        ("presence_penalty", HUGE, "a number from -100 to 100"),
        ("frequency_penalty", -101, "a number from -100 to 100"),
        ("logprobs", 65, "an integer from 0 to 64"),
        ("seed", 2**64, "an integer from 0 to 18446744073709551615"),
        ("stop_token_ids", (2**31,), "an integer from 0 to 2147483647"),
        ("stop_token_ids", (10**5000,), "an integer from 0 to 2147483647"),
        ("logit_bias", {math.inf: 1}, "an integer from 0 to 2147483647"),
        ("logit_bias", {1.7: 1.0}, "an integer from 0 to 2147483647"),
        ("logit_bias", {True: 1.0}, "an integer from 0 to 2147483647"),
        ("logit_bias", {"-1": 1.0}, "an integer from 0 to 2147483647"),
        ("logit_bias", {"1_0": 1.0}, "an integer from 0 to 2147483647"),
        ("logit_bias", {"9" * 5000: 1.0}, "an integer from 0 to 2147483647"),
        ("logit_bias", {5: HUGE}, "a number from -1e+09 to 1e+09"),
        ("constraint", {}, 'a mapping such as {"json": {"type": "object"}}'),
        ("constraint", "json", 'a mapping such as {"json": {"type": "object"}}'),
        ("constraint", {1: "a"}, 'a mapping such as {"json": {"type": "object"}}'),
        ("logit_bias", [5], "a mapping of token id to number"),
    ],
    ids=lambda value: str(value)[:20] if not isinstance(value, tuple) else "tuple",
)
def test_value_out_of_range_is_refused_by_name_and_range(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"`{name}` is ") and message.endswith(f"; allowed: {allowed}.")
    assert len(message) < 300
    assert (caught.value.param, caught.value.code) == (name, "invalid_request")


def test_values_at_the_ends_of_their_ranges_are_taken() -> None:
    low = SamplingParams(
        max_tokens=1, temperature=1e-6, top_p=1e-6, repetition_penalty=1e-3, top_k=0
    )
    high = SamplingParams(max_tokens=2**31 - 1, temperature=100, top_p=1, top_k=2**31 - 1)
    assert (low.temperature, high.max_tokens) == (1e-6, 2**31 - 1)
    assert SamplingParams(temperature=0).temperature == 0


def test_keys_of_the_bias_are_ids_or_their_digits() -> None:
    assert SamplingParams(logit_bias={7: 1, "12": -2.5}).logit_bias == {7: 1.0, 12: -2.5}  # type: ignore[dict-item]


def test_every_setting_is_described() -> None:
    described = str(SamplingParams.__doc__)
    assert all(f" {field.name}: " in described for field in fields(SamplingParams))
