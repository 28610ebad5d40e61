"""Outcomes are counts of verdicts, and probes read each token's role at its own place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import analysis
from models.config import ModelConfig
from models.transformer import Transformer
from synthetic_tasks import Problem, Tokenizer, get_task
from testbed import evaluation, notebook, runtime
from testbed.config import Evaluation
from testbed.nodes import Context, Node, Seeds
from testbed.probing import documents, teacher_forced, unlearnt_lookups
from testbed.tracking import Tracker

SETTINGS: dict[str, Any] = {"modulus": 5, "names": 8}
TASK = get_task("arithmetic", **SETTINGS)
TOKENIZER = Tokenizer.for_tasks(TASK)


def problems(count: int = 6, operations: int = 3) -> list[Problem]:
    return list(TASK.sample_batch(seed=0, start=0, count=count, operations=operations, split="test"))


class Oracle(Transformer):
    """Puts 0.9 of its probability on the right next token, or on another one where the role is in `wrong`."""

    def __init__(self, some: list[Problem], wrong: tuple[str, ...] = ()) -> None:
        super().__init__(ModelConfig(layers=1, width=8, heads=1), len(TOKENIZER))
        self.answers = {}
        for problem in some:
            prompt = [TOKENIZER.bos, *TOKENIZER.encode(problem.prompt)]
            targets = [*TOKENIZER.encode(problem.solution), TOKENIZER.eos]
            for i, role in enumerate([*TASK.token_roles(problem), "end"]):
                seen = (*prompt, *targets[:i])
                self.answers[seen] = (targets[i] + (role in wrong)) % len(TOKENIZER)

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        size = len(TOKENIZER)
        probabilities = torch.full((*tokens.shape, size), 1.0 / size)
        for row, ids in enumerate(tokens.tolist()):
            for t in range(len(ids)):
                if (right := self.answers.get(tuple(ids[: t + 1]))) is not None:
                    probabilities[row, t] = 0.1 / (size - 1)
                    probabilities[row, t, right] = 0.9
        return probabilities.log()


@pytest.mark.parametrize("wrong", [(), ("lookup",), ("end", "result"), ("next",)])
def test_roles_are_read_at_their_own_tokens(wrong: tuple[str, ...]) -> None:
    some = problems()
    table = teacher_forced(Oracle(some, wrong), TOKENIZER, TASK, {3: some}, step=7)
    assert set(table["role"]) == set(TASK.roles) and (table["step"] == 7).all() and (table["operations"] == 3).all()
    for row in table.itertuples():
        right = row.role not in wrong
        assert row.accuracy == (1.0 if right else 0.0)
        assert row.loss == pytest.approx(-np.log(0.9 if right else 0.1 / (len(TOKENIZER) - 1)), rel=1e-4)
    assert table["tokens"].sum() == sum(len(p.solution.split(" ")) + 1 for p in some)
    assert table.set_index("role").loc["lookup", "tokens"] == 6 * 3 * 2


def test_documents_are_prompt_solution_end() -> None:
    some = problems(3)
    tokens, numbers, starts = documents(TOKENIZER, some)
    for i, problem in enumerate(some):
        length = int(numbers[i].sum())
        assert TOKENIZER.decode(tokens[i, :length].tolist()) == f"<bos> {problem.prompt} {problem.solution} <eos>"
        assert TOKENIZER.decode(tokens[i, starts[i] : length - 1].tolist()) == problem.solution


def test_lookup_guess_by_hand() -> None:
    """Guessing a leaf for each quoted value, from the text of the problem alone."""
    for problem in problems(20):
        facts = [fact.split(" ") for fact in problem.prompt.split(" ; ")]
        leaves = [fact[1] for fact in facts if len(fact) == 2 and fact[0] != "?"]
        quoted = [v for step in problem.solution.split(" ; ")[:-1] for v in (step.split(" ")[1], step.split(" ")[4])]
        expected = sum(leaves.count(v) / len(leaves) for v in quoted) / len(quoted)
        assert TASK.lookup_guess(problem) == pytest.approx(expected)


def test_lookups_at_the_guess_level_are_called_unlearnt() -> None:
    rows = [(1, 1, 0.2), (1, 2, 0.2), (5, 1, 0.9), (5, 2, 0.55)]
    table = pd.DataFrame(rows, columns=["step", "operations", "accuracy"]).assign(role="lookup", guess=0.5)
    assert unlearnt_lookups(table) == [2]


def test_outcome_counts_verdicts() -> None:
    problem = problems()[0]
    steps = problem.solution.split(" ; ")
    texts = [
        problem.solution,
        problem.solution,
        f"! {problem.answer}",
        " ; ".join([steps[0], steps[0], *steps[1:]]),
        "",
    ]
    ended = np.array([True, False, True, True, False])
    row = evaluation.outcome(TASK, problem, 4, texts, ended, np.array([10, 20, 30, 40, 50]), temperature=0.7)
    assert (row["n"], row["c_strict"], row["c_answer"], row["truncated"]) == (5, 1, 4, 2)
    assert row["length_mean"] == 30 and row["problem"] == 4 and row["operations"] == 3 and row["temperature"] == 0.7
    assert row["status_redefined"] == 1 and row["status_ok"] == 3 * 3
    assert row["process_mean"] == pytest.approx((1 + 1 + 0 + 3 / 4 + 0) / 5)


def test_evaluation_problems_are_distinct_and_stable() -> None:
    """Of a cell with fewer problems than asked for, each is taken once; more asked for only adds to the list."""
    few = evaluation.distinct_problems(TASK, 200, seed=0, operations=1, split="test")
    many = evaluation.distinct_problems(TASK, 50, seed=0, operations=3, split="test")
    assert 1 < len(few) < 200 and len(many) == 50
    for found in (few, many):
        assert len({problem.instance_key for problem in found}) == len(found)
    assert evaluation.distinct_problems(TASK, 20, seed=0, operations=3, split="test") == many[:20]
    drawn = TASK.sample_batch(seed=0, start=0, count=2000, operations=1, split="test")
    assert {problem.instance_key for problem in drawn} == {problem.instance_key for problem in few}


@pytest.mark.parametrize("change", [{"samples": 0}, {"max_new_tokens": 0}, {"temperature": float("nan")}])
def test_what_cannot_be_sampled_is_refused(change: dict[str, Any]) -> None:
    model = Transformer(ModelConfig(layers=1, width=16, heads=2), len(TOKENIZER))
    with pytest.raises(ValueError, match=r"must be (at least 1|positive)"):
        notebook.generate(model, TOKENIZER, [problems()[0].prompt], **{"max_new_tokens": 4, **change})
    with pytest.raises(TypeError, match="a list of texts"):
        notebook.generate(model, TOKENIZER, "? a :")


def test_an_evaluation_fits_its_schema_and_repeats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ModelConfig(layers=1, width=16, heads=2)
    stage = tmp_path / "stage"
    stage.mkdir()
    runtime.save_model(stage, Transformer(model, len(TOKENIZER)), TOKENIZER)
    config = Evaluation(problems=3, samples=4, k=(1, 2), max_new_tokens=16)

    def run(name: str, **seeds: int) -> pd.DataFrame:
        context = Context(
            model=model, task=("arithmetic", SETTINGS), seeds=Seeds(**seeds), bands={"a": (1, 2), "b": (3,)}
        )
        node = Node(
            kind="evaluation", name="s", seed=0, key="k", config=config, parents={"stage": "p"}, context=context
        )
        out = tmp_path / name
        out.mkdir()
        with Tracker(out) as tracker:
            summary = evaluation.run(node, {"stage": stage}, out, tracker)
        assert summary["samples"] == 9 * 4
        return pd.read_parquet(out / "outcomes.parquet")

    first = run("first")
    labelled = first.assign(arm="a", stage="s", key="k", seed=0, band="a")
    analysis.check(labelled, analysis.SCHEMAS["outcomes"])
    assert first["operations"].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    pd.testing.assert_frame_equal(first, run("again", init=1, order=1))
    assert not first["length_mean"].equals(run("noise", rollout=1)["length_mean"])
