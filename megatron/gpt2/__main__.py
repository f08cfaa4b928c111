"""Start any program of the project: `gpt2 NAME [flags]`, in a checkout also `python -m megatron.gpt2 NAME [flags]`."""

import ast
import importlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from data_utils.command_line import as_command, configure_output

# {name of a program: "module:function"}. Only the program that is called is imported. So a program does not need the
# packages that other programs need.
PROGRAMS = {
    "pretrain": "commands.pretrain_gpt2:main",
    "generate-text": "commands.generate_text:main",
    "serve": "extensions.serve.command:main",
    "evaluate": "commands.evaluate_gpt2:main",
    "evaluate-harness": "commands.evaluate_harness:main",
    "checkpoint": "commands.checkpoint:main",
    "merge-mp-partitions": "commands.merge_mp_partitions:main",
    "train-tokenizer": "commands.train_tokenizer:main",
    "preprocess-data": "commands.preprocess_data:main",
    "merge-datasets": "commands.merge_datasets:main",
    "inspect-data": "commands.inspect_data:main",
    "preflight": "extensions.preflight.command:main",
    "plan": "extensions.plan.command:main",
    "show-step": "extensions.plan.show_step:main",
    "bench-kernels": "extensions.plan.bench_kernels:main",
    "bench-collectives": "commands.bench_collectives:main",
    "draw-schedule": "commands.draw_schedule:main",
    "verify": "extensions.verify.command:main",
    "prove-order": "extensions.order.command:main",
    "report": "commands.report:main",
    "reproduce": "commands.reproduce:main",
    "post-mortem": "extensions.post_mortem.command:main",
    "flag-table": "commands.flag_table:main",
    "blacklist-urls": "extensions.webtext.commands:blacklist_urls",
    "download-urls": "extensions.webtext.commands:download_urls",
    "cleanup-dataset": "extensions.webtext.commands:cleanup_dataset",
    "find-duplicates": "extensions.webtext.commands:find_duplicates",
    "group-duplicate-url": "extensions.webtext.commands:group_duplicate_url",
    "remove-group-duplicates": "extensions.webtext.commands:remove_group_duplicates",
    "filter-ngrams": "extensions.webtext.commands:filter_ngrams",
    "merge-jsons": "extensions.webtext.commands:merge_jsons",
    "split-dataset": "extensions.webtext.commands:split_dataset",
}


def run(name: str, words: Sequence[str] | None = None) -> NoReturn:
    """Run the program `name`, written with - or _, with the flags `words` (default: this process's), and exit."""

    def main() -> int | None:
        key = name.replace("_", "-")
        if key not in PROGRAMS:
            raise ValueError(f"gpt2 {name}: unknown program; gpt2 --help lists all programs")
        module, _, function = PROGRAMS[key].partition(":")
        program = getattr(importlib.import_module(f"megatron.gpt2.{module}"), function)
        return program(sys.argv[1:] if words is None else words)

    as_command(main)()


def about(target: str) -> str:
    """Return the first paragraph of the docstring of a program, in one line. The file is parsed, because an import may
    be slow or fail."""
    module, _, function = target.partition(":")
    file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    described = tree if function.startswith("main") else named[0]
    return textwrap.shorten((ast.get_docstring(described) or "").split("\n\n")[0].rstrip(":"), 95, placeholder=" …")


def main() -> NoReturn:
    """Run the installed commands `gpt2 NAME` and `gpt2-NAME`. Without a name, `gpt2` lists all programs."""
    called, words = Path(sys.argv[0]).stem, sys.argv[1:]
    if called.startswith("gpt2-"):
        run(called.removeprefix("gpt2-"))
    if words and words[0] not in ("-h", "--help"):
        run(words[0], words[1:])
    configure_output()
    print("usage: gpt2 NAME [flags]; for the flags: gpt2 NAME --help\n")
    for name, target in PROGRAMS.items():
        print(f"  {name:<24} {about(target)}")
    sys.exit()


if __name__ == "__main__":
    main()
