"""The first minutes on a GPU: every stage runs on a tiny model, and a time-out or a broken device loses one case."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mpu
from benchmarks import first_minutes, flops, report
from benchmarks.arms import result_of
from benchmarks.gpu import machine, modes, own_tests, profiles, steps, tables
from benchmarks.gpu.cases import BROKEN, BrokenContext, Cases
from benchmarks.gpu.setting import Setting
from megatron.gpt2.model.parameters import count_parameters

ROOT = Path(__file__).resolve().parents[2]
MODEL_1_5B = Setting(False, "").model("1.5B")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The JSON of a part that has begun."""
    path = tmp_path / "results" / "first_minutes.json"
    first_minutes.begin(path, list(first_minutes.STAGES), smoke=True, again=False)
    return path


def cases_of(path: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["stages"][stage]["cases"]
    return found


def test_every_stage_in_one_process(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = ("bf16", "dropout, fp16, accumulation", "documents, dropout", "offload")
    monkeypatch.setattr(modes, "MODES", {name: modes.MODES[name] for name in chosen})
    monkeypatch.setattr(steps, "run_arm", lambda spec, scratch, timeout: result_of(json.loads(json.dumps(spec))))
    monkeypatch.setattr(own_tests, "command", lambda setting: ["echo", "tests/gpu/test_x.py::test_y PASSED [100%]"])
    setting = Setting(True, str(tmp_path))
    try:
        for stage, module in {
            "machine": machine,
            "modes": modes,
            "tables": tables,
            "kernels": profiles,
            "steps": steps,
            "tests": own_tests,
        }.items():
            assert first_minutes.STAGES[stage].module == module.__name__.rsplit(".", 1)[1]
            cases = Cases(path, stage, "this call")
            module.run(setting, cases)
            cases.finish()
    finally:
        mpu.destroy_model_parallel()
    assert first_minutes.summary(path, list(first_minutes.STAGES)) == 0
    assert cases_of(path, "machine")["product"]["tflops"] > 0
    seen = cases_of(path, "modes")
    assert set(seen) == set(chosen)
    assert seen["bf16"]["loss"] == pytest.approx(seen["offload"]["loss"], rel=1e-3)
    assert all(mode["kernels"] > 100 and mode["waits"] == [] for mode in seen.values())
    found = cases_of(path, "tables")
    assert found["products, 345M, 32 tokens"]["head, dW"]["bf16"]["tflops"] > 0
    assert found["cross-entropy, 345M"]["ours, with gradients"]["chunks of 16"]["ms"] > 0
    assert found["attention, 345M"]["forward and backward, dropout 0.1"]["formula"]["ms"] > 0
    assert found["gradient of the embedding, 345M"]["arms"]["embedding_dense_backward"]["ms"] > 0
    assert found["optimizer, 345M"]["step_ms"] > 0 and found["optimizer, 345M"]["write_back_ms"] > 0
    assert found["decoding, 345M"]["ours, 8 texts"]["ms"] > 0
    for kernels in cases_of(path, "kernels").values():
        assert kernels["parts_ms"]["attention"] > 0 and kernels["kernels"][0]["ms"] >= kernels["kernels"][1]["ms"]
    step = cases_of(path, "steps")["345M"]
    assert step["tokens_per_s"] > 0 and step["expected_peak_gb"] > 0 and step["mfu"] is None, "there is no GPU"
    assert step["visit"]["flops_per_token"] > 0 and step["visit"]["flops_per_token_llm_c"] > 0
    assert cases_of(path, "tests")["pytest"]["counts"] == {"PASSED": 1}
    assert str(tmp_path) not in path.read_text() and str(ROOT) not in path.read_text()


def test_output_survives_a_test_that_never_ends(tmp_path: Path):
    program = (
        "echo 'tests/gpu/test_x.py::test_a PASSED'; echo 'tests/gpu/test_x.py::test_b FAILED'; "
        "printf 'tests/gpu/test_x.py::test_c '; sleep 600"
    )
    found = own_tests.own_tests(["sh", "-c", program], tmp_path / "gpu_tests.log", 2.0)
    assert found["outcomes"] == {"tests/gpu/test_x.py::test_a": "PASSED", "tests/gpu/test_x.py::test_b": "FAILED"}
    assert found["failed"].startswith("no end after 2 s") and "test_c" in found["failed"]
    assert "test_b FAILED" in (tmp_path / "gpu_tests.log").read_text()


def test_a_case_is_measured_once_and_a_failure_again_by_the_next_call(path: Path):
    calls: list[str] = []

    def measure(call: str, *, fails: bool) -> None:
        cases = Cases(path, "modes", call)

        def work() -> dict[str, Any]:
            calls.append(call)
            if fails:
                raise RuntimeError("this one")
            return {"ms": 1.0}

        cases.run("a", lambda: calls.append("a") or {"ms": 1.0})  # type: ignore[func-returns-value]
        cases.run("b", work)
        cases.finish()

    measure("first", fails=True)
    measure("first", fails=True)  # another process of the same call
    assert not first_minutes.is_done(path, "modes")
    assert cases_of(path, "modes")["b"]["failed"] == "RuntimeError: this one"
    measure("second", fails=False)
    assert calls == ["a", "first", "second"] and first_minutes.is_done(path, "modes")


def test_a_stage_goes_on_where_it_was_cut_or_broken(path: Path, capsys: pytest.CaptureFixture[str]):
    started: list[str] = []

    def start(name: str, limit: float) -> int | None:
        """As the process of a stage: `machine` breaks CUDA once, `modes` takes too long once."""
        started.append(name)
        cases, nth = Cases(path, name, "call"), started.count(name)

        def broken() -> dict[str, Any]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        cases.run("good", lambda: {"ms": 1.0})
        if name == "machine":
            try:
                cases.run("bad", broken)
            except BrokenContext:
                return BROKEN
        if name == "modes" and nth == 1:
            return None
        cases.finish()
        return 0

    names = ["machine", "modes"]
    first_minutes.run_stages(path, names, 500, start)
    assert started == ["machine", "machine", "modes"]
    assert "goes on in another process" in (out := capsys.readouterr().out) and "CUT" in out
    assert first_minutes.summary(path, names) == 1
    first_minutes.run_stages(path, ["modes"], 500, start)
    assert first_minutes.is_done(path, "modes") and set(cases_of(path, "modes")) == {"good"}
    first_minutes.run_stages(path, ["steps"], 30, start)
    assert "steps" not in started and "NOT RUN: 30 s are left" in capsys.readouterr().out


def test_results_of_other_versions_are_put_aside(path: Path, monkeypatch: pytest.MonkeyPatch):
    Cases(path, "machine", "call").run("product", lambda: {"ms": 1.0})
    first_minutes.begin(path, ["machine"], smoke=True, again=False)
    assert cases_of(path, "machine")
    first_minutes.begin(path, ["modes"], smoke=True, again=True)
    assert cases_of(path, "machine"), "only the stages that are asked for are measured again"
    monkeypatch.setattr(report, "versions", lambda: {"torch": "another"})
    first_minutes.begin(path, ["machine"], smoke=True, again=False)
    assert json.loads(path.read_text())["stages"] == {}
    assert json.loads(path.with_suffix(".other.json").read_text())["stages"]["machine"]["cases"]


def test_two_counts_of_flops():
    """Of 1.5B: llm.c's published 48.6 % are 50.9 % by Megatron's formula."""
    (published,) = [entry["mfu"] for entry in flops.published("1.5B") if "mfu" in entry]
    visit = {
        "flops_per_token": MODEL_1_5B.flops_per_token(1024),
        "flops_per_token_llm_c": flops.by_llm_c(count_parameters(MODEL_1_5B)[1], 48, 1600, 1024),
    }
    speed = published * flops.PEAK / visit["flops_per_token_llm_c"]
    found = flops.utilisation(speed, visit, flops.PEAK)
    assert found["mfu_by_llm_c"] == pytest.approx(published) and round(found["mfu"], 3) == 0.509


def test_waits_are_kept_with_the_line_that_waited():
    line = "import warnings\nwarnings.warn('called a synchronizing CUDA operation')"
    wait = compile(line, f"{ROOT}/mpu/x.py", "exec")
    with modes.watched(torch.device("cpu")) as (waits, other):
        exec(wait)
        warnings.warn("anything else", stacklevel=1)
    assert [entry["place"].split(" ")[0] for entry in waits] == ["mpu/x.py:2"]
    assert [entry["text"] for entry in other] == ["anything else"]
