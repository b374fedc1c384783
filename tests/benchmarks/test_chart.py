"""The chart in the README is what its command draws from the committed results."""

from xml.etree import ElementTree

from benchmarks.chart import IMAGE, read, svg


def test_the_image_is_what_the_command_draws_from_the_results():
    assert IMAGE.read_text("utf-8") == svg(read()), "run `python benchmarks/chart.py`"


def test_it_names_machine_model_and_b_of_each_run_and_bars_are_as_long_as_their_figures():
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
