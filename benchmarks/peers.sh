#!/usr/bin/env bash
# Environments for the programs that benchmarks/run.py compares with, in .peers/ (some GB; PYTHON names an interpreter).
# What can't be installed is told in a line, and run.py leaves it out.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
backend=""
# On Linux mlx's backend is a package of its own.
[ "$(uname)" = Linux ] && backend="mlx[cpu]==0.32.4"
failed=0
for peer in "mlx-dspark==0.20.3" "dflash==0.1.0" "mlx-vlm==0.7.10"; do
    directory=.peers/${peer%%==*}
    if { [ -x "$directory/bin/python" ] || "$python" -m venv "$directory"; } &&
        "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "mlx-lm==0.32.2" $backend "$peer"; then
        echo "$directory: $peer"
    else
        echo "$peer: can't be installed here" >&2
        # Half an environment would be taken for a whole one.
        rm -rf "$directory"
        failed=1
    fi
done
exit $failed
