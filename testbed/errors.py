"""Errors a person can act on: one paragraph that says what, where and what to do; the command exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the person who called can put right."""


class SpecError(UserError):
    """A spec that cannot be run; the message has one paragraph for each mistake."""


class StoreError(UserError):
    """A store that cannot be used, or does not hold what is asked of it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing where no known name is near."""
    close = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean `{close[0]}`?)" if close else ""
