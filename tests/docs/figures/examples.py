"""Output that pages show right after the Python code that prints it."""

import re
from functools import partial

from tests.docs.figures import files, printed, read

PAGES = ("cost_model", "hardware", "library", "planner_papers")
BLOCK = re.compile(r"(```python\n((?:(?!```).)*)```\n\n```(?:text)?\n)(?:(?!```).)*```", re.DOTALL)


def page(name: str) -> dict[str, str]:
    """Run the code blocks of a page that are followed by their output."""
    path, text = f"docs/{name}.md", read(f"docs/{name}.md")
    assert BLOCK.search(text), path
    return {path: BLOCK.sub(lambda match: f"{match[1]}{printed(partial(exec, match[2], {}))}```", text)}


for _name in PAGES:
    files(f"output in {_name}.md")(partial(page, _name))
