"""Convert text to batches: tokenizers, the indexed dataset, corpora, splits, the order of samples. `data_utils` needs
only numpy."""

from data_utils.gpt2_dataset import BlendedDataset, DamagedData, GPT2Dataset
from data_utils.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from data_utils.samplers import MISSING, BatchLoader, BatchSchedule, SampleOrder, evaluation_batches, permute
from data_utils.splits import Splits, build_splits, unigram_bits_per_byte, xz_bits_per_byte
from data_utils.tokenizers import build_tokenizer, default_tokenizer_kind, kind_of_vocabulary, load_tokenizer
from data_utils.tokenizers.base import Tokenizer, ensure_sentencepiece_model, train_sentencepiece

__all__ = [
    "MISSING",
    "BatchLoader",
    "BatchSchedule",
    "BlendedDataset",
    "DamagedData",
    "GPT2Dataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "SampleOrder",
    "Splits",
    "Tokenizer",
    "build_splits",
    "build_tokenizer",
    "default_tokenizer_kind",
    "ensure_sentencepiece_model",
    "evaluation_batches",
    "kind_of_vocabulary",
    "load_tokenizer",
    "permute",
    "train_sentencepiece",
    "unigram_bits_per_byte",
    "xz_bits_per_byte",
]
