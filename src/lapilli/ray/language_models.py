"""A language model behind Ray Serve: `lapilli serve`'s interface, with a replica for each device."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve

from lapilli.errors import InvalidInputError
from lapilli.llm.about import About
from lapilli.llm.language_model import LLM
from lapilli.llm.server import LOCAL, ServerLimits, application
from lapilli.ray.claims import RESOURCE, claim
from lapilli.ray.shipping import Shipped, ship
from lapilli.runtime.description import Description


def llm_deployment(
    model: Shipped | str | os.PathLike[str],
    *,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    hosts: tuple[str, ...] = LOCAL,
    share: int = 1,
    **options: Any,
) -> Any:
    """A deployment for `serve.run` with OpenAI's interface: the server of `lapilli serve` (docs/llm.md), once for each device.

    Each replica writes as many answers in one step as the file has sequences, streamed where that is asked for.
    The health check runs a method of the program; a replica whose device is lost fails it and is started anew by Serve.

    Args:
        model: what `ship` gave, or the path of a file of this machine, which is shipped: one that `lapilli compile` made of a
            language model (`--sequences 8`: answers of a step), or `LLM.save`.
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        limits: of a replica's requests. Serve keeps those beyond `max_ongoing_requests`, which is `limits.queue` here, waiting.
        hosts: what requests may name as their host, `*` for any.
        share: how many replicas may have one device.
        **options: of `serve.deployment`: num_replicas, autoscaling_config, max_ongoing_requests, …

    Raises:
        ReadError: the file cannot be read.
        InvalidFileError: it is no program, or holds no language model.
    """
    if share < 1:
        raise InvalidInputError(f"share is {share}; give a number of replicas from 1.")
    shipped = model if isinstance(model, Shipped) else ship(model)
    About.of_metadata(Description.of(shipped.bytes(), verify=False).metadata)
    of_requests = limits or ServerLimits()
    replica: list[Replica] = []  # of the process: what builds the application gets no arguments from Serve

    def build() -> Any:
        return application(replica[0].model, api_key=api_key, limits=of_requests, hosts=hosts)

    class Served(Replica):
        def __init__(self) -> None:
            super().__init__(shipped, share)
            replica.append(self)

    actor = {"num_cpus": 0, "resources": {RESOURCE: 1 / share}, **options.pop("ray_actor_options", {})}
    options = {"name": "lapilli-llm", "max_ongoing_requests": of_requests.queue, **options}
    return serve.deployment(serve.ingress(build)(Served), ray_actor_options=actor, **options).bind()


class Replica:
    """A language model on a device that no other process has."""

    def __init__(self, shipped: Shipped, share: int) -> None:
        self._claim = claim(share)
        try:
            self.model = LLM(shipped.bytes(), device=self._claim.device.uuid)
        except BaseException:
            self._claim.release()
            raise

    async def check_health(self) -> None:
        """Called by Serve. Raises DeviceLostError."""
        await asyncio.to_thread(self.model.check)
