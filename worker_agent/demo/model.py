"""Two small decoders on CPU tensors: one dense, one whose experts are spread over the data-parallel ranks.

The laws of this file:

- Output depends on the request alone. Weights come from a seed and a name, so any rank can make any part of them;
  all numbers are float64 and expert results are added in the order of expert numbers, so that neither the batch nor
  the number of ranks can flip a greedy choice.
- A token without a slot (`NO_SLOT`) is neutral: it writes no cache, asks for no expert and changes nothing (case
  B18). Dummy batches and padding consist of such tokens.
- A MoE layer learns nobody's size by itself. Both of its all-to-alls are cut evenly, for as many tokens as the
  largest rank feeds, and that number comes from the forward context (`num_tokens_across_dp`), where the step's one
  exchange has put it.
"""

import ctypes
import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from .. import forward_context

VOCABULARY = 256
"""Tokens are bytes."""

NO_SLOT = -1
"""Slot of a neutral token."""

_DTYPE = torch.float64


class ModelConfig(msgspec.Struct, frozen=True):
    """Shape of a decoder. Two models with equal configs have equal weights."""

    seed: int = 0
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    mlp: int = 128
    experts: int = 8
    experts_per_token: int = 2
    context_tokens: int = 512
    """Longest sequence, prompt and output together."""
    slots: int = 8
    """Sequences that can have a KV cache at the same time."""


class Batch(NamedTuple):
    """A flat batch of N tokens: prefill chunks and decodes mixed. Tokens of one sequence stand together, in order
    of position.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]

    def padded(self, num_tokens: int) -> "Batch":
        """Return this batch with neutral tokens behind it, `num_tokens` in all."""
        missing = num_tokens - len(self.slots)
        return Batch(self.token_ids + [0] * missing, self.positions + [0] * missing, self.slots + [NO_SLOT] * missing)


class BatchInvalidError(ValueError):
    """A batch cannot be what the model was asked to run; nothing was computed, sent or written."""


class AllToAllError(RuntimeError):
    """Tokens could not be swapped with the other ranks; the group of this rank is unusable afterwards."""

    def __init__(self, rank: int, dp_size: int, detail: str) -> None:
        self.rank = rank
        self.dp_size = dp_size
        self.detail = detail
        super().__init__(rank, dp_size, detail)  # keeps the error picklable

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.dp_size} could not swap tokens with the other ranks: {self.detail}"


class AllToAll(Protocol):
    """How tokens travel between the ranks that share a model's experts."""

    rank: int
    dp_size: int

    def swap(self, send: Tensor) -> Tensor:
        """Send `send[r]` to rank r and return what came, index == sender; both `[dp_size, M, width]`.

        Every rank must call it equally often, with the same M and width.

        Raises:
            AllToAllError: A rank is gone, or did not come within the group's deadline.
        """
        ...


class LocalAllToAll:
    """The group of a single rank: what it sends is what it gets."""

    rank = 0
    dp_size = 1

    def swap(self, send: Tensor) -> Tensor:
        """Return `send`."""
        return send


