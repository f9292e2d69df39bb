"""docs/models.md says of formats what the tests show."""

from pathlib import Path

from formats_table import TARGETS, missing, table

DOCS = Path(__file__).parent.parent / "docs" / "models.md"


def test_the_table_of_the_docs_is_that_of_the_tests():
    assert table(TARGETS) in DOCS.read_text(encoding="utf-8"), "python tests/formats_table.py prints it"


def test_every_test_and_golden_that_the_table_names_is_there():
    assert missing(TARGETS) == []
