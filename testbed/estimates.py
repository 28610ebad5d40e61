"""What a node will take, from its settings: tokens, FLOPs, memory and, with a gauge of this machine, seconds.

    first documents of a mixture, problems of a cell ──> lengths ──> shapes of a step ──> FLOPs     (models.flops)
                                                                                     └──> seconds   (testbed.timing)

No corpus is built and no stage is run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from models.config import ModelConfig
from models.flops import TRAIN, Shape, causal_pairs, forward_flops, matrix_parameters
from synthetic_tasks import Problem, Tokenizer
from synthetic_tasks.corpus import Corpus as Documents
from synthetic_tasks.corpus import PackedLoader, build_corpus
from testbed.config import RL, Combine, Evaluation, Optimizer, Parallel, Probe, Train
from testbed.errors import UserError
from testbed.nodes import Corpus, Node, split_reference

if TYPE_CHECKING:
    from testbed.timing import Gauge

# Documents of a mixture, and problems of a cell, that lengths are read off.
DOCUMENTS, PROBLEMS = 512, 64
# Of a process with torch and lightning imported, where it is not measured.
BASE_BYTES = 600_000_000
# Bytes a parameter: weights, gradient and two moments; and when a stage ends the change of its weights is taken in
# fp64, of three vectors, with weights and moments still there.
STATE_BYTES, CHANGE_BYTES = 16, 24
# Rows that `sample` decodes at once, and work on rows that have ended but are not yet dropped.
MOST_ROWS, RIDING = 1024, 1.2
# What a backward pass holds while it runs, beside what was kept for it.
BACKWARD = 1.5
# Seconds of a node that no step explains: inputs are read and checked, results written and synced.
AROUND = 0.1
# Held-out problems of each difficulty behind a probe of a stage, as `training` has it (which needs torch to be read).
HELD_OUT = 32


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What work takes. tokens: trained ones; flops: useful ones of all but scoring, as budgets count them; seconds: of
    one worker, None where nobody measured."""

    tokens: float = 0.0
    sampled_tokens: float = 0.0
    flops: float = 0.0
    seconds: float | None = 0.0

    def __add__(self, other: Cost) -> Cost:
        known = self.seconds is not None and other.seconds is not None
        return Cost(
            tokens=self.tokens + other.tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            flops=self.flops + other.flops,
            seconds=(self.seconds or 0.0) + (other.seconds or 0.0) if known else None,
        )

    def times(self, factor: float) -> Cost:
        return Cost(
            tokens=self.tokens * factor,
            sampled_tokens=self.sampled_tokens * factor,
            flops=self.flops * factor,
            seconds=None if self.seconds is None else self.seconds * factor,
        )


def parameter_count(config: ModelConfig, vocabulary: int) -> int:
    """Parameters of a model, a tied head counted once, without building it."""
    norms = config.layers * (2 * config.width + 2 * config.head_size * config.qk_norm) + config.width
    heads = config.width * vocabulary * (1 if config.tied else 2)
    return matrix_parameters(config) + norms + heads


@dataclass(frozen=True)
class Work:
    """A stage: how many steps (a share of one where a budget falls between), what each takes, and what stands around
    them."""

    steps: float
    step: Cost
    around: Cost

    @property
    def cost(self) -> Cost:
        return self.step.times(self.steps) + self.around


@dataclass(frozen=True)
class Lengths:
    """Tokens of problems: prompts with their begin token, solutions with their end token; seconds to judge one."""

    prompts: list[int]
    solutions: list[int]
    judging: float

    def shape(self, prompts: float, samples: int) -> tuple[tuple[float, float, float], float]:
        """Useful work of sampling (tokens, pairs, logits read) and tokens sampled, for that many prompts."""
        tokens = read = seen = 0
        for prompt, solution in zip(self.prompts, self.solutions, strict=True):
            read += 1 + samples * (solution - 1)
            tokens += prompt + samples * (solution - 1)
            seen += causal_pairs(0, prompt) + samples * causal_pairs(prompt, solution - 1)
        share = prompts / len(self.prompts)
        return (tokens * share, seen * share, read * share), samples * sum(self.solutions) * share

    def cut(self, length: int) -> Lengths:
        """With completions of that length in the place of solutions."""
        return replace(self, solutions=[length] * len(self.solutions))

    @property
    def document(self) -> float:
        """Tokens of prompt and solution, on average."""
        return (sum(self.prompts) + sum(self.solutions)) / len(self.prompts)

    @property
    def pairs(self) -> float:
        """Visible pairs of prompt and solution, on average."""
        both = zip(self.prompts, self.solutions, strict=True)
        return sum(causal_pairs(0, prompt + solution) for prompt, solution in both) / len(self.prompts)


