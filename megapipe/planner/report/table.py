"""Tables in a terminal, and as plain text where there is none."""

import sys
from collections.abc import Sequence

GAP = "  "


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under columns to standard output: by rich on a terminal, else aligned by blanks, one line a row."""
    if sys.stdout.isatty():
        # Imported where it is used, as that takes longer than to print.
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if _is_number(rows, index) else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    print(plain_table(columns, rows, title))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """The table as text. Numbers stand at the right of their columns."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    right = [_is_number(rows, index) for index in range(len(columns))]
    aligned = (
        GAP.join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
    return "\n".join([*([title] if title else []), *aligned])


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether all cells of a column begin with a digit or a sign."""
    cells = [row[column] for row in rows if row[column]]
    return bool(cells) and all(cell[0].isdigit() or cell[0] in "+-" for cell in cells)
