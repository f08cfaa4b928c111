"""Test that lm-eval gets the same scores over HTTP as from the model itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpu
from megatron.gpt2.generate.load_model import LoadedModel, load_for_inference
from tests.conftest import ROOT, needs
from tests.megatron.gpt2.commands.test_evaluate_harness import TASKS, folder, program  # noqa: F401
from tests.megatron.gpt2.extensions.serve.test_app import RunningServer, serving
from tests.megatron.gpt2.generate.word_model import LENGTH

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval, the extra [eval], is not installed")
pytestmark = needs("aiohttp", "tenacity", "requests", extra="eval")
Scores = dict[tuple[str, int], list[Any]]


@pytest.fixture
def loaded(folder: Path) -> Iterator[LoadedModel]:  # noqa: F811
    mpu.initialize_model_parallel(1)
    yield load_for_inference(folder / "save", torch.device("cpu"), torch.float32, log=print)
    mpu.destroy_model_parallel()


@pytest.fixture
def served(loaded: LoadedModel) -> Iterator[RunningServer]:
    with serving(loaded.model, loaded.tokenizer) as served:
        yield served


def scores(folder: Path, model: Any, **settings: Any) -> Scores:  # noqa: F811
    """Return the answer for each task and document: (ln p, whether it is the most likely), ln p, or a text."""
    results = lm_eval.simple_evaluate(
        model,
        tasks=list(TASKS),
        task_manager=program()["TaskManager"](include_path=str(folder / "tasks")),
        bootstrap_iters=0,
        **settings,
    )
    return {
        (task, sample["doc_id"]): sample["filtered_resps"]
        for task, samples in results["samples"].items()
        for sample in samples
    }


def test_the_same_scores_over_http(folder: Path, loaded: LoadedModel, served: RunningServer) -> None:  # noqa: F811
    """The settings are those of the manual. Texts that are too long for the model lose the same tokens."""
    text = (ROOT / "docs" / "how-to" / "evaluation.md").read_text()
    arguments = re.search(r"--model local-completions --model_args (\S+)", text)[1] + ",num_concurrent=3,batch_size=4"
    for printed, own in (
        ("http://127.0.0.1:5000/", f"http://127.0.0.1:{served.port}/"),
        ("model=gpt2_345m", "model=tiny"),
        ("tokenizer=gpt2_345m_hf", f"tokenizer={folder / 'exported'}"),
        ("max_length=1025", f"max_length={LENGTH + 1}"),
    ):
        assert arguments.count(printed) == 1
        arguments = arguments.replace(printed, own)
    over_http = scores(folder, "local-completions", model_args=arguments)
    model = program()["HarnessLM"](loaded.model, loaded.tokenizer)
    model.max_length = LENGTH - 1  # lm-eval keeps one position for the token that it always requests.
    expected = scores(folder, model)
    assert over_http.keys() == expected.keys() and len(expected) == 3 * 20
    for document, found in over_http.items():
        for answer, wanted in zip(found, expected[document], strict=True):
            if isinstance(wanted, str):
                assert answer == wanted
            elif isinstance(wanted, tuple):
                assert answer[0] == pytest.approx(wanted[0], abs=1e-5) and answer[1] == wanted[1]
            else:
                assert answer == pytest.approx(wanted, abs=1e-5)
