from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synthetic_tasks import Tokenizer, get_task
from synthetic_tasks.corpus import Batch, Component, Corpus, PackedLoader, build_corpus, with_replay

TASK = get_task("arithmetic")
TOKENIZER = Tokenizer.for_tasks(TASK)
BASE = [Component(name="base", operations={1: 1, 2: 2, 3: 1})]


def build(out: Path, **changes: Any) -> Corpus:
    arguments: dict[str, Any] = {"task": TASK, "tokenizer": TOKENIZER, "mixture": BASE, "documents": 300, "seed": 0}
    build_corpus(out, **{**arguments, **changes})
    return Corpus(out)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(tmp_path_factory.mktemp("corpus"))


def test_documents_are_the_tasks_problems(corpus: Corpus) -> None:
    assert len(corpus) == 300
    structures: dict[str, set[str]] = {}
    for i in range(300):
        problem = TASK.sample(seed=corpus.report["problem_seed"], index=i, operations=BASE[0].operations)
        assert TOKENIZER.decode(corpus.document(i)) == f"<bos> {problem.prompt} {problem.solution} <eos>"
        start, solution, end = corpus.documents[i].tolist()
        assert solution - start == 1 + len(problem.prompt.split(" ")) and end - start == len(corpus.document(i))
        structures.setdefault(str(problem.difficulty["operations"]), set()).add(problem.structure_key)
    report = corpus.report
    assert report["tokens"] == len(corpus.tokens) == corpus.documents[-1, 2] == corpus.lengths.sum()
    assert report["longest"] == corpus.lengths.max()
    assert sum(report["documents_by_operations"].values()) == 300
    assert report["structures_by_operations"] == {n: len(keys) for n, keys in structures.items()}
    assert report["structures_shared"] == {"1": True, "2": True, "3": False}
    assert report["tokenizer"] == TOKENIZER.digest
    corpus.check()


def test_bytes_are_a_function_of_the_arguments(corpus: Corpus, tmp_path: Path) -> None:
    assert build(tmp_path / "same").report == corpus.report
    longer = build(tmp_path / "longer", documents=400)
    assert (longer.tokens[: len(corpus.tokens)] == corpus.tokens).all()
    assert build(tmp_path / "seed", seed=1).report["digests"] != corpus.report["digests"]
    # Another mixture draws other problems even of the same operations and seed.
    other = build(tmp_path / "mixture", mixture=[Component(name="base", operations={1: 1, 2: 2, 3: 1.01})])
    assert (other.documents[:50] != corpus.documents[:50]).any()


def test_replay_keeps_shares(tmp_path: Path) -> None:
    mixture = with_replay([Component(name="edge", operations={5: 1})], BASE, share=0.3)
    assert [(part.name, part.share) for part in mixture] == [("edge", 0.7), ("base", 0.3)]
    report = build(tmp_path, mixture=mixture, documents=1500).report
    assert report["documents_by_component"]["base"] == pytest.approx(450, abs=60)
    assert report["documents_by_operations"]["5"] == report["documents_by_component"]["edge"]
    nested = with_replay([Component(name="far", operations={6: 1}, share=8)], mixture, share=0.5)
    assert sum(part.share for part in nested) == pytest.approx(1) and nested[2].share == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": 0}, "at least one document"),
        ({"mixture": []}, "a mixture needs"),
        ({"mixture": [Component(name="x", operations={1: 1}, share=-1)]}, "a mixture needs"),
        ({"mixture": [Component(name="x", operations={99: 1})]}, "ask for at most"),
        ({"tokenizer": Tokenizer(("a",))}, "not in the vocabulary"),
    ],
)
def test_corpora_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **changes)


def test_damage_is_noticed(tmp_path: Path) -> None:
    corpus = build(tmp_path)
    with (tmp_path / "tokens.bin").open("r+b") as file:
        file.write(b"\x09")
    with pytest.raises(ValueError, match="damaged"):
        Corpus(tmp_path).check()
    with (tmp_path / "tokens.bin").open("ab") as file:
        file.write(b"\x00\x00")
    with pytest.raises(ValueError, match="not a whole corpus"):
        Corpus(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps({"documents": len(corpus)}))
    with pytest.raises(ValueError, match="not a whole corpus"):
        Corpus(tmp_path)
    with pytest.raises(ValueError, match="not a whole corpus"):
        Corpus(tmp_path / "nowhere")


