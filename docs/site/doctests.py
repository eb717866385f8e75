"""Docstrings of the site's reference: their examples and drawings as code, as Markdown has it."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
DRAWING = re.compile(r"^\w+\n(?:[├│└].*(?:\n|\Z))+", re.MULTILINE)


class Doctests(Extension):
    """Puts fences around both."""

    def on_package(self, *, pkg: Object, **_: Any) -> None:
        """Change the docstrings of a package that was loaded."""
        waiting = [pkg]
        while waiting:
            found = waiting.pop()
            if found.docstring:
                text = EXAMPLE.sub("```pycon\n\\g<0>\n```", found.docstring.value)
                found.docstring.value = DRAWING.sub("```text\n\\g<0>\n```\n", text)
            waiting += [member for member in found.members.values() if not member.is_alias]
