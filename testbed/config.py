"""What a stage does, as plain dataclasses: the layer below the specs, free of pydantic and torch.

A spec (testbed.spec) holds these very classes, so a field is written once. Every class refuses what cannot be run
with a ValueError that names the field.
"""

from __future__ import annotations

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


# Tokens of a step, rows times row_length: far beyond what any machine here trains, short of filling its memory.
MOST_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class Train(Config):
    """Next-token training: pretraining, mid-training or supervised fine-tuning."""

    kind: Literal["pretrain", "midtrain", "sft"]
    # The stage whose checkpoint is continued; none starts from nothing (pretrain only).
    parent: str | None = None
    # Name of the corpus (an entry of the spec's `data`).
    data: str
    # Tokens to train on. Exactly one of `tokens` and `match` is given.
    tokens: int | None = None
    # Train for as many FLOPs as these stages took together: the placebo of a matched comparison.
    match: tuple[str, ...] = ()
    # Rows of a step and tokens of a row; documents are packed into rows and never cut.
    rows: int = 32
    row_length: int = 128
    # A step is split into this many micro-batches.
    accumulate: int = 1
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    # What becomes of the parent's optimizer state.
    parent_optimizer: Literal["carry", "reset"] = "carry"
    # Weight of the prompt's tokens in the loss; supervised fine-tuning masks them (0).
    prompt_weight: float = 1.0
    # Teacher-forced accuracy by token role is measured this many times, evenly spaced, the last at the end.
    probes: int = 4

    def __post_init__(self) -> None:
        _require((self.tokens is None) != (not self.match), "give exactly one of `tokens` and `match`")
        _require(self.tokens is None or self.tokens > 0, f"tokens must be positive, not {self.tokens}")
        _require(self.rows >= 1 and self.row_length >= 8, "rows must be at least 1 and row_length at least 8")
        _require(self.rows * self.row_length <= MOST_TOKENS, f"a step holds at most {MOST_TOKENS} tokens")
        _require(1 <= self.accumulate <= self.rows, "accumulate must lie between 1 and rows")
        _require(self.parent is not None or self.kind == "pretrain", f"a {self.kind} stage needs a parent")
        _require(0 <= self.prompt_weight <= 1, "prompt_weight must lie in [0, 1]")
        _require(self.kind != "sft" or self.prompt_weight == 0, "an sft stage masks the prompt: prompt_weight: 0")
        _require(self.probes >= 1, "probes must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RL(Config):
    """GRPO from a parent checkpoint on one band of problems."""

    kind: Literal["rl"] = "rl"
    parent: str
    # Name of the band whose problems are trained on (train split).
    band: str
    # Batches of rollouts.
    steps: int
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
        _require(self.steps > 0, f"steps must be positive, not {self.steps}")
        _require(self.prompts >= 1, "prompts must be at least 1")
        _require(self.group >= 2, "group must be at least 2: a group of one has no baseline")
        _require(self.temperature > 0, "temperature must be positive")
        _require(self.updates >= 1 and self.micro_rows >= 1, "updates and micro_rows must be at least 1")
        _require(0 < self.clip_low <= 1 and self.clip_high > 0, "clip_low must lie in (0, 1] and clip_high be positive")
        _require(self.kl >= 0, "kl must not be negative")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Config):
    """Samples on fixed problems of every band, and teacher-forced accuracy by token role."""

    # Problems of each difficulty.
    problems: int = 64
    split: Literal["validation", "test"] = "test"
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
