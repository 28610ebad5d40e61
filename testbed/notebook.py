"""For notebooks and scripts: a spec, what a run of it would take, the run and its tables; a trained model by key, what
it generates and how it scores."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.errors import StoreError, nearest
from testbed.nodes import SHELVES, shelf_of_input
from testbed.store import Store, default_root
from testbed.tables import Tables
from testbed.tables import load as load_tables

if TYPE_CHECKING:
    from models.transformer import Transformer
    from synthetic_tasks import Tokenizer
    from testbed.exporting import Format
    from testbed.planning import Plan
    from testbed.schema import Spec

# What runs a graph over the processes of this machine, by its path: launchers stand above this package and import it.
LAUNCHER = "sweeps.local:run_graph"


def load(stage: str, *, store: str | Path | None = None) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of a finished stage or kept checkpoint.

    stage: its key, the start of one (six digits or more), or `spec/stage` and `spec/stage/seed` (the first repetition
    unless a seed is given); a checkpoint has its step after it, as in `spec/pretrain@200`. Raises StoreError where the
    store has no such stage.
    """
    from testbed.runtime import load_model

    here = Store(store or default_root())
    key = _key_of_place(stage) if "/" in stage else _key_of_prefix(stage, here)
    artifact = here.get(shelf_of_input("stage", key), key)
    if artifact is None:
        raise StoreError(f"There is no stage {stage} in {here.root}. Run its spec first, or name another store.")
    return load_model(artifact.path)


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 128,
    seed: int = 0,
) -> list[list[str]]:
    """Completions of every prompt, without the end token; a function of the prompts' places and the seed."""
    from models.noise import Noise
    from models.sampler import sample

    if isinstance(prompts, str):
        raise TypeError("prompts is a list of texts, not one text")
    drawn = sample(
        model,
        [tokenizer.encode_prompt(prompt) for prompt in prompts],
        range(len(prompts)),
        samples=samples,
        max_new_tokens=max_new_tokens,
        end=tokenizer.eos,
        pad=tokenizer.pad,
        noise=Noise(seed=seed, purpose="notebook", step=0),
        temperature=temperature,
    )
    texts = [tokenizer.decode(drawn.completion(row)) for row in range(len(prompts) * samples)]
    return [texts[i * samples : (i + 1) * samples] for i in range(len(prompts))]


def score(model: Transformer, tokenizer: Tokenizer, prompt: str, completion: str) -> list[float]:
    """log-probability (nats, temperature 1) of every token of the completion and of the end after it."""
    import torch

    from models.transformer import token_log_probs

    start = tokenizer.encode_prompt(prompt)
    ids = torch.tensor([[*start, *tokenizer.encode(completion), tokenizer.eos]])
    with torch.inference_mode():
        scores = token_log_probs(model(ids[:, :-1]), ids[:, 1:])
    values: list[float] = scores[0, len(start) - 1 :].tolist()
    return values


def export(model: Transformer, tokenizer: Tokenizer, out: str | Path, *, format: Format = "safetensors") -> list[Path]:
    """Write a model and its tokenizer into a new folder: `safetensors`, or `hf` for Hugging Face's transformers where
    the architecture allows equal logits. Returns the files; raises ExportError with what stands in the way."""
    from testbed.exporting import export as written

    return written(model, tokenizer, Path(out), format=format)


def load_spec(spec: str | Path | Spec, overrides: Sequence[str] = ()) -> Spec:
    """A spec: a built-in one by name, a YAML file by its path, or one that is there already.

    overrides: changes such as `stages.mid.tokens=20000`. Raises SpecError, whose message is one paragraph a mistake.
    """
    from testbed.reading import override
    from testbed.schema import Spec
    from testbed.spec import load as load_file
    from testbed.spec import parse

    if not isinstance(spec, Spec):
        return load_file(spec, overrides)
    if not overrides:
        return spec
    raw = spec.model_dump(mode="json")
    for change in overrides:
        override(raw, change)
    return parse(raw, source=spec.name)


def plan(
    specs: str | Path | Spec | Sequence[str | Path | Spec],
    store: str | Path | None = None,
    probe: bool = True,
    *,
    workers: int | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """What a run of one spec or of several would do and take: nodes with `.key`, `.kind`, `.state`, `.tokens`,
    `.flops` and more, and `.totals`. Writes nothing.

    probe: time a few steps on this machine, for some seconds; without it there are no times.
    """
    from testbed.planning import plan as planned

    some = specs if isinstance(specs, Sequence) and not isinstance(specs, str) else [specs]
    return planned(
        [load_spec(spec, overrides) for spec in some], Store(store or default_root()), probe=probe, workers=workers
    )


def run(
    spec: str | Path | Spec,
    store: str | Path | None = None,
    workers: int | None = None,
    *,
    overrides: Sequence[str] = (),
    retry: bool = False,
    on_event: Callable[[Any], None] = lambda event: None,
) -> Any:
    """Make everything a spec asks for that the store does not have; returns the launcher's Outcome, whose `.ok` says
    whether all went well, and `.failed` what did not.

    workers: processes, one a core unless given. More than one are started anew and import the script that called: in
    it, call this below `if __name__ == "__main__":`. retry: try again what failed in an earlier run.
    """
    from testbed.graph import build

    module, _, name = LAUNCHER.partition(":")
    launch = getattr(importlib.import_module(module), name)
    graph = build(load_spec(spec, overrides))
    return launch(graph, Store(store or default_root()), workers=workers, retry=retry, on_event=on_event)


def results(spec: str | Path | Spec, *, store: str | Path | None = None, overrides: Sequence[str] = ()) -> Tables:
    """The tables of a spec that has been run: outcomes, curves, roles and stages."""
    return load_tables(load_spec(spec, overrides), Store(store or default_root()))


def _key_of_place(place: str) -> str:
    from testbed.graph import build

    *parts, last = place.split("/")
    seed: int | None = int(last) if last.isdigit() and len(parts) > 1 else None
    *path, stage = parts if seed is not None else [*parts, last]
    stages: dict[Any, str] = build(load_spec("/".join(path))).stages
    names = dict.fromkeys(name for name, _ in stages)
    for (name, label), key in stages.items():
        if name == stage and seed in (None, label):
            return key
    if stage in names:
        raise StoreError(f"{place}: the spec has no repetition {seed}.")
    raise StoreError(f"{place}: the spec has no stage `{stage}`{nearest(stage, names)}. Stages: {', '.join(names)}.")


def _key_of_prefix(prefix: str, store: Store) -> str:
    start, at, step = prefix.partition("@")
    shelf = SHELVES["checkpoint"] if at else "stages"
    found = [key for key in store.keys(shelf) if key.startswith(start) and key.endswith(at + step)]
    if len(found) > 1:
        raise StoreError(f"{prefix} is the start of {len(found)} keys in {store.root}; give more digits.")
    return found[0] if found and len(start) >= 6 else prefix
