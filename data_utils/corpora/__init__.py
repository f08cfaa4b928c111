"""Corpora: the built-in one, and documents out of files of JSON lines or text.

    files          which files a flag names, and which of a folder hold documents
    documents      the documents of a file; bad lines are counted and named
    builtin, prose the corpus that every Python brings along
    detokenizers   word-level benchmark texts back to ordinary text
"""
