#!/usr/bin/env bash
# Environments for the programs that benchmarks/run.py compares with, in .peers/ (some GB; PYTHON names an interpreter).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
backend=""
# On Linux mlx's backend is a package of its own.
[ "$(uname)" = Linux ] && backend="mlx[cpu]==0.32.4"
for peer in "mlx-dspark==0.20.3" "dflash==0.1.0"; do
    directory=.peers/${peer%%==*}
    [ -x "$directory/bin/python" ] || "$python" -m venv "$directory"
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "mlx-lm==0.32.2" $backend "$peer"
    echo "$directory: $peer"
done
