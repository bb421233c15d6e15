"""A language model and its tokenizer from a folder of transformers or a GGUF file."""

import copy
from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> tuple[Any, Any]:
    """Return the model in float32 and the tokenizer of a folder or of a .gguf file, which needs the package gguf."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if path.is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(path)
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    quantized: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = copy.deepcopy(quantized.config)
    vars(config).pop("quantization_config", None)  # the weights are ordinary now, but would not be saved with it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    return model, AutoTokenizer.from_pretrained(**place)


def convert(source: Path, folder: Path) -> None:
    """Write a model as a folder of transformers in float32, which loads faster than a GGUF file."""
    model, tokenizer = load(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
