"""A model from a GGUF file, converted once into a folder that transformers can load, train and save.

The weights are dequantised and rounded to bfloat16, so they only approximate what the file was made from.
transformers marks a model read from GGUF as quantised and will not save it; therefore a plain model of its
configuration takes the weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

SUFFIX = ".gguf"


def converted_folder(file: Path) -> Path:
    """The cached folder with the model of a GGUF file; converted now if this file has not been yet.

    A new file costs up to a minute, two float32 copies of the weights in memory, and a folder of 2 bytes a
    parameter among the Hugging Face assets (`HF_ASSETS_CACHE`). An interrupted conversion leaves no model.

    Args:
        file: the GGUF file; another size or time of change makes it a new file.

    Returns:
        A folder with configuration, tokenizer and bfloat16 weights.

    Raises:
        ValueError: the file is not a GGUF file, or of an architecture that transformers does not convert.
        RuntimeError: the package `gguf` is missing.
        OSError: the cache cannot be written.
    """
    from huggingface_hub import cached_assets_path

    status = file.stat()
    key = f"{file.name}:{status.st_size}:{status.st_mtime_ns}"
    cache = Path(cached_assets_path("grpo_lab", namespace="models", subfolder="gguf"))
    folder = cache / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    with TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished:
        whole = Path(unfinished) / "model"
        _convert(file, whole)
        try:
            whole.rename(folder)  # atomic: a reader finds the whole model or none
        except OSError:
            if not folder.is_dir():  # it is there if another process converted the same file meanwhile
                raise
    return folder


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise RuntimeError(f"reading {file} needs the package gguf: pip install 'grpo-lab[gguf]'")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        dequantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"{file} cannot be read as a GGUF model: {error}") from error
    config = dequantised.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
