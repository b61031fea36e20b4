"""Text of seconds and bytes, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gplan.core.errors import UsageError
from gplan.core.units import (
    bytes_text,
    parse_bytes,
    parse_link,
    parse_memory,
    parse_network,
    parse_seconds,
    percent_text,
    seconds_text,
)


@given(st.floats(min_value=1e-7, max_value=1e5))
def test_seconds_survive_their_text_to_three_digits(seconds: float) -> None:
    assert parse_seconds(seconds_text(seconds)) == pytest.approx(seconds, rel=0.006, abs=6e-9)


@given(st.integers(min_value=1, max_value=2**50))
def test_bytes_survive_their_text_to_three_digits(num_bytes: int) -> None:
    assert parse_bytes(bytes_text(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@pytest.mark.parametrize("text", ["", "GiB", "16 parsecs", "-1GiB", "nan", "0", "1e999GiB"])
def test_a_size_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="16GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1e1000000", "2000PiB", "1e30GB"])
def test_memory_that_no_file_holds_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="too large|expected an integer of at most"):
        parse_memory(text)


def test_a_link_that_no_file_holds_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected seconds, 0 or from 1e-30 to 1e12"):
        parse_link("1GB/s,1e13s")


def test_a_small_size_needs_its_unit() -> None:
    with pytest.raises(UsageError, match="'6' is 6 bytes; write it with its unit, such as 6GiB"):
        parse_memory("6")


@pytest.mark.parametrize("text", ["", "fast", "5 years", "-2ms"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="duration"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["25GB", "5us", "x/s,5us", "25GB/s,soon"])
def test_a_link_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_link(text)


@pytest.mark.parametrize("text", ["100Gb/s", "100Gb /s", "1Pb/s", "8 kb/s"])
def test_bits_are_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(UsageError, match="reads as bits"):
        parse_link(text)


@pytest.mark.parametrize("text", ["16Gb", "2 Tib", "800Mb"])
def test_bits_are_no_size_of_memory(text: str) -> None:
    with pytest.raises(UsageError, match="reads as bits"):
        parse_memory(text)
    assert parse_memory("16gb") == 16 * 10**9


def test_binary_and_decimal_units_differ() -> None:
    assert parse_bytes("1GiB") == 2**30
    assert parse_bytes("1GB") == 10**9


def test_a_signed_percentage_shows_its_sign() -> None:
    assert percent_text(0.034, signed=True) == "+3.4 %"
    assert percent_text(-0.034, signed=True) == "-3.4 %"


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("400", "did you mean 400Gb/s"),
        ("400Gb", "did you mean 400Gb/s"),
        ("400GB/s*8,5us", r"400 GB/s a card, more than any has; did you mean 400Gb/s\*8,5us \(bits\)"),
        ("3.2Tb/s", "give the rate of one card"),
        ("400gb/s*8", r"did you mean 400Gb/s\*8"),
        ("400Gb/s*0", "expected at least 1 a node"),
        ("400Gb/s*8,5s", "a latency of 5.00 s; did you mean 5us"),
        ("fast", "is no network; write the rate of a card"),
    ],
)
def test_a_network_in_another_unit_is_refused_with_the_nearest_reading(text: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=nearest):
        parse_network(text, devices_per_node=8)
