"""These tests need torch's CUDA build and a separate process: bash scripts/test_fake_cuda.sh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


# These modules import torch's compiler, which would take seconds in each process of the other tests.
collect_ignore_glob = [] if "FAKE_CUDA" in os.environ else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "FAKE_CUDA" in os.environ and (torch.version.cuda is None or torch.cuda.is_available()):
        reason = f"torch {torch.__version__} with {torch.cuda.device_count()} GPUs: needs its CUDA build, and no GPU"
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with training documents, which are tokenised once per session."""
    from tests.fake_cuda.program import write_documents

    folder = tmp_path_factory.mktemp("text")
    write_documents(folder)
    return folder
