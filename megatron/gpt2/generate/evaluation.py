"""The score of a trained model on a file, by task:

    WIKITEXT103, PTB   perplexity per token and, for a text whose words are separated, per word of the original
    LAMBADA            how often the last word of a passage is the model's likeliest
    TEXT               perplexity and bits per byte of any text or JSON lines, each document by itself

Every rank calls `read_task` and `evaluate_task` alike. Tokens are scored as Megatron's evaluation scores them, so that
the figures compare with published ones.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from data_utils import Tokenizer
from data_utils.corpora import documents, is_json
from data_utils.corpora.detokenizers import ptb_detokenizer, wikitext_detokenizer
from megatron.gpt2.generate.scoring import Window, score, windows_over
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.monitor.reporting import perplexity

TASKS = ("WIKITEXT103", "PTB", "LAMBADA", "TEXT")
DETOKENIZERS = {"WIKITEXT103": wikitext_detokenizer, "PTB": ptb_detokenizer}
OVERLAPPING_EVAL = 32  # Megatron's default for its tasks
_BY_NAME = ((r"wikitext|wiki\.(train|valid|test)", "WIKITEXT103"), (r"ptb", "PTB"))

Log = Callable[[str], None]
Metrics = dict[str, Any]  # name -> int or float


@dataclass(frozen=True)
class Task:
    """A file that was read for scoring.

    settings: what else decided its windows. words: number of words of the original text, for a perplexity per word;
    None if that has no meaning. cut: passages whose beginning was left out because they are longer than a window.
    """

    name: str
    windows: list[Window]
    settings: dict[str, Any]
    words: int | None = None
    cut: int = 0

    @property
    def targets(self) -> np.ndarray:
        """Every id that is scored, int64."""
        return np.concatenate([window.ids[-window.targets :] for window in self.windows])


def task_of(path: str) -> str:
    """The task that the name of a file, or of its folder, stands for; TEXT if it is unknown."""
    name = "/".join(PurePath(path).parts[-2:]).lower()
    if is_json(path):
        return "LAMBADA" if "lambada" in name else "TEXT"
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
) -> Task:
    """Read the file `path` as windows of up to `length` ids and the one after them, for the task `name`.

    overlapping_eval: targets of each window after the first (default: 32 for WIKITEXT103 and PTB; all for TEXT).
    strict_lambada: every token of the last word is a target, and the word is tokenised by itself; otherwise the target
    is the last token of the passage. max_bad_fraction: of a file's lines that may be unusable. log: takes the notices.
    Raises ValueError, in one line, if the file does not fit the task.
    """
    if overlapping_eval is not None and not 1 <= overlapping_eval <= length:
        raise ValueError(f"--overlapping-eval {overlapping_eval} must be from 1 to the {length} tokens of a window")
    if name in DETOKENIZERS and is_json(path):
        raise ValueError(f"--task {name}: {path} is JSON; give the benchmark's text file, or --task TEXT")
    if name == "LAMBADA" and not is_json(path):
        raise ValueError(f"--task LAMBADA: {path} should be JSON lines, named .jsonl, with a passage in each")
    texts = documents(path, text_key, log, max_bad_fraction)
    if name == "LAMBADA":
        passages = [
            _passage(text, number, path, tokenizer, strict_lambada, length) for number, text in enumerate(texts, 1)
        ]
        cut = sum(len(passage.ids) > length + 1 for passage in passages)
        if cut:
            log(f"{path}: the beginnings of {cut} passages longer than {length} tokens are left out")
        return Task(
            name,
            [Window(passage.ids[-length - 1 :], passage.targets) for passage in passages],
            {"seq_length": length, "strict_lambada": strict_lambada},
            cut=cut,
        )
    stride = overlapping_eval or (min(OVERLAPPING_EVAL, length) if name in DETOKENIZERS else length)
    settings = {"seq_length": length, "overlapping_eval": stride}
    if name == "TEXT":  # a document begins after the end of another
        windows = [
            window
            for text in texts
            for window in windows_over(_ids(tokenizer, text, before=[tokenizer.start]), length, stride)
        ]
        return Task(name, windows, settings)
    (text,) = texts
    windows = windows_over(_ids(tokenizer, DETOKENIZERS[name](text)), length, stride)
    if not windows:
        raise ValueError(f"{path} holds less than two tokens")
    return Task(name, windows, settings, words=len(text.strip().split(" ")))


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
    # A passage of only the target begins as a document does.
    context = context if len(context) else np.array([tokenizer.start], dtype=np.int32)
    return Window(np.concatenate([context, target]), len(target))


def evaluate_task(model: GPT2Model, task: Task, tokenizer: Tokenizer, *, batch_size: int) -> Metrics:
    """The score by name: loss [nats per token], perplexity and the task's own figures; the same on every rank.

    batch_size: windows computed together.
    """
    scores = score(model, task.windows, batch_size=batch_size)
    tokens, nats = sum(window.targets for window in task.windows), scores.total
    metrics: Metrics = {"tokens": tokens, "loss": nats / tokens, "perplexity": perplexity(nats / tokens)}
    if task.name == "LAMBADA":
        correct, examples = int(scores.greedy.sum()), len(task.windows)
        return {
            "accuracy": correct / examples,
            "correct": correct,
            "examples": examples,
            "examples_cut": task.cut,
            **metrics,
        }
    if task.words is not None:
        metrics |= {"words": task.words}
        if task.words > 1:
            metrics |= {
                "token_ratio": tokens / (task.words - 1),
                "adjusted_perplexity": perplexity(nats / (task.words - 1)),
            }
        return metrics
    size = int(tokenizer.byte_lengths[task.targets].sum())
    return {**metrics, "bytes": size, "bits_per_byte": nats / math.log(2) / size}


def plausibility_warning(task: Task, metrics: Metrics, vocab_size: int) -> str | None:
    """Why the score suggests another tokenizer than the model's, or an untrained model; None if it does not.

    A model has to do better than two guesses. The first guesses each target by how often it came before in the same
    text, with every id counted once at the start, which costs ln[(n + v - 1)! / (v - 1)!] - Σ ln(count!) nats for n
    targets. The second guesses among all v ids alike.
    """
    n, counts = len(task.targets), np.bincount(task.targets).tolist()
    counting = math.lgamma(n + vocab_size) - math.lgamma(vocab_size) - sum(math.lgamma(count + 1) for count in counts)
    least = min(counting / n, math.log(vocab_size))
    if metrics["loss"] < least:
        return None
    return (
        f"{metrics['loss']:.2f} nats per token are no better than counting the text's own tokens ({least:.2f}): "
        "the checkpoint and its tokenizer do not belong together, or the model is hardly trained"
    )
