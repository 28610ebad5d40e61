"""What this machine takes for a step of a stage: short measurements, each shape once, within a limit of time.

What is too large to be tried, or comes when the time is up, is told from its FLOPs and the rate that was reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from models.config import ModelConfig
from models.flops import TRAIN, Shape, forward_flops
from models.noise import Noise
from models.sampler import sample
from models.transformer import Transformer
from synthetic_tasks.corpus import Batch

# What a worker holds in memory before it does anything comes in with these.
from testbed import evaluation, optim, rl, runtime, training  # noqa: F401
from testbed.config import Optimizer, Train
from testbed.doctor import speed
from testbed.estimates import BASE_BYTES

# Models of more parameters are not built on a CPU for a measurement.
MOST_PARAMETERS = 200_000_000
# Seconds that all measurements may take, that one may take by its FLOPs, and that one step is timed for at least.
LIMIT, LONGEST, LEAST = 12.0, 0.25, 0.15
# Sampling is timed over so many tokens.
DECODED = 8
# Share of the speed of bare matrix products that training reaches before anything is measured.
EFFICIENCY = 0.5


@dataclass(frozen=True)
class Trained:
    """One training step: seconds, and bytes kept for the backward pass of a micro-batch (None: not measured)."""

    seconds: float
    saved_bytes: int | None


@dataclass(frozen=True)
class Decoded:
    """Sampling: seconds to read one token of a prompt, and of one new token of one row."""

    read: float
    token: float


class Gauge:
    """Measures on this machine's device with `threads` threads."""

    def __init__(self, *, threads: int, limit: float = LIMIT) -> None:
        self.threads, self.limit = threads, limit
        self.start = time.perf_counter()
        self.device = runtime.fabric().device
        # Of this process with everything imported that a worker imports.
        self.base_bytes = int(psutil.Process().memory_info().rss)
        if self.device.type == "cpu":
            # A notebook holds things that a worker does not.
            self.base_bytes = min(self.base_bytes, BASE_BYTES * 5 // 4)
        # FLOP/s of useful work by activity, as of the last measurement.
        self.bare = bare = self._bare()
        self.rates = {"training": EFFICIENCY * bare, "rollout": 0.1 * bare}
        self.measured = 0
        self.notes: list[str] = []
        self._trained: dict[Any, Trained] = {}
        self._decoded: dict[Any, Decoded] = {}
        self._models: dict[Any, Transformer] = {}

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self.start

    def train(
        self, config: ModelConfig, vocabulary: int, optimizer: Optimizer, *, rows: int, row_length: int, accumulate: int
    ) -> Trained:
        """One step of next-token training of that shape."""
        shape = (config, vocabulary, optimizer.kind, rows, row_length, accumulate)
        if shape not in self._trained:
            self._trained[shape] = self._train(config, vocabulary, optimizer, rows, row_length, accumulate)
        return self._trained[shape]

    def decode(self, config: ModelConfig, vocabulary: int, *, rows: int, samples: int, length: int) -> Decoded:
        """Sampling `rows` rows, `samples` of a prompt; length: tokens before a new one, on average."""
        shape = (config, vocabulary, rows, samples, length)
        if shape not in self._decoded:
            self._decoded[shape] = self._decode(config, vocabulary, rows, samples, length)
        return self._decoded[shape]

    def _train(
        self, config: ModelConfig, vocabulary: int, optimizer: Optimizer, rows: int, length: int, accumulate: int
    ) -> Trained:
        def work(count: int) -> float:
            return TRAIN * forward_flops(config, vocabulary, Shape.dense(count, length))

        # Muon's products grow with the cube of the width: where they take too long they are not tried either.
        products = _muon_flops(config) / self.bare if optimizer.kind == "muon" else 0.0
        # Rows beyond what the time allows are not tried: their seconds grow in proportion.
        fit = _fit(LONGEST * self.rates["training"] / work(1))
        model = self._model(config, vocabulary) if fit else None
        if model is None:
            self._note(f"a step of {rows} rows of {length} tokens")
            return Trained(work(rows) / self.rates["training"] + products, None)
        tried = min(rows, fit)
        micro = Train(
            kind="pretrain", data="", tokens=1, rows=tried, row_length=max(length, 8),
            accumulate=max(1, min(tried, round(accumulate * tried / rows))),
        )  # fmt: skip
        batch = _batch(tried, length, vocabulary, config.max_length)
        part = training.split(batch, micro.accumulate)[0]
        optimizers = optim.build(model, optimizer) if products < 4 * LONGEST else []
        if not optimizers:
            self.notes.append("Muon's updates: told from FLOPs, since they are too large to try here")
        saved: dict[int, int] = {}
        passes: list[float] = []
        updates: list[float] = []
        with self._alone():
            model.train()
            with torch.autograd.graph.saved_tensors_hooks(_counter(saved, model), lambda tensor: tensor):
                training.weighted_loss(model, part, 1.0, self.device)
            begin = time.perf_counter()
            while len(passes) < 2 or time.perf_counter() - begin < (LEAST if len(passes) > 2 else 1.0):
                start = time.perf_counter()
                training.accumulate(model, batch, micro, self.device, "a measured step")
                runtime.finite_norm(model, 1.0, "a measured step")
                middle = time.perf_counter()
                for one in optimizers:
                    one.step()
                model.zero_grad()
                self._wait()
                passes.append(middle - start)
                updates.append(time.perf_counter() - middle)
        self.measured += 1
        # The first warms up.
        seconds = float(np.median(passes[1:] or passes)) * rows / tried
        self.rates["training"] = work(rows) / seconds
        bytes_ = sum(saved.values()) * -(-rows // accumulate) / len(part.tokens)
        update = float(np.median(updates[1:] or updates)) if optimizers else products
        return Trained(seconds + update, int(bytes_))

    def _decode(self, config: ModelConfig, vocabulary: int, rows: int, samples: int, length: int) -> Decoded:
        step = forward_flops(config, vocabulary, Shape(1, length, 1))
        read = forward_flops(config, vocabulary, Shape(1, length // 2, 0))
        room = max(1, min(length, config.max_length - DECODED - 1))
        fit = _fit(LONGEST * self.rates["rollout"] / (step * (DECODED + 1) + read * length / samples))
        model = self._model(config, vocabulary) if fit else None
        if model is None:
            self._note(f"sampling {rows} rows")
            return Decoded(read / self.rates["training"], step / self.rates["rollout"])
        samples = min(samples, fit)
        prompts = max(1, min(rows, fit) // samples)
        tried = prompts * samples
        words = np.random.default_rng(0).integers(3, max(4, vocabulary), (prompts, room)).tolist()

        def timed(tokens: int) -> float:
            start = time.perf_counter()
            # No token ends a row, so that all are decoded to the end.
            sample(
                model, words, range(prompts), samples=samples, max_new_tokens=tokens, end=-1, pad=0,
                noise=Noise(seed=0, purpose="plan", step=0),
            )  # fmt: skip
            self._wait()
            return time.perf_counter() - start

        with self._alone():
            timed(1)
            first, all_ = timed(1), timed(1 + DECODED)
        self.measured += 1
        token = max((all_ - first) / DECODED, 1e-9) / tried
        self.rates["rollout"] = step / token
        return Decoded(max(first - token * tried, 0.0) / (prompts * room), token)

    def _bare(self) -> float:
        """FLOP/s of matrix products."""
        if self.device.type == "cpu":
            return speed(0.05) * 1e9 * self.threads
        matrix = torch.ones(4096, 4096, device=self.device)
        for _ in range(2):  # the first warms up
            self._wait()
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            self._wait()
        return 2 * 4096**3 / (time.perf_counter() - start)

    def _model(self, config: ModelConfig, vocabulary: int) -> Transformer | None:
        """The model, or None where it is too large or the time is up."""
        if (config, vocabulary) in self._models:
            return None if self.seconds > self.limit else self._models[config, vocabulary]
        with torch.device("meta"):
            count = Transformer(config, vocabulary).parameter_count()
        # Building one takes some ten nanoseconds a parameter; weights, gradients and moments take sixteen bytes.
        left = self.limit - self.seconds
        room = psutil.virtual_memory().available / 2
        if (count > MOST_PARAMETERS and self.device.type == "cpu") or 3e-8 * count > left or 24 * count > room:
            return None
        with self._alone():
            # One at a time: several shapes are seldom planned together.
            self._models = {(config, vocabulary): Transformer(config, vocabulary).to(self.device)}
        return self._models[config, vocabulary]

    def _note(self, what: str) -> None:
        why = "the time for measurements was up" if self.seconds > self.limit else "it is too large to try here"
        self.notes.append(f"{what}: told from FLOPs, since {why}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The threads of a worker, and nobody's random numbers touched."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        finally:
            torch.set_num_threads(before)


def _fit(rows: float) -> int:
    """Rows to try: those that the time allows; one where it alone takes several times that, none beyond."""
    return int(rows) or int(rows * 6 >= 1)


def _muon_flops(config: ModelConfig) -> float:
    """FLOPs of orthogonalising the matrices of all blocks: five rounds of three products (`optim.orthogonalise`)."""
    width, out, kept = config.width, config.heads * config.head_size, config.key_value_heads * config.head_size
    shapes = [(width, out)] * 2 + [(width, kept)] * 2 + [(width, config.hidden_size)] * 3
    return config.layers * sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)


def _batch(rows: int, length: int, vocabulary: int, longest: int) -> Batch:
    """Random tokens in documents as long as they may be."""
    place = np.tile(np.arange(length), (rows, 1))
    return Batch(
        tokens=np.random.default_rng(0).integers(0, vocabulary, (rows, length)),
        documents=place // longest + 1,
        positions=place % longest,
        prompt=np.zeros((rows, length), dtype=np.bool_),
    )


def _counter(saved: dict[int, int], model: Transformer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Enters the bytes of every storage once; weights are there anyway."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    return keep
