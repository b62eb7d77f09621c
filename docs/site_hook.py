"""A hook of MkDocs: make the site of the pages as they are in the repository.

The pages are those that `nav` in mkdocs.yml lists, each at its path in the repository. They are
read as GitHub reads them. A link to another file leads to its source below `repo_url`; without a
`repo_url`, it becomes text.
"""

from __future__ import annotations

import posixpath
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.util import Registry
from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).parents[1]


class AsGitHub(Extension):
    """Parse a page as GitHub does, and lead its links to pages or to sources."""

    def __init__(self) -> None:
        super().__init__()
        self.parser = MarkdownIt("gfm-like", {"xhtmlOut": True})
        assert self.parser.linkify is not None
        self.parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False})
        self.parser.add_render_rule("fence", _fence)

    def extendMarkdown(self, md: Markdown) -> None:
        """Replace the parser; headings and links between pages stay MkDocs's work."""
        md.preprocessors = Registry()
        md.treeprocessors.deregister("inline")
        md.parser.parseDocument = self.parse  # type: ignore[method-assign]

    def parse(self, lines: list[str]) -> ET.ElementTree[ET.Element]:
        """Return the page as a tree, without comments."""
        text = self.parser.render("\n".join(lines))
        root = ET.fromstring(f"<div>{text}</div>")
        for link in root.iter("a"):
            self.lead(link)
        return ET.ElementTree(root)

    def on(self, page: Page, files: Files, config: MkDocsConfig) -> None:
        """Take the page that is parsed next."""
        self.page, self.files, self.config = page, files, config

    def lead(self, link: ET.Element) -> None:
        """Lead a link to a page of the site or to the source."""
        target, _, anchor = link.attrib["href"].partition("#")
        if not target or ":" in target:
            return
        here = posixpath.dirname(self.page.file.src_uri)
        path = posixpath.normpath(posixpath.join(here, target))
        below = [each for each in nav_paths(self.config.nav) if each.startswith(f"{path}/")]
        if below:  # a directory: its first page
            link.attrib["href"] = posixpath.relpath(below[0], here or ".")
        elif not self.files.get_file_from_path(path) and (ROOT / path).exists():
            if self.config.repo_url:
                source = f"{self.config.repo_url.rstrip('/')}/blob/HEAD/{path}"
                link.attrib["href"] = f"{source}#{anchor}" if anchor else source
            else:
                link.tag, link.attrib = "code" if link.text else "span", {}


def _fence(_: Any, tokens: Any, index: int, *__: Any) -> str:
    name = tokens[index].info.split()[:1] or ["text"]
    text = highlight(tokens[index].content, get_lexer_by_name(name[0]), HtmlFormatter(nowrap=True))
    return f'<div class="highlight"><pre><code>{text}</code></pre></div>\n'


def _slug(text: str, _: str) -> str:
    return re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")


GITHUB = AsGitHub()


def nav_paths(node: Any) -> Iterator[str]:
    """Yield the path of each page that `nav` lists."""
    if isinstance(node, str):
        yield node
    else:
        for below in node.values() if isinstance(node, dict) else node:
            yield from nav_paths(below)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Use the parser and the anchors of GitHub."""
    config.markdown_extensions.append(GITHUB)  # type: ignore[arg-type]
    config.mdx_configs["toc"] = {"permalink": True, "slugify": _slug}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what is in docs/ with the pages of `nav` and what they show and load."""
    for file in [each for each in files if each.src_dir == config.docs_dir]:
        files.remove(file)
    pictures = (str(path.relative_to(ROOT)) for path in ROOT.glob("docs/images/*.svg"))
    loaded = (*config.extra_css, *map(str, config.extra_javascript))
    for path in (*nav_paths(config.nav), *pictures, *loaded):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Tell the parser which page comes; let the search list pages of explanation first."""
    if posixpath.dirname(page.file.src_uri) == "docs":
        page.meta["search"] = {"boost": 3}
    GITHUB.on(page, files, config)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the theme from asking the repository's host for figures."""
    return output.replace(' data-md-component="source"', "")
