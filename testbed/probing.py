"""Teacher-forced accuracy and loss by the role of the token: what a model has learnt, before any sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from models.flops import Shape, causal_pairs
from models.transformer import Transformer
from synthetic_tasks import Problem, Task, Tokenizer

# Look-ups this close to the accuracy of guessing a leaf have not been learnt.
LOOKUP_MARGIN = 0.1


def documents(tokenizer: Tokenizer, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Prompt and solution of every problem, right-padded: tokens and document numbers [P, T], prompt lengths [P]."""
    rows, starts = [], []
    for problem in problems:
        prompt = tokenizer.encode_prompt(problem.prompt)
        rows.append([*prompt, *tokenizer.encode(problem.solution), tokenizer.eos])
        starts.append(len(prompt))
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), tokenizer.pad)
    numbers = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        numbers[i, : len(row)] = 1
    return tokens, numbers, starts


@torch.inference_mode()
def teacher_forced(
    model: Transformer, tokenizer: Tokenizer, task: Task, problems: Mapping[int, Sequence[Problem]], *, step: int
) -> pd.DataFrame:
    """One row an (operations, role): accuracy, loss (nats a token), tokens, and `guess`.

    problems: by operations. `guess` is, for look-ups, the accuracy of naming a random leaf of the prompt instead.
    """
    was_training = model.training
    model.eval()
    device = model.embedding.weight.device
    rows = []
    for operations, some in problems.items():
        tokens, numbers, starts = documents(tokenizer, some)
        logits = model(tokens.to(device), documents=numbers.to(device))
        scores = torch.log_softmax(logits, dim=-1)
        right = (logits.argmax(-1)[:, :-1].cpu() == tokens[:, 1:]).tolist()
        losses = (-scores[:, :-1].cpu().gather(2, tokens[:, 1:, None]).squeeze(2)).tolist()
        found: dict[str, list[tuple[bool, float]]] = {role: [] for role in task.roles}
        for i, problem in enumerate(some):
            for j, role in enumerate([*task.token_roles(problem), "end"], start=starts[i] - 1):
                found[role].append((right[i][j], losses[i][j]))
        guess = sum(map(task.lookup_guess, some)) / len(some)
        for role, values in found.items():
            if values:
                accuracy, loss = (sum(column) / len(values) for column in zip(*values, strict=True))
                rows.append(
                    {
                        "step": step,
                        "operations": operations,
                        "role": role,
                        "accuracy": accuracy,
                        "loss": loss,
                        "tokens": len(values),
                        "guess": guess if role == "lookup" else float("nan"),
                    }
                )
    model.train(was_training)
    return pd.DataFrame(rows)


def teacher_forced_shapes(tokenizer: Tokenizer, problems: Mapping[int, Sequence[Problem]]) -> tuple[Shape, Shape]:
    """What `teacher_forced` goes over, useful and as executed."""
    useful = executed = Shape()
    for some in problems.values():
        _, numbers, _ = documents(tokenizer, some)
        lengths = numbers.sum(1).tolist()
        useful += Shape(sum(lengths), sum(causal_pairs(0, length) for length in lengths), sum(lengths))
        executed += Shape.dense(*numbers.shape)
    return useful, executed


def unlearnt_lookups(roles: pd.DataFrame) -> list[int]:
    """Operations at which look-ups of the last step are no better than guessing a leaf, within LOOKUP_MARGIN."""
    last = roles[(roles["step"] == roles["step"].max()) & (roles["role"] == "lookup")]
    return [int(o) for o in last.loc[last["accuracy"] <= last["guess"] + LOOKUP_MARGIN, "operations"]]
