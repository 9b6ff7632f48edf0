"""SPIR-V kernels by hand, of the kind y[i] = a[i] over three buffers, and what a hostile file would make of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import hostile_files

from lapilli.program import schema as s

# Instructions by name.
OPS = {
    "Name": 5, "Extension": 10, "ExtInstImport": 11, "ExtInst": 12, "MemoryModel": 14, "EntryPoint": 15, "ExecutionMode": 16,
    "Capability": 17, "TypeVoid": 19, "TypeBool": 20, "TypeInt": 21, "TypeFloat": 22, "TypeVector": 23, "TypeArray": 28,
    "TypeRuntimeArray": 29, "TypeStruct": 30, "TypePointer": 32, "TypeFunction": 33, "Constant": 43, "ConstantComposite": 44,
    "Function": 54, "FunctionParameter": 55, "FunctionEnd": 56, "FunctionCall": 57, "Variable": 59, "Load": 61, "Store": 62,
    "AccessChain": 65, "Decorate": 71, "MemberDecorate": 72, "DecorationGroup": 73, "GroupDecorate": 74,
    "VectorExtractDynamic": 77, "CompositeConstruct": 80, "ConvertUToPtr": 120, "Bitcast": 124, "UConvert": 113, "FConvert": 115,
    "IAdd": 128, "FAdd": 129, "INotEqual": 171, "Phi": 245, "LoopMerge": 246, "SelectionMerge": 247, "Label": 248,
    "Branch": 249, "BranchConditional": 250, "Return": 253,
}  # fmt: skip


class Kernel:
    """Lines of a module: names that begin with % are ids, the rest numbers or texts in quotes."""

    def __init__(self, *, skip: tuple[str, ...] = ()) -> None:
        self.head = [
            "Capability 1", 'Extension "SPV_KHR_storage_buffer_storage_class"', "MemoryModel 0 1",
            'EntryPoint 5 %main "main" %gid', "ExecutionMode %main 17 64 1 1",
        ]  # fmt: skip
        self.decorations = [
            "Decorate %gid 11 28", "Decorate %array 6 4", "Decorate %block 2", "MemberDecorate %block 0 35 0",
            "Decorate %params 2", "MemberDecorate %params 0 35 0", "MemberDecorate %params 1 35 4",
            *(f"Decorate %{b} {d} {v}" for n, b in enumerate("aby") for d, v in ((34, 0), (33, n))),
        ]  # fmt: skip
        self.types = [
            "TypeVoid %void", "TypeFunction %fn %void", "TypeBool %bool", "TypeInt %u 32 0", "TypeFloat %f 32",
            "TypeVector %v3 %u 3", "TypePointer %in3 1 %v3", "TypePointer %in 1 %u", "Variable %in3 %gid 1",
            "TypeRuntimeArray %array %u", "TypeStruct %block %array", "TypePointer %pblock 12 %block",
            "TypePointer %pu 12 %u", "Variable %pblock %a 12", "Variable %pblock %b 12", "Variable %pblock %y 12",
            "TypeStruct %params %u %u", "TypePointer %pparams 9 %params", "Variable %pparams %p 9",
            *(f"Constant %u %c{n} {n}" for n in (0, 1, 2, 4)),
        ]  # fmt: skip
        self.locals: list[str] = []
        self.body = ["Load %u %va %pa", "Store %py %va"]
        self.tail: list[str] = []
        self.skip = skip

    def lines(self) -> list[str]:
        start = [
            "AccessChain %in %pg %gid %c0", "Load %u %i %pg",
            *(f"AccessChain %pu %p{b} %{b} %c0 %i" for b in "aby"),
        ]  # fmt: skip
        main = ["Function %void %main 0 %fn", "Label %entry", *self.locals, *start, *self.body, "Return", "FunctionEnd"]
        return [
            line for line in [*self.head, *self.decorations, *self.types, *main, *self.tail] if line not in self.skip
        ]

    def code(self) -> bytes:
        ids: dict[str, int] = {}
        words: list[int] = []
        for line in self.lines():
            name, *given = line.split(" ")
            operands: list[int] = []
            for word in given:
                if word.startswith("%"):
                    operands.append(ids.setdefault(word, len(ids) + 1))
                elif word.startswith('"'):
                    text = word.strip('"').encode() + b"\0"
                    text += bytes(-len(text) % 4)
                    operands += struct.unpack(f"<{len(text) // 4}I", text)
                else:
                    operands.append(int(word, 0))
            op = OPS[name] if name in OPS else int(name)
            words += [(len(operands) + 1) << 16 | op, *operands]
        return struct.pack(f"<{5 + len(words)}I", 0x07230203, 0x00010300, 0, len(ids) + 1, 0, *words)


def plain() -> Kernel:
    return Kernel()


def _indexed(storage: int, size: int, write: bool) -> Kernel:
    """s[a[i]] is read or written, where s is in work-group memory (4) or belongs to an invocation (7)."""
    k = Kernel()
    k.types += [f"Constant %u %size {size}", "TypeArray %sa %u %size", f"TypePointer %psa {storage} %sa"]
    k.types += [f"TypePointer %psu {storage} %u"]
    (k.types if storage == 4 else k.locals).append(f"Variable %psa %s {storage}")
    k.body = ["Load %u %ix %pa", "AccessChain %psu %q %s %ix", "AccessChain %psu %q0 %s %c1"]
    k.body += ["Store %q0 %i"] if not write else ["Load %u %vb %pb", "Store %q %vb"]
    k.body += ["Load %u %w %q", "Store %py %w"]
    return k


def _functions(*lines: str) -> Callable[[], Kernel]:
    def make() -> Kernel:
        k = Kernel()
        k.body = ["FunctionCall %void %called %f0", *k.body]
        k.tail = list(lines)
        return k

    return make


def _element(at: str, side: str = "%c16") -> Callable[[], Kernel]:
    """Reads an element that the invocation holds of a matrix."""

    def make() -> Kernel:
        k = Kernel()
        k.types += ["TypeFloat %h 16", *(f"Constant %u %c{n} {n}" for n in (3, 8, 16))]
        k.types += [f"4456 %mat %h %c3 {side} %c16 %c1", "TypePointer %pmat 7 %mat", "TypePointer %ph 7 %h"]
        k.locals = ["Variable %pmat %m 7"]
        k.body = [f"AccessChain %ph %q %m {at}", "Load %h %e %q", "Store %py %c1"]
        return k

    return make


def _recursion() -> Kernel:
    return _functions("Function %void %f0 0 %fn", "Label %l0", "FunctionCall %void %r %f0", "Return", "FunctionEnd")()


def _inline_bomb() -> Kernel:
    k = Kernel()
    k.body = ["FunctionCall %void %called %f33", *k.body]
    for n in range(34):
        calls = [f"FunctionCall %void %r{n}{side} %f{n - 1}" for side in "ab"] if n else ["Store %y0 %c1"]
        if n == 0:
            calls.insert(0, "AccessChain %pu %y0 %y %c0 %c1")
        k.tail += [f"Function %void %f{n} 0 %fn", f"Label %l{n}", *calls, "Return", "FunctionEnd"]
    return k


def _changed(**changes: Any) -> Callable[[], Kernel]:
    """The plain kernel with lines added to its parts (a list), or with a new body (a tuple)."""

    def make() -> Kernel:
        k = Kernel(skip=changes.get("skip", ()))
        for part, lines in changes.items():
            if part == "skip":
                continue
            setattr(k, part, list(lines) if isinstance(lines, tuple) else [*getattr(k, part), *lines])
        return k

    return make


def _first(**lines: str) -> Callable[[], Kernel]:
    def make() -> Kernel:
        k = Kernel()
        for part, line in lines.items():
            getattr(k, part).insert(0, line)
        return k

    return make


def _physical() -> Kernel:
    k = Kernel()
    k.head[0:1] = ["Capability 1", "Capability 11", "Capability 5347"]
    k.head = [line.replace("MemoryModel 0 1", "MemoryModel 5348 1") for line in k.head]
    k.types += ["TypeInt %ul 64 0", "TypePointer %pps 5349 %u"]
    k.body = [
        "Load %u %va %pa",
        "UConvert %ul %long %va",
        "ConvertUToPtr %pps %ptr %long",
        "Load %u %v %ptr 2 4",
        "Store %py %v",
    ]
    return k


LOOP = ("Branch %head", "Label %head", "Phi %u %n %c0 %entry %n1 %cont", "LoopMerge %done %cont 0", "Branch %test", "Label %test",
        "INotEqual %bool %t %n %c4", "BranchConditional %t %cont %done", "Label %cont", "IAdd %u %n1 %n %c1", "Branch %head",
        "Label %done", "Store %py %n")  # fmt: skip

ACCEPTED: dict[str, Callable[[], Kernel]] = {
    "plain": plain,
    "a loop": _changed(body=LOOP),
    "a call": _functions("Function %void %f0 0 %fn", "Label %l0", "Return", "FunctionEnd"),
    "an array of each invocation": lambda: _indexed(7, 4, False),
}

# What is refused, and with which words.
REFUSED: dict[str, tuple[Callable[[], Kernel], str]] = {
    "physical pointers": (_physical, "capability 5347"),
    "variable pointers": (_first(head="Capability 4442"), "capability 4442"),
    "kernels of OpenCL": (_first(head="Capability 6"), "capability 6"),
    "a binding twice": (_first(decorations="Decorate %a 33 100000"), "twice"),
    "a set twice": (_first(decorations="Decorate %a 34 7"), "twice"),
    "a binding that is not there": (_changed(skip=("Decorate %b 33 1",), decorations=["Decorate %b 33 3"]), "reads binding 3"),
    "a group of decorations": (
        _changed(decorations=["Decorate %grp 33 100000", "DecorationGroup %grp", "GroupDecorate %grp %a"]), "instruction 73"),
    "a work-group size beside": (
        _changed(decorations=["Decorate %wgs 11 25"],
                 types=["Constant %u %large 65535", "ConstantComposite %v3 %wgs %large %large %large"]), "built-in value"),
    "two work-group sizes": (_changed(head=["ExecutionMode %main 17 64 1 1"]), "two work-group sizes"),
    "another work-group size": (
        _changed(skip=("ExecutionMode %main 17 64 1 1",), head=["ExecutionMode %main 17 32 1 1"]), "work groups of 32x1x1"),
    "two entry points": (_first(head="Name %main \"\""), "where it may not be"),
    "recursion": (_recursion, "recursive"),
    "functions that double": (_inline_bomb, "when calls are inlined"),
    "much work-group memory": (lambda: _indexed(4, 500_000_000, True), "bytes of work-group memory"),
    "undeclared work-group memory": (lambda: _indexed(4, 16, True), "64 bytes of work-group memory, and the program says 0"),
    "much private memory": (lambda: _indexed(7, 100_000_000, True), "bytes of variables"),
    "an array of buffers": (
        _changed(skip=("Variable %pblock %b 12", "Decorate %block 2"), types=["Constant %u %many 1000",
                 "TypeArray %blocks %block %many", "TypePointer %pbs 12 %blocks", "Variable %pbs %b 12"],
                 decorations=["Decorate %block 2"], body=("Load %u %va %pa", "AccessChain %pu %pb1 %b %va %c0 %i",
                 "Load %u %vb %pb1", "Store %py %vb")), "operands that do not fit|no block"),
    "a store where it may only read": (_changed(body=("Load %u %va %pa", "Store %pa %va", "Store %py %va")), "only reads"),
    "a store into parameters": (
        _changed(types=["TypePointer %ppu 9 %u"], body=("AccessChain %ppu %q %p %c0", "Store %q %c1")), "do not fit"),
    "parameters without offsets": (
        _changed(skip=("MemberDecorate %params 0 35 0", "MemberDecorate %params 1 35 4")), "no offsets"),
    "parameters beyond the file's": (
        _changed(skip=("MemberDecorate %params 1 35 4",), decorations=["MemberDecorate %params 1 35 64"]), "push constants"),
    "an id twice": (_changed(body=("Load %u %va %pa", "Load %u %va %pb", "Store %py %va")), "twice"),
    "an id of nothing": (_changed(body=("Store %py %nothing",)), "which it is not"),
    "an id beyond the bound": (_changed(body=("Store %py 4000000",)), "beyond its bound"),
    "a type for a value": (_changed(body=("Store %py %u",)), "which it is not"),
    "floats for integers": (_changed(body=("Load %u %va %pa", "FAdd %u %w %va %va", "Store %py %w")), "do not fit"),
    "another type than is stored": (_changed(body=("Load %u %va %pa", "Bitcast %f %w %va", "Store %py %w")), "do not fit"),
    "a member beyond the struct": (_changed(body=("AccessChain %pu %q %a %c4 %i", "Load %u %v %q", "Store %py %v")), "do not fit"),
    "a member by a number": (_changed(body=("AccessChain %pu %q %a %i %i", "Load %u %v %q", "Store %py %v")), "do not fit"),
    "a way back without a loop": (
        _changed(body=("Branch %again", "Label %again", "Load %u %va %pa", "INotEqual %bool %t %va %c0",
                       "BranchConditional %t %again %done", "Label %done")), "not structured"),
    "a value of another branch": (
        _changed(body=("Load %u %va %pa", "INotEqual %bool %t %va %c0", "SelectionMerge %done 0", "BranchConditional %t %yes %no",
                       "Label %yes", "Load %u %vb %pb", "Branch %done", "Label %no", "Branch %done", "Label %done",
                       "Store %py %vb")), "not defined"),
    "a merge that is not one": (
        _changed(body=("Load %u %va %pa", "INotEqual %bool %t %va %c0", "SelectionMerge %yes 0", "BranchConditional %t %yes %no",
                       "Label %yes", "Branch %done", "Label %no", "Branch %done", "Label %done")), "structured"),
    "a branch into nothing": (_changed(body=("Branch %nowhere", "Label %next")), "leave it"),
    "an endless first block": (_changed(body=("Branch %entry", "Label %next")), "first block"),
    "a phi of other blocks": (_changed(body=tuple(x.replace("%c0 %entry", "%c0 %test") for x in LOOP)), "phis"),
    "a function that does not end": (_changed(skip=("FunctionEnd",)), "does not end"),
    "bfloat16 in buffers": (_changed(types=["TypeFloat %bf 16 0", "TypeRuntimeArray %bfs %bf"]), "bfloat16 in memory"),
    "vectors of bfloat16 in buffers": (
        _changed(types=["TypeFloat %bf 16 0", "TypeVector %bf2 %bf 2", "TypePointer %pbf2 12 %bf2"]), "bfloat16 in memory"),
    "an element that a matrix may not have": (_element("%c8"), "do not fit"),
    "an element by a number": (_element("%i"), "do not fit"),
    "an element of a small matrix": (_element("%c0", "%c8"), "do not fit"),
    "elements in subgroups of any size": (_element("%c0"), "must ask for subgroups of at most 32"),
    "how long a number is": (_changed(body=("4460 %u %n %u", "Store %py %n")), "do not fit"),
    "arithmetic in bfloat16": (
        _changed(types=["TypeFloat %bf 16 0", "Constant %bf %one 16256"],
                 body=("FAdd %bf %w %one %one", "Store %py %c1")), "do not fit"),
    "a conversion of bfloat16": (
        _changed(types=["TypeFloat %bf 16 0", "Constant %bf %one 16256"],
                 body=("FConvert %f %w %one", "Store %py %c1")), "do not fit"),
    "floats of an unknown encoding": (_changed(types=["TypeFloat %e4 16 4214"]), "unknown encoding"),
    "bfloat16 of 32 bits": (_changed(types=["TypeFloat %bf 32 0"]), "unknown encoding"),
    "an unknown instruction": (_changed(body=("9999 1",)), "instruction 9999"),
    "raw instructions": (_changed(body=("4433 1",)), "instruction 4433"),
}  # fmt: skip


def program(kernel: Kernel, shared: int = 0, words: int = 64) -> bytes:
    """y = kernel(a, b): tensors of 32-bit integers, one command of one work group."""
    tables, method, plan, command, k = s.ProgramT(), s.MethodT(), s.PlanT(), s.DispatchT(), s.KernelT()
    code = kernel.code()
    k.name, k.codeOffset, k.codeSize, k.bindings, k.pushSize = "hostile", 0, len(code), 3, 8
    k.localX, k.localY, k.localZ, k.sharedSize = 64, 1, 1, shared
    method.exprs = []
    for value in (0, words, 4 * words, 1):
        e = s.ExprT()
        e.value, e.a, e.b, e.op = value, 0, 0, 0
        method.exprs.append(e)
    method.name, method.inputs, method.outputs, method.plans = "forward", [], [], [plan]
    plan.name, plan.buffers, plan.load, plan.run = "any", [], [], [command]
    command.kernel, command.written, command.params, command.label = 0, 4, [1, 1], "hostile"
    command.groupsX = command.groupsY = command.groupsZ = 3
    command.bindings = []
    for n, name in enumerate("aby"):
        tensor, buffer, binding = s.TensorSpecT(), s.BufferT(), s.BindingT()
        tensor.name, tensor.dtype, tensor.shape = name, 4, [1]
        (method.outputs if name == "y" else method.inputs).append(tensor)
        buffer.name, buffer.kind, buffer.index, buffer.size = name, 4 if name == "y" else 3, n % 2, 2
        plan.buffers.append(buffer)
        binding.buffer, binding.offset, binding.size = n, 0, 2
        command.bindings.append(binding)
    tables.producer, tables.methods, tables.kernels = "tests", [method], [k]
    return hostile_files.file_from(tables, code)
