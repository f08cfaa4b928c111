"""What every part of the project does with files, once each. Standard library and numpy alone; imports nothing of ours.

    atomic        a file that is replaced whole, or not at all, also when the machine stops
    format_versions   the version of each format of ours that stands on disk
    hashing       sha256 of files, of their parts and of values
    sealed_json   JSON objects that end in the sha256 of their own bytes
    strict_json   JSON objects in which no key occurs twice
    safetensors   the header of a file of tensors
    locks         locks that the system frees when their holder dies
    compression   gzip and zstd, recognised by the first bytes
    memory        what the system says of its memory
    user_cache    the folder of this user's downloads and tokenised data
"""
