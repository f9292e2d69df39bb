"""`specmlx view`: a trace as a page."""

from pathlib import Path

import click

from specmlx.cli.terminal import answers, note, say
from specmlx.formats.atomic import check_folder

EPILOG = """\b
Examples:
  specmlx generate --prompt "Can you count from 62 up to 73?" --trace trace.json
  specmlx view trace.json -o trace.html
"""


@click.command(short_help="A trace of generate --trace as a page.", epilog=EPILOG)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: TRACE with .html; - is stdout."
)
def view(trace: Path, output: Path | None) -> None:
    """Write the TRACE of a generation as one self-contained HTML page, to be opened in any browser."""
    from specmlx.evaluation.trace import read_trace
    from specmlx.evaluation.view.page import page
    from specmlx.formats.atomic import write_atomically

    html = page(read_trace(trace))
    if str(output) == "-":
        with answers() as out:
            say(html, out, nl=False)
        return
    output = trace.with_suffix(".html") if output is None else output
    if output.resolve() == trace.resolve():
        raise ValueError(f"{output} is the trace itself: name another file with -o")
    check_folder("-o", output)
    write_atomically(output, [html.encode()], private=True)
    note(f"{output}: open it in a browser")
