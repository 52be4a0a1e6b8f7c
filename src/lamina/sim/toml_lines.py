"""Line numbers of the values in a TOML file.

The standard parser does not say, and an error without a line sends people searching. This scanner reads a text that the
parser has already accepted, so it need not judge anything: it only follows the brackets and remembers where each key and
each array element began.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\]|\\.)*"')
_LITERAL = re.compile(r"'[^']*'")
_LONG = re.compile(r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+', re.DOTALL)
_PLAIN = re.compile(r"[^,\]}#\n]+")


def find_lines(text: str) -> dict[Path, int]:
    """Line of every key and array element, counted from 1, by its path: `("function", 0, "slo")`."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {(): 1}
        self._lengths: dict[Path, int] = {}  #: of arrays of tables
        self._line = 1
        self._counted = 0  #: newlines before this offset are in `_line`

    def document(self) -> None:
        table: Path = ()
        while True:
            self._skip(_BLANK)
            if self.at >= len(self.text):
                return
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)

    def _header(self, brackets: int) -> Path:
        line = self._here()
        self.at += brackets
        keys = self._keys()
        self.at += brackets
        table: Path = (*self._enter(keys[:-1], line), keys[-1])
        if brackets == 2:
            place = self._lengths.get(table, 0)
            self._lengths[table] = place + 1
            self.lines.setdefault(table, line)
            table = (*table, place)
        self.lines.setdefault(table, line)
        return table

    def _enter(self, keys: list[str], line: int) -> Path:
        """`[function.profile]` means the last function there is."""
        table: Path = ()
        for key in keys:
            table = (*table, key)
            self.lines.setdefault(table, line)
            if table in self._lengths:
                table = (*table, self._lengths[table] - 1)
        return table

    def _pair(self, table: Path) -> None:
        line = self._here()
        path = table
        for key in self._keys():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self.at += 1  # the equals sign
        self._skip(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        head = self.text[self.at]
        if head == "[":
            self._many(path, "]", named=False)
        elif head == "{":
            self._many(path, "}", named=True)
        elif head in "\"'":
            self._string()
        else:
            self._skip(_PLAIN)

    def _many(self, path: Path, end: str, *, named: bool) -> None:
        self.at += 1
        place = 0
        while True:
            self._skip(_BLANK)
            if self.text[self.at] == end:
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
            elif named:
                self._pair(path)
            else:
                self.lines[(*path, place)] = self._here()
                self._value((*path, place))
                place += 1

    def _keys(self) -> list[str]:
        """A dotted key; stops before `=` or `]`."""
        keys = []
        while True:
            self._skip(_SPACE)
            start = self.at
            if self.text[start] in "\"'":
                self._string()
                keys.append(self.text[start + 1 : self.at - 1])
            else:
                self._skip(_BARE)
                keys.append(self.text[start : self.at])
            self._skip(_SPACE)
            if self.text[self.at] != ".":
                return keys
            self.at += 1

    def _string(self) -> None:
        long = self.text.startswith(('"""', "'''"), self.at)
        self._skip(_LONG if long else _BASIC if self.text[self.at] == '"' else _LITERAL)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        assert found, f"offset {self.at}: the parser and the scanner disagree"
        self.at = found.end()

    def _here(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line
