"""Tokenizers: text to ids and back.

    base           what a tokenizer is
    build          makes one by its kind, or loads the one that a checkpoint brings along
    bytes          one id a byte
    gpt2           byte-level BPE; gigatoken_engine and regex_engine run it, and the package tiktoken
    sentencepiece  SentencePiece models, and their training
    text           what all of them do with a text first
"""
