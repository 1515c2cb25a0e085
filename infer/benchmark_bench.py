"""The models of a benchmark and how they decode in it: `Bench` warms up and measures points."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from d3d_jax.config import DecodeConfig, Miss, Mode
from d3d_jax.infer.benchmark import Chat, Conversation, Point, measure, warm_up_prompts
from d3d_jax.infer.benchmark_peer import PEERS
from d3d_jax.infer.decoding import Decoder
from d3d_jax.infer.drafter import DrafterRole
from d3d_jax.infer.measure import (
    measure_steps,
    measure_verify,
    share_hardware,
)
from d3d_jax.infer.target import Target
from d3d_jax.infer.timeline import Span, trace
from d3d_jax.memory import or_out_of_memory
from d3d_jax.sampling import SamplingParams

# The longest reply that is traced: some rounds, which a plot has room for.
TRACED_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Bench:
    """Both models, and what all points have in common.

    Attributes:
      drafter: None where plain decoding alone is measured.
      seed: of the first conversation of a task; the others count on from it.
    """

    target: Target
    drafter: DrafterRole | None
    chat: Chat
    max_new_tokens: int
    max_length: int | None = None
    miss: Miss = "stall"
    seed: int = 0

    @property
    def shared(self) -> bool:
        """Whether both roles run on the same hardware."""
        return self.drafter is not None and share_hardware(self.target, self.drafter)

    def roles(self) -> dict[str, Any]:
        """Type and devices of the target and the drafter."""
        roles = {"target": self.target, "drafter": self.drafter}
        return {
            name: {
                "dtype": jnp.dtype(role.dtype).name,
                "devices": [str(device) for device in role.mesh.devices.flat],
            }
            for name, role in roles.items()
            if role is not None
        }

    def params(self, temperature: float, number: int) -> SamplingParams:
        """Settings of a conversation, by its index in its task."""
        seed = (self.seed + number) % 2**32
        return SamplingParams(temperature, seed=seed, max_new_tokens=self.max_new_tokens)

    def warmed(
        self,
        mode: Mode,
        temperature: float,
        concurrency: int,
        conversations: Sequence[Conversation],
    ) -> Decoder | str:
        """A decoder that has compiled all these conversations need, or why memory was too small."""
        config = DecodeConfig(mode, self.max_new_tokens, self.max_length, self.miss)
        decoder = Decoder(self.target, self.drafter, config, concurrency)
        prompts = warm_up_prompts(decoder, conversations, self.chat)
        params = self.params(temperature, 0)
        return or_out_of_memory(lambda: decoder.warm_up(prompts, params=params)) or decoder

    def point(
        self, decoder: Decoder | str, temperature: float, conversations: Sequence[Conversation]
    ) -> Point | str:
        """Decodes the conversations, or says why there was too little memory."""
        if isinstance(decoder, str):
            return decoder
        slots = decoder.slots or len(conversations)
        params = functools.partial(self.params, temperature)
        return or_out_of_memory(lambda: measure(decoder, conversations, self.chat, params, slots))

    def step_times(self, prompt: list[int], batch: int) -> dict[str, Any]:
        """Milliseconds of every step alone after a prompt, medians and spreads."""

        def times() -> dict[str, Any]:
            if self.drafter is None:
                plain = measure_verify(self.target, prompt, 1, batch)
                return {"plain": dataclasses.asdict(plain)}
            return dataclasses.asdict(measure_steps(self.target, self.drafter, prompt, batch))

        found = or_out_of_memory(times)
        if isinstance(found, str):
            return {"failed": found}
        return {
            step: {name: round(1e3 * seconds, 4) for name, seconds in spread.items()}
            for step, spread in found.items()
        }

    def timeline(
        self, mode: Mode, temperature: float, conversation: Conversation
    ) -> list[Span] | str:
        """When the steps of a short reply ran, or why memory was too small."""
        new_tokens = min(TRACED_TOKENS, self.max_new_tokens)
        short = dataclasses.replace(self, max_new_tokens=new_tokens)
        decoder = short.warmed(mode, temperature, 1, [conversation])
        if isinstance(decoder, str):
            return decoder
        prompt, params = self.chat(conversation, []), short.params(temperature, 0)
        engine = decoder.engine(1)

        def reply() -> None:
            engine.submit(prompt, params)
            while engine.unfinished:
                engine.step()
            engine.drain()  # so that no round is cut off

        return or_out_of_memory(lambda: trace(reply))

    def devices(self, mode: str) -> int:
        """How many pieces of hardware a mode uses: a peer one, and a CPU's devices are one."""
        if mode in PEERS:
            return 1
        used = set(self.target.sharding.device_set)
        if self.drafter is not None and mode in ("sync", "async"):
            used |= self.drafter.sharding.device_set
        return 1 if all(device.platform == "cpu" for device in used) else len(used)
