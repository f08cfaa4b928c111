"""Test that an extension is loaded only if its flag is given. A run without extensions works even if none is
installed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace

import pytest

from megatron.gpt2 import hooks
from megatron.gpt2.config import SECTIONS, TrainConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.config.sections import flag_field
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.hooks import EXTENSIONS, MEMORY_PLAN, Hook, load_hooks
from megatron.gpt2.train.loop import train
from tests.megatron.gpt2.train.training_runs import finish, make_context, start, write_text

FLAGS = "--exact-layouts 2 --check-replicas-interval 1 --eval-tasks lambada --log-straggler --rewind-on-spike".split()


def names(*flags: str) -> list[str]:
    return [type(hook).__name__ for hook in load_hooks(parse(list(flags)).config)]


def test_a_flag_loads_its_extension() -> None:
    planner = MEMORY_PLAN.split(":")[1]
    assert names() == [planner]
    assert names(*FLAGS) == [*(target.split(":")[1] for target in EXTENSIONS.values()), planner]


def test_the_extension_in_the_docstring_works_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.__doc__
    module = ModuleType("megatron.gpt2.extensions.grumble")
    vars(module).update(Hook=Hook, flag_field=flag_field, EXTENSIONS={})
    exec(dedent(hooks.__doc__.partition(":\n\n")[2]), vars(module))
    fields = [("grumble", float | None, module.grumble)]
    extended = dataclasses.make_dataclass("Extended", fields, bases=(TrainConfig,), frozen=True)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SECTIONS, "train", extended)
    monkeypatch.setattr(hooks, "EXTENSIONS", module.EXTENSIONS)

    grumbler = load_hooks(parse(["--grumble", "4"]).config)[0]
    for loss, lines in ((None, 0), (3.0, 0), (5.0, 1)):
        record = SimpleNamespace(lm_loss=loss)
        assert len(grumbler.on_log(None, record)) == lines  # type: ignore[arg-type]


def test_a_run_without_extensions_trains_and_a_flag_of_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in (*EXTENSIONS.values(), MEMORY_PLAN):
        monkeypatch.setitem(sys.modules, f"megatron.gpt2.extensions.{target.split(':')[0]}", None)
    write_text(tmp_path)
    with pytest.raises(
        ValueError, match=r"^--log-straggler needs megatron\.gpt2\.extensions\.watch\.stragglers, which"
    ):
        make_context(tmp_path, "--log-straggler", RankInfo())
    trainer = start(0, 1, tmp_path, "--train-iters 2")
    assert trainer.hooks == []
    assert train(trainer) == ""
    finish(trainer)


def test_the_order_of_hook_calls(tmp_path: Path) -> None:
    write_text(tmp_path)
    trainer = start(0, 1, tmp_path, "--train-iters 2 --log-interval 1 --save-interval 1")
    seen: list[str] = []

    class Seeing(Hook):
        def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
            seen.append(name)
            return super().__getattribute__(name)

    trainer.hooks[:] = [Seeing()]
    train(trainer)
    finish(trainer)
    step = ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_log"]
    assert seen == [*step, "expected_memory", "maybe_rewind", "on_save", *step, "maybe_rewind", "on_train_end"]
