"""The memory of Megatron-LM's first release (2019) on a GPU in fp16, whose figures are published: the same kind of sums
as `megatron/gpt2/extensions/plan/step.py` has of this program, `--accounting megatron-2019` of `tools/plan.py`.

It kept 20 bytes a parameter from step to step: weights and gradients in fp16 (2 + 2), and in float32 masters, their
gradients and two moments (16). Attention held its scores; the loss held three float32 copies of the logits at once: the
model's output, a clone from which the maximum is subtracted, and its exponential, which becomes the gradient.

Legend: b micro-batch, s sequence, h hidden, n heads, l layers, v padded vocabulary, p model-parallel size.
"""

from megatron.gpt2.config import Config
from megatron.gpt2.extensions.plan.step import PARTS, Memory
from megatron.gpt2.model.parameters import count_parameters
from mpu.partition import padded_vocab_size

BYTES_PER_PARAMETER = 20


def layer_matrices(num_layers: int, hidden_size: int) -> int:
    """12·l·h²: the elements of all layers' matrices where the MLP is 4h wide."""
    return 12 * num_layers * hidden_size**2


def layer_activations(*, s: int, b: int, h: int, n: int, p: int = 1) -> int:
    """What a layer keeps in 16 bits where attention holds its scores: 34·s·b·h + 5·b·s²·n bytes (arXiv:2205.05198,
    equations 1 and 2), of which 24·s·b·h and the scores are split over p ranks."""
    return 10 * s * b * h + (24 * s * b * h + 5 * b * s * s * n) // p


def megatron_2019(config: Config) -> Memory:
    """One rank at its fullest, in the loss; --recompute-granularity full is its --checkpoint-activations. No context of
    CUDA: what was published is what torch's allocator counted. `config` has the vocabulary's size."""
    model, train, p = config.model, config.train, config.parallel.model_parallel_size
    assert model.vocab_size is not None
    # It padded to a multiple of the ranks' number as well.
    rows = padded_vocab_size(model.vocab_size, p * model.make_vocab_size_divisible_by, p) // p
    ours = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, p) // p
    parameters = count_parameters(model, p)[1] + (rows - ours) * model.hidden_size
    s, b, h = config.data.seq_length, train.micro_batch_size, model.hidden_size
    hidden = 2 * s * b * h
    if train.recompute_granularity == "full":
        kept = -(-model.num_layers // train.recompute_num_layers) * hidden  # the input of each part
    else:
        kept = model.num_layers * layer_activations(s=s, b=b, h=h, n=model.num_attention_heads, p=p)
    # The last layer's output, the norm's and the mask of the embeddings' dropout, a byte an element.
    kept += 2 * hidden + hidden // 2
    parts = {
        "weights": 2 * parameters,
        "gradients": 2 * parameters,
        "optimizer": (BYTES_PER_PARAMETER - 4) * parameters,
        "activations": kept,
        "logits and loss": 3 * 4 * s * b * rows,
    }
    return Memory("the loss", {**dict.fromkeys(PARTS, 0), **parts})
