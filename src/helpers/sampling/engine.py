"""Rollouts: many replies at once, one token of each a step, with all that a step reads and writes on the device.

The stock `generate` starts each of a token's several hundred kernels from Python, which takes a small model longer than to compute
them. Here a step (`decoder`, then `kernels.decode.draw` and `advance`) works on memory that stays where it is, so that on a GPU it
is captured as one CUDA graph and replayed, one launch a token. The host looks every `CHECK` tokens which replies have ended, and
has waiting prompts read into their rows; where none wait, on a CPU, the rows are given up.

The engine of a model is kept for the next rollout. Its graph is captured again where anything that it was captured from has
changed: any tensor's place, any module, hook or setting (`fingerprint`). That weights have changed in place does not matter.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from helpers.kernels import backend, decode
from helpers.models import adapters
from helpers.sampling.decoder import Decoder, cached_bytes

NO_GRAPH = "no CUDA graph of a decoding step"  # how that warning begins
CHECK = 8  # tokens between two looks at which replies have ended
MULTIPLE = 64  # of the cache's width, so that rollouts of like length share a graph
CACHE = 0.4  # of a GPU's memory, at most, for keys and values
SHARE = 8  # one row in so many must be free before waiting prompts are read, or rows given up
PLAIN = (bool, int, float, str)
Drawn = tuple[list[int], list[float]]  # a reply's tokens, end mark included, and their log-probabilities


@dataclass
class State:
    """Where each row is: `(B,)`, or `(B, limit + 1)` for `tokens` and `logprobs`."""

    token: torch.Tensor  # drawn last, not yet in the cache
    lengths: torch.Tensor  # tokens in the cache
    counts: torch.Tensor  # tokens of the reply
    ended: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def of(cls, rows: int, limit: int, device: torch.device) -> "State":
        """Rows without a prompt, which have ended."""
        token, lengths, counts = torch.zeros(3, rows, dtype=torch.long, device=device).unbind()
        ended = torch.ones(rows, dtype=torch.bool, device=device)
        tokens = torch.zeros(rows, limit + 1, dtype=torch.long, device=device)
        return cls(token, lengths, counts, ended, tokens, torch.zeros(rows, limit + 1, device=device))

    def all(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def take(self, rows: torch.Tensor) -> "State":
        return State(*(mine[rows] for mine in self.all()))

    def put(self, rows: torch.Tensor, other: "State") -> None:
        for mine, theirs in zip(self.all(), other.all(), strict=True):
            mine[rows] = theirs


def fingerprint(model: nn.Module) -> list[Any]:
    """What a captured step depends on besides numbers: modules, the places of their tensors, their hooks and plain settings."""
    found: list[Any] = [torch.get_float32_matmul_precision()]
    for module in model.modules():
        found += (type(module), id(module))
        for value in vars(module).values():
            if isinstance(value, dict):
                found += (mark(key, own) for key, own in value.items())
            else:
                found.append(mark("", value))
    return found


def mark(name: str, value: Any) -> Any:
    """A tensor's place, a plain value or what a list, tuple or set of them holds, or which object it is."""
    if isinstance(value, torch.Tensor):
        return name, value.data_ptr(), value.shape, value.dtype
    if isinstance(value, list | tuple | set) and all(isinstance(each, PLAIN) for each in value):
        return name, type(value), frozenset(value) if isinstance(value, set) else tuple(value)
    return name, value if isinstance(value, PLAIN) else id(value)


