"""Downloads a model twice from the Hub at HF_ENDPOINT, and says where it came to lie."""

import sys

from specmlx.hub import download

print(download("owner/name", revision=sys.argv[1] if len(sys.argv) > 1 else None))
print(download("owner/name", revision=sys.argv[1] if len(sys.argv) > 1 else None))
