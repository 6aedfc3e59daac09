"""lab/svg.py: pieces of drawings that are valid XML whatever stands in them."""

from xml.etree import ElementTree

from flashspec_core.lab import svg


def test_words_are_escaped_and_bars_have_their_size():
    ElementTree.fromstring(f"<g>{svg.words(1, 2, 'a < b & c')}</g>")
    bar = ElementTree.fromstring(svg.bar(3, 4, 5, 6, svg.COLORS[0]))
    assert [float(bar.get(k)) for k in ("x", "y", "width", "height")] == [3, 4 - 6, 5, 6]  # it stands on 4
