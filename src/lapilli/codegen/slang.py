"""The Slang compiler, called through ctypes: libslang-compiler of the package slangtorch.

Its interfaces are COM-like: an object is a pointer to a table of functions, which are called by index. One session serves one
process; load and link are not thread-safe, so a lock protects them.
"""

from __future__ import annotations

import ctypes as c
import glob
import importlib.util
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from lapilli.codegen.spirv import strip
from lapilli.errors import CompileError

_KERNELS_OF_A_SESSION = 64
"""A session keeps what it has compiled: a megabyte a kernel."""
KERNELS = Path(__file__).resolve().parent.parent / "kernels"

_SPIRV, _METAL = 6, 24
_NO_LINES = 1  # directives in text
_PROFILES = {_SPIRV: b"", _METAL: b"metallib_2_4"}
"""Without a profile Slang writes SPIR-V 1.5, of which `spirv.py` makes 1.3. By the profile spirv_1_3 it writes 1.3, and other
code."""
_OPTION = {"MacroDefine": 0, "EmitSpirvDirectly": 58, "SkipSPIRVValidation": 29}
_RELEASE = 2  # of everything
_CREATE_SESSION, _FIND_PROFILE, _BUILD_TAG = 3, 4, 8  # of the global session
_COMPOSE = 6  # of a session
_FIND_ENTRY = 17  # of a module
_CODE, _LINK = 6, 10  # of a component


class _Value(c.Structure):
    _fields_ = [("kind", c.c_int32), ("i0", c.c_int32), ("i1", c.c_int32), ("s0", c.c_char_p), ("s1", c.c_char_p)]


class _Option(c.Structure):
    _fields_ = [("name", c.c_int32), ("value", _Value)]


class _Target(c.Structure):
    _fields_ = [
        ("size", c.c_size_t), ("format", c.c_int32), ("profile", c.c_uint32), ("flags", c.c_uint32),
        ("floating", c.c_uint32), ("line", c.c_uint32), ("scalar", c.c_bool), ("options", c.POINTER(_Option)),
        ("n_options", c.c_uint32),
    ]  # fmt: skip


class _Session(c.Structure):
    _fields_ = [
        ("size", c.c_size_t), ("targets", c.POINTER(_Target)), ("n_targets", c.c_int64), ("flags", c.c_uint32),
        ("matrix", c.c_uint32), ("paths", c.POINTER(c.c_char_p)), ("n_paths", c.c_int64), ("macros", c.c_void_p),
        ("n_macros", c.c_int64), ("files", c.c_void_p), ("effects", c.c_bool), ("glsl", c.c_bool),
        ("options", c.POINTER(_Option)), ("n_options", c.c_uint32), ("skip_validation", c.c_bool),
    ]  # fmt: skip


def _call(obj: Any, slot: int, result: Any, *args: tuple[Any, Any]) -> Any:
    table = c.cast(c.cast(obj, c.POINTER(c.c_void_p))[0], c.POINTER(c.c_void_p))
    return c.CFUNCTYPE(result, c.c_void_p, *(t for t, _ in args))(table[slot])(obj, *(v for _, v in args))


def _release(component: c.c_void_p) -> None:
    if component:
        _call(component, _RELEASE, c.c_uint32)
        component.value = None


def _take(blob: c.c_void_p) -> bytes:
    """Copies the bytes of a blob, and releases it."""
    if not blob:
        return b""
    data = c.string_at(_call(blob, 3, c.c_void_p), _call(blob, 4, c.c_size_t))
    _release(blob)
    return data


@lru_cache(maxsize=1)
def library() -> str:
    """Path of libslang-compiler: from $LAPILLI_SLANG, or in the package slangtorch or slangpy."""
    given = os.environ.get("LAPILLI_SLANG")
    if given:
        return given
    for package, pattern in (("slangtorch", "bin/libslang-compiler.so.0.*"), ("slangtorch", "bin/slang-compiler.dll"),
                             ("slangpy", "*slang-compiler*")):  # fmt: skip
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            found = sorted(glob.glob(str(Path(spec.origin).parent / pattern)))
            if found:
                return found[0]
    raise CompileError("the Slang compiler is missing: pip install 'lapilli[compile]'")


