"""Which implementation runs on which device."""

import os
from importlib.util import find_spec

import torch


def resolve_implementation(name: str, device: torch.device) -> str:
    """The implementation that will run on this device.

    Args:
        name: `"auto"` (Triton on CUDA where it is installed, else torch), `"torch"` or `"triton"`.
        device: where the hidden states live.

    Returns:
        `"triton"` or `"torch"`.

    Raises:
        ValueError: `name` is none of these.
        RuntimeError: Triton was asked for and is not installed, or the device is not CUDA and Triton's
            interpreter is off.
    """
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation must be auto, torch or triton; got {name!r}.")
    installed = find_spec("triton") is not None
    if name == "auto":
        return "triton" if installed and device.type == "cuda" else "torch"
    if name == "triton" and not installed:
        raise RuntimeError("implementation 'triton' needs the package triton, which is not installed. Use 'torch'.")
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            f"implementation 'triton' needs a CUDA device; got {device.type}. Use 'torch', or set "
            "TRITON_INTERPRET=1 before Python starts to try the kernels in Triton's slow interpreter."
        )
    return name
