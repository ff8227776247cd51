"""A decoder's architecture as plain numbers: `ModelConfig`, `MoeConfig` and `RopeConfig`.

Every difference between the supported model families is a field here with a neutral default. The
files of `models/` fill the fields in from a `config.json`; `models/decoder.py`, the only decoder,
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ModelConfig", "MoeConfig", "RopeConfig"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its angles, and their scaling past the training length.

    Attributes
    ----------
    theta : float
        Base of the geometric series of wavelengths.
    rotary_dim : int
        Leading features of a head that are rotated (even; the rest passes through).
    scaling : str
        "default", "linear", "dynamic" (NTK), "yarn", "llama3", "longrope", or "none": no rotation
        at any position.
    factor : float
        Context extension factor, for every scaling but "default".
    original_max_position : int
        Training length in tokens; 0 if the scaling does not use it.
    low_freq_factor, high_freq_factor : float
        Bounds of the llama3 ramp.
    beta_fast, beta_slow : float
        Bounds of the yarn ramp, in rotations over the training length.
    attention_factor : float or None
        Scale of cos and sin; None derives it from the paper's formula.
    mscale, mscale_all_dim : float
        YaRN's two factors of the attention scale; 0: not given.
    truncate : bool
        Whether the bounds of the yarn ramp are rounded to whole dimensions.
    short_factor, long_factor : tuple of float
        Longrope's divisors of each frequency, below and above the training length.
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
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts that replaces the MLP of some layers.

    Attributes
    ----------
    num_experts, top_k, intermediate_size : int
        E, experts per token, and features of an expert.
    sparse_layers : tuple of bool
        Per layer: True for experts, False for an MLP.
    score : str
        Function of the router's logits: "softmax" (over all experts) or "sigmoid".
    renormalize : bool
        Whether the weights of a token's experts are divided by their sum.
    scale : float
        Factor on the weights of a token's experts.
    num_groups, top_groups : int
        A token's experts are chosen from its `top_groups` best of `num_groups` groups.
    correction : bool
        Whether a bias per expert is added to the scores when experts are chosen.
    shared_size : int
        Features of the shared expert, which computes every token; 0: none.
    shared_gate : bool
        Whether the shared expert's output is multiplied by the sigmoid of a product with the token.
    router_bias, expert_bias : bool
        Whether these weights exist.
    activation : str
        Activation of the experts: "swiglu", or gpt-oss's "swiglu_clamped".
    alpha, limit : float
        Parameters of "swiglu_clamped".
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction: bool = False
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    activation: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer, as numbers.

    Attributes
    ----------
    model_type : str
        Hugging Face's name for the family ("llama", "qwen3", ...).
    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size : int
        V, N, number of layers, H, K, D and F.
    max_position_embeddings : int
        Longest sequence in tokens.
    rms_norm_eps : float
        Added to the mean square (or variance) before the square root.
    layer_norm, norm_bias : bool
        Whether norms subtract the mean first (LayerNorm); whether they add a bias.
    rope : RopeConfig
        Rope of every layer; with `rope_local`, of the full-attention layers.
    rope_local : RopeConfig or None
        Rope of the layers with a sliding window (Gemma 3).
    layer_windows : tuple of int
        Per layer: sliding window in keys, including the query's own; 0: full attention.
    rope_layers : tuple of bool
        Per layer: whether q and k are rotated; (): in all layers.
    tie_word_embeddings, qkv_bias, o_bias, mlp_bias, lm_head_bias, qk_norm, pre_norms, post_norms
        Whether each of these exists (bool): an output embedding tied to the input's, biases, norms
        of q and k, norms before and after attention and MLP.
    whole_qk_norm : bool
        Whether q and k are normed over all heads together instead of per head (OLMo).
    parallel : bool
        Whether attention and MLP read the same input, normed once, and their outputs are added
        together.
    gated_mlp : bool
        True: the MLP is down(act(gate x) * up x); False: down(act(up x)).
    sinks : bool
        Whether every head has an attention sink: a logit in the softmax without a value (gpt-oss).
    activation : str
        Activation of the gate, or of up: "silu", "gelu" (erf) or "gelu_tanh".
    moe : MoeConfig or None
        Mixture of experts; None: all layers are dense.
    num_extra_layers : int
        Layers that the checkpoint stores after the last one; they are not read.
    norm_weight_offset : float
        Added to every norm's weight (Gemma: 1).
    embed_scale : float
        Factor on the embedding (Gemma: sqrt(N)).
    rounds_embed_scale : bool
        Whether `embed_scale` is first rounded to the dtype of the weights (Gemma).
    branch_scale : float
        Factor on the outputs of attention and MLP that are added to the residual stream (Granite).
    attn_scale : float
        Factor on q·k; 0 means 1/sqrt(D).
    attn_softcap, final_softcap : float
        c of c·tanh(x/c), applied to the scores and to the logits; 0: none.
    logits_scale : float
        Factor on the logits.
    bos_token_id, pad_token_id : int or None
    eos_token_ids : tuple of int
        Tokens that end a sequence.
    dtype : str
        Dtype of the checkpoint: "float32", "float16" or "bfloat16".
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
    norm_bias: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_local: RopeConfig | None = None
    layer_windows: tuple[int, ...] = ()
    rope_layers: tuple[bool, ...] = ()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    gated_mlp: bool = True
    sinks: bool = False
    activation: str = "silu"
    moe: MoeConfig | None = None
    num_extra_layers: int = 0
    norm_weight_offset: float = 0.0
    embed_scale: float = 1.0
    rounds_embed_scale: bool = False
    branch_scale: float = 1.0
    attn_scale: float = 0.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    logits_scale: float = 1.0
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @property
    def qkv_dim(self) -> int:
        """Rows of the fused qkv matrix: (H + 2K)·D."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def window(self, layer: int) -> int:
        """Return the sliding window of layer `layer` in keys; 0: full attention."""
        return self.layer_windows[layer] if self.layer_windows else 0

    def has_rope(self, layer: int) -> bool:
        """Tell whether layer `layer` rotates q and k."""
        return not self.rope_layers or self.rope_layers[layer]

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return the mixture of experts of layer `layer`; None if the layer has an MLP."""
        return self.moe if self.moe is not None and self.moe.sparse_layers[layer] else None

    @property
    def has_mlp(self) -> bool:
        """Tell whether any layer has an MLP instead of experts."""
        return self.moe is None or not all(self.moe.sparse_layers)