class Compiler:
    """A session for a language, SPIR-V or Metal's, with the modules of `kernels/` in its search path.

    defines: macros for all modules; with LAPILLI_EMULATE_COOPMAT, tests run the matrix kernels on any device.
    """

    def __init__(self, language: int = _SPIRV, defines: tuple[str, ...] = ()) -> None:
        lib = c.CDLL(library())
        lib.slang_createGlobalSession.argtypes = [c.c_int64, c.POINTER(c.c_void_p)]
        self._load = lib.slang_loadModuleFromSource
        self._load.restype = c.c_void_p
        self._load.argtypes = [c.c_void_p, c.c_char_p, c.c_char_p, c.c_char_p, c.c_size_t, c.POINTER(c.c_void_p)]
        self._lock = threading.Lock()
        self._count = 0
        self._global = c.c_void_p()
        if lib.slang_createGlobalSession(0, c.byref(self._global)):
            raise CompileError(f"the Slang compiler {library()} does not start")
        self._session = c.c_void_p()
        self._language, self._defines = language, defines

    @property
    def version(self) -> str:
        tag: bytes = _call(self._global, _BUILD_TAG, c.c_char_p)
        return tag.decode()

    def _create(self) -> None:
        options = (_Option * 2)()
        for option, name, value in zip(options, ("EmitSpirvDirectly", "SkipSPIRVValidation"), (1, 1), strict=True):
            option.name, option.value = _OPTION[name], _Value(0, value, 0, None, None)
        profile = _call(self._global, _FIND_PROFILE, c.c_uint32, (c.c_char_p, _PROFILES[self._language]))
        target = _Target(
            c.sizeof(_Target), self._language, profile, 1 << 10, 0, _NO_LINES, False, options, len(options)
        )
        paths = (c.c_char_p * 1)(str(KERNELS).encode())
        macros = (_Option * max(1, len(self._defines)))()
        for macro, define in zip(macros, self._defines, strict=False):
            macro.name, macro.value = _OPTION["MacroDefine"], _Value(1, 0, 0, define.encode(), b"1")
        self._keep = (options, target, paths, macros)
        desc = _Session(c.sizeof(_Session), c.pointer(target), 1, 0, 1, paths, 1)
        desc.options, desc.n_options = macros, len(self._defines)
        if _call(self._global, _CREATE_SESSION, c.c_int32, (c.c_void_p, c.addressof(desc)),
                 (c.c_void_p, c.addressof(self._session))):  # fmt: skip
            raise CompileError("the Slang compiler refuses to create a session")

    def compile(self, source: str, entry: str = "main") -> bytes:
        """SPIR-V of an entry point, or text in Metal's language. Raises CompileError with the compiler's messages and the
        source."""
        with self._lock:
            if self._count % _KERNELS_OF_A_SESSION == 0:
                _release(self._session)
                self._create()
            self._count += 1
            made: list[c.c_void_p] = []
            try:
                code = self._code(source, entry, made)
                return strip(code) if self._language == _SPIRV else code
            finally:
                for component in made:
                    _release(component)

    def _code(self, source: str, entry: str, made: list[c.c_void_p]) -> bytes:
        """As `compile`; objects to release are added to `made`."""
        name = f"kernel{self._count}"
        text, diagnostics = source.encode(), c.c_void_p()
        module = self._load(
            self._session, name.encode(), f"{name}.slang".encode(), text, len(text), c.byref(diagnostics)
        )
        self._check(bool(module), diagnostics, source)
        point = c.c_void_p()
        failed = _call(module, _FIND_ENTRY, c.c_int32, (c.c_char_p, entry.encode()), (c.c_void_p, c.addressof(point)))
        self._check(not failed, c.c_void_p(), source)
        parts = (c.c_void_p * 2)(module, point.value)
        whole, linked, code = c.c_void_p(), c.c_void_p(), c.c_void_p()
        made += (point, whole, linked)
        failed = _call(self._session, _COMPOSE, c.c_int32, (c.c_void_p, c.addressof(parts)), (c.c_int64, 2),
                       (c.c_void_p, c.addressof(whole)), (c.c_void_p, c.addressof(diagnostics)))  # fmt: skip
        self._check(not failed, diagnostics, source)
        failed = _call(
            whole, _LINK, c.c_int32, (c.c_void_p, c.addressof(linked)), (c.c_void_p, c.addressof(diagnostics))
        )
        self._check(not failed, diagnostics, source)
        failed = _call(linked, _CODE, c.c_int32, (c.c_int64, 0), (c.c_int64, 0), (c.c_void_p, c.addressof(code)),
                       (c.c_void_p, c.addressof(diagnostics)))  # fmt: skip
        self._check(not failed, diagnostics, source)
        return _take(code)

    @staticmethod
    def _check(ok: bool, diagnostics: c.c_void_p, source: str) -> None:
        """Raises for errors in the messages, which the compiler may report together with success."""
        messages = _take(diagnostics).decode(errors="replace")
        diagnostics.value = None
        if not ok or ("error" in messages and ": error" in messages):
            numbered = "\n".join(f"{n:4} {line}" for n, line in enumerate(source.splitlines(), 1))
            raise CompileError(f"a generated kernel does not compile (please report this):\n{messages}\n{numbered}")


DEFINES: tuple[str, ...] = ()
"""Macros of this process's compilers."""


@lru_cache(maxsize=4)
def _compiler(language: int, defines: tuple[str, ...]) -> Compiler:
    return Compiler(language, defines)


def compile(source: str) -> bytes:
    """SPIR-V of a kernel's entry point `main`, by this process's compiler."""
    return _compiler(_SPIRV, DEFINES).compile(source)


def to_metal(source: str) -> str:
    """The kernel in Metal's shading language. Raises CompileError for what that has not, as the kernels for matrix units."""
    return _compiler(_METAL, DEFINES).compile(source).decode()
