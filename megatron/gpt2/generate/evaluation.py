"""Evaluate a trained model on a file. The tasks are:

    WIKITEXT103, PTB   perplexity per token and per word of the original text
    LAMBADA            accuracy of predicting the last word of a passage
    HELLASWAG          accuracy of choosing the likeliest of four endings, as in EleutherAI's lm-eval
    TEXT               perplexity and bits per byte of plain text or JSON lines, for each document separately

Every rank calls `read_task` and `evaluate_task` with the same arguments. Tokens are scored as in Megatron's evaluation,
so that the results can be compared with published results.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_utils import Tokenizer
from data_utils.command_line import Log, require
from data_utils.corpora import is_json, json_object, open_bytes, read_documents, read_items
from data_utils.corpora.detokenizers import ptb_detokenizer, wikitext_detokenizer
from data_utils.files import wrap_errors
from megatron.gpt2.generate.scoring import Window, score_windows, sliding_windows
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.monitor.log_lines import perplexity

TASKS = ("WIKITEXT103", "PTB", "LAMBADA", "HELLASWAG", "TEXT")
DETOKENIZERS = {"WIKITEXT103": wikitext_detokenizer, "PTB": ptb_detokenizer}
ENDINGS = 4  # The number of endings of a question of HellaSwag.
OVERLAPPING_EVAL = 32  # Megatron's default of --overlapping-eval.
_BY_NAME = ((r"wikitext|wiki\.(train|valid|test)", "WIKITEXT103"), (r"ptb", "PTB"))

Metrics = dict[str, Any]  # {name: int or float}


@dataclass(frozen=True)
class EvaluationTask:
    """The content of a file, cut into the windows to score.

    settings: the options that decided the windows.
    words: the number of words of the original text, for the perplexity per word; None for other tasks.
    num_truncated: the number of passages that were cut at the beginning to fit a window.
    endings: for HELLASWAG, the index of the right ending [questions], and the number of characters of each ending
        [questions, endings].
    """

    name: str
    windows: list[Window]
    settings: dict[str, Any]
    words: int | None = None
    num_truncated: int = 0
    endings: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def targets(self) -> np.ndarray:
        """The scored ids of all windows, int64."""
        return np.concatenate([window.ids[-window.num_targets :] for window in self.windows])


def guess_task(path: str) -> str:
    """Guess the task from the name of a file and its folder. The default is TEXT."""
    name = "/".join(Path(path).parts[-2:]).lower()
    if is_json(path):
        return next((task for task in ("LAMBADA", "HELLASWAG") if task.lower() in name), "TEXT")
    return next((task for pattern, task in _BY_NAME if re.search(pattern, name)), "TEXT")


def read_task(
    name: str,
    path: str,
    tokenizer: Tokenizer,
    *,
    length: int,
    overlapping_eval: int | None = None,
    strict_lambada: bool = False,
    text_key: str | None = None,
    max_bad_fraction: float = 0.0,
    log: Log,
) -> EvaluationTask:
    """Read the file `path` for the task `name`, as windows of up to `length` + 1 ids.

    overlapping_eval: targets of each window after the first (default: 32 for WIKITEXT103 and PTB; all for TEXT).
    strict_lambada: every token of the last word is a target, and the word is tokenised separately; otherwise the target
        is the last token of the passage.
    max_bad_fraction: the fraction of lines that may be unusable.
    log: receives notices.

    Raises ValueError if the file does not fit the task.
    """
    require(
        overlapping_eval is None or 1 <= overlapping_eval <= length,
        f"--overlapping-eval {overlapping_eval} must be from 1 to the {length} tokens of a window",
    )
    if name != "TEXT":
        wanted = "the benchmark's text file" if name in DETOKENIZERS else "JSON lines, named .jsonl"
        require(is_json(path) != (name in DETOKENIZERS), f"--task {name}: {path} should be {wanted}; or --task TEXT")
    if name == "HELLASWAG":
        return _read_hellaswag(path, tokenizer, length)
    texts = read_documents(path, text_key, log, max_bad_fraction)
    if name == "LAMBADA":
        passages = [
            _passage(text, number, path, tokenizer, strict_lambada, length) for number, text in enumerate(texts, 1)
        ]
        num_truncated = sum(len(passage.ids) > length + 1 for passage in passages)
        if num_truncated:
            log(f"{path}: {num_truncated} passages longer than {length} tokens are truncated at the beginning")
        return EvaluationTask(
            name,
            [Window(passage.ids[-length - 1 :], passage.num_targets) for passage in passages],
            {"seq_length": length, "strict_lambada": strict_lambada},
            num_truncated=num_truncated,
        )
    stride = overlapping_eval or (min(OVERLAPPING_EVAL, length) if name in DETOKENIZERS else length)
    settings = {"seq_length": length, "overlapping_eval": stride}
    if name == "TEXT":  # As in training, each document begins after an end-of-document token.
        windows = [
            window
            for text in texts
            for window in sliding_windows(_ids(tokenizer, text, before=[tokenizer.bos]), length, stride)
        ]
        return EvaluationTask(name, windows, settings)
    (text,) = texts
    windows = sliding_windows(_ids(tokenizer, DETOKENIZERS[name](text)), length, stride)
    if not windows:
        raise ValueError(f"{path} holds less than two tokens")
    return EvaluationTask(name, windows, settings, words=len(text.strip().split(" ")))


def _ids(tokenizer: Tokenizer, text: str, before: Sequence[int] = ()) -> np.ndarray:
    return np.array([*before, *tokenizer.encode(text)], dtype=np.int32)


def _passage(text: str, number: int, path: str, tokenizer: Tokenizer, strict: bool, length: int) -> Window:
    if not text.strip():
        raise ValueError(f"{path}: passage {number} has no last word")
    if strict:
        word = text.split()[-1]
        target = _ids(tokenizer, " " + word)
        context = _ids(tokenizer, text[: text.rindex(word)].strip())
    else:
        ids = _ids(tokenizer, text)
        context, target = ids[:-1], ids[-1:]
    if len(target) > length:
        raise ValueError(f"{path}: a last word has {len(target)} tokens, more than a window of {length}")
    # The context of a passage of one word is the end-of-document token, after which a document begins.
    context = context if len(context) else np.array([tokenizer.bos], dtype=np.int32)
    return Window(np.concatenate([context, target]), len(target))


def _read_hellaswag(path: str, tokenizer: Tokenizer, length: int) -> EvaluationTask:
    """Read the questions of hellaswag_val.jsonl. Texts are cleaned and tokenised as in lm-eval's task "hellaswag"."""
    windows, labels, characters = list[Window](), list[int](), list[list[int]]()
    with open_bytes(path) as file:
        for number, line in enumerate(read_items(file, path), 1):
            if isinstance(line, bytes) and not line.strip():
                continue
            with wrap_errors(Path(f"{path}:{number}")):
                item = json_object(line)
                about, before, start = (item[key] for key in ("activity_label", "ctx_a", "ctx_b"))
                context = _clean_wikihow(f"{about}: {before} {start.capitalize()}")
                endings, label = [_clean_wikihow(ending) for ending in item["endings"]], int(item["label"])
                is_valid = len(endings) == ENDINGS and 0 <= label < ENDINGS and all(endings)
                require(is_valid, f"should have {ENDINGS} endings and a label below {ENDINGS}")
            num_context = len(_ids(tokenizer, context))
            for ending in endings:
                ids = _ids(tokenizer, f"{context} {ending}")
                windows.append(Window(ids[-length - 1 :], min(len(ids) - num_context, length)))
            labels.append(label)
            characters.append(list(map(len, endings)))
    if not labels:
        raise ValueError(f"{path} holds no question")
    settings = {"seq_length": length}
    return EvaluationTask("HELLASWAG", windows, settings, endings=(np.array(labels), np.array(characters, dtype=float)))


