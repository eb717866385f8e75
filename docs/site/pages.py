"""Lay out the sources of the site as they lie in the repository, so that their links hold.

`python docs/site/pages.py FOLDER`, in the root of the repository; `make site` does.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/*.md", "docs/images/*", "spec/*.md")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
API = re.compile(r"api/(.+)\.md")


def main(folder: Path) -> None:
    """Write the pages, what they link to, and a page for each public module."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", *PAGES], cwd=ROOT, capture_output=True, check=True)
    names = {ROOT / name for name in listed.stdout.decode().split()}
    for page in [name for name in names if name.suffix == ".md"]:
        links = LINK.findall(page.read_text("utf-8"))
        names |= {(page.parent / link).resolve() for link in links}
    for name in names:
        copy = folder / name.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name.is_file():  # what is missing, mkdocs will say
            shutil.copy(name, copy)
    (folder / "api").mkdir()
    for module in API.findall((ROOT / "docs/site/mkdocs.yml").read_text("utf-8")):
        (folder / "api" / f"{module}.md").write_text(api_page(module), "utf-8")
    shutil.copy(ROOT / "docs/site/site.css", folder)


def api_page(module: str) -> str:
    """A page for a module: what it is for, its functions, its classes."""
    if module == "errors":
        return blocks("Errors", "elsa_format._errors", "elsa_format", ERRORS)
    return blocks(module, module, module, public(module) - ERRORS)


def blocks(title: str, about: str, module: str, names: set[str]) -> str:
    """What mkdocstrings makes a page of: the docstring of a module, and names, functions first."""
    parts = [f"# {title}\n\n::: {about}\n    options:\n      members: false\n"]
    for name in sorted(names, key=lambda name: (name[0].isupper(), name)):
        parts.append(f"::: {module}.{name}\n    options:\n      show_root_heading: true\n")
    return "\n".join(parts)


def tree(module: str) -> ast.Module:
    """The source of a module, which need not be one that can be imported here."""
    path = Path(*module.split("."))
    folders = (ROOT / path, ROOT / "converters" / path)
    files = [file for f in folders for file in (f / "__init__.py", f.with_suffix(".py"))]
    return ast.parse(next(file for file in files if file.exists()).read_text("utf-8"))


def public(module: str) -> set[str]:
    """The names that a module lists, or else defines."""
    nodes = tree(module).body
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) - {"__version__"}
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {name for name in defined if name[0] != "_"}


ERRORS = public("elsa_format._errors")
"""They have a page of their own."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
