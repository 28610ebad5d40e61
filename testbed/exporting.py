"""A model as files that others read: its own safetensors, or a folder for Hugging Face's transformers.

transformers is not needed here: its files are written by hand, and the tests hold them against the real one. A model
without normalised queries and keys is a Llama, one with them a Qwen3; what neither can compute is refused.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from models.config import ModelConfig
from models.transformer import Transformer
from synthetic_tasks import Tokenizer
from synthetic_tasks.tokenizer import SPECIALS
from testbed.errors import UserError, nearest
from testbed.runtime import MODEL, save_model

Format = Literal["safetensors", "hf"]

# Modules of `models.transformer`, and of a block of it, by the names that Llama and Qwen3 share.
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.queries": "self_attn.q_proj",
    "attention.keys": "self_attn.k_proj",
    "attention.values": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class ExportError(UserError):
    """A model that cannot be written as asked, or a folder that cannot take it."""


def export(model: Transformer, tokenizer: Tokenizer, out: Path, *, format: Format = "safetensors") -> list[Path]:
    """Write a model and its tokenizer into a new or empty folder, whole or not at all, and return the files.

    `safetensors` takes every model and is read by `testbed.runtime.load_model`. `hf` is read by transformers
    (`AutoModelForCausalLM` and `AutoTokenizer`, from 4.51 on), which computes the same logits but for fp32 rounding.
    Its tokenizer puts the begin token first, as a model reads a prompt, unless called with add_special_tokens=False.

    Raises ExportError for an unknown format, a tokenizer of another vocabulary, a model that the format cannot hold, a
    folder that is not empty, or one that cannot be written.
    """
    if format not in get_args(Format):
        raise ExportError(f"There is no format {format!r}{nearest(format, get_args(Format))}: safetensors or hf.")
    if model.vocabulary != len(tokenizer):
        raise ExportError(
            f"The model has a vocabulary of {model.vocabulary} tokens and the tokenizer one of {len(tokenizer)}. "
            "Give the tokenizer that the model was trained with."
        )
    if format == "hf" and (reasons := _in_the_way(model)):
        raise ExportError(
            f"Neither Llama nor Qwen3 of transformers computes what this model does: {'; '.join(reasons)}. "
            "Export it as safetensors, which takes every model, or train one with these values."
        )
    out = out.expanduser().resolve()
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ExportError(
                f"{out} is there and not an empty folder, and an export overwrites nothing. Name a new one."
            )
        # Beside the folder, so that the rename stays within one file system.
        draft = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
        try:
            draft.mkdir(parents=True)
            if format == "hf":
                _save_for_transformers(draft, model, tokenizer)
            else:
                save_model(draft, model, tokenizer)
            # safetensors makes a file that its owner alone may read; the others are as the umask has it.
            shutil.copymode(draft / "tokenizer.json", draft / MODEL)
            draft.rename(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return sorted(out.iterdir())
    except (OSError, SafetensorError) as error:  # safetensors raises its own where it cannot write
        reason = getattr(error, "strerror", None) or error
        raise ExportError(
            f"The model cannot be written to {out}: {reason}. Make room there or name another folder."
        ) from error


def _in_the_way(model: Transformer) -> list[str]:
    """What keeps a model from being a Llama or a Qwen3: each field with its value and the one that would do."""
    config, reasons = model.config, []
    if config.canon:
        reasons.append(f"model.canon is {config.canon} and must be 0 (they have no convolutions)")
    if config.rope_share != 1:
        reasons.append(f"model.rope_share is {config.rope_share} and must be 1 (they turn all of a head)")
    if config.head_size % 2:
        name = "model.head_dim" if config.head_dim else "model.width / model.heads"
        reasons.append(
            f"{name} is {config.head_size} and must be even (they turn one half of a head against the other)"
        )
    if not config.qk_norm and config.width % config.heads:
        reasons.append(
            f"model.heads is {config.heads} and must divide model.width {config.width} (Llama demands it; with "
            "model.qk_norm true the model would be a Qwen3, which does not)"
        )
    if others := sorted({str(p.dtype) for p in model.parameters() if p.dtype != torch.float32}):
        reasons.append(f"the weights are {' and '.join(others)} and must be torch.float32, as they are stored")
    return reasons


def _save_for_transformers(out: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_file(_weights(model), out / MODEL)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    files = {
        "config.json": _architecture(model.config, model.vocabulary) | ids,
        "generation_config.json": ids,
        "tokenizer.json": _tokenizer(tokenizer),
        "tokenizer_config.json": _tokenizer_settings(tokenizer, model.config.max_length),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _weights(model: Transformer) -> dict[str, torch.Tensor]:
    """The weights under transformers' names, as they are: both turn the first half of a head against the second."""
    weights = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module == "head" and model.config.tied:
            continue  # the embedding, written once
        if module.startswith("blocks."):
            _, number, part = module.split(".", 2)
            module = f"model.layers.{number}.{INSIDE[part]}"
        else:
            module = OUTSIDE[module]
        weights[f"{module}.weight"] = tensor.detach().cpu().contiguous()
    return weights


def _architecture(config: ModelConfig, vocabulary: int) -> dict[str, Any]:
    """config.json, without the special tokens. Numbers that transformers wants as floats are written as such."""
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": float(config.norm_eps),
        # Version 5 calls it rope_parameters.rope_theta, and reads this name too.
        "rope_theta": float(config.rope_base),
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tied,
        # Qwen3's default is a window, unused, but version 4 warns about it.
        "sliding_window": None,
    }


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json of the library `tokenizers`: a closed list of words between single spaces."""
    begin = tokenizer.tokens[tokenizer.bos]
    first, second = ({"Sequence": {"id": part, "type_id": 0}} for part in "AB")
    start = {"SpecialToken": {"id": begin, "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        # The first of all tokens. They are cut out of a text before it is split; the space on either side goes too.
        "added_tokens": [
            {"id": i, "content": token, "special": True, "single_word": False, "normalized": False}
            | {"lstrip": True, "rstrip": True}
            for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        # One space between two tokens splits them. Any other stays in its piece, which is then no word.
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(?<=[^ ]) (?=[^ ])"},
            "behavior": "Removed",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, first],
            "pair": [start, first, second],
            "special_tokens": {begin: {"id": begin, "ids": [tokenizer.bos], "tokens": [begin]}},
        },
        # None joins tokens by single spaces.
        "decoder": None,
        # What stands for an unknown word must not be in the vocabulary: such a word is then an error, as it is here.
        "model": {
            "type": "WordLevel",
            "vocab": {token: i for i, token in enumerate(tokenizer.tokens)},
            "unk_token": "",
        },
    }


def _tokenizer_settings(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.tokens[tokenizer.bos],
        "eos_token": tokenizer.tokens[tokenizer.eos],
        "pad_token": tokenizer.tokens[tokenizer.pad],
        # Otherwise ` .` and ` !` would lose their space when ids become text.
        "clean_up_tokenization_spaces": False,
        # Completions are appended, so prompts of a batch must end together.
        "padding_side": "left",
        # Version 4 would add token types, which neither model takes.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
    }
