"""For notebooks: a trained model by key, what it generates, how it scores, and the tables of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.errors import StoreError, nearest
from testbed.store import Store, default_root
from testbed.tables import Tables
from testbed.tables import load as load_tables

if TYPE_CHECKING:
    from models.transformer import Transformer
    from synthetic_tasks import Tokenizer
    from testbed.schema import Spec


def load(stage: str, *, store: str | Path | None = None) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of a finished stage.

    stage: its key, the start of one (six digits or more), or `spec/stage` and `spec/stage/seed` (the first repetition
    unless a seed is given). Raises StoreError where the store has no such stage.
    """
    from testbed.runtime import load_model

    here = Store(store or default_root())
    key = _key_of_place(stage) if "/" in stage else _key_of_prefix(stage, here)
    artifact = here.get("stages", key)
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


def results(spec: str | Path | Spec, *, store: str | Path | None = None, overrides: Sequence[str] = ()) -> Tables:
    """The tables of a spec that has been run: outcomes, curves, roles and stages."""
    from testbed.schema import Spec
    from testbed.spec import load as load_spec

    checked = spec if isinstance(spec, Spec) else load_spec(spec, overrides)
    return load_tables(checked, Store(store or default_root()))


def _key_of_place(place: str) -> str:
    from testbed.graph import build
    from testbed.spec import load as load_spec

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
    found = [key for key in store.keys("stages") if key.startswith(prefix)]
    if len(found) > 1:
        raise StoreError(f"{prefix} is the start of {len(found)} keys in {store.root}; give more digits.")
    return found[0] if found and len(prefix) >= 6 else prefix
