"""Makes exports.json: what the engines that exports are for propose, by the drafters that tests/engines.py makes.

Run with the engines installed (each may be in an environment of its own: what is not installed stays as it is), from
the repository root:

    pip install torch transformers safetensors mlx-dspark==0.20.3 && pip install --no-deps dflash==0.1.0
    PYTHONPATH=src:tests:../DeepSpec python tests/goldens/make_export_goldens.py
    pip install speculators==0.9.0  # elsewhere
    PYTHONPATH=src:tests python tests/goldens/make_export_goldens.py
"""

import importlib
import json
import tempfile
from pathlib import Path

from engines import ENGINES, MODULES, made

from specmlx.training.export import export

OUT = Path(__file__).parent / "exports.json"


def main():
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    for engine, cases in ENGINES.items():
        try:
            importlib.import_module(MODULES[engine])
        except ImportError as error:
            print(f"{engine}: not installed ({error})")
            continue
        found[engine] = {}
        for case, run in cases.items():
            packaging, kind, window = case.split()
            target, drafter = made(kind, None if window == "full" else int(window))
            with tempfile.TemporaryDirectory() as folder:
                export(drafter, target, packaging, Path(folder), anchors=24, verifier="tiny")
                found[engine][case] = run(Path(folder), target, drafter)
            print(f"{engine}: {case}")
    lines = [
        f"{json.dumps(engine)}: {{\n"
        + ",\n".join(f"  {json.dumps(case)}: {json.dumps(tokens)}" for case, tokens in cases.items())
        + "\n}"
        for engine, cases in sorted(found.items())
    ]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
