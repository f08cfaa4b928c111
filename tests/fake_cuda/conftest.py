"""These tests need torch's CUDA build and a separate process: bash scripts/test_fake_cuda.sh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.program import write_documents

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "FAKE_CUDA" not in os.environ:
        reason = "runs in a separate environment: bash scripts/test_fake_cuda.sh"
    elif torch.version.cuda is None or torch.cuda.is_available():
        reason = f"torch {torch.__version__} with {torch.cuda.device_count()} GPUs: needs its CUDA build, and no GPU"
    else:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with training documents, which are tokenised once per session."""
    folder = tmp_path_factory.mktemp("text")
    write_documents(folder)
    return folder
