"""transformers, the oracle: what it loads from an export computes the same logits, ids, texts and completions."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

import testbed.exporting
from models.config import ModelConfig
from models.transformer import Transformer
from synthetic_tasks import Tokenizer, get_task
from testbed.exporting import ExportError, Format, export
from testbed.runtime import load_model, save_model

TASK = get_task("arithmetic", order="shuffled", distractors=2)
TOKENIZER = Tokenizer.for_tasks(TASK)
PLAIN = ModelConfig(layers=2, width=32, heads=4, canon=0, qk_norm=False, max_length=96)
# Odd values all over, so that no default of transformers can stand in for one that was not written; and integers, which
# transformers refuses in place of floats.
OWN = {"kv_heads": 2, "head_dim": 10, "hidden": 56, "rope_base": 300, "norm_eps": 1, "tied": False}
CONFIGS = {
    "llama": PLAIN,
    "llama, all its own": dataclasses.replace(PLAIN, **OWN),
    "qwen3": dataclasses.replace(PLAIN, qk_norm=True),
    "qwen3, all its own": dataclasses.replace(PLAIN, qk_norm=True, **{**OWN, "heads": 6}),
}
UNTIED = [name for name, config in CONFIGS.items() if not config.tied]


def model_of(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config, len(TOKENIZER)).eval()
    for parameter in model.parameters():  # norms too, so that none can be lost unseen
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a folder with transformers, and see that it asked nobody."""
    asked: list[object] = []

    def connect(_: socket.socket, address: object) -> None:
        asked.append(address)
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(socket.socket, "connect", connect)

    def load(path: Path) -> tuple[Any, Any]:
        model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
        assert not asked
        assert not any(loading.values()), loading  # no weight missing, left over or of another shape
        return model, tokenizer

    return load


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path, read: Any) -> None:
    model = model_of(CONFIGS[name])
    files = export(model, TOKENIZER, tmp_path / "out", format="hf")
    assert [path.name for path in files] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    theirs, _ = read(tmp_path / "out")
    kind = "Qwen3ForCausalLM" if model.config.qk_norm else "LlamaForCausalLM"
    assert type(theirs).__name__ == kind and theirs.config.architectures == [kind]
    assert theirs.config.max_position_embeddings == model.config.max_length
    assert theirs.num_parameters() == model.parameter_count()
    tokens = torch.randint(len(TOKENIZER), (3, model.config.max_length))
    with torch.no_grad():
        ours, logits = model(tokens), theirs(tokens).logits
    assert float(ours.std()) > 0.5
    torch.testing.assert_close(logits, ours, atol=1e-5, rtol=1e-5)


def test_every_field_of_a_model_was_judged() -> None:
    """A new field must be refused by the export, written, or found harmless, and then named here."""
    refused = {"canon", "rope_share", "head_dim", "heads", "width", "qk_norm"}
    written = {"layers", "kv_heads", "hidden", "rope_base", "tied", "norm_eps", "max_length"}
    assert {field.name for field in dataclasses.fields(ModelConfig)} == refused | written


def test_the_same_ids_and_texts(tmp_path: Path, read: Any) -> None:
    export(model_of(PLAIN), TOKENIZER, tmp_path / "out", format="hf")
    _, theirs = read(tmp_path / "out")
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (
        TOKENIZER.pad,
        TOKENIZER.bos,
        TOKENIZER.eos,
    )
    assert len(theirs) == len(TOKENIZER) and theirs.model_max_length == PLAIN.max_length
    for problem in TASK.sample_batch(seed=0, start=0, count=100):
        assert theirs(problem.prompt)["input_ids"] == TOKENIZER.encode_prompt(problem.prompt)
        for text in (problem.prompt, problem.solution):
            ids = TOKENIZER.encode(text)
            assert theirs(text, add_special_tokens=False)["input_ids"] == ids
            assert theirs.decode(ids) == text
            assert theirs.decode([TOKENIZER.bos, *ids, TOKENIZER.eos], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["", "<bos> a", "a <eos>", "a <eos> <pad> <pad> a", "<pad>", " ".join(TOKENIZER.tokens)]
)
def test_special_tokens_in_a_text(text: str, tmp_path: Path, read: Any) -> None:
    export(model_of(PLAIN), TOKENIZER, tmp_path / "out", format="hf")
    _, theirs = read(tmp_path / "out")
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids == TOKENIZER.encode(text) and theirs.decode(ids) == text


@pytest.mark.parametrize("text", ["a  b", " a", "a ", " ", "a\tb", "a\n", "a unheard", "ab"])
def test_a_text_outside_the_vocabulary_is_refused_there_too(text: str, tmp_path: Path, read: Any) -> None:
    with pytest.raises(ValueError, match="not in the vocabulary"):
        TOKENIZER.encode(text)
    export(model_of(PLAIN), TOKENIZER, tmp_path / "out", format="hf")
    _, theirs = read(tmp_path / "out")
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        theirs(text)


