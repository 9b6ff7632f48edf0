"""Where the bits of codes lie, and how kernels put them together: words with all bits of some codes, or two nodes with some bits
of each, as codes of 5 and 6 bits lie in files. So a matrix takes the memory of the bits that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lapilli.codegen.emit import LANES, KernelBuilder
from lapilli.codegen.template import Context
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, rewrite
from lapilli.ir.integer import Atom, Int, as_int, minimum
from lapilli.ir.node import Matmul, Node
from lapilli.lower.codes import bits_of
from lapilli.schedule.encoding import Blocks, Lying

WORD = 32
BYTE = WORD // LANES
BYTES = 0x01010101
"""One in each byte of a word."""


@dataclass(frozen=True)
class CodeWords:
    """nodes: a row for each line, with so many bits (`widths`) of each code, the lowest ones first. bits: of a code in the words
    that kernels take apart. Codes lie by fours (`code_operators.py`) unless one node has all of these. per_line: such words of a
    line. flip: bits of one that are inverted before it is taken apart.
    """

    nodes: tuple[Node, ...]
    widths: tuple[int, ...]
    bits: int
    per_line: int
    flip: int = 0

    def is_like(self, other: CodeWords) -> bool:
        """Whether lines of both are read by the same statements."""
        return replace(self, nodes=()) == replace(other, nodes=())

    def fetched(self, kernel: KernelBuilder, line: str, at: str, words: int, room: int) -> str:
        """The text of a vector of `room` words that has the bits of 1, 2 or 4 words of codes, vector `at` of a line: those of a
        node behind those of the other, a word at least of each.
        """
        found: list[str] = []
        used = 0
        for node, width in zip(self.nodes, self.widths, strict=True):
            apart = self.bits // width
            count, vectors, per_line = max(words // apart, 1), max(apart // words, 1), self.per_line // apart
            if count > 1 and per_line % count == 0:
                found.append(f"{kernel.bind(node, f'uint{count}')}[{line} * {per_line // count} + {at}]")
            else:
                source = kernel.bind(node, "int" if node.dtype is DType.int32 else "uint")
                place = f"{at} / {vectors}" if vectors > 1 else f"{at} * {count}"
                found += [f"uint({source}[{line} * {per_line} + {place} + {k}])" for k in range(count)]
            used += count
        assert used <= room
        if used == room and len(found) == 1:
            return found[0]
        return f"uint{room}({', '.join([*found, *['0'] * (room - used)])})"

    def four(self, k: int, word: str, which: str) -> str:
        """The text of one of the fours of codes that a word of node k has bits of, where a line is four columns. If the node has
        all bits of a code, the next fours are still above it.
        """
        width = self.widths[k]
        if self.widths == (self.bits,):
            return f"{word} >> ({which} * {LANES * width})" if width * LANES < WORD else word
        place = f" << {_lowest_bits(self.widths)[k]}" if k else ""
        return f"(({word} >> ({which} * {width}) & {BYTES * ((1 << width) - 1):#x}u){place})"

    def together(self, fetched: str, at: str, words: int) -> str:
        """The text of words of codes, the first ones of a vector. fetched: the name of what `fetched` gave for `at`."""
        if self.widths == (self.bits,):
            return f"({fetched} ^ {self.flip:#x}u)" if self.flip else fetched
        found: list[list[str]] = [[] for _ in range(words)]
        first = 0
        for width, place in zip(self.widths, _lowest_bits(self.widths), strict=True):
            apart = self.bits // width
            vectors = max(apart // words, 1)
            for k in range(words):
                word, shift = f"{fetched}[{first + k // apart}]", place - k % apart * width
                if vectors > 1:
                    word = f"({word} >> ({at} % {vectors} * {words * width}))"
                moved = f"{word} << {shift}" if shift > 0 else f"{word} >> {-shift}" if shift else word
                found[k].append(f"({moved} & {BYTES * ((1 << width) - 1) << place:#x}u)")
            first += max(words // apart, 1)
        return f"uint4({', '.join([*(' | '.join(parts) for parts in found), *['0'] * (4 - words)])})"


def bits_in_word(widths: Sequence[int]) -> int:
    """The bits of a code in the words that kernels take apart."""
    return widths[0] if len(widths) == 1 and widths[0] in (BYTE // 2, BYTE) else BYTE


def packed_words(
    blocks: Blocks,
    contraction: Matmul,
    ctx: Context,
    widths: tuple[int, ...],
    shape: tuple[Int, int],
    place: Callable[[Int, Int, int], tuple[Int, Int]],
    lying: Lying | None = None,
) -> CodeWords:
    """Codes packed into words, lowest bits first; beyond the matrix, those at its edge. shape: lines, and words of one; place: the
    column and k of a code of such a word. lying: where the same bits are by themselves.
    """
    n, k, bits = contraction.column.extent, contraction.inner.extent, bits_in_word(widths)
    nodes: list[Node] = []
    if lying is not None and (len(widths) == 1 or lying.widths != widths):
        lying = None
    for number, (first, width) in enumerate(zip(_lowest_bits(widths), widths, strict=True)):
        key = ("codes", blocks.code, shape, bits, first, width, contraction.column.id, contraction.inner.id)
        if key not in ctx.copies:

            def body(
                line: Int, word: Int, first: int = first, width: int = width, number: int = number
            ) -> tuple[list[Int], Expr]:
                packed: Expr = const(0, DType.int32)
                apart = bits // width
                for i in range(WORD // width):
                    column, inner = place(line, word * apart + i % apart, i // apart)
                    column, inner = below(column, n), below(inner, k)
                    if lying is not None:
                        code = bits_of(lying.nodes[number], (column, inner), width, True)
                    else:
                        at: dict[Atom, Int] = {contraction.column: column, contraction.inner: inner}
                        code = binary("sub", rewrite(blocks.code, at), blocks.low)
                        if len(widths) > 1:
                            code = binary("bitand", binary("shr", code, first), (1 << width) - 1)
                    moved = binary("shl", code, width * i)
                    packed = moved if i == 0 else binary("bitor", packed, moved)
                return [], packed

            size = [shape[0], as_int(shape[1] // (bits // width))]
            ctx.copies[key] = ctx.packed("codes", contraction.rhs, size, body, DType.int32)
        nodes.append(ctx.copies[key])
    return CodeWords(tuple(nodes), widths, bits, shape[1])


def below(i: Int, n: Int) -> Int:
    """An index, or the last one, if it may be beyond."""
    high, count = i.bounds[1], n.value
    return i if high is not None and count is not None and high < count else minimum(i, n - 1)


def _lowest_bits(widths: Sequence[int]) -> list[int]:
    """Of each node, in a code."""
    return list(accumulate(widths[:-1], initial=0))
