"""The section `model`: the shape of GPT-2."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require, require_fraction, require_positive


@dataclass(frozen=True)
class ModelConfig:
    """The shape of GPT-2. `vocab_size` is the tokenizer's true size; rows are padded inside the model alone."""

    num_layers: int = option(24, "transformer layers")
    hidden_size: int = option(1024, "width of the residual stream, h")
    num_attention_heads: int = option(16, "attention heads; must divide --hidden-size")
    ffn_hidden_size: int | None = option(None, "width inside the MLP (default 4h)", "--intermediate-size")
    max_position_embeddings: int = option(512, "learned positions; at least --seq-length")
    vocab_size: int | None = option(None, "true vocabulary size (default: the tokenizer's)")
    make_vocab_size_divisible_by: int = option(
        128, "pad the vocabulary to a multiple of this and of the model-parallel size"
    )
    attention_dropout: float = option(0.1, "dropout of the attention probabilities")
    hidden_dropout: float = option(0.1, "dropout of embeddings and of both residual branches")
    layernorm_epsilon: float = option(1e-5, "added to the variance in layer norms", "--norm-epsilon")
    gelu: str = option("tanh", "form of GELU: tanh is GPT-2's, erf is 4 times faster on a CPU", choices=("tanh", "erf"))
    init_method_std: float = option(0.02, "standard deviation of the initial weights")

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "max_position_embeddings",
            "make_vocab_size_divisible_by",
            "layernorm_epsilon",
            "init_method_std",
        )
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}",
        )
        require_fraction(self, "attention_dropout", "hidden_dropout")
        # A damaged file may ask for more, and torch would answer with an error of its own.
        for name in ("hidden_size", "ffn_hidden_size", "max_position_embeddings", "vocab_size"):
            width = getattr(self, name)
            require(
                width is None or width * self.hidden_size < 1 << 58,
                f"no memory holds a matrix of {width} x {self.hidden_size} numbers (--{name.replace('_', '-')})",
            )

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP: --ffn-hidden-size, or 4h."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def has_dropout(self) -> bool:
        """Whether anything is dropped in training."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    def flops_per_token(self, seq_length: int) -> int:
        """Model FLOPs of one token, forward and backward, attention credited in full: 72·l·h²·(1 + s/6h) + 6·h·V where
        the MLP is 4h wide (Megatron's formula, arXiv:2104.04473, section 5.1). Another width changes the 72."""
        h, layers = self.hidden_size, self.num_layers
        assert self.vocab_size is not None
        linears = 6 * layers * (4 * h * h + 2 * h * self.ffn_size)
        return linears + 12 * layers * h * seq_length + 6 * h * self.vocab_size
