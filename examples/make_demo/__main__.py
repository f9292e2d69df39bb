"""`python examples/make_demo all --work DIR` makes the demo pair again."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from make_demo.pair import main  # noqa: E402

main()
