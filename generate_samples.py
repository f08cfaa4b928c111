import sys

from tools.generate_text import main

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    sys.exit(main(sys.argv[1:]))
