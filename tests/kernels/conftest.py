"""Where do the kernel tests run? On the card where there is one, else in Triton's interpreter.

The interpreter is chosen when a kernel's module is imported, so the variable is set here, before
any test module of this folder is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # the tests run one process a core

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not ON_CARD:
    importlib.import_module("tests.kernels.interpreter")
    importlib.import_module("tests.kernels.conversions")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_CARD else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261201)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `gpu` in this folder runs on a card only."""
    if ON_CARD:
        return
    for item in items:
        if "tests/kernels" in item.path.as_posix() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