@pytest.mark.parametrize("name", UNTIED)
def test_greedy_completions_of_a_padded_batch_are_the_same(name: str, tmp_path: Path, read: Any) -> None:
    model, new = model_of(CONFIGS[name]), 20
    with torch.no_grad():  # so that some completions end early
        model.head.weight[TOKENIZER.eos] *= 2
    export(model, TOKENIZER, tmp_path / "out", format="hf")
    theirs, tokenizer = read(tmp_path / "out")
    prompts = [TASK.sample(seed=0, index=i, operations=1 + i % 3).prompt for i in range(8)]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    drawn = theirs.generate(**batch, max_new_tokens=new, do_sample=False)[:, batch["input_ids"].shape[1] :]
    lengths = set()
    for prompt, row in zip(prompts, drawn.tolist(), strict=True):
        ids = start = TOKENIZER.encode_prompt(prompt)
        with torch.no_grad():
            while len(ids) < len(start) + new and (ids == start or ids[-1] != TOKENIZER.eos):
                ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
        completion = ids[len(start) :]
        assert row == completion + [TOKENIZER.pad] * (len(row) - len(completion))
        lengths.add(len(completion))
    assert len(lengths) > 2  # so that ends and padding were compared


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"canon": 4}, "model.canon is 4 and must be 0"),
        ({"rope_share": 0.5}, "model.rope_share is 0.5 and must be 1"),
        ({"rope_share": 0.0, "qk_norm": True}, "model.rope_share is 0.0 and must be 1"),
        ({"head_dim": 5}, "model.head_dim is 5 and must be even"),
        ({"width": 36, "qk_norm": True}, "model.width / model.heads is 9 and must be even"),
        ({"heads": 3, "head_dim": 8}, "model.heads is 3 and must divide model.width 32"),
    ],
)
def test_what_transformers_cannot_compute_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = model_of(dataclasses.replace(PLAIN, **changes))
    with pytest.raises(ExportError) as refusal:
        export(model, TOKENIZER, tmp_path / "out", format="hf")
    message = str(refusal.value)
    assert said in message and "as safetensors" in message
    assert message.count("must") == 1 and "\n" not in message
    assert not list(tmp_path.iterdir())
    assert export(model, TOKENIZER, tmp_path / "out", format="safetensors")


def test_one_refusal_names_all_that_is_in_the_way(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, canon=2, rope_share=0.5, heads=3, head_dim=7)
    with pytest.raises(ExportError) as refusal:
        export(model_of(config).bfloat16(), TOKENIZER, tmp_path / "out", format="hf")
    for name in ("model.canon", "model.rope_share", "model.head_dim", "model.heads", "torch.bfloat16"):
        assert name in str(refusal.value)


def test_what_is_refused_would_not_have_loaded(tmp_path: Path, read: Any) -> None:
    """The refusals that stand for a demand of transformers, not for a part it lacks."""
    for number, changes in enumerate(({"head_dim": 5}, {"heads": 3, "head_dim": 8})):
        model = model_of(dataclasses.replace(PLAIN, **changes))
        out = tmp_path / str(number)
        out.mkdir()
        testbed.exporting._save_for_transformers(out, model, TOKENIZER)
        with pytest.raises(Exception, match=r"an even rotary dimension|not a multiple"):
            read(out)


@pytest.mark.parametrize("config", [ModelConfig(layers=2, width=32, heads=4), dataclasses.replace(PLAIN, tied=False)])
def test_safetensors_are_what_a_stage_holds(config: ModelConfig, tmp_path: Path) -> None:
    model = model_of(config)
    files = export(model, TOKENIZER, tmp_path / "out")
    assert [path.name for path in files] == ["model.json", "model.safetensors", "tokenizer.json"]
    back, tokenizer = load_model(tmp_path / "out")
    assert tokenizer == TOKENIZER and back.config == config
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    (tmp_path / "stage").mkdir()
    save_model(tmp_path / "stage", model, TOKENIZER)
    assert [path.read_bytes() for path in files] == [(tmp_path / "stage" / path.name).read_bytes() for path in files]


@pytest.mark.parametrize("format", ["safetensors", "hf"])
def test_a_folder_is_filled_whole_or_not_at_all(
    format: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = model_of(PLAIN), tmp_path / "new" / "out"
    writes = (testbed.exporting, "save_model" if format == "safetensors" else "_tokenizer")
    for (owner, name), error in (
        (writes, OSError(errno.ENOSPC, "No space left on device")),
        (writes, SafetensorError("No space left on device")),
        ((Path, "rename"), OSError(errno.ENOSPC, "No space left on device")),
    ):

        def full(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(ExportError, match=r"cannot be written to .*out: No space left on device"):
                export(model, TOKENIZER, out, format=format)
        assert not list(out.parent.iterdir())
    out.mkdir()  # an empty folder is as good as none
    files = export(model, TOKENIZER, out, format=format)
    assert list(out.parent.iterdir()) == [out] and sorted(out.iterdir()) == files
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(ExportError, match="overwrites nothing"):
        export(model, TOKENIZER, out, format=format)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ExportError, match="overwrites nothing"):
        export(model_of(PLAIN), TOKENIZER, file)
    with pytest.raises(ExportError, match="cannot be written"):
        export(model_of(PLAIN), TOKENIZER, file / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and file.read_text() == "kept"


def test_mistakes_in_the_call(tmp_path: Path) -> None:
    model = model_of(PLAIN)
    with pytest.raises(ExportError, match=r"no format 'safetensor' \(did you mean `safetensors`\?\)"):
        export(model, TOKENIZER, tmp_path / "out", format="safetensor")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="vocabulary of 34 tokens and the tokenizer one of 5"):
        export(model, Tokenizer(("a", "b")), tmp_path / "out")
    assert not list(tmp_path.iterdir())
