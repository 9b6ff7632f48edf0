"""Makes `generate` of the package transformers quick on the device: with a cache of fixed size, the step of a token is compiled.

The package does so by itself for the devices that it knows. What the caller chose stays: a cache, a configuration, no compilation.
"""

from __future__ import annotations

import functools
from typing import Any

from lapilli.eager.device_state import NAMES
from lapilli.torch_compat import replace

_MODES = ("GREEDY_SEARCH", "SAMPLE", "BEAM_SEARCH", "BEAM_SAMPLE")
"""Ways to choose tokens that take caches of fixed size."""
_LEAST = 128
"""Caches have this many places, or twice as many, and so on: answers of other lengths use the same program."""


def prefer_compiled_steps(utils: Any) -> None:
    """utils: the module `transformers.generation.utils`. In a version that lacks what this builds on, nothing changes."""
    mixin = utils.GenerationMixin
    theirs = getattr(mixin, "_prepare_cache_for_generation", None)
    if theirs is None or not hasattr(mixin, "_valid_auto_compile_criteria"):
        return

    @functools.wraps(theirs)
    def prepare(
        self: Any, config: Any, model_kwargs: Any, mode: Any, batch_size: Any, max_cache_length: Any, *rest: Any
    ) -> Any:
        if self.device.type in NAMES and getattr(mode, "name", None) in _MODES and not config.disable_compile:
            max_cache_length = _choose(self, config, model_kwargs, max_cache_length)
        return theirs(self, config, model_kwargs, mode, batch_size, max_cache_length, *rest)

    replace(mixin, "_prepare_cache_for_generation", prepare)


def _choose(model: Any, config: Any, model_kwargs: dict[str, Any], length: int) -> int:
    """Fills in what the caller left open; returns the number of places of a cache. config: this call's own copy."""
    from transformers import CompileConfig

    given, text = model_kwargs.get("past_key_values"), model.config.get_text_config(decoder=True)
    open_ = given is None and config.use_cache is not False and not config.is_assistant
    if open_ and config.cache_implementation is None and getattr(model, "_can_compile_fullgraph", False):
        config.cache_implementation = "static"
        most = getattr(text, "max_position_embeddings", None) or length
        length = max(length, min(max(_LEAST, 1 << (length - 1).bit_length()), most))
    if config.cache_implementation == "static" or getattr(given, "is_compileable", False):
        if config.compile_config is None:
            # Caches of windows count tokens in Python: such a number must become a symbol, or each step is another graph.
            dynamic = None if getattr(text, "sliding_window", None) else False
            config.compile_config = CompileConfig(backend="vulkan", mode="default", dynamic=dynamic)
        if config.compile_config.backend == "vulkan":
            config.compile_config._compile_all_devices = True
    return length
