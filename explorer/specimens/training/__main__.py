"""``python -m explorer.specimens.training FAMILY``: train a family's specimen and measure it."""

import sys

from explorer.specimens.training.train import main

if __name__ == "__main__":
    sys.exit(main())
