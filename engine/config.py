"""A decoder's architecture in numbers: `ModelConfig` and the configs of its parts.

Every difference between the supported model families is a field here with a neutral default. The
modules of `models/` set the fields from a `config.json`; the only decoder, `models/decoder.py`,
reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

__all__ = [
    "AltUpConfig",
    "GatedDeltaConfig",
    "LayerSizes",
    "LightningConfig",
    "Mamba2Config",
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "PerLayerInputConfig",
    "RopeConfig",
    "ShortConvConfig",
]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its angles, and how they scale beyond the training length.

    Attributes
    ----------
    theta : float
        Base of the geometric series of wavelengths.
    rotary_dim : int
        Number of leading head features to rotate (even; the rest pass through).
    scaling : str
        "default", "linear", "dynamic" (NTK), "yarn", "llama3", "longrope", "proportional", or
        "none" (no rotation at any position).
    factor : float
        Context extension factor; used by every scaling except "default".
    original_max_position : int
        Training length in tokens; 0 if the scaling does not use it.
    low_freq_factor, high_freq_factor : float
        Bounds of the llama3 ramp.
    beta_fast, beta_slow : float
        Bounds of the yarn ramp, in rotations over the training length.
    attention_factor : float or None
        Scale of cos and sin; None computes it by the paper's formula.
    long_attention_factor : float or None
        Longrope: the same above the training length; None is `attention_factor`.
    mscale, mscale_all_dim : float
        YaRN's two attention-scale factors; 0 if not given. Latent attention reads the second with
        every scaling.
    is_reversed : bool
        Whether to rotate backwards (nanochat).
    truncate : bool
        Whether to round the bounds of the yarn ramp to whole dimensions.
    short_factor, long_factor : tuple of float
        Longrope's divisor of each frequency, below and above the training length.
    q_scale_beta, q_scale_length, q_scale_start : float, int, int
        Rotated queries at position p are multiplied by 1 + beta ln(1 + floor((p + start) /
        length)), length in tokens; beta 0 disables it (Ministral 3, Llama 4).
    num_frequencies : int
        Proportional rope: number of leading pairs to rotate; the others have frequency 0.
    """

    theta: float = 10000.0
    rotary_dim: int = 0
    scaling: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    long_attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    is_reversed: bool = False
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    q_scale_beta: float = 0.0
    q_scale_length: int = 0
    q_scale_start: int = 0

    @property
    def has_two_ropes(self) -> bool:
        """Tell whether sequences beyond the training length have frequencies of their own."""
        factor = self.long_attention_factor
        is_scaled = factor is not None and factor != self.attention_factor
        return self.scaling == "longrope" and (is_scaled or self.short_factor != self.long_factor)

    num_frequencies: int = 0


@dataclass(frozen=True)
class LayerSizes:
    """Fields of `ModelConfig` whose values differ between the layers of a model.

    Attributes
    ----------
    num_kv_heads, head_dim, intermediate_size : int
    values_from_keys, sinks : bool
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    values_from_keys: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class PerLayerInputConfig:
    """A second embedding, which gives each layer its own P features of every token.

    Attributes
    ----------
    size : int
        P.
    vocab_size : int
        Rows of its table. Tokens beyond it read row 0.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True)
