"""What every test stands on: no account, no hub, no home folder of the user, and one thread a worker.

It is set when this file is imported, because torch, triton, huggingface_hub and wandb read it on import.
"""

import os
import tempfile

_HOME = tempfile.TemporaryDirectory(prefix="grpo-lab-tests-", ignore_cleanup_errors=True)

for _name in [name for name in os.environ if name.startswith(("WANDB_", "HF_"))]:
    del os.environ[_name]
os.environ |= {
    "HOME": _HOME.name,
    "USERPROFILE": _HOME.name,
    "HF_HOME": f"{_HOME.name}/huggingface",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_DIR": _HOME.name,
    "TOKENIZERS_PARALLELISM": "false",  # its threads and forks of the tests do not mix
}
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers and their notebooks' kernels share the cores

import pytest
import torch
from hypothesis import settings

# The same examples at every run: a mutant that one draw in ten misses is then missed always, and seen by its author.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when a kernel's module is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; run on one before a kernel change lands")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
