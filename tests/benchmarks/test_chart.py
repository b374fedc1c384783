"""Tests that the README's chart is drawn by its command from results on the figures' page."""

import re
from xml.etree import ElementTree

from benchmarks.chart import IMAGE, ROOT, read, svg


def test_committed_chart_equals_the_drawn_chart():
    assert IMAGE.read_text("utf-8") == svg(read()), "run `python benchmarks/chart.py`"


def speed_ups(text: str) -> set[tuple[float, float]]:
    """Returns the ends of ranges such as 1.73-2.25, and single values such as 1.71 x twice."""
    ranges = re.findall(r"(\d+\.\d+)-(\d+\.\d+)", text)
    singles = re.findall(r"(?<![\d.-])(\d+\.\d+) x", text)
    return {(float(a), float(b)) for a, b in [*ranges, *zip(singles, singles, strict=True)]}


def test_figures_page_has_every_speed_up_of_chart_and_readme():
    results = read()
    known = speed_ups((ROOT / results.source).read_text("utf-8"))
    drawn = {(run.least, run.greatest) for run in results.runs}
    shown = speed_ups((ROOT / "README.md").read_text("utf-8"))
    assert len(shown) >= 3
    assert drawn <= known
    assert shown <= known


def test_chart_names_its_runs_and_bars_are_proportional_to_figures():
    results = read()
    image = ElementTree.fromstring(svg(results))
    texts = [each.text for each in image.iterfind(".//{*}text")]
    assert results.machine in texts
    rects = [float(each.attrib["width"]) for each in image.iterfind(".//{*}rect")][1:]
    assert len(rects) == 2 * len(results.runs)
    for run, greatest, least in zip(results.runs, rects[::2], rects[1::2], strict=True):
        assert f"{run.data}, b = {run.b}" in texts
        assert run.model in texts
        assert abs(greatest / least - run.greatest / run.least) < 0.01
    longest = max(results.runs, key=lambda run: run.greatest)
    assert max(rects) == rects[2 * results.runs.index(longest)]
