"""Programs on many devices and machines, by Ray. Needs the extra: `pip install lapilli[ray]`.

model = lapilli.ray.ship("model.lap")                       # the file travels to each node once
rows = lapilli.ray.predict(dataset, model, batch_size=256)  # a ray.data.Dataset in, one out: an actor for each device
app = lapilli.ray.deployment(model, max_batch_size=32)      # serve.run(app)
app = lapilli.ray.llm_deployment("chat.lap")                # a language model with OpenAI's interface

Nodes say how many devices they have: `ray start --resources='{"vulkan": 4}'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lapilli.runtime.extras import require

require("ray", "lapilli.ray", "ray")

from lapilli.ray.predictor import Predictor, predict  # noqa: E402
from lapilli.ray.shipping import Shipped, ship  # noqa: E402

if TYPE_CHECKING:
    from lapilli.ray.language_models import llm_deployment as llm_deployment
    from lapilli.ray.serving import deployment as deployment

__all__ = ["Predictor", "Shipped", "deployment", "llm_deployment", "predict", "ship"]
_SERVED = {"deployment": "lapilli.ray.serving", "llm_deployment": "lapilli.ray.language_models"}
"""What brings Ray Serve, which actors of data sets do without."""


def __getattr__(name: str) -> Any:
    if name not in _SERVED:
        raise AttributeError(f"module 'lapilli.ray' has no attribute {name!r}")
    return getattr(import_module(_SERVED[name]), name)
