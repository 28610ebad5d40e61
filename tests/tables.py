"""Made-up tables in the shape of an experiment: four bands, six arms, the true rates given or defaulted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

BANDS = {"in range": (1, 2, 3, 4), "edge": (5,), "further": (6,), "far": (8,)}
STAGE_OF = {
    "pretrained": "pretrain",
    "mid": "mid",
    "rl": "rl_edge",
    "mid+rl": "mid_rl",
    "rl far": "rl_far",
    "continued": "continued",
}
PARENTS = {"mid": "pretrained", "rl": "pretrained", "mid+rl": "mid", "rl far": "pretrained", "continued": "pretrained"}
# True chance that a sample is strictly right, by arm and operations.
RATES: dict[str, dict[int, float]] = {
    "pretrained": {1: 0.99, 2: 0.98, 3: 0.95, 4: 0.86, 5: 0.3, 6: 0.08, 8: 0.003},
    "mid": {1: 0.99, 2: 0.98, 3: 0.95, 4: 0.88, 5: 0.55, 6: 0.2, 8: 0.01},
    "rl": {1: 0.99, 2: 0.98, 3: 0.97, 4: 0.94, 5: 0.6, 6: 0.28, 8: 0.02},
    "mid+rl": {1: 0.99, 2: 0.98, 3: 0.97, 4: 0.95, 5: 0.82, 6: 0.5, 8: 0.06},
    "rl far": {1: 0.99, 2: 0.98, 3: 0.95, 4: 0.86, 5: 0.3, 6: 0.08, 8: 0.003},
    "continued": {1: 0.99, 2: 0.99, 3: 0.96, 4: 0.9, 5: 0.35, 6: 0.1, 8: 0.004},
}
GUESS = {1: 0.84, 2: 0.5, 3: 0.33, 4: 0.25, 5: 0.22, 6: 0.2, 8: 0.18}


def outcomes(
    rates: Mapping[str, Mapping[int, float]] = RATES,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3),
    problems: int = 64,
    n: int = 16,
    seed_sd: float = 0.0,
    problem_sd: float = 0.8,
    rng_seed: int = 0,
) -> pd.DataFrame:
    """Each problem has its own difficulty (normal on the logit scale), each seed of an arm its own skill.

    A rate of exactly 0 or 1 leaves no chance at all: its cells are constant.
    """
    rng = np.random.default_rng(rng_seed)
    band_of = {operations: band for band, members in BANDS.items() for operations in members}
    difficulty = {o: rng.normal(0, problem_sd, size=problems) for row in rates.values() for o in row}
    tables = []
    for arm, row in rates.items():
        for seed in seeds:
            skill = rng.normal(0, seed_sd)
            for operations, rate in row.items():
                if 0 < rate < 1:
                    chance = 1 / (1 + np.exp(-(np.log(rate / (1 - rate)) + skill + difficulty[operations])))
                else:
                    chance = np.full(problems, rate)
                strict = rng.binomial(n, chance)
                answer = strict + rng.binomial(n - strict, GUESS.get(operations, 0.2) * 0.5)
                tables.append(
                    pd.DataFrame(
                        {
                            "arm": arm,
                            "stage": STAGE_OF.get(arm, arm),
                            "key": f"{STAGE_OF.get(arm, arm)}-{seed}",
                            "seed": seed,
                            "task": "arithmetic",
                            "context": "symbolic",
                            "band": band_of[operations],
                            "operations": operations,
                            "problem": np.arange(problems),
                            "structures_shared": operations <= 2,
                            "n": n,
                            "c_answer": answer,
                            "c_strict": strict,
                            "process_mean": np.clip(strict / n + 0.3 * (1 - strict / n), 0, 1),
                            "length_mean": 7.0 * operations + 3,
                            "truncated": rng.binomial(n, 0.01 * operations, size=problems),
                            "temperature": 1.0,
                            "status_ok": strict * operations,
                        }
                    )
                )
    return pd.concat(tables, ignore_index=True)


def stages(seeds: Sequence[int] = (0, 1, 2, 3), *, far_signal: int = 0) -> pd.DataFrame:
    """The stages of the six arms; RL far beyond the edge has `far_signal` groups with signal a seed."""
    # name: kind, parent, tokens, samples, sampled tokens, FLOPs, groups, groups with signal, weight change
    shape: dict[str, tuple[object, ...]] = {
        "pretrain": ("pretrain", None, 3_000_000, None, None, 6e12, None, None, None),
        "mid": ("midtrain", "pretrain", 500_000, None, None, 1e12, None, None, 0.21),
        "rl_edge": ("rl", "pretrain", 400_000, 10_240, 400_000, 2e12, 640, 480, 0.034),
        "mid_rl": ("rl", "mid", 420_000, 10_240, 420_000, 2e12, 640, 610, 0.031),
        "rl_far": ("rl", "pretrain", 500_000, 10_240, 500_000, 2e12, 640, far_signal, 0.031 if far_signal else 0.0),
        "continued": ("pretrain", "pretrain", 1_500_000, None, None, 3e12, None, None, 0.25),
    }
    rows = [
        {
            "stage": name,
            "key": f"{name}-{seed}",
            "kind": kind,
            "seed": seed,
            "parent": parent,
            "tokens": tokens,
            "samples": samples,
            "sampled_tokens": sampled,
            "flops": flops,
            "wall_s": 60.0,
            "rows": 32,
            "groups": groups,
            "groups_with_signal": signal,
            "weight_change": change,
        }
        for seed in seeds
        for name, (kind, parent, tokens, samples, sampled, flops, groups, signal, change) in shape.items()
    ]
    return pd.DataFrame(rows)


def curves(seeds: Sequence[int] = (0, 1, 2, 3), *, points: int = 40) -> pd.DataFrame:
    """Loss of the trained stages, reward and signal share of the RL stages."""
    rng = np.random.default_rng(1)
    x = np.linspace(0, 1, points)
    tables = []
    for row in stages(seeds).itertuples(index=False):
        step = np.linspace(0, 400, points).astype(int)
        base = {"stage": row.stage, "key": row.key, "seed": row.seed, "step": step, "tokens": step * 4096}
        noise = rng.normal(0, 0.02, size=points)
        if row.kind == "rl":
            far = row.stage == "rl_far"
            reward = np.zeros(points) if far else np.clip(0.3 + 0.5 * x + noise, 0, 1)
            signal = np.zeros(points) if far else np.clip(0.8 - 0.3 * x + noise, 0, 1)
            tables.append(pd.DataFrame(base | {"reward": reward, "signal_share": signal}))
        else:
            start = 2.5 if row.stage == "pretrain" else 0.3
            tables.append(pd.DataFrame(base | {"loss": 0.6 + start * np.exp(-6 * x) + noise, "lr": 3e-3 * (1 - x)}))
    return pd.concat(tables, ignore_index=True)


def roles(seeds: Sequence[int] = (0, 1, 2, 3)) -> pd.DataFrame:
    """Teacher-forced accuracy by role at two steps of every stage; look-ups of `continued` sit at the guess level."""
    skill = {"lookup": 0.98, "result": 0.95, "next name": 0.75, "end": 0.99}
    rows = []
    for stage in STAGE_OF.values():
        for seed in seeds:
            for step in (200, 400):
                for band, members in BANDS.items():
                    for operations in members:
                        for role, top in skill.items():
                            guess = 1 / (operations + 1) if role == "lookup" else None
                            accuracy = top - 0.03 * operations - 0.01 * seed - 0.1 * (step == 200)
                            if stage == "continued" and guess is not None:
                                accuracy = guess + 0.01
                            rows.append(
                                {"stage": stage, "seed": seed, "step": step, "band": band, "operations": operations}
                                | {"role": role, "accuracy": accuracy, "loss": 1 - accuracy, "tokens": 64 * operations}
                                | {"guess": guess}
                            )
    return pd.DataFrame(rows)