class AltUpConfig:
    """Alternating updates: the residual stream is several streams, of which layers compute one.

    Attributes
    ----------
    num_streams : int
        Number of streams; the layers compute the first.
    scales_output : bool
        Whether the layer's output is scaled per feature before the per-layer input.
    laurel_rank : int
        Rank of the low-rank branch beside attention.
    """

    num_streams: int
    scales_output: bool
    laurel_rank: int


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts that replaces the MLP in some layers.

    Attributes
    ----------
    num_experts, top_k, intermediate_size : int
        E, experts per token (at most, with `layer_top_k`), and features per expert.
    sparse_layers : tuple of bool
        Per layer: True for experts, False for an MLP.
    layer_top_k : tuple of int
        Per layer: experts per token; () is `top_k` in all layers.
    score : str
        Scoring function of the router logits: "softmax" (over all experts), "sigmoid" or
        "sparsemixer". See `kernels.moe_route`.
    jitter : float
        Parameter of "sparsemixer".
    renormalize : bool
        Whether to divide the weights of a token's experts by their sum.
    scale : float
        Factor on the weights of a token's experts.
    num_groups, top_groups : int
        Group-limited routing: a token's experts come from its `top_groups` best of `num_groups`
        groups.
    sums_groups : bool
        Whether groups rank by the sum of their two best scores, which a correction implies, and not
        by the best one.
    correction : bool
        Whether a bias per expert is added to the scores for the choice of experts.
    scales_input : bool
        Whether a token's weight multiplies the input of its only expert instead of the output
        (Llama 4).
    shared_size : int
        Features of the shared expert, which processes every token; 0 if there is none.
    shared_scale : float
        Factor on the shared expert's output.
    shared_gate : bool
        Whether the shared expert's output is scaled by a sigmoid gate computed from the token.
    router_bias, expert_bias, shared_bias : bool
        Whether the router, the experts and the shared expert have biases.
    activation : str
        Activation of the experts: "swiglu", "geglu" (tanh), gpt-oss's "swiglu_clamped", or, without
        a gate, "relu2" (the square of ReLU).
    alpha, limit : float
        Parameters of "swiglu_clamped".
    beside_mlp : bool
        Whether sparse layers have an MLP too, beside the experts: each branch has norms of its own,
        and the router reads the residual stream through a norm and scales every expert's weight.
    latent_size : int
        Features of the experts' input and output, which are projected from and to the token's; 0
        if they are the token's (Nemotron 3).
    latent_bias : bool
        Whether these projections have biases.
    num_identity : int
        Zero-compute experts, which return their input: the router chooses among them too, as
        experts E and following (LongCat).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    layer_top_k: tuple[int, ...] = ()
    score: str = "softmax"
    jitter: float = 0.0
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    sums_groups: bool = False
    correction: bool = False
    scales_input: bool = False
    shared_size: int = 0
    shared_scale: float = 1.0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    shared_bias: bool = False
    activation: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
    beside_mlp: bool = False
    latent_size: int = 0
    latent_bias: bool = False
    num_identity: int = 0

    @property
    def is_gated(self) -> bool:
        """Whether an expert's first matrix includes a gate."""
        return self.activation != "relu2"

    @property
    def num_choices(self) -> int:
        """Number of experts that the router chooses from."""
        return self.num_experts + self.num_identity


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated delta net: linear attention that replaces attention in layers of kind "gated_delta".

    Kimi delta attention is a gated delta net whose decays belong to key channels.

    Attributes
    ----------
    num_key_heads, num_value_heads : int
        Hk and Hv; key head j serves the Hv / Hk value heads from j * Hv / Hk on.
    key_head_dim, value_head_dim : int
        dk and dv.
    conv_size : int
        Taps of the causal convolution over q, k and v.
    beta_scale : float
        Largest update strength: 1, or 2 to allow negative eigenvalues of the transition.
    norm_eps : float
        Epsilon of the output norm; 0 means `rms_norm_eps`.
    norm_activation : str
        Activation of the output's gate: "silu" or "sigmoid".
    channel_gate : bool
        Whether each value head has a decay per key channel instead of one.
    gate_rank : int
        Features of two latents from which the decays and the output's gate are projected; 0
        projects both directly.
    gate_bound : float
        Lower bound of a decay's logarithm; 0 for none.

    References
    ----------
    Yang et al.: Gated Delta Networks, arXiv:2412.06464; Kimi Team: Kimi Linear, arXiv:2510.26692.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int = 4
    beta_scale: float = 1.0
    norm_eps: float = 0.0
    norm_activation: str = "silu"
    channel_gate: bool = False
    gate_rank: int = 0
    gate_bound: float = 0.0

    @property
    def key_dim(self) -> int:
        """Features of all keys, Hk * dk."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Features of all values, Hv * dv."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def decay_dim(self) -> int:
        """Number of a token's decays."""
        return self.num_value_heads * (self.key_head_dim if self.channel_gate else 1)

    @property
    def in_dim(self) -> int:
        """Rows of the input projection: q, k, v, the output's gate or a latent, decays, and b."""
        gates = 2 * self.gate_rank or self.value_dim + self.decay_dim
        return self.conv_dim + gates + self.num_value_heads


