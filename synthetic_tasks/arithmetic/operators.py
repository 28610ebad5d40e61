"""The operations between two quantities."""

from __future__ import annotations

OPERATORS = "+-*"


def apply(operator: str, left: int, right: int, modulus: int) -> int:
    """What an operation of two numbers comes to."""
    return (left + right if operator == "+" else left - right if operator == "-" else left * right) % modulus
