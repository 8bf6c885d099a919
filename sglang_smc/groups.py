"""The requests of one round, and what the host knows of them."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_smc import memory
from sglang_smc.config import SMCConfig
from sglang_smc.request_config import config_of
from sglang_smc.runs import running
from sglang_smc.sampling import Kinds, Settings

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Extent(NamedTuple):
    """Sizes and kinds in a batch, known without asking the device; tensors are cut to them."""

    num_particles: int  # the most that a request has
    num_steps: int  # the most that a request drafts a round
    max_tail: int  # no tail is longer when the round ends
    max_arena: int  # no request owns more KV slots behind its emitted text
    kinds: Kinds
    powered: bool  # some request samples from a power of p
    weighs: bool  # some request's rounds weigh and resample
    verifies: bool  # some request's rounds verify
    shows_particles: bool  # some request wants all of its particles with the answer
    methods: tuple[str, ...]  # how ancestors are drawn, by one request or another


class Groups(NamedTuple):
    """The requests of one round: who they are, what they asked for, what they own."""

    reqs: "list[Req]"
    rows: torch.Tensor  # [G] in req_to_token_pool
    settings: Settings
    committed: torch.Tensor  # [G] KV slots of the emitted text
    allocated: torch.Tensor  # [G] KV slots owned
    extent: Extent


def extent_of(server: SMCConfig, reqs: "list[Req]") -> Extent:
    """The extent of a batch.

    Under the overlap schedule the host's figures are one round old, and too large if anything.
    """
    configs = [config_of(server, req) for req in reqs]
    pairs = list(zip(configs, reqs, strict=True))
    arenas = [running(req).arena for req in reqs]
    return Extent(
        num_particles=max(config.num_particles for config in configs),
        num_steps=max(config.num_steps for config in configs),
        max_tail=max(memory.tail(config, memory.remaining(req)) for config, req in pairs),
        max_arena=max(end - start for start, end in arenas),
        kinds=Kinds.of(reqs),
        powered=any(config.power != 1.0 for config in configs),
        weighs=any(config.weighs for config in configs),
        verifies=not all(config.weighs for config in configs),
        shows_particles=any(config.return_particles for config in configs),
        methods=tuple(sorted({config.resampling_method for config in configs if config.weighs})),
    )
