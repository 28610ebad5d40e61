"""The corpus node: sample, tokenize and write the documents of a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_tasks.corpus import build_corpus
from testbed.nodes import Corpus, Node
from testbed.tracking import Tracker


def run(node: Node, inputs: dict[str, Path], out: Path, tracker: Tracker) -> dict[str, Any]:
    """Writes tokens.bin, documents.npy and report.json (`synthetic_tasks.corpus`); the report is the summary."""
    assert isinstance(node.config, Corpus)
    task, tokenizer = node.context.task_and_tokenizer()
    return build_corpus(
        out,
        task=task,
        tokenizer=tokenizer,
        mixture=node.config.components,
        documents=node.config.documents,
        seed=node.context.seeds.problems,
        progress=lambda done, total: tracker.log(done, total),
    )
