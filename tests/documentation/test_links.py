"""Tests that every link inside the repository leads to an existing file and heading."""

import re

import pytest
from documents import ROOT, Document, document, documents


def broken(page: Document) -> list[str]:
    """Returns the broken links of a page inside the repository."""
    found = []
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.exists() or ROOT not in (target, *target.parents):
            found.append(f"{page.path.name}: there is no {link}")
        elif anchor and (target.suffix != ".md" or anchor not in document(target).anchors):
            found.append(f"{page.path.name}: there is no heading {link}")
    return found


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.path.relative_to(ROOT)))
def test_links_lead_to_existing_files_and_headings(page: Document) -> None:
    assert broken(page) == []


def test_broken_links_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("test_links.ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# One\n## Two & two\n## One\n## `tasc task` [x](y)\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[a](b.md) [b](b.md#one) [c](b.md#one-1) [d](#here)\n"
        "[e](none.md) [f](b.md#three) [g](../x)\n"
        "[h](https://example.org) ![i](image.svg) [j]: none\n\n[k]: missing.md\n"
        '<img src="chart.svg">\n# Here\n```\n[in code](nowhere.md)\n```\n[l](b.md#tasc-task-x)\n'
    )
    reported = [each.rpartition(" ")[2] for each in broken(document(page))]
    wanted = "b.md#one-1 none.md b.md#three ../x image.svg missing.md chart.svg"
    assert reported == wanted.split()
