"""Reasoning tasks whose every step can be checked: sampling, traces, verification, tokenizers and corpora."""

from synthetic_tasks.base import Corruption, EmptyCellError, ParseError, Problem, Split, StepVerdict, Verdict
from synthetic_tasks.family import Task
from synthetic_tasks.registry import corrupt, get_task, list_tasks
from synthetic_tasks.tokenizer import Tokenizer

__all__ = [
    "Corruption",
    "EmptyCellError",
    "ParseError",
    "Problem",
    "Split",
    "StepVerdict",
    "Task",
    "Tokenizer",
    "Verdict",
    "corrupt",
    "get_task",
    "list_tasks",
]