@dataclass(frozen=True)
class LightningConfig:
    """Lightning attention, which replaces attention in layers of kind "lightning" (Ling 2.5).

    Attributes
    ----------
    num_heads, head_dim : int
        H, and D of keys and values alike.
    num_groups : int
        Groups of heads; the output norm is over all features of a group.
    qk_norm : bool
        Whether queries and keys are normalised per head.
    slopes : tuple of float
        Per head: decay rate of its states, without the layer's factor.
    layer_factors : tuple of float
        Per layer: factor on the slopes.

    References
    ----------
    Qin et al.: Lightning Attention-2, arXiv:2401.04658.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    qk_norm: bool
    slopes: tuple[float, ...]
    layer_factors: tuple[float, ...]

    @property
    def inner_dim(self) -> int:
        """Features of all heads, H * D."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class ShortConvConfig:
    """Gated short convolution that replaces attention in layers of kind "short_conv" (LFM2).

    Attributes
    ----------
    num_channels : int
        C, channels of the convolution and of its two gates.
    conv_size : int
        Taps of the causal convolution.
    bias : bool
        Whether the projections and the convolution have biases.
    """

    num_channels: int
    conv_size: int = 3
    bias: bool = False

    @property
    def convolutions(self) -> tuple[int, ...]:
        """Taps of the convolutions that compute it, at most 4 each.

        Beyond 4 taps: a delay by 3 inputs, the convolution of the inputs before the newest 3, which
        reads the delayed ones, and that of the newest 3.
        """
        return (self.conv_size,) if self.conv_size <= 4 else (4, self.conv_size - 3, 3)

    @property
    def state_rows(self) -> int:
        """Inputs that a sequence keeps, one fewer than the taps of each convolution."""
        return sum(taps - 1 for taps in self.convolutions)


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2's selective state space, which replaces attention in layers of kind "mamba2".

    Attributes
    ----------
    num_heads, head_dim : int
        H and P.
    num_groups, state_size : int
        G and N; each group's B and C serve H / G heads.
    conv_size : int
        Taps of the causal convolution over x, B and C.
    conv_bias, proj_bias, out_bias : bool
        Whether the convolution and the input and output projections have biases.
    norm : str
        Norm of the output: "gate_first" (of the gated output), "norm_first" (then gated) or "none"
        (gated only).
    dt_min, dt_max : float
        Bounds of the time step.

    References
    ----------
    Dao, Gu: Transformers are SSMs, arXiv:2405.21060.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_size: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    norm: str = "gate_first"
    dt_min: float = 0.0
    dt_max: float = math.inf

    @property
    def inner_dim(self) -> int:
        """Features of all heads, H * P."""
        return self.num_heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Features of B, and of C: G * N."""
        return self.num_groups * self.state_size

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_dim + 2 * self.group_dim


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: keys and values of all heads are projected from one latent.

    Attributes
    ----------
    q_rank : int
        Features of the queries' latent; 0 projects queries directly.
    kv_rank : int
        L, features of the latent of keys and values, which is cached.
    nope_dim, rope_dim : int
        Features of a head's query and key that are not rotated, and R, those that are. The rotated
        key is common to all heads, and cached.
    v_dim : int
        Features of a head's value.
    norm_eps : float
        Epsilon of the latents' norms.
    head_gate : bool
        Whether each head's output is multiplied by the sigmoid of a gate, before the output
        projection.

    References
    ----------
    DeepSeek-AI: DeepSeek-V2, arXiv:2405.04434.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float = 1e-6
    head_gate: bool = False

    @property
    def cache_dim(self) -> int:
        """Values cached of a token, L + R."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder-only transformer.

    Attributes
    ----------
    model_type : str
        Hugging Face name of the family ("llama", "qwen3", ...).
    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size : int
        V, N, number of layers, H, K, D and F.
    max_position_embeddings : int
        Maximum sequence length in tokens.
    rms_norm_eps : float
        Epsilon added to the mean square (or variance) before the square root.
    layer_norm, norm_weight, norm_bias : bool
        Whether norms subtract the mean first (LayerNorm), whether checkpoints have their weights
        (otherwise ones), and whether they add a bias.
    embed_norm : bool
        Whether the embedding is normalised.
    learned_positions : bool
        Whether a learned embedding of its position, of which there are `max_position_embeddings`,
        is added to each token's (GPT-2).
    rope : RopeConfig
        Rope of every layer or, with `rope_local`, of the full-attention layers.
    rope_local : RopeConfig or None
        Rope of the sliding-window layers (Gemma 3).
    rope_thetas : tuple of float
        Per layer: base of `rope`, 0 for none; () is `rope`'s own in all layers (Granite SWA).
    interleaved_rope : bool
        Whether the checkpoint, unless a .gguf file, stores the rotated rows of q and k interleaved.
    layer_windows : tuple of int
        Per layer: sliding window in keys, including the query's own; 0 is full attention.
    layer_chunks : tuple of int
        Per layer: keys per chunk of chunked attention (Llama 4), where a query sees only the keys
        of its own chunk; 0 is no chunk, () is none in all layers.
    rope_layers : tuple of bool
        Per layer: whether to rotate q and k; () rotates in all layers.
    no_rope : RopeConfig
        Factors on queries in layers that do not rotate them.
    layer_kinds : tuple of str
        Per layer: "attention" or the kind that replaces it: "gated_delta", "lightning",
        "short_conv", "mamba2" or "mla"; "attention_mamba2" is both side by side, () is all
        attention. "shortcut" is two of "mla", each followed by an MLP, with experts beside the
        first MLP whose output is added at the end of the layer (LongCat). With `single_branch`,
        also "mlp" and "moe".
    gated_delta : GatedDeltaConfig or None
        Sizes of the "gated_delta" layers.
    lightning : LightningConfig or None
        Sizes of the "lightning" layers.
    short_conv : ShortConvConfig or None
        Sizes of the "short_conv" layers.
    mamba2 : Mamba2Config or None
        Sizes of the "mamba2" layers.
    mla : MlaConfig or None
        Sizes of the "mla" and "shortcut" layers; `head_dim` is then the width of their queries and
        keys.
    tie_word_embeddings, qkv_bias, o_bias, mlp_bias, lm_head_bias, qk_norm, pre_norms, post_norms
        Whether each of these exists (bool): output embedding tied to the input embedding, biases,
        q and k norms, norms before and after attention and MLP.
    inner_norms : bool
        Whether the inputs of attention's output projection and of the MLP's down projection are
        normalised (BitNet).
    norms_by_kind : bool
        Whether only layers with attention have the norms after, and only the others those before
        (OLMo hybrid).
    whole_qk_norm : bool
        Whether q and k are normalised over all heads together instead of per head (OLMo).
    own_qk_norms : bool
        Whether every head has a weight of QK-norm of its own; only with `layer_norm` (Command R+).
    qk_norm_after_rope : bool
        Whether q and k are rotated first, then normalised (Hunyuan).
    bare_qk_norm : bool
        Whether q and k norms have no weight, and only layers with rope have them (Llama 4).
    single_branch : bool
        Whether a layer is one norm and one branch: attention, what replaces it, or an MLP (Nemotron
        H). Otherwise an MLP or experts follow in the same layer.
    qk_norm_eps : float
        Epsilon of the norms of q and k; 0 means `rms_norm_eps`.
    parallel : bool
        Whether attention and MLP read the same normalised input and their outputs are summed
        (parallel block).
    parallel_norms : bool
        Whether each branch of a parallel block has a norm of its own (GPT-NeoX).
    gated_mlp : bool
        True: the MLP is down(act(gate x) * up x); False: down(act(up x)).
    v_head_dim : int
        Features of a head's values; 0 means D. Pages and `qkv` have D, whose others are 0.
    v_scale : float
        Factor on the values (MiMo-V2).
    sinks : bool
        Whether every head has an attention sink: a softmax logit without a value (gpt-oss).
    attn_gate : str
        "sigmoid" multiplies the output of attention by sigmoid(g) before its projection; a row of
        `qkv` per feature of the heads computes g. "sigmoid_heads" has a g per head, "" no gate.
    activation : str
        Activation of the gate (of up, without a gate): "silu", "gelu" (erf), "gelu_tanh", "relu2"
        (the square of ReLU) or, without a gate, "relu" or "xielu".
    moe : MoeConfig or None
        Mixture of experts; None if all layers are dense.
    num_extra_layers : int
        Multi-token-prediction layers stored after the last layer; the decoder does not read them.
    norm_weight_offset : float
        Added to every norm's weight (Gemma: 1).
    embed_scale : float
        Factor on the embedding (Gemma: sqrt(N)).
    rounds_embed_scale : bool
        Whether to round `embed_scale` to the weights' dtype first (Gemma).
    branch_scale : float
        Factor on the attention and MLP outputs before the residual addition (Granite).
    weight_factors : tuple of (str, float, float)
        Kind of a weight ("o"), or a part of its rows ("gate_up.gate"), and factors on the
        checkpoint's weight and on its bias (Falcon-H1).
    attn_scale : float
        Factor on q·k; 0 means 1/sqrt(D).
    attn_scale_by_layer : bool
        Whether the i-th layer, counted from 1, divides that factor by i (GPT-2).
    clip_qkv : float
        Limit of the absolute values of q, k and v; 0 is none (OLMo).
    attn_softcap, final_softcap : float
        c in c·tanh(x/c), applied to the attention scores and to the logits; 0 disables it.
    logits_scale : float
        Factor on the logits.
    layer_sizes : tuple of LayerSizes
        Per layer: the values of the fields in `LayerSizes`; () if all layers are alike. The
        model's own fields then hold the largest values. See `at`.
    kv_sources : tuple of int
        Per layer: the layer whose keys and values it reads, itself or an earlier one; () if every
        layer has its own.
    values_from_keys : bool
        Whether v is the key projection's output, before k's norm and rope.
    v_norm : bool
        Whether v is normalised per head, without a weight.
    layer_scale : bool
        Whether every layer ends by scaling the residual stream by a learned number.
    per_layer_input : PerLayerInputConfig or None
        Embedding that every layer reads.
    altup : AltUpConfig or None
        Several residual streams.
    activation_sparsity : tuple of float
        Per layer: the share of the gate's features to set to 0, estimated from a normal
        distribution; () for none.
    bos_token_id, pad_token_id : int or None
    eos_token_ids : tuple of int
        Tokens that end a sequence.
    dtype : str
        Checkpoint dtype: "float32", "float16" or "bfloat16".
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    layer_norm: bool = False
    norm_weight: bool = True
    embed_norm: bool = False
    norm_bias: bool = False
    learned_positions: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_local: RopeConfig | None = None
    rope_thetas: tuple[float, ...] = ()
    interleaved_rope: bool = False
    layer_windows: tuple[int, ...] = ()
    layer_chunks: tuple[int, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    no_rope: RopeConfig = RopeConfig(scaling="none")
    layer_kinds: tuple[str, ...] = ()
    gated_delta: GatedDeltaConfig | None = None
    lightning: LightningConfig | None = None
    short_conv: ShortConvConfig | None = None
    mamba2: Mamba2Config | None = None
    mla: MlaConfig | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    own_qk_norms: bool = False
    qk_norm_after_rope: bool = False
    qk_norm_eps: float = 0.0
    bare_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    inner_norms: bool = False
    norms_by_kind: bool = False
    single_branch: bool = False
    parallel: bool = False
    parallel_norms: bool = False
    gated_mlp: bool = True
    v_head_dim: int = 0
    v_scale: float = 1.0
    sinks: bool = False
    attn_gate: str = ""
    activation: str = "silu"
    moe: MoeConfig | None = None
    num_extra_layers: int = 0
    norm_weight_offset: float = 0.0
    embed_scale: float = 1.0
    rounds_embed_scale: bool = False
    branch_scale: float = 1.0
    weight_factors: tuple[tuple[str, float, float], ...] = ()
    attn_scale: float = 0.0
    attn_scale_by_layer: bool = False
    clip_qkv: float = 0.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    logits_scale: float = 1.0
    layer_sizes: tuple[LayerSizes, ...] = ()
    kv_sources: tuple[int, ...] = ()
    values_from_keys: bool = False
    v_norm: bool = False
    layer_scale: bool = False
    per_layer_input: PerLayerInputConfig | None = None
    altup: AltUpConfig | None = None
    activation_sparsity: tuple[float, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused qkv matrix, (H + 2K)·D, and those of a gate."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.gate_dim

    @property
    def gate_dim(self) -> int:
        """Rows of the fused qkv matrix that compute the gate of the attention's output."""
        sizes = {"": 0, "sigmoid": self.head_dim, "sigmoid_heads": 1}
        return self.num_heads * sizes[self.attn_gate]

    def at(self, layer: int) -> ModelConfig:
        """Return the config with the sizes of layer `layer`."""
        return replace(self, **vars(self.layer_sizes[layer])) if self.layer_sizes else self

    @property
    def completes_stream(self) -> bool:
        """Tell whether the end of a layer needs the whole residual stream."""
        return self.layer_scale or self.per_layer_input is not None or self.altup is not None

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The head dims of all layers, each once."""
        dims = (self.at(layer).head_dim for layer in range(self.num_layers))
        return tuple(dict.fromkeys(dims)) if self.layer_sizes else (self.head_dim,)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values layer `layer` reads."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def num_storing_layers(self) -> int:
        """Number of layers up to the last one that stores keys and values."""
        return max(self.kv_sources) + 1 if self.kv_sources else self.num_layers

    def qkv_parts(self, layer: int) -> tuple[str, ...]:
        """Return the parts of layer `layer`'s fused qkv matrix; the gate may have no rows."""
        if self.kv_source(layer) != layer:
            return ("q", "attn_gate")
        values = () if self.at(layer).values_from_keys else ("v",)
        return ("q", "k", *values, "attn_gate")

    def sparsity(self, layer: int) -> float:
        """Return the activation sparsity of layer `layer`; 0 for none."""
        return self.activation_sparsity[layer] if self.activation_sparsity else 0.0

    def window(self, layer: int) -> int:
        """Return the sliding window of layer `layer` in keys; 0 is full attention."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def chunk(self, layer: int) -> int:
        """Return the keys per chunk in layer `layer`; 0 is no chunked attention."""
        return self.layer_chunks[layer] if self.layer_chunks else 0

    def kind(self, layer: int) -> str:
        """Return the kind of layer `layer`. See `layer_kinds`."""
        return self.layer_kinds[layer] if self.layer_kinds else "attention"

    def has_rope(self, layer: int) -> bool:
        """Tell whether layer `layer` rotates q and k."""
        return not self.rope_layers or self.rope_layers[layer]

    def has_qk_norm(self, layer: int) -> bool:
        """Tell whether layer `layer` normalises q and k."""
        return self.qk_norm and (not self.bare_qk_norm or self.has_rope(layer))

    def has_pre_norms(self, layer: int) -> bool:
        """Tell whether layer `layer` normalises the inputs of attention and MLP."""
        return self.pre_norms and not (self.norms_by_kind and self.kind(layer) == "attention")

    def has_post_norms(self, layer: int) -> bool:
        """Tell whether layer `layer` normalises the outputs of attention and MLP."""
        return self.post_norms and not (self.norms_by_kind and self.kind(layer) != "attention")

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return the mixture of experts of layer `layer`; None if it has an MLP."""
        moe = self.moe
        if moe is None or not moe.sparse_layers[layer]:
            return None
        return replace(moe, top_k=moe.layer_top_k[layer]) if moe.layer_top_k else moe

    @property
    def has_mlp(self) -> bool:
        """Tell whether any layer has an MLP."""
        is_beside = "shortcut" in self.layer_kinds or (self.moe is not None and self.moe.beside_mlp)
        return self.moe is None or is_beside or not all(self.moe.sparse_layers)

    @property
    def has_mlp_norms(self) -> bool:
        """Tell whether the MLP reads a norm of its own, and not the same as attention."""
        return not self.single_branch and (self.parallel_norms or not self.parallel)
