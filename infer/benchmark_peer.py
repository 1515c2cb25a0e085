"""Other software on the same machine, weights and prompts: transformers + torch, greedy, alone.

`torch` is plain `generate`; `torch-lookup` drafts by looking the last tokens up in the prompt and
the reply (`prompt_lookup_num_tokens`), which needs no drafter. torch is a development dependency.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d3d_jax.errors import D3DError
from d3d_jax.infer.benchmark import Answer, Chat, Conversation, Point, utc_now

# Modes, and how many tokens each looks up at most.
PEERS: Mapping[str, int | None] = {"torch": None, "torch-lookup": 10}


def peer_machine(platform: str) -> dict[str, Any]:
    """Versions of torch and transformers, and what they run on.

    Args:
      platform: of the target's devices, which the peer must have, too.

    Raises:
      D3DError: one is not installed, or torch finds no such device.
    """
    try:
        found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        import torch
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError) as error:
        raise D3DError(
            f'--peer needs {error.name}, which is not installed: pip install -e ".[dev]"'
        ) from None
    if platform not in ("cpu", "gpu") or (platform == "gpu" and not torch.cuda.is_available()):
        raise D3DError(f"--peer compares on the same hardware, and torch finds no {platform}")
    device = "cpu" if platform == "cpu" else torch.cuda.get_device_name()
    return found | {"torch_device": device, "torch_threads": torch.get_num_threads()}


class _Clock:
    """What transformers calls a streamer: notes when tokens come, and how many."""

    def __init__(self) -> None:
        self.arrived: list[tuple[float, int]] = []

    def put(self, tokens: Any) -> None:
        """The prompt, then what each step said."""
        self.arrived.append((time.perf_counter(), tokens.numel()))

    def end(self) -> None:
        """Required of a streamer."""


class TorchPeer:
    """The target's weights in transformers.

    Args:
      folder: Hugging Face folder.
      dtype: name of a type that both have.
      limit: longest prompt and reply together.
      platform: "cpu" or "gpu".
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        limit: int,
        platform: str,
    ):
        import torch
        import transformers

        self._torch, self.limit, self.max_new_tokens = torch, limit, max_new_tokens
        self.device = {"cpu": "cpu", "gpu": "cuda"}[platform]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=getattr(torch, dtype)
        )
        self._model = model.to(self.device).eval()
        # Its own may penalise repetition or sample.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=list(stop_ids) or None, pad_token_id=0
        )
        for mode in PEERS:
            self._generate(mode, [1, 2, 3], 4)  # what is slow once is not timed

    def point(self, mode: str, conversations: Sequence[Conversation], chat: Chat) -> Point | str:
        """Decodes conversations one after another, or says why there was too little memory."""
        try:
            return self._point(mode, conversations, chat)
        except self._torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]:.300}"

    def _point(self, mode: str, conversations: Sequence[Conversation], chat: Chat) -> Point:
        point = Point(outside=None, host=None, compiled=None, peak_bytes=[None], began=utc_now())
        for number, conversation in enumerate(conversations):
            replies: list[list[int]] = []
            for turn in range(len(conversation.turns)):
                prompt = chat(conversation, replies)
                if len(prompt) >= self.limit:
                    point.left_out += len(conversation.turns) - turn
                    break
                answer = self._answer(mode, prompt)
                answer.conversation, answer.turn = number, turn
                replies.append(answer.token_ids)
                point.answers.append(answer)
                point.prefill += answer.first_seconds
                point.decode += answer.seconds - answer.first_seconds
                point.rounds += len(answer.rounds)
        return point

    def _answer(self, mode: str, prompt: list[int]) -> Answer:
        began = time.perf_counter()
        most = min(self.max_new_tokens, self.limit - len(prompt))
        tokens, arrived = self._generate(mode, prompt, most)
        (first, _), *rounds = arrived
        return Answer(
            0,
            0,
            prompt,
            tokens,
            [count for _, count in rounds],
            finish_reason="length" if len(tokens) == most else "stop",
            first_seconds=first - began,
            seconds=arrived[-1][0] - began,
        )

    def _generate(
        self, mode: str, prompt: list[int], most: int
    ) -> tuple[list[int], list[tuple[float, int]]]:
        """New tokens, and when how many of them came; the first of a lookup may be several."""
        clock, ids = _Clock(), self._torch.tensor([prompt], device=self.device)
        look_up = {} if PEERS[mode] is None else {"prompt_lookup_num_tokens": PEERS[mode]}
        with self._torch.no_grad():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=most,
                streamer=clock,
                **look_up,
            )
        return output[0, len(prompt) :].tolist(), clock.arrived[1:]
