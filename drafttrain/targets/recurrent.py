"""The scans of recurrent layers, recorded to make their states again for accepted positions, and our cache for transformers.

transformers' mixers call functions of their own file. `install` wraps these functions, once for each file. A wrapped function
does what it did, unless a pass of ours records (`recording`): other models of the process notice nothing.

The states after the accepted positions follow from the inputs of the scans; outputs are not computed. Positions are taken in
chunks. A position that must not count is an identity: decay 0 and beta 0, or step 0.

Shapes: B rows, N positions, h heads, g groups of heads, K key width, V value width, S state width, C channels.
Of the cache: P cached + new positions, D width, W + 1 columns of a convolution.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from drafttrain.model.kv_cache import KVCache
from drafttrain.model.recurrent_state import RecurrentStates


class _RecurrentLayer:
    """A layer's states where transformers before 5.20 look for them."""

    record_past = True

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        return {0: None}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        return {0: self._recorder.states.scan_state(self._number)}


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a layer writes for each position."""

    heads: int
    width: int  # of keys
    value_width: int


def extra_layers(config: Any) -> int:
    """Layers of the cache after those of the blocks: one per block that keeps index keys (sparse attention)."""
    return int(config.num_hidden_layers) if getattr(config, "index_topk", None) else 0


class SlotCache(Cache):
    """Our KV cache behind the interface of transformers' models: layers write scratch positions and read the whole row back.

    Latent attention caches "keys" of one width and "values" of another. Index keys are a layer of keys without values.
    Recurrent layers get copies of the committed states, which stay as they are until the cache commits positions.
    """

    def __init__(self, kv: KVCache, blocks: int, shapes: dict[int, RowShape], recorder: Recorder | None = None) -> None:
        """shapes: gets the row shape of every layer that writes. recorder: of a model with recurrent layers."""
        layers: list[Any] = [] if recorder is None else [_RecurrentLayer(recorder, number) for number in range(blocks)]
        super().__init__(layers=layers)
        self.kv, self.blocks, self.shapes, self.recorder = kv, blocks, shapes, recorder

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, h, N, D] -> [B, h, P, D]."""
        self.shapes[layer_idx] = RowShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.kv.append(layer_idx, key_states, value_states)
        return self.kv.read(layer_idx, key_states.shape[2])

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Index keys, [B, N, D] -> [B, P, D]."""
        keys_B1ND = indexer_key_states[:, None]
        return self.update(keys_B1ND, keys_B1ND[..., :0], self.blocks + layer_idx)[0][:, 0]

    # -- recurrent layers

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Then convolutions give all their inputs to `update_conv_state`, and write nothing themselves."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        assert self.recorder is not None
        return self.recorder.states.scan_state(layer_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """A convolution's new inputs, [B, C, N] -> those and the W before them, [B, C, W + N]."""
        assert self.recorder is not None and conv_kernel_size is not None
        self.recorder.layer = layer_idx
        return self.recorder.states.convolution_inputs(layer_idx, conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        assert self.recorder is not None
        self.recorder.states.finish(layer_idx, recurrent_states)
        return recurrent_states

    # -- lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.kv.longest + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.kv.layers

    @property
    def is_compileable(self) -> bool:
        return False


Limits = tuple[float, float]
NO_LIMITS: Limits = (0.0, float("inf"))
CHUNK = 64  # positions at once


class Recorder:
    """The states that a pass reads, and the layer that is running."""

    def __init__(self, states: RecurrentStates, limits: dict[int, Limits]) -> None:
        """limits: of the step sizes, by layer."""
        states.begin()
        self.states, self.limits, self.layer = states, limits, -1


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Within this context the recorder gets what the scans read and make. None: nothing is recorded."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def counted(count_B: Tensor, positions: int) -> Tensor:
    """[B, N] whether a position is among each row's first `count`."""
    return torch.arange(positions, device=count_B.device) < count_B[:, None]


@dataclass(frozen=True, slots=True)
class DeltaTape:
    state_BhKV: Tensor | None
    k_BNhK: Tensor
    v_BNhV: Tensor
    decay_BNhD: Tensor
    beta_BNh: Tensor
    normalise: bool

    def after(self, count_B: Tensor) -> Tensor:
        accepted_BN1 = counted(count_B, self.k_BNhK.shape[1])[..., None]
        k_BNhK, (B, _, h, V) = self.k_BNhK.float(), self.v_BNhV.shape
        if self.normalise:  # as the scan does, which has no name for its 1e-6
            k_BNhK = k_BNhK * torch.rsqrt((k_BNhK * k_BNhK).sum(-1, keepdim=True) + 1e-6)
        state_BhKV = k_BNhK.new_zeros(B, h, k_BNhK.shape[-1], V) if self.state_BhKV is None else self.state_BhKV
        decay_BNhD, beta_BNh = self.decay_BNhD * accepted_BN1[..., None], self.beta_BNh * accepted_BN1
        return delta_state(state_BhKV, k_BNhK, self.v_BNhV, decay_BNhD, beta_BNh)


@dataclass(frozen=True, slots=True)
class StateSpaceTape:
    state_BhVS: Tensor | None
    x_BNhV: Tensor
    step_BNh: Tensor
    rate_h: Tensor
    b_BNgS: Tensor

    def after(self, count_B: Tensor) -> Tensor:
        accepted_BN1 = counted(count_B, self.x_BNhV.shape[1])[..., None]
        B, _, h, V = self.x_BNhV.shape
        state_BhVS = self.step_BNh.new_zeros(B, h, V, self.b_BNgS.shape[-1]) if self.state_BhVS is None else self.state_BhVS
        return state_space_state(state_BhVS, self.x_BNhV, self.step_BNh * accepted_BN1, self.rate_h, self.b_BNgS)


@dataclass(frozen=True, slots=True)
class SelectiveTape:
    state_BCS: Tensor | None
    x_BCN: Tensor
    step_BCN: Tensor
    rate_CS: Tensor
    b_BSN: Tensor

    def after(self, count_B: Tensor) -> Tensor:
        accepted_B1N = counted(count_B, self.x_BCN.shape[2])[:, None]
        (B, C, _), S = self.x_BCN.shape, self.b_BSN.shape[1]
        state_BCS = self.x_BCN.new_zeros(B, C, S) if self.state_BCS is None else self.state_BCS
        return selective_state(state_BCS, self.x_BCN, self.step_BCN * accepted_B1N, self.rate_CS, self.b_BSN)


def _delta(scan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scan)
    def recorded(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        recorder, N = _recorder.get(), key.shape[1]
        if recorder is None:
            return scan(query, key, value, g=g, beta=beta, **kwargs)
        if N > 1:
            normalise = bool(kwargs.get("use_qk_l2norm_in_kernel"))
            decay_BNhD = g if g.ndim == key.ndim else g[..., None]
            tape = DeltaTape(kwargs.get("initial_state"), key, value, decay_BNhD, beta, normalise)
            recorder.states.record(recorder.layer, tape)
            if N < CHUNK and not key.is_cuda:  # the plain-torch scan pads to its chunk
                kwargs["chunk_size"] = N
        return scan(query, key, value, g=g, beta=beta, **kwargs)

    return recorded


def _state_space(scan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scan)
    def recorded(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **kwargs: Any) -> Any:
        recorder, N = _recorder.get(), x.shape[1]
        if recorder is not None and N > 1:
            step_BNh = steps(dt, kwargs.get("dt_bias"), kwargs.get("dt_softplus", False), kwargs.get("dt_limit", NO_LIMITS))
            tape = StateSpaceTape(kwargs.get("initial_states"), x, step_BNh, A, B)
            recorder.states.record(recorder.layer, tape)
            chunk_size = chunk_size if x.is_cuda else min(chunk_size, N)
        return scan(x, dt, A, B, C, chunk_size=chunk_size, **kwargs)

    return recorded


def _selective(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The scan has no argument for a state, and starts from zero. What an earlier state adds is added here."""

    @functools.wraps(scan)
    def recorded(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        if recorder is None:
            return scan(x, dt, A, B, C, **kwargs)
        bias = kwargs.get("delta_bias")
        step_BCN = steps(dt, None if bias is None else bias[:, None], kwargs.get("delta_softplus", False))
        state_BCS = recorder.states.scan_state(recorder.layer)
        recorder.states.record(recorder.layer, SelectiveTape(state_BCS, x, step_BCN, A, B))
        out_BCN, final_BCS = scan(x, dt, A, B, C, **kwargs)
        if state_BCS is None:
            return out_BCN, final_BCS
        sum_BCN = step_BCN.float().cumsum(-1)
        decayed_BCNS = (sum_BCN[..., None] * A[:, None]).exp() * state_BCS[:, :, None]
        added_BCN = torch.einsum("bcns,bsn->bcn", decayed_BCNS, C.float())
        gate = kwargs.get("z")
        added_BCN = added_BCN if gate is None else added_BCN * F.silu(gate)
        return out_BCN + added_BCN.to(out_BCN.dtype), final_BCS + decayed_BCNS[:, :, -1]

    return recorded


def _step(step: Callable[..., Any]) -> Callable[..., Any]:
    """One position. It writes into the state that it was given, a copy of ours.

    transformers' step ignores the limits of step sizes that its scan obeys. One position would differ from several.
    """

    @functools.wraps(step)
    def recorded(state: Tensor, x: Tensor, dt: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        if recorder is None:
            return step(state, x, dt, *args, **kwargs)
        limits = recorder.limits.get(recorder.layer, NO_LIMITS)
        if limits != NO_LIMITS:
            dt = steps(dt, kwargs.get("dt_bias"), kwargs.get("dt_softplus", False), limits)
            kwargs |= {"dt_bias": None, "dt_softplus": False}
        out = step(state, x, dt, *args, **kwargs)
        recorder.states.finish(recorder.layer, state)
        return out

    return recorded


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {  # by the function's name
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _state_space,
    "mamba2_selective_state_update": _step,
    "mamba_selective_scan": _selective,
    "mamba_selective_state_update": _step,
}


def install(model: Any) -> dict[int, Limits]:
    """Wrap the scans of the files that define the model's modules. Gives the limits of step sizes by layer."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = sys.modules[name]
        for function, wrapper in WRAPPERS.items():
            original = getattr(file, function, None)
            if original is not None and not hasattr(original, "recorded_by"):
                wrapped: Any = wrapper(original)
                wrapped.recorded_by = __name__
                setattr(file, function, wrapped)
    limited = [m for m in model.modules() if getattr(m, "time_step_limit", None) is not None and hasattr(m, "layer_idx")]
    return {m.layer_idx: (float(m.time_step_limit[0]), float(m.time_step_limit[1])) for m in limited}


def delta_state(state_BhKV: Tensor, k_BNhK: Tensor, v_BNhV: Tensor, decay_BNhD: Tensor, beta_BNh: Tensor) -> Tensor:
    """The state of the gated delta rule, S <- exp(decay) S + beta k (v - k' exp(decay) S)', in float32 (arXiv 2412.06464).

    Keys are normalised already. Key heads may serve several value heads each. D: 1, or K for a decay of each key channel
    (Kimi delta attention, arXiv 2510.26692).
    """
    state_BhKV, shared = state_BhKV.float(), v_BNhV.shape[2] // k_BNhK.shape[2]
    k_BhNK = k_BNhK.float().repeat_interleave(shared, 2).transpose(1, 2)
    v_BhNV, decay_BhND, beta_BhN = v_BNhV.float().transpose(1, 2), decay_BNhD.float().transpose(1, 2), beta_BNh.float().mT
    by_channel = decay_BhND.shape[-1] > 1
    positions = CHUNK // 4 if by_channel else CHUNK  # their pairs have each channel
    for start in range(0, k_BhNK.shape[2], positions):
        chunk = slice(start, start + positions)
        k, v, sum_BhND, beta = (
            k_BhNK[:, :, chunk],
            v_BhNV[:, :, chunk],
            decay_BhND[:, :, chunk].cumsum(-2),
            beta_BhN[..., chunk, None],
        )
        later_NN = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril(-1)
        ratio_BhNND = (sum_BhND[:, :, :, None] - sum_BhND[:, :, None]).masked_fill(~later_NN[..., None], -torch.inf).exp()
        if by_channel:
            product_BhNN = (k[:, :, :, None] * k[:, :, None] * ratio_BhNND).sum(-1)
        else:
            product_BhNN = (k @ k.mT) * ratio_BhNND[..., 0]
        delta_BhNV = beta * (v - (k * sum_BhND.exp()) @ state_BhKV)
        added_BhNV = torch.linalg.solve_triangular(beta * product_BhNN, delta_BhNV, upper=False, unitriangular=True)
        end_BhD = sum_BhND[:, :, -1]
        decay_to_end_BhND = (end_BhD[:, :, None] - sum_BhND).exp()
        state_BhKV = end_BhD.exp()[..., None] * state_BhKV + (k * decay_to_end_BhND).mT @ added_BhNV
    return state_BhKV


def state_space_state(state_BhVS: Tensor, x_BNhV: Tensor, step_BNh: Tensor, rate_h: Tensor, b_BNgS: Tensor) -> Tensor:
    """The state of Mamba-2, S <- exp(rate step) S + step x b', in float32 (arXiv 2405.21060, section 6)."""
    heads = x_BNhV.shape[2] // b_BNgS.shape[2]
    x_BhNV, step_BhN = x_BNhV.float().transpose(1, 2), step_BNh.float().mT
    b_BhNS = b_BNgS.float().transpose(1, 2).repeat_interleave(heads, 1)
    sum_BhN = (step_BhN * rate_h.float()[:, None]).cumsum(-1)
    weight_BhN = (sum_BhN[..., -1:] - sum_BhN).exp() * step_BhN
    return sum_BhN[..., -1].exp()[..., None, None] * state_BhVS.float() + (x_BhNV * weight_BhN[..., None]).mT @ b_BhNS


def selective_state(state_BCS: Tensor, x_BCN: Tensor, step_BCN: Tensor, rate_CS: Tensor, b_BSN: Tensor) -> Tensor:
    """The state of Mamba, S <- exp(rate step) S + step x b', in float32 (arXiv 2312.00752, section 3.2)."""
    state_BCS, rate_CS = state_BCS.float(), rate_CS.float()
    input_BCN, b_BNS = (x_BCN * step_BCN).float(), b_BSN.float().mT
    for start in range(0, x_BCN.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        sum_BCN = step_BCN[..., chunk].float().cumsum(-1)
        decay_to_end_BCNS = ((sum_BCN[..., -1:] - sum_BCN)[..., None] * rate_CS[:, None]).exp()
        added_BCS = torch.einsum("bcn,bcns,bns->bcs", input_BCN[..., chunk], decay_to_end_BCNS, b_BNS[:, chunk])
        state_BCS = (sum_BCN[..., -1:] * rate_CS).exp() * state_BCS + added_BCS
    return state_BCS


def steps(raw: Tensor, bias: Tensor | None, softplus: bool, limits: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """The step sizes that a state space model makes of its raw ones; the bias has the shape of the raw ones' other sizes."""
    step = raw if bias is None else raw + bias.to(raw.dtype)
    return (F.softplus(step) if softplus else step).clamp(*limits)
