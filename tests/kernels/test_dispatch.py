"""Which implementation runs where, and what is said when none can."""

import pytest
import torch

from grpo_lab.kernels import dispatch, per_token_logps, resolve_implementation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_prefers_triton_on_cuda_only():
    assert resolve_implementation("auto", CPU) == "torch"
    assert resolve_implementation("auto", CUDA) == "triton"
    assert resolve_implementation("torch", CUDA) == "torch"


def test_auto_is_torch_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    assert resolve_implementation("auto", CUDA) == "torch"
    with pytest.raises(RuntimeError, match="needs the package triton, which is not installed"):
        resolve_implementation("triton", CUDA)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_implementation("triton", CPU) == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    message = "needs a CUDA device; got cpu"
    with pytest.raises(RuntimeError, match=message):
        resolve_implementation("triton", CPU)
    zeros = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=message):
        per_token_logps(
            zeros,
            zeros,
            torch.zeros(2, dtype=torch.int64),
            temperature=1.0,
            chunk_size=1,
            implementation="triton",
        )


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="must be auto, torch or triton; got 'cuda'"):
        resolve_implementation("cuda", CPU)
