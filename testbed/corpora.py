"""The corpus node: sample, tokenize and write the documents of a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_tasks.corpus import build_corpus
from testbed import stopping
from testbed.nodes import Corpus, Node
from testbed.saves import Saves
from testbed.tracking import Tracker


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker, saves: Saves | None = None) -> dict[str, Any]:
    """Writes tokens.bin, documents.npy and report.json (`synthetic_tasks.corpus`); the report is the summary."""
    assert isinstance(node.config, Corpus)
    task, tokenizer = node.context.task_and_tokenizer()

    def progress(done: int, total: int) -> None:
        tracker.log(done, total)
        stopping.check()

    return build_corpus(
        out,
        task=task,
        tokenizer=tokenizer,
        mixture=node.config.components,
        documents=node.config.documents,
        seed=node.context.seeds.problems,
        progress=progress,
    )
