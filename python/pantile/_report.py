"""Tables on a terminal: through rich when it is installed, aligned text otherwise."""

from __future__ import annotations

_STYLES = {"ok": "green", "FAIL": "bold red", "-": "dim"}


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _print_plain(title, columns, rows)
        return
    console = Console()
    if not console.is_terminal:
        _print_plain(title, columns, rows)  # a file or a pipe has no width to wrap to
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _print_plain(title: str, columns: list[str], rows: list[list[str]]) -> None:
    print(title)
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"  {line.rstrip()}")
