"""Compiles a function that only compiled code calls no further than LLVM's bitcode.

Numba optimises every function together with all that it calls, and makes machine code of it. Then
its callers link it, and all of that is optimised again, once for each level of calls. But only a
function that Python calls needs machine code. So the others are left as bitcode (:class:`Bitcode`),
and a function that Python calls (:class:`MachineCode`) links every part it needs once.
"""

from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
from numba.core import codegen, compiler, config, cpu

from tailrace import compile_speed
from tailrace.code_names import names_used

_codegen: Any = codegen
_config: Any = config
_compiler: Any = compiler
_llvm: Any = llvm

#: Marks a part in a cached file, where Numba writes "object" or "bitcode".
KIND = "tailrace part"


class MachineCode(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """The machine code of a function that Python calls, with all the parts that it needs."""

    _linking_libraries: list[Any]

    def _optimize_functions(self, ll_module: Any) -> None:
        _shrink(self._codegen, ll_module)

    def finalize(self) -> None:
        """Link every part once, optimise, and make machine code."""
        self._linking_libraries = _flat(self._linking_libraries)
        super().finalize()
        self._linking_libraries = []

    def _optimize_final_module(self) -> None:
        """Optimise the function with its parts, which no other library can call by name.

        LLVM then inlines every part that has a single call, and drops arguments that a part does
        not use. An array is passed as seven numbers or more, the KV cache of a server as thirty.
        """
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == _llvm.Linkage.linkonce_odr:
                function.linkage = "internal"
        _optimise(self._codegen, self._final_module)


class DenseMachineCode(MachineCode):
    """The same of a function whose loops are vectorised, see :class:`DenseBitcode`."""

    _optimize_functions = _codegen.JITCodeLibrary._optimize_functions
    _optimize_final_module = _codegen.JITCodeLibrary._optimize_final_module


class Bitcode(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """The bitcode of a function that only compiled code calls, and of everything it calls."""

    _linking_libraries: list[Any]
    _shared_module: Any
    _parts: tuple[bytes, ...] = ()

    def _optimize_functions(self, ll_module: Any) -> None:
        _shrink(self._codegen, ll_module)

    def finalize(self) -> None:
        """Keep the function's bitcode, and that of what it calls."""
        self._raise_if_finalized()
        self._final_module.verify()
        needed = (_bitcode(library) for library in self._linking_libraries)
        called = dict.fromkeys(part for parts in needed for part in parts)
        for library in self._linking_libraries:
            self._reload_init.update(library._reload_init)
        self._keep((*called, _shareable(self._final_module)))

    def _keep(self, parts: tuple[bytes, ...]) -> None:
        self._finalize_dynamic_globals()
        self._parts = parts
        self._linking_libraries = []
        self._finalized = True

    @property
    def parts(self) -> tuple[bytes, ...]:
        """One module of bitcode for each function, callees before their callers."""
        self._ensure_finalized()
        return self._parts

    @property
    def codegen(self) -> Any:
        """Whom Numba tells the function's Python objects: without machine code there are none."""
        return _NoEnvironment

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        del name
        self._ensure_finalized()
        return 0

    def _get_module_for_linking(self) -> Any:
        """Link all that is needed, for a library that knows nothing of parts."""
        if self._shared_module is None:
            *called, own = self.parts
            self._shared_module = _llvm.parse_bitcode(own)
            for part in reversed(called):
                self._shared_module.link_in(_llvm.parse_bitcode(part))
        return self._shared_module

    def serialize_using_object_code(self) -> tuple[str, str, tuple[bytes, ...]]:
        """Return what is cached."""
        return self.name, KIND, self.parts

    @classmethod
    def load(cls, generator: Any, cached: Any) -> "Bitcode":
        """Return a part from what was cached."""
        name, _, parts = cached
        loaded = cls(generator, name)
        loaded._keep(parts)
        return loaded


class DenseBitcode(Bitcode):
    """A part whose loops are vectorised before its callers link it.

    In which order its sums are taken depends on that, and so does their last bit. Its callers do
    not make it internal, so that they optimise it no further than Python's twin of it.
    """

    _optimize_functions = _codegen.JITCodeLibrary._optimize_functions

    def finalize(self) -> None:
        """Optimise the function with what it calls."""
        self._raise_if_finalized()
        for library in _flat(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._optimize_final_module()
        self._final_module.verify()
        self._keep((_shareable(self._final_module, "weak_odr"),))


class _NoEnvironment:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Do nothing."""


class _BitcodeModule:
    """What Numba links, of one part."""

    def __init__(self, bitcode: bytes) -> None:
        self._bitcode = bitcode
        self._reload_init: set[Any] = set()

    def _get_module_for_linking(self) -> Any:
        return _llvm.parse_bitcode(self._bitcode)


def _flat(libraries: Iterable[Any]) -> list[Any]:
    """Return what to link for these libraries: every part once."""
    parts: dict[bytes, None] = {}
    others: dict[Any, None] = {}
    for library in libraries:
        if isinstance(library, Bitcode):
            parts |= dict.fromkeys(library.parts)
        else:
            others[library] = None
    # Callers first: what nothing refers to yet is not linked.
    return [*map(_BitcodeModule, reversed(parts)), *others]


def _bitcode(library: Any) -> tuple[bytes, ...]:
    """Return the parts of a library."""
    if isinstance(library, Bitcode):
        return library.parts
    return (library._get_module_for_linking().as_bitcode(),)


def _shareable(module: Any, linkage: str = "linkonce_odr") -> bytes:
    """Return a module as bitcode, which several others may link."""
    for function in module.functions:
        if not function.is_declaration and function.linkage == _llvm.Linkage.external:
            function.linkage = linkage
    bitcode: bytes = module.as_bitcode()
    return bitcode


def _shrink(generator: Any, module: Any) -> None:
    """Keep variables in registers, and leave the rest to those who link the module."""
    module.data_layout = generator._data_layout
    for function in module.functions:
        if not function.is_declaration:
            passes = _llvm.create_new_function_pass_manager()
            passes.add_sroa_pass()
            passes.add_simplify_cfg_pass()
            passes.add_instruction_combine_pass()
            passes.run(function, generator._pass_builder())


def _optimise(generator: Any, module: Any) -> None:
    """Optimise a module as Numba does, but unroll no loops.

    Loops over a few replicas or requests are slower unrolled, and take longer to compile.
    """
    first, builder = generator._module_pass_manager(
        loop_vectorize=generator._loopvect, slp_vectorize=False, opt=generator._opt_level,
        cost="cheap",
    )  # fmt: skip
    first.run(module, builder)
    tuning = _llvm.create_pipeline_tuning_options(speed_level=_config.OPT)
    tuning.loop_vectorization = _config.LOOP_VECTORIZE
    tuning.slp_vectorization = _config.SLP_VECTORIZE
    tuning.loop_unrolling = False
    builder = _llvm.create_pass_builder(generator._tm, tuning)
    builder.getModulePassManager().run(module, builder)


class Loading:
    """Numba's target, for a part that is loaded."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def codegen(self) -> Any:
        """Return what loads it."""
        return self

    def unserialize_library(self, cached: Any) -> Bitcode:
        """Load it."""
        return Bitcode.load(self._target.codegen(), cached)


def _pipeline(library: Any) -> Any:
    """Return a compiler whose result is this kind of library."""

    class Pipeline(_compiler.Compiler):  # type: ignore[misc]
        def compile_extra(self, func: Any) -> Any:
            with compile_speed.rare_collections():
                made = library(self.state.targetctx.codegen(), func.__qualname__)
                made.enable_object_caching()
                self.state.library = made
                return super().compile_extra(func)

    return Pipeline


def _is_known() -> bool:
    """Whether Numba links and loads functions as it did when this was written (0.62 to 0.69)."""
    library, result = _codegen.CPUCodeLibrary, _compiler.CompileResult
    names = {
        library.finalize: {
            "require_global_compiler_lock", "_codegen", "_check_llvm_bugs", "_raise_if_finalized",
            "config", "DUMP_FUNC_OPT", "dump", "name", "get_llvm_str", "set", "_linking_libraries",
            "_reload_init", "update", "add", "_final_module", "link_in", "_get_module_for_linking",
            "_optimize_final_module", "verify", "_finalize_final_module",
        },
        result._rebuild.__func__: {
            "codegen", "unserialize_library", "get_executable", "typing_context", "set_env",
            "env_name",
        },
        cpu.CPUContext.get_executable: {
            "get_pointer_to_function", "llvm_cpython_wrapper_name", "qualname", "_dynfunc",
            "make_function", "lookup_module", "split", "codegen", "set_env", "get_env_name",
        },
    }  # fmt: skip
    same = all(names_used(function) == known for function, known in names.items())
    return same and hasattr(_llvm, "create_new_function_pass_manager")


def options(library: Any) -> dict[str, Any]:
    """Return the options of ``numba.njit`` for this kind of library; none if Numba has changed."""
    return {"pipeline_class": _pipeline(library)} if _is_known() else {}