def _clean_wikihow(text: str) -> str:
    """Remove the marks of WikiHow's headings, and double spaces."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def evaluate_task(model: GPT2Model, task: EvaluationTask, tokenizer: Tokenizer, *, batch_size: int) -> Metrics:
    """Return the metrics by name: loss [nats per token], perplexity and the task's metrics; equal on every rank.

    batch_size: windows per forward pass.
    """
    scores = score_windows(model, task.windows, batch_size=batch_size)
    tokens, nats = sum(window.num_targets for window in task.windows), math.fsum(scores.nats)
    metrics: Metrics = {"tokens": tokens, "loss": nats / tokens, "perplexity": perplexity(nats / tokens)}
    if task.name == "LAMBADA":
        correct, examples = int(scores.greedy.sum()), len(task.windows)
        return {
            "accuracy": correct / examples,
            "correct": correct,
            "examples": examples,
            "examples_cut": task.num_truncated,
            **metrics,
        }
    if task.endings is not None:
        labels, characters = task.endings
        nats_of = scores.nats.reshape(characters.shape)
        return {
            "accuracy": float((nats_of.argmin(1) == labels).mean()),
            "accuracy_norm": float(((nats_of / characters).argmin(1) == labels).mean()),
            "examples": len(labels),
            **metrics,
        }
    if task.words is not None:
        words = max(task.words - 1, 1)
        metrics |= {"words": task.words, "token_ratio": tokens / words, "adjusted_perplexity": perplexity(nats / words)}
        return metrics
    size = int(tokenizer.byte_lengths[task.targets].sum())
    return {**metrics, "bytes": size, "bits_per_byte": nats / math.log(2) / size}


def plausibility_warning(task: EvaluationTask, metrics: Metrics, vocab_size: int) -> str | None:
    """Return a warning if the tokenizer may be wrong or the model may be untrained, otherwise None. HELLASWAG has no
    warning, because most of its texts are wrong on purpose.

    A trained model must be better than two baselines without training. The first baseline predicts each target from the
    counts of the targets before it, and all v counts begin at 1. The baseline costs ln[(n + v - 1)! / (v - 1)!] - Σ
    ln(count!) nats for n targets. The second baseline gives all v ids the same probability.
    """
    n, counts = len(task.targets), np.bincount(task.targets).tolist()
    counting = math.lgamma(n + vocab_size) - math.lgamma(vocab_size) - sum(math.lgamma(count + 1) for count in counts)
    least = min(counting / n, math.log(vocab_size))
    if metrics["loss"] < least or task.endings is not None:
        return None
    return (
        f"{metrics['loss']:.2f} nats per token are no better than counting the text's own tokens ({least:.2f}): "
        "the tokenizer does not belong to the checkpoint, or the model is hardly trained"
    )
