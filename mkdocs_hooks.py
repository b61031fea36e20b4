"""Brings the pages and files outside `docs/` into the documentation site, and makes links between them work there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md")
FOLDERS = ("reports", "examples", "notebooks")
SOURCES = ("profiler/gplan_profiler/analytic/families.toml",)  # that pages link to
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, README.md as the first page, and everything that pages link to."""
    found = [
        *PAGES,
        *SOURCES,
        *(str(x.relative_to(ROOT)) for name in FOLDERS for x in ROOT.glob(f"{name}/**/*") if x.is_file()),
    ]
    for name in found:
        files.append(File.generated(config, _in_site(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change each link from a path in the repository to the path in the site."""
    source = "README.md" if page.file.src_uri == "index.md" else page.file.src_uri
    is_outside = source in PAGES or source.partition("/")[0] in FOLDERS
    folder = posixpath.dirname(source if is_outside else f"docs/{source}")
    here = posixpath.dirname(page.file.src_uri)

    def changed(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        path = ROOT / target
        if not path.exists():
            return match[0]
        if path.is_dir():
            return match[0] if not (path / "README.md").exists() else _link(match, f"{target}/README.md", here)
        return _link(match, target, here)

    return LINK.sub(changed, markdown)


def _link(match: re.Match[str], target: str, here: str) -> str:
    return f"{match[1]}{posixpath.relpath(_in_site(target), here or '.')}{match[3]}"


def _in_site(name: str) -> str:
    return "index.md" if name == "README.md" else name.removeprefix("docs/")