class Engine:
    """Replies of a model from `rows` rows, each of a prompt and up to `limit` tokens of reply, together at most `width`.

    What is kept is made outside of inference mode, whose tensors could not be written to in the next rollout outside of it.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        rows: int,
        width: int,
        limit: int,
        ends: Sequence[int],
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        base = adapters.base_of(model)
        self.model, device = ref(base), base.get_input_embeddings().weight.device
        self.rows, self.width, self.limit, self.ends = rows, width, limit, tuple(ends)
        self.settings = (temperature, top_k, top_p)
        self.marks = torch.tensor(self.ends, dtype=torch.long, device=device)
        self.seed, self.clock = torch.zeros(2, 1, dtype=torch.long, device=device).unbind()
        self.captures = backend.usable(self.seed)
        self.lean = not self.captures  # rows may be given up, and caches cut to what is in use
        self.graph: Any = None
        self.source: Any = None  # the fingerprint of what the graph was captured from

    def fits(self, rows: int, width: int, limit: int, ends: Sequence[int], settings: tuple) -> bool:
        """Whether this engine does such a rollout as it is."""
        same = (self.rows, self.limit, self.ends, self.settings) == (rows, limit, tuple(ends), settings)
        moved = self.model().get_input_embeddings().weight.device != self.seed.device
        return same and width <= self.width and not moved

    @torch.inference_mode(False)
    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Drawn]:
        """One reply a prompt, in order. The draws follow from the device's default random generator."""
        model = self.model()
        self._clear(model)
        waiting, replies = deque(enumerate(prompts)), [None] * len(prompts)
        while True:
            self._collect(replies)
            free = [row for row, owner in enumerate(self.owners) if owner is None]
            if len(free) == len(self.owners) and not waiting:
                return replies
            if len(free) * SHARE >= len(self.owners):
                if waiting:
                    self._admit(model, waiting, prompts, free)
                elif self.lean:
                    self._shrink()
            self._steps(model)

    def _clear(self, model: nn.Module) -> None:
        """Begin with no row in use."""
        self.seed.random_()
        self.clock.zero_()
        if self.graph is None or fingerprint(model) != self.source:
            self.graph = None
            self.decoder = Decoder(model, self.rows, self.width)
            self.state = State.of(self.rows, self.limit, self.seed.device)
        self.state.ended.fill_(True)
        self.owners: list[int | None] = [None] * self.rows  # which prompt each row replies to
        self.lengths, self.counts = [0] * self.rows, [0] * self.rows  # those of the rows in use that have not ended

    def _held(self) -> list[int]:
        return [row for row, owner in enumerate(self.owners) if owner is not None]

    def _collect(self, replies: list[Any]) -> None:
        """Take the replies that have ended from their rows."""
        held = self._held()
        ended = self.state.ended.tolist() if held else []
        done = [row for row in held if ended[row]]
        if not done:
            return
        rows = torch.tensor(done, device=self.seed.device)
        found = self.state.take(rows)
        self.state.lengths[rows] = 0
        for row, n, ids, logs in zip(
            done, found.counts.tolist(), found.tokens.tolist(), found.logprobs.tolist(), strict=True
        ):
            replies[self.owners[row]] = (ids[:n], logs[:n])
            self.owners[row] = None

    def _admit(self, model: nn.Module, waiting: deque, prompts: Sequence[Sequence[int]], free: list[int]) -> None:
        """Read waiting prompts into free rows and draw the first token of each reply."""
        for row in free[: len(waiting)]:
            self.owners[row] = waiting.popleft()[0]
            self.lengths[row], self.counts[row] = len(prompts[self.owners[row]]), 1
        taken = [row for row in free if self.owners[row] is not None]
        rows, device = torch.tensor(taken, device=self.seed.device), self.seed.device
        logits = self.decoder.read(model, [prompts[self.owners[row]] for row in taken], taken)
        begun = State.of(len(taken), self.limit, device)
        begun.ended.fill_(False)
        begun.lengths.copy_(torch.tensor([self.lengths[row] - 1 for row in taken]))  # the last token was read just now
        # a seed for each time, as draws from one seed must be of equally many rows
        self._draw(logits, begun, self.seed + 1 + self.clock)
        self.state.put(rows, begun)

    def _shrink(self) -> None:
        """Give up the rows that are not in use."""
        held = self._held()
        rows = torch.tensor(held, device=self.seed.device)
        self.state = self.state.take(rows)
        self.decoder.keep(rows)
        self.owners, self.lengths, self.counts = (
            [kept[row] for row in held] for kept in (self.owners, self.lengths, self.counts)
        )

    def _draw(self, logits: torch.Tensor, state: State, seed: torch.Tensor) -> None:
        drawn, logprob = decode.draw(logits, *self.settings, seed, self.clock)
        decode.advance(*state.all(), drawn, logprob, self.marks, self.clock)

    def _steps(self, model: nn.Module) -> None:
        """As many steps as until the next look."""
        held = self._held()
        longest = max(self.lengths[row] + self.counts[row] for row in held)  # tokens that the first step attends to
        steps = min(CHECK, self.limit - min(self.counts[row] for row in held))
        for n in range(steps):
            if self.graph is not None:
                self.graph.replay()
            elif self.captures:
                self._step_and_capture(model)
            else:
                self._step(model, longest + n if self.lean else self.width)
        for row in held:
            self.counts[row] += steps

    def _step(self, model: nn.Module, longest: int) -> None:
        """One token of each row: nothing but work on the device, always in the same places."""
        logits = self.decoder.step(model, self.state.token, self.state.lengths, longest)
        self._draw(logits, self.state, self.seed)

    def _step_and_capture(self, model: nn.Module) -> None:
        """Make one step as it is, which loads and tunes its kernels, and capture the next, which the capture does not run."""
        stream, current = side_stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._step(model, self.width)
            graph = torch.cuda.CUDAGraph()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            spare = generator.clone_state()  # a capture that fails leaves the generator unusable
            try:
                # the bare calls: the context manager torch.cuda.graph would also empty the allocator's cache each time
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._step(model, self.width)
                finally:
                    graph.capture_end()
                self.graph, self.source = graph, fingerprint(model)
            except Exception as error:
                self.captures = False
                generator.graphsafe_set_state(spare)
                reason = (str(error).splitlines() or [""])[0]
                warnings.warn(f"{NO_GRAPH}: {type(error).__name__}: {reason}", stacklevel=2)
        current.wait_stream(stream)


@cache
def side_stream() -> Any:
    """The stream to capture on; one for good, since libraries keep a workspace for each."""
    return torch.cuda.Stream()


ENGINES: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()  # the last of each model


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU; elsewhere there is no bound."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")


def engine_for(model: nn.Module, rows: int, width: int, limit: int, ends: Sequence[int], *settings: float) -> Engine:
    """The engine kept for the model, or a new one where that is another's size. `settings`: temperature, top_k, top_p.

    It has fewer rows where their cache would take more than `CACHE` of a GPU: the other prompts wait.
    """
    base = adapters.base_of(model)
    width = -(-width // MULTIPLE) * MULTIPLE
    rows = int(max(1, min(rows, CACHE * memory_of(base.device) // cached_bytes(base, width))))
    kept = ENGINES.get(base)
    if kept is None or not kept.fits(rows, width, limit, ends, settings):
        ENGINES.pop(base, None)
        kept = None  # its memory is free before the new one takes its own
        kept = ENGINES[base] = Engine(model, rows, width, limit, ends, *settings)
    return kept
