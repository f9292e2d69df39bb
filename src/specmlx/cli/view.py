"""`specmlx view`: a trace as a page."""

from pathlib import Path

from specmlx.cli.flags import FILE, argument, command
from specmlx.cli.terminal import note, say
from specmlx.formats.atomic import check_folder, write_atomically
from specmlx.formats.values import option


@command()
class View:
    """Write the TRACE of a generation as one self-contained HTML page, to be opened in any browser.

    \b
    Examples:
      specmlx generate --prompt "Can you count from 62 up to 73?" --trace trace.json
      specmlx view trace.json -o trace.html
    """

    trace: Path = argument(type=FILE)
    output: Path | None = option(None, "Default: TRACE with .html; - is stdout.", names=("-o",))

    def run(self) -> None:
        from specmlx.evaluation.trace import read_trace
        from specmlx.evaluation.view.page import page

        html = page(read_trace(self.trace))
        if str(self.output) == "-":
            say(html, nl=False)
            return
        output = self.output or self.trace.with_suffix(".html")
        if output.resolve() == self.trace.resolve():
            raise ValueError(f"{output} is the trace itself: name another file with -o")
        check_folder("-o", output)
        write_atomically(output, [html.encode()], private=True)
        note(f"{output}: open it in a browser")
