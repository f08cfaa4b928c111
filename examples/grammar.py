"""Write a text whose entropy is known exactly, to see whether a training is right: its loss must approach the entropy.

    python examples/grammar.py grammar.txt --sentences 60000

The text has sentences of a weighted grammar, such as "the dog that all cats see sings." A sentence is drawn by choosing
a rule for each symbol, and each sentence determines its rules. The entropy of a sentence is therefore the sum over all
symbols of the expected number of times that the symbol occurs, times the entropy of its rules.
"""

import argparse
import math
import random

import numpy as np

# Symbol -> [(weight, symbols and words)]. A symbol is in capitals.
GRAMMAR = {
    "SENTENCE": [(6, "ONE"), (4, "MANY")],
    "ONE": [(1, "SUBJECT does VERB "), (1, "SUBJECT VERBS ")],
    "MANY": [(1, "PLURAL VERB "), (1, "PLURAL never VERB ")],
    "SUBJECT": [(3, "a NOUN "), (2, "the ADJECTIVE NOUN "), (1, "the NOUN that PLURAL VERB ")],
    "PLURAL": [(3, "all NOUNS "), (2, "some ADJECTIVE NOUNS ")],
    "ADJECTIVE": [(4, "old "), (2, "young "), (1, "green "), (1, "quiet ")],
    "NOUN": [(5, "dog "), (4, "cat "), (3, "child "), (2, "house "), (1, "river "), (1, "king ")],
    "NOUNS": [(5, "dogs "), (4, "cats "), (3, "children "), (2, "houses "), (1, "rivers "), (1, "kings ")],
    "VERB": [(4, "see "), (3, "hear "), (2, "like "), (1, "find ")],
    "VERBS": [(4, "sings "), (3, "sleeps "), (2, "runs "), (1, "waits ")],
}
END = ".\n"


def draw(symbol: str, choose: random.Random) -> str:
    """Return a random text that the grammar makes from `symbol`."""
    weights, rules = zip(*GRAMMAR[symbol], strict=True)
    (rule,) = choose.choices(rules, weights)
    return "".join(draw(word, choose) if word in GRAMMAR else f"{word} " for word in rule.split())


def entropy_per_byte() -> float:
    """Return the entropy of the text, in bits per byte: the bits of a sentence over its expected length."""
    symbols = list(GRAMMAR)
    # uses[i, j]: how often symbol j occurs in a rule of symbol i, on average
    uses = np.zeros((len(symbols), len(symbols)))
    bits, size = np.zeros(len(symbols)), np.zeros(len(symbols))
    for row, rules in enumerate(GRAMMAR.values()):
        total = sum(weight for weight, _ in rules)
        for weight, rule in rules:
            p = weight / total
            bits[row] -= p * math.log2(p)
            for word in rule.split():
                if word in GRAMMAR:
                    uses[row, symbols.index(word)] += p
                else:
                    size[row] += p * len(f"{word} ")
    per_sentence, length = np.linalg.solve(np.eye(len(symbols)) - uses, np.stack([bits, size], axis=1))[0]
    return float(per_sentence / (length + len(END) - 1))  # In the file, END replaces the last space of a sentence.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--sentences", type=int, default=60_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    choose = random.Random(args.seed)
    with open(args.file, "w", encoding="ascii") as file:
        file.writelines(draw("SENTENCE", choose).rstrip() + END for _ in range(args.sentences))
    print(f"{args.file}: {entropy_per_byte():.4f} bits per byte")


if __name__ == "__main__":
    main()
