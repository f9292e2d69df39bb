"""The curves of a training, drawn from its log (matplotlib, extra `plot`)."""

import json
from pathlib import Path

from specmlx.evaluation.plot import check_plot
from specmlx.training.loop import LOG


def draw(folder: Path, path: Path) -> None:
    """Loss and acceptance length by step, as a .png or .svg. Raises ValueError as `check_plot`."""
    check_plot(path)
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    steps = [record["step"] for record in records]
    figure = Figure(figsize=(7, 4), layout="constrained")
    loss = figure.add_subplot(xlabel="step", ylabel="loss")
    loss.plot(steps, [record["loss"] for record in records], color="tab:blue", label="loss")
    tau = loss.twinx()
    tau.plot(steps, [record["tau"] for record in records], color="tab:orange", label="τ on the batch")
    measured = [record for record in records if "held_out_tau" in record]
    held_out = [record["held_out_tau"] for record in measured]
    tau.plot([record["step"] for record in measured], held_out, "o-", color="tab:green", label="τ on held-out rows")
    tau.set_ylabel("τ")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path)
