"""What an epilogue reads before the sums are there: the struct `Known`, and the statements that fill it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

INDENT = "        "
_BITS = {"float": "asuint({})", "int": "uint({})", "bool": "uint({})"}


@dataclass(frozen=True)
class Known:
    """members: of the struct. made, filled: statements that compute them, and put them into `known`. unpacked: those that take them
    out again. words: an expression with bits of all.
    """

    members: str
    made: Sequence[str]
    filled: Sequence[str]
    unpacked: Sequence[str]
    words: str
    is_empty: bool

    @classmethod
    def of(cls, before: Sequence[str], after: Sequence[str]) -> Known:
        """before: statements that need no sums; after: those that may."""
        matches = (re.match(rf"{INDENT}(float|int|bool)(4?) (v\d+)\b", line) for line in before)
        defined = {m[3]: (m[1], m[2]) for m in matches if m is not None}
        wanted = set(re.findall(r"\bv\d+\b", "\n".join(after)))
        fields = {name: kind for name, kind in defined.items() if name in wanted}
        is_empty = not fields
        if is_empty:
            fields, before = {"none": ("int", "")}, [f"{INDENT}int none = 0;"]
        bits = (_BITS[kind].format(f"known.{name}" + (".x" if lanes else "")) for name, (kind, lanes) in fields.items())
        return cls(
            " ".join(f"{kind}{lanes} {name};" for name, (kind, lanes) in fields.items()),
            before,
            [f"{INDENT}known.{name} = {name};" for name in fields],
            [f"{INDENT}{kind}{lanes} {name} = known.{name};" for name, (kind, lanes) in fields.items() if not is_empty],
            " | ".join(bits),
            is_empty,
        )

    def reader(self, name: str, signature: str, declaration: str, statements: Sequence[str]) -> list[str]:
        """The members of an epilogue's struct that read before (`name`) and use what was read: a function with these statements.
        AHEAD says whether there is anything, and whether it depends on the column alone (kernels/operands.slang).
        """
        in_rows = any(re.search(r"\bm\b", line) for line in self.made)
        return [
            f"    static const int AHEAD = {0 if self.is_empty else 1 if in_rows else 2};",
            *self.struct_and_read(name, signature),
            f"    static {declaration}",
            "    {",
            *self.unpacked,
            *statements,
            "    }",
        ]

    def struct_and_read(self, name: str, signature: str) -> list[str]:
        """The lines of the struct, and of the functions that read it and give its words."""
        return [
            f"    struct Known {{ {self.members} }};",
            f"    static Known {name}({signature})",
            "    {",
            *self.made,
            f"{INDENT}Known known;",
            *self.filled,
            f"{INDENT}return known;",
            "    }",
            f"    static uint words(Known known) {{ return {self.words}; }}",
        ]
