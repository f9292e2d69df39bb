"""A repository's directory, asked for twice; run by test_hub.py. Arguments: @REVISION in its name, a revision."""

import sys

from specmlx.loading.hub import download, download_config

at = next((argument for argument in sys.argv[1:] if argument.startswith("@")), "")
revision = next((argument for argument in sys.argv[1:] if not argument.startswith("@")), None)
download_config(f"owner/name{at}", revision)
for _ in range(2):
    print(download(f"owner/name{at}", revision))
