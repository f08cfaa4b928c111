"""What every part of the project does with files, once each. Standard library and numpy alone; imports nothing of ours.

atomic        a file that is replaced whole, or not at all, also when the machine stops; locks that die with their
              holder
format_versions   the version of each format of ours that stands on disk
hashing       sha256 of files, of their parts and of values
checked_json  JSON objects that end in the sha256 of their own bytes; those in which no key occurs twice
safetensors   the header of a file of tensors
compression   gzip and zstd, recognised by the first bytes
system        what the system says of its memory, and of this user's cache folder
"""
