"""lm-eval gets the same results from our model as from transformers with the exported model, also over HTTP."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mpu
from data_utils.corpora.detokenizers import wikitext_detokenizer
from megatron.gpt2.generate.load_model import LoadedModel, load_for_inference
from megatron.gpt2.train.loop import train
from tests.conftest import ROOT, needs, tool
from tests.distributed import run_ranks
from tests.megatron.gpt2.generate.word_model import LENGTH, SHAPE, word_model
from tests.megatron.gpt2.train.training_runs import finish, start

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval, the extra [eval], is not installed")

# One task for each kind of lm-eval's requests: loglikelihood (multiple choice), loglikelihood_rolling, generate_until.
TASKS: dict[str, dict[str, Any]] = json.loads("""{
"choice": {"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{words}}",
    "doc_to_target": 0, "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
"rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
"written": {"output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": " {{next}}",
    "generation_kwargs": {"until": [" school", "\\n"], "max_gen_toks": 1, "do_sample": false},
    "metric_list": [{"metric": "exact_match"}]}
}""")
Figures = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("word_model")
    words = word_model(shared_folder, folder)
    docs = [
        {
            "context": " ".join(words[at : at + 6]),
            "next": words[at + 6],
            "text": " ".join(words[at : at + 40]),
            "words": [words[at + 6], words[at + 7], words[at + 8]],
        }
        for at in range(0, 400, 20)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        write_task(folder / "tasks" / f"{name}.yaml", folder / "docs.jsonl", task)
    return folder


def write_task(path: Path, docs: Path, task: dict[str, Any]) -> None:
    files = {"dataset_path": "json", "test_split": "test", "dataset_kwargs": {"data_files": {"test": str(docs)}}}
    path.write_text(json.dumps({"task": path.stem, **files, **task}))  # JSON is also valid YAML.


@functools.cache  # A model name can be registered only once.
def program() -> dict[str, Any]:
    """Return the module evaluate_harness as a dictionary. TaskManager is limited to the tasks of this test, because
    reading lm-eval's 14,000 task files takes seconds."""
    names = vars(tool("evaluate_harness"))
    names["TaskManager"] = functools.partial(names["TaskManager"], include_defaults=False)
    return names


def scores(folder: Path, model: Any, **settings: Any) -> Figures:
    """Return {(task, metric): value} of all tasks in the folder."""
    return float_metrics(
        lm_eval.simple_evaluate(
            model,
            tasks=list(TASKS),
            task_manager=program()["TaskManager"](include_path=str(folder / "tasks")),
            log_samples=False,
            bootstrap_iters=0,
            **settings,
        )["results"]
    )


def float_metrics(results: dict[str, Any]) -> Figures:
    return {
        (task, name): value
        for task, entries in results.items()
        for name, value in entries.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = program()["main"]
    flags = ["--load", str(folder / "save"), "--include-path", str(folder / "tasks"), "--device", "cpu"]
    assert main([*flags, "--tasks", ",".join(TASKS), "--output", str(folder / "out.json")]) == 0
    assert capsys.readouterr().out.count("bits_per_byte") == 1
    result = json.loads((folder / "out.json").read_text())
    own = float_metrics(result["results"])
    exported = {"pretrained": str(folder / "exported"), "dtype": "float32"}
    theirs = scores(folder, "hf", model_args=exported, device="cpu")
    assert own == pytest.approx(theirs, rel=1e-4) and {task for task, _ in own} == set(TASKS)
    assert 0.2 < own["choice", "acc,none"] < 1 and 0.2 < own["written", "exact_match,none"] < 1
    assert len(result["manifest_sha256"]) == 64

    for wrong, said in (
        (["--tasks", "ch*,none"], "--tasks: lm-eval has no task none"),
        (["--tasks", "choice", "--output", "no/such/folder/x"], "--output no/such/folder/x"),
        (["--tasks", "choice", "--batch-size", "0"], "--micro-batch-size/--batch-size/--eval-batch-size"),
    ):
        assert main([*flags, *wrong]) == 2
        out, error = capsys.readouterr()
        assert not out and error.splitlines()[-1].startswith(f"error: {said}")


def train_with_tasks(rank: int, world_size: int, folder: Path, flags: list[str]) -> None:
    trainer = start(rank, world_size, folder, flags)
    train(trainer)
    finish(trainer)


def test_hellaswag_while_training_and_afterwards(folder: Path, tmp_path: Path) -> None:
    """`--eval-tasks`, evaluate_gpt2.py and lm-eval's own preparation of HellaSwag give the same accuracies."""
    import datasets  # type: ignore[import-untyped]
    from lm_eval.tasks.hellaswag.utils import process_docs

    words = (folder / "text.txt").read_text().split()
    raw = [
        {
            "activity_label": words[at],
            "ctx_a": " ".join(words[at + 1 : at + 6]) + " [title]",
            "ctx_b": words[at + 6],
            "endings": [f"{words[at + 7 + i]}  [step] {words[at + 8 + 2 * i]}." for i in range(4)],
            "label": str(at % 4),
        }
        for at in range(0, 800, 20)
    ]
    (tmp_path / "hellaswag_val.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in raw))
    process_docs(datasets.Dataset.from_list(raw)).to_json(tmp_path / "prepared.jsonl")
    task = TASKS["choice"] | {"doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "{{gold}}"}
    write_task(tmp_path / "questions.yaml", tmp_path / "prepared.jsonl", task)

    def results(main: Any, flags: str) -> Any:
        words = f"--load {folder}/save --device cpu --output {tmp_path}/out.json {flags}"
        assert main(words.split()) == 0
        return json.loads((tmp_path / "out.json").read_text())["results"]

    theirs = results(program()["main"], f"--include-path {tmp_path} --tasks questions")["questions"]
    ours = results(tool("evaluate_gpt2").main, f"--valid-data {tmp_path}/hellaswag_val.jsonl")[0]["metrics"]
    assert (ours["accuracy"], ours["accuracy_norm"]) == (theirs["acc,none"], theirs["acc_norm,none"])
    assert 0.1 < ours["accuracy"] != ours["accuracy_norm"] < 0.9

    shutil.copy(folder / "text.txt", tmp_path)
    flags = (
        "--pipeline-model-parallel-size 2 --exit-interval 1 --eval-interval 1 --lr 1e-30 "
        f"--override-opt-param-scheduler --eval-tasks hellaswag --eval-tasks-folder {tmp_path} --load {folder}/save"
    )
    run_ranks(train_with_tasks, 2, tmp_path, [*SHAPE, *flags.split()])
    records = map(json.loads, (tmp_path / "save" / "metrics.jsonl").read_text().splitlines())
    (scored,) = [record for record in records if record.get("split") == "hellaswag"]
    assert (scored["accuracy"], scored["accuracy_norm"]) == (ours["accuracy"], ours["accuracy_norm"])


def test_the_detokenizer_is_that_of_lm_eval(test_data: Path) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer as theirs

    text = (test_data / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    assert wikitext_detokenizer(text) == theirs({"page": text})


pytestmark = needs("aiohttp", "tenacity", "requests", extra="eval")


@pytest.fixture
def loaded(folder: Path) -> Iterator[LoadedModel]:
    mpu.initialize_model_parallel(1)
    yield load_for_inference(folder / "save", torch.device("cpu"), torch.float32, log=print)
    mpu.destroy_model_parallel()


def test_the_same_scores_over_http(folder: Path, loaded: LoadedModel) -> None:
    """Use the settings of docs/how-to/evaluation.md. If a text is too long for the model, the server and HarnessLM cut
    the same tokens."""
    from tests.megatron.gpt2.extensions.serve.test_app import serving

    text = (ROOT / "docs" / "how-to" / "evaluation.md").read_text()
    arguments = re.search(r"--model local-completions --model_args (\S+)", text)[1] + ",num_concurrent=3,batch_size=4"
    with serving(loaded.model, loaded.tokenizer) as served:
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
    model.max_length = LENGTH - 1  # Over HTTP, lm-eval requests one new token, for which it keeps one position.
    assert over_http == pytest.approx(scores(folder, model), rel=1e-5)
