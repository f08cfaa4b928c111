"""Corpora: the built-in one, and documents out of files of JSON lines or text.

documents      the files that a flag names, and their documents; bad lines are counted and named
builtin        the corpus that every Python brings along
detokenizers   word-level benchmark texts back to ordinary text
"""