def rows_of(batch: Batch) -> list[list[tuple[int, ...]]]:
    """The documents of each row, after checking all that a row promises."""
    rows = []
    for tokens, documents, positions, prompt in zip(
        batch.tokens, batch.documents, batch.positions, batch.prompt, strict=True
    ):
        found = []
        count = documents.max()
        assert (np.diff(documents[documents > 0]) >= 0).all() and (documents[(documents > 0).sum() :] == 0).all()
        for number in range(1, count + 1):
            of = documents == number
            document = tokens[of].tolist()
            assert document[0] == TOKENIZER.bos and document.index(TOKENIZER.eos) == len(document) - 1
            assert positions[of].tolist() == list(range(len(document)))
            colon = TOKENIZER.decode(document).split(" ").index(":")
            assert prompt[of].tolist() == [i <= colon for i in range(len(document))]
            found.append(tuple(document))
        padding = documents == 0
        assert (tokens[padding] == TOKENIZER.pad).all() and not prompt[padding].any() and not positions[padding].any()
        rows.append(found)
    return rows


def test_each_epoch_holds_each_document_once_and_whole(corpus: Corpus) -> None:
    loader = PackedLoader(corpus, rows=1, row_length=96, seed=3)
    everything = sorted(tuple(corpus.document(i).tolist()) for i in range(len(corpus)))
    orders, step = [], 0
    for _ in range(3):
        seen: list[tuple[int, ...]] = []
        while len(seen) < len(corpus):
            seen += rows_of(loader.batch(step))[0]
            step += 1
        assert sorted(seen) == everything
        orders.append(seen)
    assert all(one != other for one, other in pairwise(orders))
    # Whole documents leave little room: nothing but an optimal packing would beat 9 in 10 by much.
    assert corpus.lengths.sum() * 3 / (step * 96) > 0.9


def test_a_step_does_not_depend_on_what_was_asked_before(corpus: Corpus) -> None:
    def arrays(batch: Batch) -> bytes:
        return b"".join(array.tobytes() for array in vars(batch).values())

    in_order = [
        arrays(loader.batch(step))
        for loader in [PackedLoader(corpus, rows=7, row_length=96, seed=0)]
        for step in range(80)
    ]
    assert len(set(in_order)) == 80
    for step in (79, 0, 40, 41, 3):
        assert arrays(PackedLoader(corpus, rows=7, row_length=96, seed=0).batch(step)) == in_order[step]
    jumping = PackedLoader(corpus, rows=7, row_length=96, seed=0)
    for step in np.random.default_rng(0).permutation(80):
        assert arrays(jumping.batch(int(step))) == in_order[step]
    assert arrays(PackedLoader(corpus, rows=7, row_length=96, seed=1).batch(0)) != in_order[0]
    # Rows are one endless list: the size of a batch only cuts it.
    single = PackedLoader(corpus, rows=1, row_length=96, seed=0)
    wide = PackedLoader(corpus, rows=7, row_length=96, seed=0)
    for step in (0, 33, 79):
        assert rows_of(wide.batch(step)) == [rows_of(single.batch(7 * step + i))[0] for i in range(7)]


def test_shapes_and_dtypes(corpus: Corpus) -> None:
    batch = PackedLoader(corpus, rows=5, row_length=80, seed=0).batch(2)
    assert {name: (array.shape, array.dtype.name) for name, array in vars(batch).items()} == {
        "tokens": ((5, 80), "int64"),
        "documents": ((5, 80), "int64"),
        "positions": ((5, 80), "int64"),
        "prompt": ((5, 80), "bool"),
    }


def test_loaders_that_cannot_be(corpus: Corpus) -> None:
    longest = int(corpus.lengths.max())
    with pytest.raises(ValueError, match=f"row_length to at least {longest}"):
        PackedLoader(corpus, rows=2, row_length=longest - 1, seed=0)
    rows_of(PackedLoader(corpus, rows=2, row_length=longest, seed=0).batch(0))
    with pytest.raises(ValueError, match="at least 1"):
        PackedLoader(corpus, rows=0, row_length=96, seed=0)
    with pytest.raises(ValueError, match="no step -1"):
        PackedLoader(corpus, rows=1, row_length=96, seed=0).batch(-1)
