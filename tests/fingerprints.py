"""What tasks, corpora and every kind of node make, in a few numbers: tests/golden/fingerprints.json keeps them.

    make golden     write the file anew, after epochs were raised

Nobody remembers to raise an epoch. test_epochs.py makes the fingerprints again and fails by name where one changed
under an epoch that did not. Each kind is run on its own, from a parent that no training code made, so that a change
shows in the kind that it is in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from models.config import ModelConfig
from models.transformer import Transformer
from synthetic_tasks import Task, get_task, list_tasks
from testbed import runtime
from testbed.conditions import numeric_class
from testbed.execute import execute
from testbed.graph import EPOCHS, build
from testbed.nodes import Node
from testbed.spec import parse
from testbed.store import Store

FILE = Path(__file__).parent / "golden" / "fingerprints.json"
PROBLEMS = 1000
RESET = {"parent": "stable", "optimizer": "reset", "rate": "restart"}
SAME = RESET | {"rate": "continue"}
ROWS = {"rows": 4, "row_length": 64, "probes": 1, "schedule": {"shape": "constant", "decay": 0}}
RL = {
    "kind": "rl", "parent": "start", "edge": RESET, "band": "in_range", "steps": 5, "prompts": 3, "group": 4,
    "max_new_tokens": 12,
}  # fmt: skip
# Five steps of each kind, and of rl with each part of its loss and reward that can be chosen.
STAGES: dict[str, dict[str, Any]] = {
    "start": {"kind": "pretrain", "data": "mixed", "tokens": 1100, **ROWS},
    "pretrain muon": {"kind": "pretrain", "data": "mixed", "tokens": 1100, "optimizer": {"kind": "muon"}, **ROWS},
    "midtrain": {"kind": "midtrain", "parent": "start", "edge": SAME, "data": "mixed", "tokens": 1100, **ROWS},
    "sft": {
        "kind": "sft", "parent": "start", "edge": SAME, "data": "mixed", "tokens": 1100, "prompt_weight": 0, **ROWS,
    },
    "rl": RL | {"reward": "random"},
    "rl no std": RL | {"reward": "random", "scale_by_std": False, "temperature": 1.2},
    "rl kl, two updates": RL | {"reward": "random", "kl": 0.1, "updates": 2, "clip_high": 0.1},
    "parallel": {"kind": "parallel", "objectives": {"sft": 0.5, "rl": 0.5}, "steps": 4, "every": 2},
    "combine": {"kind": "combine", "of": {"start": 1.5, "other": -0.5}},
    "other": {"kind": "pretrain", "data": "mixed", "tokens": 1, **ROWS},
}  # fmt: skip
SPEC: dict[str, Any] = {
    "name": "golden",
    "task": {"name": "arithmetic", "settings": {"modulus": 5, "names": 8}},
    "model": {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "max_length": 96},
    "bands": {"in_range": [1], "edge": [2]},
    "data": {"mixed": {"documents": 200, "operations": {1: 1, 2: 0.5}}},
    "stages": STAGES,
    "arms": {name: name for name in STAGES},
    "parents": {name: "start" for name in STAGES if name != "start"},
    "probes": {
        "roles": {"measure": "roles", "of": ["start"], "problems": 4},
        "weights": {"measure": "weights", "of": ["start"], "against": "other"},
    },
    "evaluation": {"problems": 4, "samples": 4, "k": [1, 2], "max_new_tokens": 24},
}  # fmt: skip
# Parents that no training made.
GIVEN = ("start", "other")


# What a task's default settings leave out: name -> settings, of which every value of every axis is drawn.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "task arithmetic, in contexts": ("arithmetic", {"contexts": ["symbolic", "zoo", "school", "festival"]}),
}


def epochs() -> dict[str, int]:
    """Epochs of the code as it is: of kinds, and of tasks by `task <name>`."""
    return EPOCHS | {f"task {name}": get_task(name).epoch for name in list_tasks()}


def epoch_of(name: str) -> str:
    """Whose epoch a fingerprint stands under."""
    if name.startswith("task "):
        return name.partition(",")[0]
    return STAGES[name]["kind"] if name in STAGES else name.partition(" ")[0]


def here() -> dict[str, Any]:
    """Where bits are equal: the numeric class on one thread, and the processor, for which libraries choose kernels."""
    torch.set_num_threads(1)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return numeric_class({}) | {"processor": model}


def fingerprints() -> dict[str, Any]:
    """Digests of what is discrete and projections of what is not, by name."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {f"task {name}": {"sha256": task_digest(get_task(name))} for name in list_tasks()}
    for name, (task, settings) in VARIANTS.items():
        found[name] = {"sha256": task_digest(get_task(task, **settings))}
    with tempfile.TemporaryDirectory() as folder:
        found |= dict(_made(Store(Path(folder) / "store")))
    return found


