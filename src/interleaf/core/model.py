"""What a model is: its shape and its switches. Knows no file format and no tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum


class Module(StrEnum):
    """The linear layers of a decoder layer that a LoRA adapter may target."""

    Q = "q_proj"
    K = "k_proj"
    V = "v_proj"
    O = "o_proj"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


class LoraGroup(Enum):
    """Modules that read the same input, and so share one LoRA launch and one base product."""

    QKV = 0
    O = 1
    GATE_UP = 2
    DOWN = 3


GROUP_MODULES: dict[LoraGroup, tuple[Module, ...]] = {
    LoraGroup.QKV: (Module.Q, Module.K, Module.V),
    LoraGroup.O: (Module.O,),
    LoraGroup.GATE_UP: (Module.GATE, Module.UP),
    LoraGroup.DOWN: (Module.DOWN,),
}
"""The modules of a group, in the order of their columns in the group's fused output."""

MODULE_GROUP: dict[Module, LoraGroup] = {m: g for g, modules in GROUP_MODULES.items() for m in modules}


class RopeKind(StrEnum):
    """How rotary frequencies are scaled for contexts longer than those trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021; Llama 3.1's scaling as in its reference code).

    Attributes:
        theta: base of the geometric series of wavelengths.
        factor: by how much positions (LINEAR) or low frequencies (LLAMA3) are stretched.
        low_freq_factor, high_freq_factor, original_max_position: LLAMA3 only.
    """

    theta: float = 10_000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder of the Llama family; the families differ by the switches below.

    Attributes:
        family: "llama", "mistral", "qwen2" or "qwen3"; for messages only, behaviour hangs on the switches.
        head_dim: elements of one attention head; num_heads * head_dim need not equal hidden_size.
        intermediate_size: width of the MLP.
        max_position: longest context that the model was made for, in tokens.
        qkv_bias, o_bias, mlp_bias: whether those linear layers add a bias.
        qk_norm: RMS norm over head_dim on q and k before rotary (Qwen3).
        sliding_window: tokens a query may look back at, itself included; None = all.
        tie_embeddings: the output head is the embedding matrix.
        eos_token_ids: tokens that end a sequence unless `ignore_eos`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeSpec = field(default_factory=RopeSpec)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Columns of q: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of k, and of v: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def in_features(self, module: Module) -> int:
        """Width of a module's input, over all ranks."""
        match module:
            case Module.O:
                return self.q_size
            case Module.DOWN:
                return self.intermediate_size
            case _:
                return self.hidden_size

    def out_features(self, module: Module) -> int:
        """Width of a module's output, over all ranks."""
        match module:
            case Module.Q:
                return self.q_size
            case Module.K | Module.V:
                return self.kv_size
            case Module.GATE | Module.UP:
                return self.intermediate_size
            case _:
                return self.hidden_size
