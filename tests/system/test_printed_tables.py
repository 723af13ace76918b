"""Results print themselves as one form of tables."""

from graticule.system.tables import PrintedTable, format_table


class Scores(PrintedTable):
    heading = "a < b"

    def summary(self):
        return [("layer", "score"), ("0", "0.5"), ("features", "1")]


def test_a_result_prints_its_heading_and_its_table_and_escapes_them_in_a_notebook():
    table = "layer     score\n--------  -----\n0           0.5\nfeatures      1"
    assert format_table(Scores().summary()) == table and str(Scores()) == f"a < b\n{table}"
    rows = "<tr><th>layer</th><th>score</th></tr><tr><td>0</td><td>0.5</td></tr><tr><td>features</td><td>1</td></tr>"
    assert Scores()._repr_html_() == f"<p>a &lt; b</p><table>{rows}</table>"