def task_digest(task: Task) -> str:
    """Of problems all over the grid in every split, with their keys and roles, and of the verdicts on the gold trace
    and on spoilt ones."""
    digest = hashlib.sha256()
    axes: dict[str, Any] = {axis: dict.fromkeys(values, 1.0) for axis, values in task.axes.items()}
    for split, count in (("train", PROBLEMS - 200), ("validation", 100), ("test", 100)):
        for i, problem in enumerate(task.sample_batch(seed=11, start=0, count=count, split=split, **axes)):  # type: ignore[arg-type]
            words = problem.solution.split(" ")
            cut, swapped = i % len(words), [*words]
            swapped[cut], swapped[-1 - cut] = swapped[-1 - cut], swapped[cut]
            tried = (problem.solution, " ".join(words[:cut]), " ".join(swapped), problem.answer)
            verdicts = [vars(task.verify(problem, text, ended=bool(i % 3))) for text in tried]
            fields = (
                problem.prompt, problem.solution, problem.answer, sorted(problem.difficulty.items()), problem.context,
                problem.structure_key, problem.instance_key, list(task.token_roles(problem)), verdicts,
            )  # fmt: skip
            digest.update(json.dumps(fields, default=str).encode())
    return digest.hexdigest()


def _made(store: Store) -> Iterator[tuple[str, Any]]:
    graph = build(parse(SPEC))
    store.prepare()
    corpus = execute(graph.nodes[graph.corpora["mixed"]], store).path
    files = hashlib.sha256((corpus / "tokens.bin").read_bytes() + (corpus / "documents.npy").read_bytes())
    yield "corpus", {"sha256": files.hexdigest()}
    given = {graph.stages[name, 0]: name for name in GIVEN}
    for key, name in given.items():
        _give(store, graph.nodes[key], seed=GIVEN.index(name))
    for name in [name for name in STAGES if name not in GIVEN]:
        yield name, _model(execute(graph.nodes[graph.stages[name, 0]], store).path)
    # From nothing: init, order and AdamW.
    fresh = dataclasses.replace(graph.nodes[graph.stages["start", 0]], key="f" * 32)
    yield "pretrain", _model(execute(fresh, store).path)
    evaluation = execute(graph.nodes[graph.evaluations["start", 0]], store).path
    yield "evaluation", _table(pd.read_parquet(evaluation / "outcomes.parquet"))
    for probe in SPEC["probes"]:
        made = execute(graph.nodes[graph.probes[probe, "start", 0]], store).path
        yield f"probe {probe}", _table(pd.read_parquet(made / "probe.parquet"))


def _give(store: Store, node: Node, seed: int) -> None:
    """Publish weights under a stage's key that come from numpy's generator alone."""
    _, tokenizer = node.context.task_and_tokenizer()
    model = Transformer(ModelConfig(**dataclasses.asdict(node.context.model)), len(tokenizer))
    noise = np.random.Generator(np.random.Philox(key=seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(noise.normal(scale=0.3, size=tuple(parameter.shape))))
    with store.publish("stages", node.key) as draft:
        runtime.save_model(draft.out, model, tokenizer)
        draft.manifest = {"summary": {"positions": {}, "flops": 0.0}, "kind": node.kind, "name": node.name}


def _model(path: Path) -> dict[str, Any]:
    """Of the parameters and of the logits on fixed tokens."""
    model, tokenizer = runtime.load_model(path)
    tokens = torch.arange(24).remainder(len(tokenizer)).view(2, 12)
    with torch.inference_mode():
        logits = model(tokens)
    arrays = [*(p.detach().numpy() for p in model.parameters()), logits.numpy()]
    return _numbers(arrays)


def _table(table: pd.DataFrame) -> dict[str, Any]:
    numbers = table.select_dtypes("number").to_numpy(dtype=np.float64)
    found = _numbers([np.nan_to_num(numbers)])
    words = table.select_dtypes(exclude="number").astype(str).to_csv(index=False)
    return found | {"words": hashlib.sha256((words + str(list(table.columns))).encode()).hexdigest()}


def _numbers(arrays: list[np.ndarray]) -> dict[str, Any]:
    """The exact digest, and of every array a projection that rounding hardly moves."""
    digest, projections = hashlib.sha256(), []
    for number, array in enumerate(arrays):
        digest.update(np.ascontiguousarray(array).tobytes())
        signs = np.random.Generator(np.random.Philox(key=1000 + number)).choice([-1.0, 1.0], size=array.size)
        projections.append(float(signs @ array.astype(np.float64).ravel() / np.sqrt(array.size)))
    return {"sha256": digest.hexdigest(), "projections": projections}


def main() -> None:
    found = {"epochs": epochs(), "made_on": here(), "fingerprints": fingerprints()}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
