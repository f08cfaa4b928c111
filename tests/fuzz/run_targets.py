"""What runs leave behind and are given, and what clients send to the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_utils.tokenizers.base import ByteTokenizer
from megatron.gpt2.config import Config, foreign, read_config, write_config
from megatron.gpt2.extensions.serve.app import error_response
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    CompletionRequest,
    Offer,
    Text,
    read_megatron_request,
    read_request,
)
from megatron.gpt2.generate.generation import GeneratedToken
from megatron.gpt2.generate.sampling import Sampler
from megatron.gpt2.monitor.incidents import Incidents, rank_name, read_incidents
from megatron.gpt2.monitor.run_report import page
from tests.fuzz.fuzzing import Target

TOKENIZER = ByteTokenizer()
OFFER = Offer("tiny", TOKENIZER, context=64, max_tokens=100, texts=8, body_bytes=1 << 16)


def run_folder(folder: Path) -> None:
    """The records of a run."""
    config = Config.from_dict({"checkpoint": {"save": "checkpoints/a"}})
    facts = {"global_batch_size": 8, "train_iters": 100, "environment": {"torch": "2"}}
    write_config(folder, config, facts, goes_on=False)
    metrics = [
        {
            "iteration": i,
            "lm_loss": 5.0 / i,
            "learning_rate": 1e-3,
            "consumed_samples": 8 * i,
            "ms_per_iteration": 10.0,
            "tokens_per_second": 1e4,
            "grad_norm": 1.0,
            "memory_bytes": 10**9,
        }
        for i in range(1, 6)
    ] + [{"iteration": 5, "split": "valid", "lm_loss": 2.0, "bits_per_byte": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in metrics))
    (folder / "samples.jsonl").write_text('{"iteration": 5, "text": "[Once] upon"}\n')
    (folder / "history.jsonl").write_text('{"iteration": 0, "time": "2026-01-01T00:00:00+00:00", "text": "started"}\n')
    Incidents(folder, rank_name(0)).note("start", "2 ranks", iteration=0)
    Incidents(folder, "launcher_a").note("rank ended", "rank 1 was ended by SIGKILL", rank=1, signal=9)


def read_run(folder: Path) -> None:
    """The page, and the incidents by time."""
    times = [record["time"] for record in read_incidents(folder)]
    assert times == sorted(times)
    assert page(folder).startswith("<!DOCTYPE html>")


def deepspeed_file(folder: Path) -> None:
    (folder / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_clipping": 1.0,
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 16,
                    "hysteresis": 2,
                    "loss_scale_window": 500,
                },
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": 5e8},
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
                },
                "activation_checkpointing": {"partition_activations": False},
            }
        )
    )


def read_deepspeed(folder: Path) -> None:
    values, notes = foreign.read_deepspeed_config(str(folder / "ds.json"), {"train.micro_batch_size": 4})
    assert all("." in key for key in values) and all("\n" not in note for note in notes)


BODY = {
    "model": "tiny",
    "prompt": ["Once upon", "a time"],
    "max_tokens": 20,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 3,
    "n": 2,
    "stop": ["\n", "x"],
    "seed": 7,
    "logprobs": 2,
    "stream": True,
    "echo": True,
    "user": "me",
    "stream_options": {"include_usage": True},
    "repetition_penalty": 1.2,
    "logit_bias": {},
    "best_of": 1,
}
MEGATRON_BODY = {
    "prompts": ["Once upon", "a time: "],
    "tokens_to_generate": 20,
    "logprobs": True,
    "temperature": 0.7,
    "top_k": 0,
    "top_p": 0.9,
    "top_p_decay": 0.0,
    "top_p_bound": 0.5,
    "add_BOS": True,
    "stop_on_eol": False,
    "stop_on_double_eol": True,
    "prevent_newline_after_colon": False,
    "random_seed": 7,
    "no_log": True,
    "stop_token": 256,
    "length_penalty": 1.0,
    "beam_width": None,
}


def body_target(name: str, body: dict[str, Any], read: Callable[[bytes, Offer], CompletionRequest]) -> Target:
    """What a client sends to one of the server's addresses."""
    return Target(
        name,
        lambda folder: (folder / "body").write_text(json.dumps(body)),
        lambda folder: read_body(folder, read),
        refusals=(ApiError,),
        named=False,
    )


def read_body(folder: Path, read: Callable[[bytes, Offer], CompletionRequest]) -> None:
    """A request that is taken can be generated and answered; one that is not has an answer in JSON."""
    try:
        request = read((folder / "body").read_bytes(), OFFER)
    except ApiError as error:
        assert error.status in (400, 404)
        json.loads(bytes(error_response(error).body))
        raise
    continuations = request.continuations()
    assert 1 <= len(continuations) <= OFFER.texts and request.sampling.max_new_tokens <= OFFER.max_tokens
    logits = torch.linspace(-5, 5, TOKENIZER.vocab_size)
    texts = []
    for c in continuations:
        assert len(c.prompt) <= OFFER.context and all(0 <= i < TOKENIZER.vocab_size for i in c.prompt)
        sampler = Sampler(c.sampling, c.prompt, TOKENIZER.vocab_size, torch.device("cpu"))
        token, probability = sampler.draw(logits, logits.logsumexp(0))
        assert 0 <= token < TOKENIZER.vocab_size and 0 <= probability <= 1
        if c.score_prompt:
            c.prompt_tokens = [GeneratedToken(0, i, 0.5, "") for i in c.prompt[1:]]
        c.ids, c.finish = [token], "length"
        texts.append(
            Text(
                c,
                [GeneratedToken(0, token, probability, TOKENIZER.decode([token]), sampler.likeliest(logits), c.finish)],
            )
        )
    json.dumps(request.answer(texts, TOKENIZER, {}), allow_nan=False)


TARGETS = [
    Target("records of a run", run_folder, read_run, "**/*.jsonl"),
    Target("config.json", run_folder, lambda folder: read_config(str(folder / "config.json")), "config.json"),
    Target("config.json of a report", run_folder, read_run, "config.json"),
    Target("DeepSpeed's file", deepspeed_file, read_deepspeed),
    body_target("HTTP body", BODY, read_request),
    body_target("HTTP body in Megatron's form", MEGATRON_BODY, read_megatron_request),
]