class GlooAllToAll:
    """`all_to_all_single` in a torch process group of the engine; the group's own timeout is the deadline."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.dp_size = dist.get_world_size(group)
        self._group = group

    def swap(self, send: Tensor) -> Tensor:
        """Swap with all ranks of the group; see `AllToAll.swap`."""
        received = torch.empty_like(send)
        try:
            dist.all_to_all_single(received, send, group=self._group)
        except RuntimeError as error:  # gloo has no narrower type and does not name the lost rank
            raise AllToAllError(self.rank, self.dp_size, str(error)) from error
        return received


def owner_of(expert: int, config: ModelConfig, dp_size: int) -> int:
    """Return the rank that holds an expert: equal contiguous shares, also where dp_size does not divide the experts."""
    return expert * dp_size // config.experts


class DenseDecoder:
    """Embedding, `layers` of causal attention and MLP, logits. Holds the KV caches of `slots` sequences."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.context_tokens = config.context_tokens
        self.slots = config.slots
        hidden = config.hidden
        self._embedding = self._weight("embedding", VOCABULARY, hidden) * hidden**0.5
        self._position = self._weight("position", config.context_tokens, hidden) * hidden**0.5
        self._qkv = [self._weight(f"{layer}/qkv", hidden, 3 * hidden) for layer in range(config.layers)]
        self._out = [self._weight(f"{layer}/out", hidden, hidden) for layer in range(config.layers)]
        self._unembedding = self._weight("unembedding", hidden, VOCABULARY)
        cache = (config.layers, config.slots, config.context_tokens, config.heads, hidden // config.heads)
        self._keys = torch.zeros(cache, dtype=_DTYPE)
        self._values = torch.zeros(cache, dtype=_DTYPE)
        self._load_feed_forward()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a flat batch, `[N, VOCABULARY]`; real tokens are put into their slots' caches.

        Raises:
            BatchInvalidError: A token, position or slot is out of range. Nothing was changed.
        """
        self._check(batch)
        slots = torch.tensor(batch.slots, dtype=torch.long)
        positions = torch.tensor(batch.positions, dtype=torch.long)
        x = self._embedding[torch.tensor(batch.token_ids, dtype=torch.long)] + self._position[positions]
        for layer in range(self.config.layers):
            x = x + self._attend(layer, _normed(x), slots, positions, batch)
            x = x + self._feed_forward(layer, _normed(x), slots != NO_SLOT)
        return _normed(x) @ self._unembedding

    def next_tokens(self, batch: Batch) -> list[int]:
        """Return the greedy choice after each token of the batch, length N; only that after a sequence's last token
        is of use.
        """
        choices: list[int] = self.forward(batch).argmax(dim=-1).tolist()
        return choices

    def state_digest(self) -> str:
        """Return a hash of everything that a forward pass can leave behind."""
        digest = hashlib.sha256()
        for cache in (self._keys, self._values):
            digest.update(ctypes.string_at(cache.data_ptr(), cache.numel() * cache.element_size()))
        return digest.hexdigest()

    def _check(self, batch: Batch) -> None:
        if not batch.slots:
            raise BatchInvalidError("a batch has at least one token; an idle rank feeds neutral ones")
        for token_id, position, slot in zip(*batch, strict=True):
            if not (
                0 <= token_id < VOCABULARY and 0 <= position < self.context_tokens and NO_SLOT <= slot < self.slots
            ):
                raise BatchInvalidError(
                    f"token {token_id} at position {position} in slot {slot}: must be below {VOCABULARY}, "
                    f"{self.context_tokens} and {self.slots}"
                )

    def _weight(self, name: str, rows: int, columns: int) -> Tensor:
        """A weight of unit gain, the same for every rank that asks for this name."""
        seed = hashlib.sha256(f"{self.config.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7]))
        unit = torch.randn(rows, columns, generator=generator, dtype=_DTYPE)
        return unit * float(rows**-0.5)

    def _attend(self, layer: int, x: Tensor, slots: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """Causal attention of each token to its own sequence's cache; a neutral token sees only itself."""
        heads, width = self.config.heads, self.config.hidden // self.config.heads
        queries, keys, values = (x @ self._qkv[layer]).view(-1, 3, heads, width).unbind(1)
        real = slots != NO_SLOT
        self._keys[layer, slots[real], positions[real]] = keys[real]
        self._values[layer, slots[real], positions[real]] = values[real]
        mixed = values.clone()
        for start, end in _segments(batch):
            slot, seen = batch.slots[start], batch.positions[end - 1] + 1
            scores = torch.einsum("qhd,khd->hqk", queries[start:end], self._keys[layer, slot, :seen]) * width**-0.5
            future = torch.arange(seen) > positions[start:end, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
            mixed[start:end] = torch.einsum("hqk,khd->qhd", weights, self._values[layer, slot, :seen])
        return mixed.reshape(-1, self.config.hidden) @ self._out[layer]

    def _load_feed_forward(self) -> None:
        self._mlps = [self._mlp(f"{layer}/mlp") for layer in range(self.config.layers)]

    def _feed_forward(self, layer: int, x: Tensor, real: Tensor) -> Tensor:
        """What a layer adds after attention, `[N, hidden]`; `real` tells the neutral tokens."""
        return self._mlps[layer](x)

    def _mlp(self, name: str) -> "_Mlp":
        up = self._weight(f"{name}/up", self.config.hidden, self.config.mlp)
        down = self._weight(f"{name}/down", self.config.mlp, self.config.hidden)
        return _Mlp(up, down)


class MoeDecoder(DenseDecoder):
    """The same decoder with `experts` MLPs per layer, of which each token asks `experts_per_token`.

    This rank holds only its share of the experts; `join` tells which. A forward pass with more than one rank is a
    group act: every rank runs it, with the numbers of tokens that the forward context tells.
    """

    def __init__(self, config: ModelConfig, all_to_all: AllToAll) -> None:
        self._routers: list[Tensor] = []
        self._experts: dict[tuple[int, int], _Mlp] = {}
        super().__init__(config)
        self.join(all_to_all)

    def join(self, all_to_all: AllToAll) -> None:
        """Let tokens travel this way from now on, and hold this rank's share of the experts."""
        self._all_to_all = all_to_all
        self._owners = [owner_of(e, self.config, all_to_all.dp_size) for e in range(self.config.experts)]
        mine = [expert for expert, owner in enumerate(self._owners) if owner == all_to_all.rank]
        wanted = {(layer, expert) for layer in range(self.config.layers) for expert in mine}
        self._experts = {
            key: self._experts.get(key) or self._mlp(f"{key[0]}/expert/{key[1]}") for key in sorted(wanted)
        }

    def _load_feed_forward(self) -> None:
        config = self.config
        self._routers = [self._weight(f"{n}/router", config.hidden, config.experts) for n in range(config.layers)]

    def _check(self, batch: Batch) -> None:
        super()._check(batch)
        # Feeding another number than the group was told breaks the others' all-to-all, so it must end here.
        group, told = self._all_to_all, self._num_tokens_across_dp(batch)
        if len(told) != group.dp_size or told[group.rank] != len(batch.slots):
            raise BatchInvalidError(
                f"rank {group.rank} of {group.dp_size} feeds {len(batch.slots)} tokens, but the forward context "
                f"says {told}"
            )

    def _num_tokens_across_dp(self, batch: Batch) -> tuple[int, ...]:
        """Tokens of every rank in this pass; a single rank needs no context to know its own."""
        if self._all_to_all.dp_size == 1:
            return (len(batch.slots),)
        return forward_context.current().num_tokens_across_dp

    def _feed_forward(self, layer: int, x: Tensor, real: Tensor) -> Tensor:
        choices, weights = self._route(layer, x)
        sent = self._dispatch(x, choices, real)
        answers = self._run_experts(layer, self._all_to_all.swap(sent))
        return self._combine(self._all_to_all.swap(answers), choices, weights)

    def _route(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token in the order of their numbers, and their weights; both `[N, experts_per_token]`."""
        scores = x @ self._routers[layer]
        choices = scores.topk(self.config.experts_per_token, dim=-1).indices.sort(dim=-1).values
        return choices, scores.gather(1, choices).softmax(dim=-1)

    def _dispatch(self, x: Tensor, choices: Tensor, real: Tensor) -> Tensor:
        """Token i in row i for every rank that holds one of its experts: `[dp_size, M, hidden + experts_per_token]`.

        The last columns are the experts asked for, -1 where it is none of that rank's; a row that asks for none is
        empty.
        """
        dp_size = self._all_to_all.dp_size
        largest = len(x) if dp_size == 1 else max(forward_context.current().num_tokens_across_dp)
        sent = torch.zeros(dp_size, largest, self.config.hidden + self.config.experts_per_token, dtype=_DTYPE)
        asked = sent[:, :, self.config.hidden :]
        asked.fill_(-1)
        owners = torch.tensor(self._owners)[choices]
        for rank in range(dp_size):
            here = (owners == rank) & real[:, None]
            rows = here.any(dim=1).nonzero().squeeze(1)
            sent[rank, rows, : self.config.hidden] = x[rows]
            asked[rank, rows] = choices[rows].to(_DTYPE).masked_fill(~here[rows], -1)
        return sent

    def _run_experts(self, layer: int, received: Tensor) -> Tensor:
        """Answers of this rank's experts, in the rows and columns of the questions: `[dp_size, M, experts_per_token
        * hidden]`.
        """
        dp_size, largest, _ = received.shape
        flat = received.flatten(0, 1)
        tokens, asked = flat[:, : self.config.hidden], flat[:, self.config.hidden :]
        answers = torch.zeros(dp_size * largest, self.config.experts_per_token, self.config.hidden, dtype=_DTYPE)
        for (of_layer, expert), mlp in self._experts.items():
            if of_layer == layer:
                rows, columns = (asked == expert).nonzero(as_tuple=True)
                if len(rows):
                    answers[rows, columns] = mlp(tokens[rows])
        return answers.view(dp_size, largest, -1)

    def _combine(self, answers: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the answers to this rank's tokens, `[N, hidden]`, added in the order of expert numbers."""
        owners = torch.tensor(self._owners)[choices]
        rows = torch.arange(len(choices))
        total = torch.zeros(len(choices), self.config.hidden, dtype=_DTYPE)
        for k, answer in enumerate(answers.view(*answers.shape[:2], -1, self.config.hidden).unbind(2)):
            total += weights[:, k, None] * answer[owners[:, k], rows]
        return total


class _Mlp(NamedTuple):
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.nn.functional.silu(x @ self.up) @ self.down
        return result


def _normed(x: Tensor) -> Tensor:
    scale: Tensor = (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
    return x * scale


def _segments(batch: Batch) -> Iterator[tuple[int, int]]:
    """Start and end of each sequence's tokens in the batch; neutral tokens belong to none."""
    start = 0
    for index in range(1, len(batch.slots) + 1):
        if index == len(batch.slots) or batch.slots[index] != batch.slots[start]:
            if batch.slots[start] != NO_SLOT:
                yield start, index
            start = index
