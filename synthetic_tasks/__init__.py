"""Reasoning tasks whose every step can be checked: sampling, traces, verification, tokenizers and corpora."""

from synthetic_tasks.base import EmptyCellError, ParseError, Problem, Split, StepVerdict, Task, Verdict
from synthetic_tasks.registry import get_task, list_tasks
from synthetic_tasks.tokenizer import Tokenizer

__all__ = [
    "EmptyCellError",
    "ParseError",
    "Problem",
    "Split",
    "StepVerdict",
    "Task",
    "Tokenizer",
    "Verdict",
    "get_task",
    "list_tasks",
]
