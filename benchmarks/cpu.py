"""Speed on one CPU core against named peers in the same run: ours / peer, medians of alternating repetitions.

    pip install -e '.[benchmarks]'
    OMP_NUM_THREADS=1 python benchmarks/cpu.py [--repeats 5] [--json FILE]

training    tokens/s of a forward, backward and AdamW step, 32 rows of 128 tokens, at the quickstart's size.
            Ours: packed documents, document mask, convolutions. Peer: transformers' LlamaForCausalLM of the same
            layers, width, heads, hidden width and vocabulary; plain causal rows, no mask, no convolutions.
sampling    new tokens/s of 32 prompts x 16 samples x 64 new tokens at temperature 1, no early end.
            Ours: `models.sampler.sample`. Peer: `LlamaForCausalLM.generate` with its default cache; it returns no
            log-probabilities, ours does. Second peer: ours without caches, the whole prefix read again every token.
problems    problems/s. Ours: `arithmetic`, 4 operations, with trace, roles and two canonical keys.
            Peer: reasoning-gym's `chain_sum` with 5 terms (question and answer alone).
verdicts    gold solutions judged a second. Ours: step by step. Peer: reasoning-gym's `score_answer` (answer alone).
states      MB/s of weights and AdamW moments saved, at 5M parameters. Ours: safetensors, synced, digests, the manifest
            last, renamed, read back and checked before the older state goes. Peer: Lightning Fabric's `save`
            (torch.save; not synced, no digests, not read back). Second peer: the same, and synced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from models.config import ModelConfig, preset
from models.noise import Noise
from models.sampler import sample
from models.transformer import Transformer, token_log_probs
from synthetic_tasks import Tokenizer, get_task
from testbed import load_spec, optim, runtime
from testbed.config import Optimizer
from testbed.graph import build
from testbed.saves import Saves
from testbed.store import Store
from testbed.tracking import Tracker

# A measurement returns how many units of work one call did.
Work = Callable[[], int]
ROWS, LENGTH = 32, 128
PROMPTS, SAMPLES, NEW = 32, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, unit, works in (
        ("training", "tokens/s", training()),
        ("sampling", "new tokens/s", sampling()),
        ("problems", "problems/s", problems()),
        ("verdicts", "verdicts/s", verdicts()),
        ("states", "MB/s", states()),
    ):
        rates = measure(works, options.repeats)
        ours = rates.pop("ours")
        rows += [
            {"what": name, "unit": unit, "ours": ours, "peer": peer, "theirs": rate, "ratio": ours / rate}
            for peer, rate in rates.items()
        ]
    print(f"{'what':10} {'ours':>12} {'peer':>12}  ratio  peer's name")
    for row in rows:
        print(f"{row['what']:10} {row['ours']:12,.0f} {row['theirs']:12,.0f} {row['ratio']:6.2f}  {row['peer']}")
    packages = {name: version(name) for name in ("torch", "transformers", "reasoning-gym", "lightning")}
    print(f"{platform.processor() or platform.machine()}, one thread, {packages}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "versions": packages, "repeats": options.repeats}, file, indent=1)


def measure(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """Median units a second of each, after one call to warm up, taken in turns so that all see the same machine."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            start = time.perf_counter()
            units = work()
            rates[name].append(units / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def training() -> dict[str, Work]:
    ours, peer, vocabulary = models()
    tokens = torch.randint(3, vocabulary, (ROWS, LENGTH))
    documents = torch.arange(LENGTH).div(LENGTH // 2, rounding_mode="floor").add(1).expand(ROWS, LENGTH)
    positions = torch.arange(LENGTH).remainder(LENGTH // 2).expand(ROWS, LENGTH)
    our_optimizers = optim.build(ours, Optimizer())
    peer_optimizer = torch.optim.AdamW(peer.parameters(), lr=3e-3)

    def step_ours() -> int:
        for _ in range(8):
            logits = ours(tokens, positions=positions, documents=documents)
            (-token_log_probs(logits[:, :-1], tokens[:, 1:]).mean()).backward()
            torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
            for optimizer in our_optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return 8 * ROWS * LENGTH

    def step_peer() -> int:
        for _ in range(8):
            peer(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            peer_optimizer.step()
            peer_optimizer.zero_grad()
        return 8 * ROWS * LENGTH

    return {"ours": step_ours, "transformers LlamaForCausalLM": step_peer}


def sampling() -> dict[str, Work]:
    ours, peer, vocabulary = models()
    prompts = torch.randint(3, vocabulary, (PROMPTS, 48))
    noise = Noise(seed=0, purpose="benchmark")

    def sample_ours() -> int:
        drawn = sample(
            ours, prompts.tolist(), range(PROMPTS), samples=SAMPLES, max_new_tokens=NEW, end=-1, pad=0, noise=noise
        )
        return int(drawn.lengths.sum())

    @torch.inference_mode()
    def sample_peer() -> int:
        out = peer.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, num_return_sequences=SAMPLES,
            min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
        return int(out.shape[0] * (out.shape[1] - prompts.shape[1]))

    @torch.inference_mode()
    def without_cache() -> int:
        ids = prompts.repeat_interleave(SAMPLES, 0)[:64]
        for _ in range(NEW):
            ids = torch.cat([ids, torch.multinomial(ours(ids)[:, -1].softmax(-1), 1)], dim=1)
        return 64 * NEW

    return {"ours": sample_ours, "transformers generate": sample_peer, "ours without caches (64 rows)": without_cache}


def problems() -> dict[str, Work]:
    import reasoning_gym

    task = get_task("arithmetic")
    seeds = iter(range(10**9))

    def ours() -> int:
        return len(task.sample_batch(seed=next(seeds), start=0, count=2000, operations=4))

    def theirs() -> int:
        data = reasoning_gym.create_dataset("chain_sum", seed=next(seeds), size=2000, min_terms=5, max_terms=5)
        return sum(1 for _ in data)

    return {"ours": ours, "reasoning-gym chain_sum": theirs}


def verdicts() -> dict[str, Work]:
    import reasoning_gym

    task = get_task("arithmetic")
    some = task.sample_batch(seed=0, start=0, count=2000, operations=4)
    data = reasoning_gym.create_dataset("chain_sum", seed=0, size=2000, min_terms=5, max_terms=5)
    entries = list(data)

    def ours() -> int:
        assert all(task.verify(problem, problem.solution).strict for problem in some)
        return len(some)

    def theirs() -> int:
        assert all(data.score_answer(entry["answer"], entry) == 1.0 for entry in entries)
        return len(entries)

    return {"ours": ours, "reasoning-gym score_answer": theirs}


def states() -> dict[str, Work]:
    from lightning.fabric import Fabric

    tokenizer = Tokenizer.for_tasks(get_task("arithmetic"))
    model = Transformer(preset("5M"), len(tokenizer))
    optimizers = optim.build(model, Optimizer())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    size = 3 * 4 * model.parameter_count() // 10**6
    folder = Path(tempfile.mkdtemp())
    store, fabric = Store(folder / "store", announce=print), Fabric(accelerator="cpu", devices=1)
    store.prepare()
    spec = load_spec("smoke")
    node = next(node for node in build(spec).nodes.values() if node.kind == "pretrain")
    saves, steps = Saves(store, node), iter(range(1, 10**6))
    tracker = Tracker(folder)
    tracker.log(1, 1)

    def write(out: Path) -> dict[str, Any]:
        runtime.save_model(out, model, tokenizer)
        runtime.save_optimizers(out, optimizers)
        return {}

    def ours() -> int:
        saves.save(next(steps), write, tracker)
        return size

    def fabric_save() -> int:
        state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        fabric.save(folder / "peer.ckpt", state)
        return size

    def fabric_save_synced() -> int:
        fabric_save()
        with (folder / "peer.ckpt").open("rb") as file:
            os.fsync(file.fileno())
        return size

    return {"ours": ours, "lightning Fabric.save": fabric_save, "lightning Fabric.save, synced": fabric_save_synced}


def models() -> tuple[Transformer, Any, int]:
    """The quickstart's model and a Llama of its layers, width, heads, hidden width and vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: ModelConfig = preset("0.1M")
    vocabulary = len(Tokenizer.for_tasks(get_task("arithmetic")))
    torch.manual_seed(0)
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=config.width, intermediate_size=config.hidden_size,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.heads,
            max_position_embeddings=config.max_length, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    return Transformer(config, vocabulary), peer, vocabulary


if __name__ == "__main__":
    main()
