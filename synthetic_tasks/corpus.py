"""Corpora: documents of packed token ids on disk, and a loader whose whole state is one integer.

task.sample -> <bos> prompt solution <eos> -> tokens.bin, documents.npy, report.json      build_corpus
documents -> permuted by (seed, epoch) -> packed whole into rows -> batch(step)           PackedLoader
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from synthetic_tasks.base import Split
from synthetic_tasks.family import Task
from synthetic_tasks.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a mixture: its share of the documents, and the weights of its numbers of operations."""

    name: str
    operations: Mapping[int, float]
    share: float = 1.0


def with_replay(own: Sequence[Component], replay: Sequence[Component], *, share: float) -> list[Component]:
    """A mixture of which `share` is another mixture, replayed with fresh documents, and the rest its own."""
    if not 0 <= share <= 1:
        raise ValueError(f"the share of the replayed mixture must lie in [0, 1], not {share}")
    parts = ((own, 1 - share), (replay, share))
    return [
        Component(name=part.name, operations=part.operations, share=factor * part.share / _total(components))
        for components, factor in parts
        if factor > 0
        for part in components
    ]


def build_corpus(
    out: Path,
    *,
    task: Task,
    tokenizer: Tokenizer,
    mixture: Sequence[Component],
    documents: int,
    seed: int,
    split: Split = "train",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write a corpus into the directory `out` and return its report.

    tokens.bin      ids of all documents, one after the other; uint16, or uint32 for more than 65,536 tokens
    documents.npy   int64 (documents, 3): where a document, its solution, and the next document start in tokens.bin
    report.json     what it was made of and what it holds, with digests of the other two

    Two mixtures draw different problems from one seed. `progress` is called with (documents done, documents) now and
    then. Raises ValueError for an empty mixture, a negative share, no documents, and what the task refuses.
    """
    if documents < 1:
        raise ValueError(f"a corpus needs at least one document, not {documents}")
    shares = np.array([part.share for part in mixture]) / _total(mixture)
    described = [{**asdict(part), "operations": {str(k): v for k, v in part.operations.items()}} for part in mixture]
    stream = hashlib.sha256(json.dumps([seed, described], sort_keys=True).encode()).digest()
    problem_seed = int.from_bytes(stream[:7], "big")
    # A document's component depends on its index alone, so a longer corpus begins with the shorter one.
    uniform = np.random.Generator(np.random.Philox(key=problem_seed)).random(documents)
    component = np.minimum(np.searchsorted(np.cumsum(shares), uniform, side="right"), len(mixture) - 1)

    out.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    bounds = np.empty((documents, 3), dtype="<i8")
    structures: dict[int, set[str]] = {}
    counts = Counter[int]()
    digest = hashlib.sha256()
    position = longest = 0
    with (out / "tokens.bin").open("wb") as file:
        for start in range(0, documents, 4096):
            ids: list[int] = []
            stop = min(start + 4096, documents)
            for index in range(start, stop):
                part = mixture[component[index]]
                problem = task.sample(seed=problem_seed, index=index, operations=part.operations, split=split)
                prompt, solution = tokenizer.encode(problem.prompt), tokenizer.encode(problem.solution)
                ids += (tokenizer.bos, *prompt, *solution, tokenizer.eos)
                end = position + len(prompt) + len(solution) + 2
                bounds[index] = (position, position + 1 + len(prompt), end)
                longest = max(longest, end - position)
                position = end
                operations = problem.difficulty["operations"]
                counts[operations] += 1
                structures.setdefault(operations, set()).add(problem.structure_key)
            data = np.array(ids, dtype=dtype).tobytes()
            digest.update(data)
            file.write(data)
            if progress:
                progress(stop, documents)
    np.save(out / "documents.npy", bounds)
    report: dict[str, Any] = {
        "task": task.name,
        "settings": asdict(task.settings),
        "mixture": described,
        "split": split,
        "seed": seed,
        "problem_seed": problem_seed,
        "documents": documents,
        "documents_by_component": _by_name(mixture, np.bincount(component, minlength=len(mixture)).tolist()),
        "documents_by_operations": {str(n): counts[n] for n in sorted(counts)},
        "structures_by_operations": {str(n): len(structures[n]) for n in sorted(structures)},
        # Splits are disjoint in structures, except for these operations, where they are in instances only.
        "structures_shared": {str(n): task.structures_shared(n) for n in sorted(counts)},
        "tokens": position,
        "longest": longest,
        "dtype": dtype.str,
        "pad": tokenizer.pad,
        "tokenizer": tokenizer.digest,
        "digests": {
            "tokens.bin": digest.hexdigest(),
            "documents.npy": hashlib.sha256((out / "documents.npy").read_bytes()).hexdigest(),
        },
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _total(mixture: Sequence[Component]) -> float:
    if not mixture or any(not part.share >= 0 for part in mixture) or not sum(part.share for part in mixture) > 0:
        raise ValueError("a mixture needs components with shares that are not negative and not all 0")
    return sum(part.share for part in mixture)


def _by_name(mixture: Sequence[Component], numbers: Sequence[int]) -> dict[str, int]:
    total = Counter[str]()
    for part, number in zip(mixture, numbers, strict=True):
        total[part.name] += number
    return dict(total)


class Corpus:
    """A corpus on disk, its tokens mapped and not read. Raises ValueError where it is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.report: dict[str, Any] = json.loads((path / "report.json").read_text())
            # (documents, 3): starts of a document, of its solution, and of the next document.
            self.documents: Ints = np.load(path / "documents.npy")
            self.tokens: npt.NDArray[Any] = np.memmap(path / "tokens.bin", dtype=self.report["dtype"], mode="r")
            whole = self.tokens.shape == (self.report["tokens"],) and self.documents.shape == (
                self.report["documents"],
                3,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a whole corpus: {error}; build it again") from error
        if not whole:
            raise ValueError(
                f"{path} is not a whole corpus: its files do not have the sizes its report names; build it again"
            )

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> Ints:
        """(documents,) tokens of each document."""
        return self.documents[:, 2] - self.documents[:, 0]

    def document(self, index: int) -> Ints:
        """The ids of one document, `<bos>` and `<eos>` included."""
        start, _, end = self.documents[index]
        return np.asarray(self.tokens[start:end], dtype=np.int64)

    def check(self) -> None:
        """Read everything. Raises ValueError where the bytes are not those that were written."""
        for name, digest in self.report["digests"].items():
            found = hashlib.sha256((self.path / name).read_bytes()).hexdigest()
            if found != digest:
                raise ValueError(
                    f"{self.path / name} is damaged: digest {found[:12]}, not {digest[:12]}; build it again"
                )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of whole documents. All arrays are (rows, row_length)."""

    # Token ids; padding at the end of each row.
    tokens: Ints
    # Which document of the row a token belongs to, from 1; 0 is padding.
    documents: Ints
    # Position in the document, from 0.
    positions: Ints
    # Whether a token belongs to the prompt, `<bos>` included.
    prompt: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Plan:
    """Where each document of an epoch stands: sorted by row, then column."""

    # (documents,) index in the corpus, and column of the first token.
    document: Ints
    column: Ints
    # (rows + 1,) first entry of each row in the two above.
    row_starts: Ints


class PackedLoader:
    """Batches of documents packed whole into rows; batch `step` is a function of the arguments and the step alone.

    Each epoch permutes the documents by (seed, epoch), puts each into the fullest row that still holds it (best fit)
    and permutes the rows. Epochs follow one another without a gap, so a batch may hold the end of one and the start of
    the next.
    Raises ValueError for a document longer than a row.
    """

    def __init__(self, corpus: Corpus, *, rows: int, row_length: int, seed: int) -> None:
        if rows < 1 or row_length < 1:
            raise ValueError(f"rows and row_length must be at least 1, not {rows} and {row_length}")
        longest = int(corpus.lengths.max())
        if longest > row_length:
            raise ValueError(
                f"the corpus {corpus.path} has a document of {longest} tokens, longer than a row of {row_length}; "
                f"documents are never cut, so set row_length to at least {longest}, or leave the hardest problems out"
            )
        self.corpus, self.rows, self.row_length, self.seed = corpus, rows, row_length, seed
        self._plans: dict[int, _Plan] = {}
        # Rows before each epoch, as far as epochs were planned.
        self._rows_before = [0]

    def batch(self, step: int) -> Batch:
        if step < 0:
            raise ValueError(f"steps count from 0; there is no step {step}")
        shape = (self.rows, self.row_length)
        size = self.rows * self.row_length
        tokens = np.full(size, self.corpus.report["pad"], dtype=np.int64)
        documents, positions = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        prompt = np.zeros(size, dtype=np.bool_)

        filled, first = 0, step * self.rows
        while filled < self.rows:
            epoch = self._epoch_of(first + filled)
            plan = self._plan(epoch)
            begin = first + filled - self._rows_before[epoch]
            end = min(begin + self.rows - filled, len(plan.row_starts) - 1)
            # Entries of the plan, one a document; then one element a token.
            starts = plan.row_starts[begin : end + 1]
            held = np.diff(starts)
            entry = slice(starts[0], starts[-1])
            source, solution, stop = self.corpus.documents[plan.document[entry]].T
            length = stop - source
            row = filled + np.repeat(np.arange(end - begin), held)
            number = np.arange(len(length)) - np.repeat(starts[:-1] - starts[0], held) + 1
            position = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
            target = np.repeat(row * self.row_length + plan.column[entry], length) + position
            tokens[target] = self.corpus.tokens[np.repeat(source, length) + position]
            documents[target] = np.repeat(number, length)
            positions[target] = position
            prompt[target] = position < np.repeat(solution - source, length)
            filled += end - begin
        return Batch(
            tokens=tokens.reshape(shape),
            documents=documents.reshape(shape),
            positions=positions.reshape(shape),
            prompt=prompt.reshape(shape),
        )

    def row_costs(self, first: int) -> Iterator[tuple[Ints, Ints]]:
        """Tokens and visible query-key pairs of every row from `first` on, epoch after epoch without end; reads lengths
        alone."""
        epoch = self._epoch_of(first)
        begin = first - self._rows_before[epoch]
        while True:
            plan = self._plan(epoch)
            lengths = self.corpus.lengths[plan.document]
            tokens = np.add.reduceat(lengths, plan.row_starts[:-1])
            pairs = np.add.reduceat(lengths * (lengths + 1) // 2, plan.row_starts[:-1])
            yield tokens[begin:], pairs[begin:]
            epoch, begin = epoch + 1, 0

    def _epoch_of(self, row: int) -> int:
        while self._rows_before[-1] <= row:
            plan = self._plan(len(self._rows_before) - 1)
            self._rows_before.append(self._rows_before[-1] + len(plan.row_starts) - 1)
        return int(np.searchsorted(self._rows_before, row, side="right")) - 1

    def _plan(self, epoch: int) -> _Plan:
        if epoch not in self._plans:
            if len(self._plans) >= 2:
                self._plans.pop(next(iter(self._plans)))
            key = hashlib.sha256(json.dumps(["documents", self.seed, epoch]).encode()).digest()[:16]
            noise = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))
            order = noise.permutation(len(self.corpus))
            row, column = _best_fit(self.corpus.lengths[order].tolist(), self.row_length)
            count = int(row.max()) + 1
            row = noise.permutation(count)[row]
            sort = np.lexsort((column, row))
            row_starts = np.searchsorted(row[sort], np.arange(count + 1))
            self._plans[epoch] = _Plan(order[sort], column[sort], row_starts)
        return self._plans[epoch]


def _best_fit(lengths: Sequence[int], row_length: int) -> tuple[Ints, Ints]:
    """Row and first column of each document: it goes into the row with the least room that suffices, or a new one."""
    rows, columns = np.empty(len(lengths), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    # Rows by the room they have left, and a bit mask of the rooms that some row has.
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    mask = count = 0
    for i, length in enumerate(lengths):
        fitting = mask >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                mask ^= 1 << room
        else:
            room, row, count = row_length, count, count + 1
        rows[i], columns[i] = row, row_length - room
        by_room[room - length].append(row)
        mask |= 1 << (room - length)
    return rows, columns
