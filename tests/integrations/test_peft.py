"""LoRA adapters that peft makes and saves: our logits are peft's, in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import engine  # noqa: E402
from engine.device import to_numpy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LIMIT = 1e-4  # standard deviations of the logits
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "llama": (*ATTENTION, *MLP),
    "qwen2": (*ATTENTION, *MLP),
    "qwen3": (*ATTENTION, *MLP),
    "gemma2": (*ATTENTION, *MLP),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    # peft compares the ends of names, so c_proj is both of them; it warns that they are transposed.
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
EACH = [(kind, module) for kind, modules in FAMILIES.items() for module in modules]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return the folder of a random checkpoint of a family."""
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(1)
            values = {"model_type": kind, **SIZES}
            if kind == "glm4":
                values |= {"head_dim": 16, "attention_bias": True}
            if kind == "gemma2":
                values |= {"head_dim": 16, "query_pre_attn_scalar": 16}
            if kind in ("gpt_neox", "gpt2", "opt"):
                del values["num_key_value_heads"]
            config = transformers.AutoConfig.for_model(**values)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
                else:
                    parameter.data.add_(0.2 * torch.randn_like(parameter))
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


def _peft_model(folder, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    torch.manual_seed(len(json.dumps(options, default=str)))
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or (options.get("bias") and name.endswith(".bias")):
            parameter.data.normal_(0, 0.2)
    return adapted.eval()


def _check(folder, tmp_path, **options):
    adapted = _peft_model(folder, **options)
    adapted.save_pretrained(tmp_path / "adapter")
    prompt = np.random.default_rng(0).integers(3, 95, 24).tolist()
    with torch.no_grad():
        want = adapted(torch.tensor([prompt])).logits[0].numpy()
        with adapted.disable_adapter():
            base = adapted(torch.tensor([prompt])).logits[0].numpy()
    model = engine.load(
        folder,
        device="cpu",
        dtype="float32",
        progress=False,
        enable_lora=True,
        max_lora_rank=64,
        max_loras=2,
    )
    model.write_adapter(model.read_adapter("a", tmp_path / "adapter"), 1)
    cache = model.new_cache(1, len(prompt), adapter_slots=[1])
    got = to_numpy(model.step([prompt], cache, logits="all"))[0]
    assert np.abs(got - want).max() < LIMIT * want.std()
    assert np.abs(want - base).max() > 100 * LIMIT * want.std()


@pytest.mark.parametrize(("kind", "module"), EACH)
def test_each_module(bases, tmp_path, kind, module):
    _check(bases(kind), tmp_path, r=8, lora_alpha=24, target_modules=[module])


@pytest.mark.parametrize("rank", [1, 4, 33, 64])
@pytest.mark.parametrize("kind", FAMILIES)
def test_all_modules(bases, tmp_path, kind, rank):
    _check(bases(kind), tmp_path, r=rank, lora_alpha=16, target_modules=list(FAMILIES[kind]))


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"lora_bias": True},
        {"bias": "lora_only"},
        {"rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 12}},
        {"alpha_pattern": {"k_proj": 40, "^model.layers.0.self_attn.o_proj": 2}},
        {"layers_to_transform": [1]},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_options(bases, tmp_path, kind, options):
    modules = list(FAMILIES[kind])
    _check(bases(kind), tmp_path, r=8, lora_alpha=16, target_modules=modules, **options)


def test_dora_is_refused(bases, tmp_path):
    adapted = _peft_model(bases("llama"), r=4, target_modules=["q_proj"], use_dora=True)
    adapted.save_pretrained(tmp_path / "adapter")
    model = engine.load(bases("llama"), device="cpu", progress=False, enable_lora=True)
    with pytest.raises(engine.errors.ConfigError, match="use_dora must be left out"):
        model.read_adapter("a", tmp_path / "adapter")
