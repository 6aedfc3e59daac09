"""lab/results.py: README's table is what the stored rows say."""

from test_architecture import ROOT

from flashspec_core.lab import results


def test_readmes_table_is_what_the_rows_say():
    assert results.table() in (ROOT / "README.md").read_text(encoding="utf-8")
