"""Count the Python tokens of the repository by folder: python .ci/tokens.py [DEPTH]

Tokens are those of Python's `tokenize`, without comments, line ends, indentation and blank lines. A docstring is one
token, so that documentation costs nothing. Only files that git tracks are counted. Everything except tests,
benchmarks, examples and docs is the program.
"""

import collections
import subprocess
import sys
import tokenize

LEFT_OUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count(path: str) -> int:
    """Return the number of tokens of a file."""
    with open(path, "rb") as file:
        return sum(token.type not in LEFT_OUT for token in tokenize.tokenize(file.readline))


depth = int(sys.argv[1]) if len(sys.argv) > 1 else 3
tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
kinds, totals, files = (collections.Counter[str]() for _ in range(3))
for path in tracked:
    if path.endswith(".py"):
        *folders, _ = path.split("/")
        kind = folders[0] if folders and folders[0] in ("tests", "benchmarks", "examples", "docs", ".ci") else "program"
        folder = "/".join(folders[:depth]) or "."
        tokens = count(path)
        kinds[kind] += tokens
        totals[folder] += tokens
        files[folder] += 1
for folder, tokens in totals.most_common():
    print(f"{tokens:8,} {files[folder]:4} {folder}")
print(
    f"{len(tracked)} tracked files; tokens: {', '.join(f'{kind} {tokens:,}' for kind, tokens in kinds.most_common())}"
)
