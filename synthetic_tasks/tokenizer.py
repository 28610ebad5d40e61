"""A closed vocabulary of whole tokens: text and ids are a bijection."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synthetic_tasks.family import Task

SPECIALS = ("<pad>", "<bos>", "<eos>")


class Tokenizer:
    """`<pad> <bos> <eos>` and then the given tokens, numbered in order; text is tokens joined by single spaces.

    Every list of ids decodes to exactly one text and back, the empty list to the empty text.
    Raises ValueError for a vocabulary with a repeated token, or one that is empty or holds white space.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.tokens: tuple[str, ...] = (*SPECIALS, *vocabulary)
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            repeated = sorted({token for token in self.tokens if self.tokens.count(token) > 1})
            raise ValueError(f"the vocabulary repeats {repeated}; every token must be new")
        for token in vocabulary:
            if not token or token.split() != [token]:
                raise ValueError(f"the vocabulary holds {token!r}; a token is not empty and has no white space")
        self.pad, self.bos, self.eos = (self._ids[token] for token in SPECIALS)
        # Names this vocabulary in every key that depends on it.
        self.digest = hashlib.sha256(json.dumps(self.tokens, separators=(",", ":")).encode()).hexdigest()

    @classmethod
    def for_tasks(cls, *tasks: Task) -> Tokenizer:
        """The union of the tasks' vocabularies, in order of first appearance."""
        return cls(list(dict.fromkeys(token for task in tasks for token in task.vocabulary)))

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash(self.tokens)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, {self.digest[:12]})"

    def encode(self, text: str) -> list[int]:
        """Ids of a text's tokens. Raises ValueError at the first token outside the vocabulary."""
        if not text:
            return []
        pieces = text.split(" ")
        try:
            return [self._ids[piece] for piece in pieces]
        except KeyError:
            position = next(i for i, piece in enumerate(pieces) if piece not in self._ids)
            raise ValueError(
                f"token {position} of the text, {pieces[position]!r}, is not in the vocabulary of {len(self)} tokens; "
                "tokens are separated by exactly one space"
            ) from None

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a prompt as a model reads it, the begin token first. Raises ValueError as `encode` does."""
        return [self.bos, *self.encode(prompt)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a list of ids. Raises ValueError at the first id outside the vocabulary."""
        ids = list(ids)
        for position, i in enumerate(ids):
            if not 0 <= i < len(self.tokens):
                raise ValueError(f"id {position} of the list, {i}, is not in the vocabulary of {len(self)} tokens")
        return " ".join([self.tokens[i] for i in ids])

    def save(self, path: Path) -> None:
        path.write_text(
            json.dumps({"vocabulary": self.tokens[len(SPECIALS) :], "digest": self.digest}, indent=1) + "\n"
        )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Raises ValueError where the file is not a saved tokenizer or does not match its own digest."""
        try:
            saved = json.loads(path.read_text())
            tokenizer, digest = cls(saved["vocabulary"]), saved["digest"]
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a saved tokenizer: {error!r}") from error
        if tokenizer.digest != digest:
            raise ValueError(f"{path} is damaged: its tokens have digest {tokenizer.digest[:12]}, not {digest[:12]}")
        return tokenizer
