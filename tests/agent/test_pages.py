"""Tests of agent/pages.py: what is filled in stays text, and a page stands alone."""

from html.parser import HTMLParser
from pathlib import Path

from coda_agent.agent import pages

EVIL = '<script>alert("1")</script><b x=\'&amp;'
VOID = {"meta"}


class Page(HTMLParser):
    """Collects a page's texts and tags, and checks that each is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.text = list[str](), list[str](), list[str]()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [key for key, _ in attrs if key in ("href", "src") or key.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def test_a_page_has_tables_and_texts_and_escapes_them(tmp_path: Path) -> None:
    sections = [("Table", [("a", "b"), (EVIL, 2)]), ("Text", EVIL), ("Nothing", "")]
    path = pages.write(tmp_path / "page.html", EVIL, sections)
    page = Page(path.read_text("utf-8"))
    assert page.text.count(EVIL) == 4  # the title twice, a cell and a text
    assert {"a", "b", "2", "Table", "Text"} <= {*page.text} and "Nothing" not in page.text
    assert page.tags.count("tr") == 2 and not {"script", "b", "link", "img"} & {*page.tags}