class Estimates:
    """What nodes take by themselves, from their settings; `gauge` None: without seconds."""

    def __init__(self, nodes: Mapping[str, Node], folder: Path, gauge: Gauge | None) -> None:
        self.nodes, self.folder, self.gauge = nodes, folder, gauge
        self._corpora: dict[str, tuple[Documents, float]] = {}
        self._rows: dict[tuple[str, int], tuple[float, float]] = {}
        self._lengths: dict[Any, Lengths] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        # Of stages that are matched: FLOPs by key.
        self.flops: dict[str, float] = {}

    def work(self, node: Node) -> Work:
        """Of a checkpoint: its steps alone."""
        work = self._work(node)
        return work if node.step is None else replace(work, steps=min(float(node.step), work.steps))

    def shape(self, node: Node) -> tuple[ModelConfig, int]:
        """Model and size of the vocabulary."""
        return node.context.model, len(self._tokenizer(node))

    def flops_most(self, node: Node) -> float | None:
        """FLOPs when every completion takes all the tokens it may; None where nothing is sampled."""
        config = node.config
        if isinstance(config, RL):
            if config.steps is None:
                return config.flops
            longest = self._band(node).cut(config.max_new_tokens)
            return min(node.step or config.steps, config.steps) * self._policy_flops(node, config, longest)
        if isinstance(config, Evaluation):
            cells = [self._cell(node, o, config.split).cut(config.max_new_tokens) for o in node.context.operations]
            return sum(self._forward(node, cell.shape(config.problems, config.samples)[0]) for cell in cells)
        return None

    def corpus_tokens(self, node: Node) -> int:
        assert isinstance(node.config, Corpus)
        documents, _ = self._documents(node)
        return round(float(documents.lengths.mean()) * node.config.documents)

    def memory(self, node: Node) -> int:
        """Peak of the process, in bytes; on a GPU partly there."""
        base = self.gauge.base_bytes if self.gauge else BASE_BYTES
        config = node.config
        if isinstance(config, Corpus):
            # Bounds and keys of structures of every document.
            return base + 200 * config.documents
        model, vocabulary = self.shape(node)
        count = parameter_count(model, vocabulary)
        if isinstance(config, Evaluation):
            hardest = self._cell(node, max(node.context.operations), config.split)
            cache = self._cache(node, config.problems * config.samples, max(hardest.prompts) + config.max_new_tokens)
            return base + 4 * count + cache
        if isinstance(config, Probe | Combine):
            held = len(config.of) if isinstance(config, Combine) else 2
            # Both take sums or differences in fp64.
            return base + (4 * held + 16) * count
        parts = list(node.objectives.values()) or [node]
        states = sum(STATE_BYTES + 8 + 4 * (getattr(part.config, "kl", 0) > 0) for part in parts) * count
        working = max(self._working(part) for part in parts)
        return base + max(states + working, states - 4 * count + CHANGE_BYTES * count)

    def _working(self, node: Node) -> int:
        """Activations of a micro-batch with logits and their gradient, or the caches of sampling; bytes."""
        config = node.config
        if isinstance(config, RL):
            lengths = self._band(node)
            rows, length = min(config.micro_rows, config.prompts * config.group), math.ceil(lengths.document)
            cache = self._cache(node, config.prompts * config.group, max(lengths.prompts) + config.max_new_tokens)
            return max(cache, self._activations(node, rows, length, 1, config.optimizer))
        assert isinstance(config, Train)
        corpus = self.nodes[node.parents["corpus"]].config
        assert isinstance(corpus, Corpus)
        # The tokens are mapped from the disk; the order of the documents is planned an epoch ahead.
        read = 150 * corpus.documents + 2 * self.corpus_tokens(self.nodes[node.parents["corpus"]])
        return read + self._activations(node, config.rows, config.row_length, config.accumulate, config.optimizer)

    def _activations(self, node: Node, rows: int, length: int, accumulate: int, optimizer: Optimizer) -> int:
        model, vocabulary = self.shape(node)
        micro = -(-rows // accumulate)
        # Logits and their gradient.
        bytes_ = 8 * micro * length * vocabulary
        if self.gauge is not None:
            timed = self.gauge.train(
                model, vocabulary, optimizer, rows=rows, row_length=length, accumulate=accumulate
            ).saved_bytes
            if timed is not None:
                return round(bytes_ + BACKWARD * timed)
        return round(bytes_ + BACKWARD * micro * length * _saved_bytes(model, vocabulary, length))

    def _cache(self, node: Node, rows: int, capacity: int) -> int:
        model, vocabulary = self.shape(node)
        rows = min(rows, MOST_ROWS)
        keys_and_values = 8 * model.layers * model.key_value_heads * model.head_size * capacity
        # Twice: rows that are dropped are left behind in a copy.
        return 2 * rows * keys_and_values + 24 * rows * vocabulary

    def _work(self, node: Node) -> Work:
        config = node.config
        none = Work(1.0, Cost(), self._seconds(AROUND))
        if isinstance(config, Corpus):
            _, seconds = self._documents(node)
            return replace(none, around=self._seconds(AROUND + seconds * config.documents))
        if isinstance(config, Evaluation):
            return self._evaluation(node, config)
        if isinstance(config, Probe):
            cells = [] if config.measure == "weights" else node.context.operations
            one = (self._cell(node, o, config.split) for o in cells)
            seconds = sum(self._sampled(node, cell, 0, 1, scored=config.problems) for cell in one)
            return replace(none, around=self._seconds(AROUND + seconds))
        if isinstance(config, Train):
            return self._next_token(node, config)
        if isinstance(config, RL):
            return self._policy(node, config)
        if isinstance(config, Parallel):
            parts = [self._work(part) for part in node.objectives.values()]
            step = sum((part.step for part in parts), Cost())
            return Work(float(config.steps), step, sum((part.around for part in parts), Cost()))
        return none

    def _next_token(self, node: Node, config: Train) -> Work:
        tokens, pairs = self._packed(self.nodes[node.parents["corpus"]], config.row_length, node)
        tokens, pairs = tokens * config.rows, pairs * config.rows
        flops = TRAIN * self._forward(node, (tokens, pairs, tokens))
        matched = sum(self.flops[key] for role, key in node.parents.items() if role.startswith("match/"))
        # A budget is met to the nearest step.
        share = config.tokens / tokens if config.tokens is not None else (config.flops or matched) / flops
        seconds = around = None
        if self.gauge is not None:
            model, vocabulary = self.shape(node)
            seconds = self.gauge.train(
                model, vocabulary, config.optimizer,
                rows=config.rows, row_length=config.row_length, accumulate=config.accumulate,
            ).seconds  # fmt: skip
            cells = [self._cell(node, operations, "validation") for operations in node.context.operations]
            scored = sum(HELD_OUT * cell.document for cell in cells)
            # Scoring is a forward pass, and as much again around it.
            around = AROUND + config.probes * scored * seconds / (config.rows * config.row_length) * 2 / TRAIN
        return Work(
            float(max(1, round(share))),
            Cost(tokens=tokens, flops=flops, seconds=seconds),
            Cost(seconds=around),
        )

    def _policy(self, node: Node, config: RL) -> Work:
        lengths, rows = self._band(node), config.prompts * config.group
        _, sampled = lengths.shape(config.prompts, config.group)
        flops = self._policy_flops(node, config, lengths)
        seconds = None
        if self.gauge is not None:
            micro, length = min(config.micro_rows, rows), math.ceil(lengths.document)
            model, vocabulary = self.shape(node)
            update = self.gauge.train(
                model, vocabulary, config.optimizer, rows=micro, row_length=length, accumulate=1
            ).seconds
            passes = config.updates + (config.kl > 0) / TRAIN
            seconds = self._sampled(node, lengths, config.prompts, config.group) + passes * update * rows / micro
        trained = rows * lengths.document
        step = Cost(tokens=trained * config.updates, sampled_tokens=sampled, flops=flops, seconds=seconds)
        steps = float(config.steps) if config.steps is not None else (config.flops or 0.0) / flops
        return Work(steps, step, self._seconds(AROUND))

    def _policy_flops(self, node: Node, config: RL, lengths: Lengths) -> float:
        """FLOPs of one batch: sampling, reference where there is one, and updates on every row."""
        shape, _ = lengths.shape(config.prompts, config.group)
        rows = config.prompts * config.group
        tokens = rows * lengths.document
        one = self._forward(node, (tokens, rows * lengths.pairs, tokens))
        return self._forward(node, shape) + one * (TRAIN * config.updates + (config.kl > 0))

    def _evaluation(self, node: Node, config: Evaluation) -> Work:
        cost = self._seconds(AROUND)
        for operations in node.context.operations:
            lengths = self._cell(node, operations, config.split)
            shape, sampled = lengths.shape(config.problems, config.samples)
            seconds = None
            if self.gauge is not None:
                seconds = self._sampled(node, lengths, config.problems, config.samples, scored=config.problems)
            cost += Cost(sampled_tokens=sampled, flops=self._forward(node, shape), seconds=seconds)
        return Work(1.0, cost, Cost())

    def _sampled(self, node: Node, lengths: Lengths, prompts: int, samples: int, *, scored: int = 0) -> float:
        """Seconds to sample and judge, and to score `scored` gold solutions."""
        if self.gauge is None:
            return 0.0
        prompt, solution = float(np.mean(lengths.prompts)), float(np.mean(lengths.solutions))
        # To half a power of two, so that cells of like length share a measurement.
        length = round(2 ** (round(2 * math.log2(prompt + solution / 2)) / 2))
        rows = min(max(prompts * samples, scored), MOST_ROWS)
        timed = self.gauge.decode(*self.shape(node), rows=rows, samples=samples, length=length)
        seconds = timed.token * prompts * samples * solution * RIDING + lengths.judging * prompts * samples
        # Scoring is a forward pass, and as much again around it.
        return seconds + timed.read * (prompts * prompt + 2 * scored * lengths.document)

    def _seconds(self, seconds: float) -> Cost:
        return Cost(seconds=seconds if self.gauge else None)

    def _forward(self, node: Node, shape: tuple[float, float, float]) -> float:
        """FLOPs of forward passes over tokens, pairs and logits read, which may be averages."""
        model, vocabulary = self.shape(node)
        # Exact for whole numbers, and linear in all three.
        units = (Shape(1, 0, 0), Shape(0, 1, 0), Shape(0, 0, 1))
        return sum(a * forward_flops(model, vocabulary, unit) for a, unit in zip(shape, units, strict=True))

    def _tokenizer(self, node: Node) -> Tokenizer:
        name = str(node.fields["tokenizer"])
        if name not in self._tokenizers:
            self._tokenizers[name] = node.context.task_and_tokenizer()[1]
        return self._tokenizers[name]

    def _documents(self, node: Node) -> tuple[Documents, float]:
        """The first documents of a corpus, and seconds to make one."""
        assert isinstance(node.config, Corpus)
        if node.key not in self._corpora:
            task, tokenizer = node.context.task_and_tokenizer()
            start, count = time.perf_counter(), min(DOCUMENTS, node.config.documents)
            build_corpus(
                self.folder / node.key, task=task, tokenizer=tokenizer, mixture=node.config.components,
                documents=count, seed=node.context.seeds.problems,
            )  # fmt: skip
            seconds = (time.perf_counter() - start) / count
            self._corpora[node.key] = Documents(self.folder / node.key), seconds
        return self._corpora[node.key]

    def _packed(self, corpus: Node, row_length: int, reader: Node) -> tuple[float, float]:
        """Tokens and visible pairs of a row of packed documents, on average.

        Raises UserError where a document is longer than a row.
        """
        place = (corpus.key, row_length)
        if place not in self._rows:
            documents, _ = self._documents(corpus)
            if (longest := int(documents.lengths.max())) > row_length:
                raise UserError(
                    f"stages.{split_reference(reader.name)[0]}.row_length: the corpus `{corpus.name}` has documents of "
                    f"{longest} tokens, and a row holds {row_length}; documents are never cut."
                )
            tokens, pairs = next(PackedLoader(documents, rows=1, row_length=row_length, seed=0).row_costs(0))
            self._rows[place] = float(tokens.mean()), float(pairs.mean())
        return self._rows[place]

    def _band(self, node: Node) -> Lengths:
        """Problems that an RL stage trains on."""
        assert isinstance(node.config, RL)
        operations = node.context.bands[node.config.band]
        return self._some(node, dict.fromkeys(operations, 1.0), node.config.split)

    def _cell(self, node: Node, operations: int, split: Any) -> Lengths:
        return self._some(node, operations, split)

    def _some(self, node: Node, operations: int | dict[int, float], split: Any) -> Lengths:
        asked = operations if isinstance(operations, int) else tuple(sorted(operations))
        place = (str(node.fields["task"]), asked, split)
        if place not in self._lengths:
            task, tokenizer = node.context.task_and_tokenizer()
            problems: Sequence[Problem] = task.sample_batch(
                seed=node.context.seeds.problems, start=0, count=PROBLEMS, operations=operations, split=split
            )
            start = time.perf_counter()
            for problem in problems:
                task.verify(problem, problem.solution)
            judging = (time.perf_counter() - start) / len(problems)
            self._lengths[place] = Lengths(
                [len(tokenizer.encode_prompt(problem.prompt)) for problem in problems],
                [len(tokenizer.encode(problem.solution)) + 1 for problem in problems],
                judging,
            )
        return self._lengths[place]


def _saved_bytes(config: ModelConfig, vocabulary: int, length: int) -> int:
    """Bytes a token that a training step keeps for its backward pass, as counted on a few shapes: 17 vectors a block
    for norms and attention, one a tap for the convolutions, four of the SwiGLU; then masks and log-probabilities."""
    wide = max(config.width, config.heads * config.head_size)
    block = 17 * wide + 2 * config.canon * config.width + 4 * config.hidden_size
    return 4 * (config.layers * block + length + vocabulary)
