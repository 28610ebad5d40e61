"""Logits do not depend on packing, padding or caching, and no gradient crosses a document boundary."""

from __future__ import annotations

import pytest
import torch

from models.config import PRESETS, ModelConfig
from models.noise import Noise, uniforms
from models.sampler import sample
from models.transformer import Transformer, token_log_probs

VOCABULARY = 23
CONFIGS = {
    "default": ModelConfig(layers=2, width=32, heads=4),
    "grouped": ModelConfig(layers=2, width=32, heads=4, kv_heads=2, qk_norm=False, tied=False),
    "no convolution": ModelConfig(layers=2, width=32, heads=2, canon=0),
    "half rope": ModelConfig(layers=1, width=32, heads=2, rope_share=0.5, head_dim=24, canon=2),
    "no rope": ModelConfig(layers=2, width=32, heads=2, rope_share=0.0),
}


@pytest.fixture(params=CONFIGS, ids=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(CONFIGS[request.param], VOCABULARY)
    for parameter in model.parameters():  # random, so that no path is silent
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def documents_of(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def pack(documents: list[torch.Tensor], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, positions, numbers = (torch.zeros(1, width, dtype=torch.long) for _ in range(3))
    start = 0
    for number, document in enumerate(documents, start=1):
        end = start + len(document)
        tokens[0, start:end], numbers[0, start:end] = document, number
        positions[0, start:end] = torch.arange(len(document))
        start = end
    return tokens, positions, numbers


def test_packed_equals_alone(model: Transformer) -> None:
    documents = documents_of([7, 1, 2, 12, 3])
    tokens, positions, numbers = pack(documents, 30)
    packed = model(tokens, positions=positions, documents=numbers)[0]
    start = 0
    for document in documents:
        alone = model(document[None])[0]
        torch.testing.assert_close(packed[start : start + len(document)], alone, atol=1e-5, rtol=1e-5)
        start += len(document)


def test_padding_and_batch_mates_do_not_matter(model: Transformer) -> None:
    documents = documents_of([9, 4])
    tokens = torch.zeros(2, 9, dtype=torch.long)
    numbers = torch.zeros(2, 9, dtype=torch.long)
    for row, document in enumerate(documents):
        tokens[row, : len(document)], numbers[row, : len(document)] = document, 1
    padded = model(tokens, documents=numbers)
    for row, document in enumerate(documents):
        torch.testing.assert_close(padded[row, : len(document)], model(document[None])[0], atol=1e-5, rtol=1e-5)


def test_cached_equals_full(model: Transformer) -> None:
    prompts, continuation = documents_of([6, 1, 2]), documents_of([5, 5, 5], seed=1)
    length = max(map(len, prompts))
    tokens, real = torch.zeros(3, length, dtype=torch.long), torch.zeros(3, length, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :], real[row, length - len(prompt) :] = prompt, True
    with torch.no_grad():
        logits, caches = model.prefill(tokens, real, length + 5)
        visible = torch.cat([real, torch.ones(3, 5, dtype=torch.bool)], dim=1)
        steps = [logits]
        for t in range(5):
            column = length + t
            token = torch.stack([c[t] for c in continuation])
            steps.append(model.step(token, real.sum(1) + t, visible[:, : column + 1], column, caches))
    for row, (prompt, more) in enumerate(zip(prompts, continuation, strict=True)):
        full = model(torch.cat([prompt, more])[None])[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack([s[row] for s in steps]), full, atol=1e-5, rtol=1e-5)


def test_no_gradient_crosses_a_boundary(model: Transformer) -> None:
    tokens, positions, numbers = pack(documents_of([5, 8]), 16)
    embedded: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        output = output.detach().requires_grad_()
        embedded.append(output)
        return output

    model.embedding.register_forward_hook(keep)
    logits = model(tokens, positions=positions, documents=numbers)
    token_log_probs(logits[0, 5:12], tokens[0, 6:13]).sum().backward()
    gradient = embedded[0].grad
    assert gradient is not None
    assert torch.equal(gradient[0, :5], torch.zeros_like(gradient[0, :5]))
    assert torch.equal(gradient[0, 13:], torch.zeros_like(gradient[0, 13:]))
    assert (gradient[0, 5:12].abs().sum(-1) > 0).all()


def test_causal(model: Transformer) -> None:
    tokens = documents_of([10])[0][None]
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % VOCABULARY
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:6], after[:6], atol=0, rtol=0)
    assert not torch.allclose(before[6], after[6])


def test_first_position_by_hand() -> None:
    """With one token attention returns its value, so the whole model is a few matrix products in float64."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig(layers=1, width=16, heads=2, qk_norm=True), VOCABULARY)
    token = 5
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt() * gain

    x = w["embedding.weight"][token]
    h = norm(x, w["blocks.0.attention_norm.weight"])
    h = h * (1 + w["blocks.0.attention_canon.weight"][0])
    x = x + w["blocks.0.attention.out.weight"] @ (w["blocks.0.attention.values.weight"] @ h)
    h = norm(x, w["blocks.0.mlp_norm.weight"])
    h = h * (1 + w["blocks.0.mlp_canon.weight"][0])
    gate = w["blocks.0.mlp.gate.weight"] @ h
    x = x + w["blocks.0.mlp.down.weight"] @ (gate / (1 + (-gate).exp()) * (w["blocks.0.mlp.up.weight"] @ h))
    logits = w["embedding.weight"] @ norm(x, w["norm.weight"])
    torch.testing.assert_close(model(torch.tensor([[token]]))[0, 0].double(), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampled_log_probs_equal_scoring(model: Transformer, temperature: float) -> None:
    prompts = [d.tolist() for d in documents_of([5, 1, 8, 3])]
    drawn = sample(
        model,
        prompts,
        [0, 1, 2, 3],
        samples=6,
        max_new_tokens=20,
        end=2,
        pad=0,
        noise=Noise(seed=0, purpose="test"),
        temperature=temperature,
    )
    assert int(drawn.ended.sum()) > 0 and int(drawn.lengths.max()) > 8
    for row in range(24):
        prompt, length = prompts[row // 6], int(drawn.lengths[row])
        whole = torch.tensor(prompt + drawn.tokens[row, :length].tolist())
        scores = token_log_probs(model(whole[None])[0, len(prompt) - 1 : -1], whole[len(prompt) :], temperature)
        torch.testing.assert_close(drawn.log_probs[row, :length], scores, atol=1e-5, rtol=1e-5)
        assert bool(drawn.ended[row]) == (drawn.tokens[row, length - 1] == 2)
        assert (drawn.log_probs[row, length:] == 0).all() and (drawn.tokens[row, length:] == 0).all()
        assert 2 not in drawn.completion(row)


def test_samples_do_not_depend_on_batch_mates(model: Transformer) -> None:
    prompts = [d.tolist() for d in documents_of([5, 2, 8])]
    noise = Noise(seed=3, purpose="test", step=4)
    settings = {"max_new_tokens": 16, "end": 2, "pad": 0, "noise": noise}
    together = sample(model, prompts, [10, 11, 12], samples=4, **settings)
    alone = sample(model, prompts[1:2], [11], samples=4, **settings)
    few = sample(model, prompts[::-1], [12, 11, 10], samples=2, max_rows=2, **settings)
    assert torch.equal(together.tokens[4:8], alone.tokens)
    assert torch.equal(together.tokens[4:6], few.tokens[2:4])
    again = sample(model, prompts, [10, 11, 12], samples=4, **settings)
    assert torch.equal(together.tokens, again.tokens) and torch.equal(together.log_probs, again.log_probs)


def test_members_of_a_group_differ_from_the_first_token() -> None:
    model = Transformer(CONFIGS["default"], VOCABULARY)
    torch.nn.init.zeros_(model.embedding.weight)  # uniform logits
    drawn = sample(model, [[1]], [0], samples=400, max_new_tokens=2, end=2, pad=0, noise=Noise(seed=0, purpose="x"))
    counts = torch.bincount(drawn.tokens[:, 0], minlength=VOCABULARY)
    assert (counts > 0).all()
    chi_square = ((counts - 400 / VOCABULARY) ** 2 / (400 / VOCABULARY)).sum()
    assert chi_square < 48.3  # 99.9th percentile with 22 degrees of freedom


def test_noise_streams_are_uniform_and_apart() -> None:
    ids, zeros = torch.arange(20_000), torch.zeros(20_000, dtype=torch.long)
    streams = [
        uniforms(Noise(seed=s, purpose=p, step=t).keys(ids, zeros + j), position)
        for s, p, t, j, position in [
            (0, "a", 0, 0, 0),
            (1, "a", 0, 0, 0),
            (0, "b", 0, 0, 0),
            (0, "a", 1, 0, 0),
            (0, "a", 0, 1, 0),
            (0, "a", 0, 0, 1),
        ]
    ]
    for i, u in enumerate(streams):
        assert abs(float(u.mean()) - 0.5) < 0.01 and abs(float(u.var()) - 1 / 12) < 0.003
        assert ((u >= 0) & (u < 1)).all()
        for v in streams[i + 1 :]:
            assert abs(float(torch.corrcoef(torch.stack([u, v]))[0, 1])) < 0.03


def test_mix_is_splitmix64() -> None:
    """First outputs of SplitMix64 from state 0, computed with Python's integers."""
    from models.noise import GOLDEN, mix

    def reference(z: int) -> int:
        mask = (1 << 64) - 1
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    states = [(i * 0x9E3779B97F4A7C15) & ((1 << 64) - 1) for i in range(1, 6)]
    signed = torch.tensor([s - (1 << 64) if s >> 63 else s for s in states])
    assert [int(v) & ((1 << 64) - 1) for v in mix(signed)] == [reference(s) for s in states]
    assert GOLDEN & ((1 << 64) - 1) == 0x9E3779B97F4A7C15
    assert reference(states[0]) == 0xE220A8397B1DCDAF  # published first output for seed 0


def test_sampler_refuses() -> None:
    model = Transformer(CONFIGS["default"], VOCABULARY)
    settings = {"samples": 1, "end": 2, "pad": 0, "noise": Noise(seed=0, purpose="x")}
    with pytest.raises(ValueError, match="max_length"):
        sample(model, [[1] * 500], [0], max_new_tokens=20, **settings)
    with pytest.raises(ValueError, match="temperature"):
        sample(model, [[1]], [0], max_new_tokens=2, temperature=0.0, **settings)
    with pytest.raises(ValueError, match="empty"):
        sample(model, [[]], [0], max_new_tokens=2, **settings)


def test_too_long_a_document_is_refused() -> None:
    model = Transformer(ModelConfig(layers=1, width=16, heads=2, max_length=8), VOCABULARY)
    with pytest.raises(ValueError, match="max_length"):
        model(torch.ones(1, 9, dtype=torch.long))


SIZES = {"0.1M": 0.1e6, "0.2M": 0.2e6, "0.8M": 0.8e6, "5M": 5e6, "26M": 26e6, "87M": 87e6, "300M": 300e6, "1B": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_size(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[name], 64)
    assert model.parameter_count() == pytest.approx(SIZES[name], rel=0.15)
