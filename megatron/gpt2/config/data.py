"""The section `data`: where the text is and how it becomes tokens."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require


@dataclass(frozen=True)
class DataConfig:
    """Where the text is and how it becomes tokens."""

    seq_length: int = option(512, "tokens in a sample", "--encoder-seq-length")
    train_data: tuple[str, ...] = option(
        (),
        "loose JSON (.json, .jsonl) or plain-text files, folders of them, or 'builtin'; none: the built-in corpus",
        metavar="FILE",
    )
    valid_data: tuple[str, ...] = option((), "files for validation, instead of a part of --split", metavar="FILE")
    test_data: tuple[str, ...] = option((), "files for the test, instead of a part of --split", metavar="FILE")
    data_path: tuple[str, ...] = option(
        (),
        "prefix of a .bin/.idx pair, instead of --train-data; several are mixed, "
        "by their sizes or by weights: 0.7 A 0.3 B",
        metavar="PREFIX",
    )
    valid_data_path: tuple[str, ...] = option(
        (), "prefixes for validation, instead of a part of --split", "--val-data-path", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] = option(
        (), "prefixes for the test, instead of a part of --split", metavar="PREFIX"
    )
    data_order: str = option(
        "shuffled",
        "shuffled: by seed, epoch and global sample number; megatron: as today's Megatron orders a prefix",
        choices=("shuffled", "megatron"),
    )
    split: str = option("969,30,1", "proportions of training, validation and test")
    text_key: str | None = option(None, "the JSON field that holds the text (default: text, else sentence)")
    max_bad_fraction: float = option(0.001, "share of unusable lines above which a text file is refused")
    data_cache_path: str | None = option(None, "folder of tokenised files (default: beside the user's cache)")
    tokenizer_type: str | None = option(
        None,
        "default: the small BPE shipped for the built-in corpus; GPT2BPETokenizer once --vocab-file is given, "
        "characters where it is a meta.pkl",
        choices=("GPT2BPETokenizer", "SentencePieceTokenizer", "bytes", "builtin", "characters"),
    )
    vocab_file: str | None = option(None, "GPT-2 vocabulary (encoder.json), or nanoGPT's meta.pkl of characters")
    merge_file: str | None = option(None, "GPT-2 merges (vocab.bpe)")
    tokenizer_model: str | None = option(
        None, "SentencePiece model; trained on the data if the file is missing", "--tokenizer-path"
    )
    tokenizer_vocab_size: int = option(8192, "pieces of a SentencePiece model that is to be trained")
    cache_dir: str | None = option(None, "folder searched for the GPT-2 vocabulary")
    eod_mask_loss: bool = option(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = option(False, "positions count from 0 in each document")
    reset_attention_mask: bool = option(False, "tokens see their own document alone")
    num_workers: int = option(
        2,
        "prefetch depth: steps whose batches one thread prepares ahead; 0: the training thread reads each batch itself",
    )

    def __post_init__(self) -> None:
        require(self.seq_length > 0, f"--seq-length must be positive, not {self.seq_length}")
        for prefixes, files in (
            ("data_path", "train_data"),
            ("valid_data_path", "valid_data"),
            ("test_data_path", "test_data"),
        ):
            require(
                not (getattr(self, prefixes) and getattr(self, files)),
                f"give --{prefixes.replace('_', '-')} or --{files.replace('_', '-')}, not both",
            )
        require(
            0 <= self.max_bad_fraction <= 1, f"--max-bad-fraction must lie between 0 and 1, not {self.max_bad_fraction}"
        )
        require(self.num_workers >= 0, f"--num-workers must not be negative, got {self.num_workers}")
