"""What a stage does, as plain dataclasses: the layer below the specs, free of pydantic and torch.

A spec (testbed.spec) holds these very classes, so a field is written once. Every class refuses what cannot be run
with a ValueError that names the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal


class Config:
    """Base of every setting: pydantic refuses unknown keys where a spec contains one."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Optimizer(Config):
    """AdamW on every parameter, or Muon on the matrices of the blocks and AdamW on the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    # Peak learning rate of AdamW.
    lr: float = 3e-3
    # Peak learning rate of Muon's matrices.
    muon_lr: float = 0.02
    # Momentum of Muon.
    muon_momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    # Decoupled weight decay of matrices; vectors and embeddings are not decayed.
    weight_decay: float = 0.0
    # Gradients are clipped to this global norm; 0 turns clipping off.
    clip: float = 1.0

    def __post_init__(self) -> None:
        _require(0 < self.lr <= 10 and 0 < self.muon_lr <= 10, "optimizer.lr and muon_lr must lie in (0, 10]")
        _require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "optimizer.beta1 and beta2 must lie in [0, 1)")
        _require(self.clip >= 0 and self.weight_decay >= 0, "optimizer.clip and weight_decay must not be negative")


@dataclass(frozen=True, kw_only=True)
class Schedule(Config):
    """Learning-rate factor over a stage: linear warm-up, then constant, cosine, or stable and a linear decay."""

    shape: Literal["constant", "cosine", "wsd"] = "wsd"
    # Share of the stage's steps that warm up; 0 continues at the full rate.
    warmup: float = 0.0
    # Share of the stage's steps that decay at the end (wsd only); 0 leaves the checkpoint stable (un-annealed).
    decay: float = 0.2
    # Factor reached at the end of a cosine or a decay.
    final: float = 0.0

    def __post_init__(self) -> None:
        _require(0 <= self.warmup <= 1 and 0 <= self.decay <= 1, "schedule.warmup and decay are shares in [0, 1]")
        _require(self.warmup + self.decay <= 1 or self.shape != "wsd", "schedule.warmup + decay must not exceed 1")
        _require(0 <= self.final <= 1, "schedule.final must lie in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class Edge(Config):
    """What crosses from a parent to its child. A spec states it, so that nobody has to guess it from two stages.

    `parent` and `rate` say what the settings of the two stages come to and are checked against them; `optimizer` is
    chosen here.
    """

    # Where the parent's learning rate stood when it was left: at its peak (stable), at the end of its decay (annealed),
    # or, of a kept checkpoint, on its way up (warming) or down (annealing).
    parent: Literal["annealed", "stable", "warming", "annealing"]
    # Moments of the parent's optimizer.
    optimizer: Literal["carry", "reset"]
    # The learning rate goes on at the one the parent's schedule ends with, warms up, or jumps to another (restart).
    rate: Literal["continue", "rewarm", "restart"]


@dataclass(frozen=True, kw_only=True)
class _Kept(Config):
    """What stays of a stage on its way, as artifacts of their own: `pretrain@200` in a spec."""

    # Steps whose checkpoints are kept; one that is a parent, an arm or probed is kept without being named here.
    keep: tuple[int, ...] = ()
    # Checkpoints after 1, 2, 4, 8, ... steps up to this one, which the stage has to reach; 0 keeps none.
    keep_doubling: int = 0

    def kept_steps(self) -> tuple[int, ...]:
        """Every step that these fields name, from low to high."""
        doubling = [2**i for i in range(self.keep_doubling.bit_length())]
        return tuple(sorted({*self.keep, *doubling}))

    def _check_kept(self) -> None:
        _require(all(step >= 1 for step in self.keep), "keep: steps are counted from 1")
        _require(self.keep_doubling >= 0, "keep_doubling must not be negative")


# Tokens of a step, rows times row_length: far beyond what any machine here trains, short of filling its memory.
MOST_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class Train(_Kept):
    """Next-token training: pretraining, mid-training or supervised fine-tuning."""

    kind: Literal["pretrain", "midtrain", "sft"]
    # The stage, or the kept checkpoint `stage@step`, that is continued; none starts from nothing (pretrain only).
    parent: str | None = None
    # What crosses from the parent.
    edge: Edge | None = None
    # Name of the corpus (an entry of the spec's `data`).
    data: str
    # The budget, met to the nearest step: tokens to train on, or FLOPs of training. Exactly one of `tokens`, `flops`
    # and `match` is given.
    tokens: int | None = None
    flops: float | None = None
    # Train for as many FLOPs as these stages took together: the placebo of a matched comparison.
    match: tuple[str, ...] = ()
    # Rows of a step and tokens of a row; documents are packed into rows and never cut.
    rows: int = 32
    row_length: int = 128
    # A step is split into this many micro-batches.
    accumulate: int = 1
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    # Weight of the prompt's tokens in the loss; supervised fine-tuning masks them (0).
    prompt_weight: float = 1.0
    # Teacher-forced accuracy by token role is measured this many times, evenly spaced, the last at the end.
    probes: int = 4

    def __post_init__(self) -> None:
        budgets = (self.tokens is not None) + (self.flops is not None) + bool(self.match)
        _require(budgets == 1, "give exactly one of `tokens`, `flops` and `match`")
        _require(self.tokens is None or self.tokens > 0, f"tokens must be positive, not {self.tokens}")
        _require(self.flops is None or self.flops > 0, f"flops must be positive, not {self.flops}")
        self._check_kept()
        _require(self.parent is not None or self.edge is None, "edge: nothing crosses to a stage without a parent")
        _require(self.rows >= 1 and self.row_length >= 8, "rows must be at least 1 and row_length at least 8")
        _require(self.rows * self.row_length <= MOST_TOKENS, f"a step holds at most {MOST_TOKENS} tokens")
        _require(1 <= self.accumulate <= self.rows, "accumulate must lie between 1 and rows")
        _require(self.parent is not None or self.kind == "pretrain", f"a {self.kind} stage needs a parent")
        _require(0 <= self.prompt_weight <= 1, "prompt_weight must lie in [0, 1]")
        _require(self.kind != "sft" or self.prompt_weight == 0, "an sft stage masks the prompt: prompt_weight: 0")
        _require(self.probes >= 1, "probes must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RL(_Kept):
    """GRPO from a parent checkpoint on one band of problems."""

    kind: Literal["rl"] = "rl"
    parent: str
    # What crosses from the parent.
    edge: Edge | None = None
    # Name of the band whose problems are trained on, and their split; `rl` needs the task's setting `rl_share`.
    band: str
    split: Literal["train", "rl"] = "train"
    # Batches of rollouts. Exactly one of `steps` and `flops` is given.
    steps: int | None = None
    # FLOPs of rollouts, reference and training; the stage ends with the batch that reaches them.
    flops: float | None = None
    # Problems of a batch and samples of a problem.
    prompts: int = 32
    group: int = 16
    # What a sample earns; `random` is a coin flip that knows nothing of the sample: the null arm.
    reward: Literal["strict", "answer", "process", "random"] = "strict"
    temperature: float = 1.0
    # Tokens a sample may take.
    max_new_tokens: int = 128
    # Optimizer steps per batch of rollouts; above 1 the later ones are off-policy and the ratio clip acts.
    updates: int = 1
    # Lower and upper distance of the ratio clip from 1.
    clip_low: float = 0.2
    clip_high: float = 0.2
    # Weight of the k3 estimate of KL(policy || parent); 0 turns it and the reference pass off.
    kl: float = 0.0
    # Divide a group's centred rewards by their standard deviation (ddof 0) + 1e-4.
    scale_by_std: bool = True
    # Rows of a micro-batch in the update.
    micro_rows: int = 128
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=3e-4))
    schedule: Schedule = field(default_factory=lambda: Schedule(shape="constant", decay=0.0))

    def __post_init__(self) -> None:
        _require((self.steps is None) != (self.flops is None), "give exactly one of `steps` and `flops`")
        _require(self.steps is None or self.steps > 0, f"steps must be positive, not {self.steps}")
        _require(self.flops is None or self.flops > 0, f"flops must be positive, not {self.flops}")
        unplanned = self.schedule.shape == "constant" and self.schedule.warmup == 0
        beyond = [step for step in self.kept_steps() if self.steps is not None and step > self.steps]
        _require(not beyond, f"keep: the stage has {self.steps} steps, so none has the number {beyond[:1]}")
        # How many steps a budget of FLOPs buys depends on what is sampled.
        _require(self.flops is None or unplanned, "flops: a schedule that changes over the stage needs `steps`")
        self._check_kept()
        _require(self.prompts >= 1, "prompts must be at least 1")
        _require(self.group >= 2, "group must be at least 2: a group of one has no baseline")
        _require(self.temperature > 0, "temperature must be positive")
        _require(self.updates >= 1 and self.micro_rows >= 1, "updates and micro_rows must be at least 1")
        _require(0 < self.clip_low <= 1 and self.clip_high > 0, "clip_low must lie in (0, 1] and clip_high be positive")
        _require(self.kl >= 0, "kl must not be negative")


@dataclass(frozen=True, kw_only=True)
class Combine(Config):
    """A weighted sum of checkpoints, parameter by parameter: {a: 0.5, b: 0.5} averages two, and
    {base: 1, tuned: 0.5, start: -0.5} adds half of what a stage changed (task arithmetic, Ilharco et al. 2023,
    arXiv 2212.04089, §2)."""

    kind: Literal["combine"]
    # Factor of every stage or kept checkpoint; factors sum to 1.
    of: dict[str, float]

    # It continues no single stage: gains are measured from the arm that `parents` names.
    parent: ClassVar[None] = None
    edge: ClassVar[None] = None

    def kept_steps(self) -> tuple[int, ...]:
        return ()

    def __post_init__(self) -> None:
        _require(len(self.of) > 0, "of: give at least one stage, such as {a: 0.5, b: 0.5}")
        total = math.fsum(self.of.values())
        _require(abs(total - 1) < 1e-9, f"of: the factors must sum to 1, not {total:g}")


@dataclass(frozen=True, kw_only=True)
class Parallel(_Kept):
    """Several objectives trained from one parent, their changes averaged every few steps (parallel averaging of "RL
    Excursions", arXiv 2606.04272): weights <- weights + sum of factor x (objective's weights - weights). Each
    objective keeps its own optimizer state throughout."""

    kind: Literal["parallel"]
    # Factors of the stages whose settings are the objectives; all have the same parent, and their budgets are not used.
    objectives: dict[str, float]
    # Steps of each objective, all in all and between two averages.
    steps: int
    every: int

    parent: ClassVar[None] = None
    edge: ClassVar[None] = None

    def __post_init__(self) -> None:
        _require(len(self.objectives) >= 2, "objectives: give at least two stages, such as {sft: 0.5, rl: 0.5}")
        _require(self.steps >= 1 and self.every >= 1, "steps and every must be at least 1")
        _require(self.steps % self.every == 0, f"steps ({self.steps}) must be a multiple of every ({self.every})")
        self._check_kept()
        odd = [step for step in self.keep if step % self.every or step > self.steps]
        _require(not odd, f"keep: weights stand after multiples of {self.every} steps up to {self.steps}, not {odd}")
        _require(self.keep_doubling == 0, "keep_doubling: name the steps in `keep`; they must be multiples of `every`")


# Settings of anything that makes a checkpoint.
StageConfig = Train | RL | Combine | Parallel


@dataclass(frozen=True, kw_only=True)
class Probe(Config):
    """What is read off checkpoints, beside their evaluation."""

    # roles: teacher-forced accuracy and loss by the role of the token. weights: change of every tensor.
    measure: Literal["roles", "weights"]
    # Stages, or kept checkpoints `stage@step`.
    of: tuple[str, ...]
    # weights: the stage or checkpoint that the change is measured from.
    against: str | None = None
    # roles: problems of each difficulty, and their split.
    problems: int = 64
    split: Literal["validation", "test", "held_out"] = "validation"

    def __post_init__(self) -> None:
        _require(len(self.of) > 0, "of: give at least one stage")
        _require(self.problems >= 1, "problems must be at least 1")
        _require((self.measure == "weights") == (self.against is not None), "against goes with measure: weights")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Config):
    """Samples on fixed problems of every band, and teacher-forced accuracy by token role."""

    # Problems of each difficulty.
    problems: int = 64
    split: Literal["validation", "test", "held_out"] = "test"
    # Samples of a problem, and the k of pass@k; n >= 2k.
    samples: int = 16
    k: tuple[int, ...] = (1, 2, 4, 8)
    temperature: float = 1.0
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        _require(self.problems >= 1 and self.samples >= 1, "evaluation.problems and samples must be at least 1")
        _require(len(self.k) > 0 and min(self.k) >= 1, "evaluation.k needs values of at least 1")
        _require(
            self.samples >= 2 * max(self.k),
            f"evaluation.samples ({self.samples}) must be at least twice the largest k ({max(self.k)})",
        )
        _require(self.temperature > 0, "evaluation.temperature must be positive")
