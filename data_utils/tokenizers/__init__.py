"""Tokenizers: text to ids and back.

base           what a tokenizer is, what it does with a text first, and the one of bytes
build          makes one by its kind, or loads the one that a checkpoint brings along
characters     an id for each character, as in nanoGPT's small examples
gpt2           byte-level BPE, which the package tiktoken runs, or one of bpe_engines
sentencepiece  SentencePiece models, and their training
"""
