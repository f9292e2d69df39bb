"""docs/models.md says of formats what the tests show."""

import json
from pathlib import Path

import pytest
from drafters_table import DRAFTERS
from formats_table import GOLDENS, TARGETS, Row, missing, table

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(("rows", "file"), [(TARGETS, "formats_table.py"), (DRAFTERS, "drafters_table.py")])
def test_the_tables_of_the_docs_are_those_of_the_tests(rows, file):
    assert table(rows) in DOCS.read_text(encoding="utf-8"), f"python tests/{file} prints it"


@pytest.mark.parametrize("rows", [TARGETS, DRAFTERS])
def test_every_test_golden_and_case_that_a_table_names_is_there(rows):
    assert missing(rows) == []


def test_every_model_of_the_goldens_is_in_a_row():
    models = {("drafters", case) for case in json.loads((GOLDENS / "drafters" / "configs.json").read_text())}
    models |= {("speculators", folder.name) for folder in (GOLDENS / "speculators").iterdir() if folder.is_dir()}
    named = {(row.golden, case) for row in DRAFTERS if row.golden in ("drafters", "speculators") for case in row.cases}
    assert named == models
    # target_tied is the MTP head's target too; rope and training hold no models.
    others = {"rope", "scaled", "target_tied", "training", "__pycache__"}
    folders = {path.name for path in GOLDENS.iterdir() if path.is_dir()} - others
    folders |= {f"scaled/{path.name}" for path in (GOLDENS / "scaled").iterdir()}
    assert folders == {row.golden for row in (*TARGETS, *DRAFTERS) if row.golden}


def test_what_is_not_there_is_missing():
    name = "test_ngram::test_proposals_are_those_of_a_naive_search"
    wrong = Row("a", "runs", "", (name, "test_ngram::test_nothing"), (), "nowhere", ("ngram", "no such case"))
    assert missing((wrong,)) == [
        "test_ngram::test_nothing",
        "a: no no such case",
        "a: no test that compares or that refuses it",
        "nowhere",
    ]
    assert missing((Row("b", "refused", "", (), (name,)),)) == []
    assert missing((Row("c", "runs", "", (), ("test_gone::test_x",)),))[0] == "test_gone::test_x"
