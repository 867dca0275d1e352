"""Rows of text in columns."""

from __future__ import annotations


def columns(rows: list[list[str]], left: set[str]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    header = rows[0]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in rows
    ]
