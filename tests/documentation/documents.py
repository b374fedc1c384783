"""The documents of the repository: their code blocks, links and headings."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages that a new user follows. All their blocks run.
FOLLOWED = [ROOT / "README.md", *sorted((ROOT / "docs" / "get-started").glob("*.md"))]
LANGUAGES = {"bash", "python", "json", "yaml", "text", "mermaid"}

_FENCE = re.compile(r"^ *(`{3,}|~{3,}) *(\w*)")
_NOT_RUN = re.compile(r"<!-- not run:(.*)-->")
_HEADING = re.compile(r"^#+ +(.+?)(?: +#+)?$")
_LINK = re.compile(
    r"""\]\(<?([^)\s>]+)>?(?: +"[^"]*")?\)|^ *\[[^\]]+\]: +(\S+)|(?:href|src)="([^"]+)\"""", re.M
)
_MARKUP = re.compile(r"!?\[([^\]]*)\]\([^)]*\)|[`*]|<[^>]*>")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        line: Line number of its fence, from 1.
        reason: Reason why it is not run; None if it is run.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_make(self) -> bool:
        """Whether it runs targets of the Makefile, which are tests or installations."""
        return self.language == "bash" and self.text.lstrip().startswith("make ")


@dataclass(frozen=True)
class Document:
    """A page, its blocks, and its other lines without code."""

    path: Path
    blocks: tuple[Block, ...]
    prose: str

    @property
    def links(self) -> list[str]:
        return ["".join(groups) for groups in _LINK.findall(self.prose)]

    @property
    def anchors(self) -> set[str]:
        """The anchors of its headings on GitHub and on the built site."""
        headings = [match[1] for line in self.prose.split("\n") if (match := _HEADING.match(line))]
        texts = [_MARKUP.sub(r"\1", heading).strip() for heading in headings]
        on_github = {
            *_numbered([re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in texts], "-")
        }
        ascii_ = [
            unicodedata.normalize("NFKD", t).encode("ascii", "ignore").decode() for t in texts
        ]
        slugs = [re.sub(r"[^\w\s-]", "", t).strip().lower() for t in ascii_]
        return on_github & {*_numbered([re.sub(r"[-\s]+", "-", slug) for slug in slugs], "_")}


def _numbered(names: list[str], sign: str) -> Iterator[str]:
    """Yields the names; repeated names get a number."""
    seen = Counter[str]()
    for name in names:
        yield f"{name}{sign}{seen[name]}" if seen[name] else name
        seen[name] += 1


@cache
def document(path: Path) -> Document:
    blocks: list[Block] = []
    prose: list[str] = []
    code: list[str] = []
    fence, start, language = "", 0, ""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if fence:
            if match and match[1] == fence and not match[2]:
                mark = _NOT_RUN.search(next((p for p in reversed(prose) if p.strip()), ""))
                reason = mark[1].strip() if mark else None
                blocks.append(Block(path, start, language, "\n".join(code), reason))
                fence = ""
                prose.append("(code)")
            else:
                code.append(line)
        elif match:
            fence, language, start, code = match[1], match[2], number, []
        else:
            prose.append(line)
    assert not fence, f"{path}:{start}: the block has no end"
    return Document(path, tuple(blocks), "\n".join(prose))


def documents() -> list[Document]:
    """Returns all pages of the root, of docs and of deploy, and that of tasc-draft."""
    folders = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    folders.append(ROOT / "services" / "README.md")
    return [document(path) for path in sorted(folders)]
