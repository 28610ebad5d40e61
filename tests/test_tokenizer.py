import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic_tasks import Tokenizer, get_task

VOCABULARY = (";", "=", "0", "1", "a", "b", "Ω")
TOKENIZER = Tokenizer(VOCABULARY)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1)))
def test_ids_to_text_and_back(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


@given(st.one_of(st.text(), st.lists(st.sampled_from((*TOKENIZER.tokens, "")), max_size=6).map(" ".join)))
def test_text_to_ids_and_back_or_an_error_that_names_the_place(text: str) -> None:
    pieces = text.split(" ") if text else []
    unknown = [i for i, piece in enumerate(pieces) if piece not in TOKENIZER.tokens]
    if unknown:
        with pytest.raises(ValueError, match=f"token {unknown[0]} of the text"):
            TOKENIZER.encode(text)
    else:
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize(("ids", "place"), [([-1], 0), ([3, len(TOKENIZER)], 1)])
def test_ids_outside_the_vocabulary(ids: list[int], place: int) -> None:
    with pytest.raises(ValueError, match=f"id {place} of the list"):
        TOKENIZER.decode(ids)


def test_specials_come_first() -> None:
    assert [TOKENIZER.tokens[i] for i in (TOKENIZER.pad, TOKENIZER.bos, TOKENIZER.eos)] == ["<pad>", "<bos>", "<eos>"]
    assert (TOKENIZER.pad, TOKENIZER.bos, TOKENIZER.eos) == (0, 1, 2)
    assert TOKENIZER.tokens[3:] == VOCABULARY


def test_digest_names_the_vocabulary_and_its_order() -> None:
    canonical = b'["<pad>","<bos>","<eos>","a","b"]'
    assert Tokenizer(("a", "b")).digest == hashlib.sha256(canonical).hexdigest()
    assert Tokenizer(("a", "b")).digest == Tokenizer(["a", "b"]).digest
    assert len({Tokenizer(v).digest for v in (("a", "b"), ("b", "a"), ("ab",), ("a", "b", "c"))}) == 4


@pytest.mark.parametrize("vocabulary", [("a", "a"), ("<eos>",), ("",), ("a b",), ("a\n",), ("\u00a0",)])
def test_vocabularies_that_cannot_be(vocabulary: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="the vocabulary"):
        Tokenizer(vocabulary)


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    assert Tokenizer.load(path) == TOKENIZER
    path.write_text(path.read_text().replace('"a"', '"z"'))
    with pytest.raises(ValueError, match="damaged"):
        Tokenizer.load(path)
    for broken in ("{", "[]", "{}", '{"vocabulary": 3, "digest": ""}'):
        path.write_text(broken)
        with pytest.raises(ValueError, match="not a saved tokenizer"):
            Tokenizer.load(path)


def test_union_of_tasks() -> None:
    small, large = get_task("arithmetic", names=8), get_task("arithmetic", names=16, modulus=11)
    tokenizer = Tokenizer.for_tasks(small, large)
    assert set(tokenizer.tokens[3:]) == {*small.vocabulary, *large.vocabulary}
    assert tokenizer.tokens[3 : 3 + len(small.vocabulary)] == small.vocabulary


def test_a_tasks_text_is_in_its_vocabulary() -> None:
    task = get_task("arithmetic", distractors=2, question="first", order="shuffled")
    tokenizer = Tokenizer.for_tasks(task)
    for problem in task.sample_batch(seed=0, start=0, count=200):
        for part in (problem.prompt, problem.solution):
            assert tokenizer.decode(tokenizer.encode(part)) == part
