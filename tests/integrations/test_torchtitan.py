"""TorchTitan with our overrides beside its own modules, on the CPU with the real package."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytest.importorskip("triton", reason="torchtitan imports triton, which is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config.override import parse_cli_imports
    from torchtitan.models.common import attention as titan_attention
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.nn_modules import RMSNorm

    from engine.integrations import torchtitan
    from tests.integrations import torchtitan_parts as parts

from engine.errors import ConfigError  # noqa: E402

# TorchTitan's own warnings are not ours to fail on.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
MODELS = {
    "llama3": ("llama3", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3_moe": ("qwen3", "debugmodel_moe"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),
}
STEPS = 20


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """TorchTitan's varlen attention without a GPU; ours does not come from it."""
    monkeypatch.setattr(titan_attention.VarlenAttention, "forward", parts.plain_attention)


def _pair(kind):
    stock = parts.model(*MODELS[kind])
    ours = parts.model(*MODELS[kind], parts.OVERRIDES)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("kind", MODELS)
def test_its_conditions_for_modules(kind):
    """The Module protocol, the checkpoint's names and shapes, and no module of theirs left over."""
    stock, ours = _pair(kind)
    ours.verify_module_protocol()
    shapes = {name: value.shape for name, value in stock.state_dict().items()}
    assert {name: value.shape for name, value in ours.state_dict().items()} == shapes
    kinds = {type(module) for module in ours.modules()}
    replaced = {cls.__bases__[-1] for cls in kinds if cls.__module__ == torchtitan.__name__}
    assert len(replaced) >= 4 and not replaced & kinds
    assert {type(module) for module in stock.modules()} >= replaced


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_a_step(kind):
    stock, ours = _pair(kind)
    losses = []
    for model in (stock, ours):
        loss = parts.loss_of(model, 0)
        loss.backward()
        losses.append(loss.item())
        # A checkpoint of gradients in place of weights: the names are those of the other model.
        for parameter in model.parameters():
            parameter.data = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    half = any("experts" in name for name, _ in stock.named_parameters())  # in bfloat16
    assert losses[1] == pytest.approx(losses[0], rel=1e-4 if half else 1e-6)
    given, found = stock.state_dict(), ours.state_dict()
    for name, wanted in given.items():
        error = (found[name].float() - wanted.float()).norm()
        assert error <= (2e-2 if half else 1e-4) * wanted.float().norm() + 1e-7, name


@pytest.mark.parametrize("kind", ["llama3", "qwen3_moe"])
def test_loss_curve(kind):
    curves = []
    for model in _pair(kind):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = parts.loss_of(model, step)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    wanted, found = curves
    assert wanted[-1] < wanted[0] - 2
    torch.testing.assert_close(found, wanted, rtol=1e-2 if kind == "qwen3_moe" else 1e-4, atol=0)


def test_experts_are_initialised_half_by_half():
    """Gate and up have initialisers of their own: up's depends on the layer."""
    stock, ours = (parts.model(*MODELS["qwen3_moe"], names) for names in ((), parts.OVERRIDES))
    given, found = stock.state_dict(), ours.state_dict()
    names = [name for name in given if name.endswith(("w1_EFD", "w2_EDF", "w3_EFD"))]
    assert len(names) == 6
    for name in names:
        torch.testing.assert_close(found[name].std(), given[name].std(), rtol=0.02, atol=0)


def test_a_checkpoint_of_ours_loads_into_theirs():
    ours = parts.model(*MODELS["qwen3_moe"], parts.OVERRIDES)
    stock = parts.model(*MODELS["qwen3_moe"])
    stock.load_state_dict(ours.state_dict())
    assert parts.loss_of(stock, 3).item() == pytest.approx(parts.loss_of(ours, 3).item(), rel=1e-4)


@pytest.mark.parametrize("has_empty", [False, True])
def test_experts_without_rows(has_empty):
    """An expert, or all of them, gets no token."""
    config = torchtitan.GroupedExperts.Config(dim=16, hidden_dim=24, num_experts=3)
    ours = torchtitan.grouped_experts(config).build()
    torch.nn.init.normal_(ours.w13)
    torch.nn.init.normal_(ours.w2_EDF)
    counts = torch.tensor([0, 0, 0] if has_empty else [2, 0, 3])
    x = torch.randn(int(counts.sum()), 16, requires_grad=True)
    y = ours(x, counts)
    y.sum().backward()
    rows = []
    for expert, part in enumerate(x.detach().split(counts.tolist())):
        gate, up = (part @ ours.w13[expert, half].T for half in (0, 1))
        rows.append((torch.nn.functional.silu(gate) * up) @ ours.w2_EDF[expert].T)
    torch.testing.assert_close(y, torch.cat(rows), rtol=0.05, atol=0.5)  # bfloat16
    assert torch.all(ours.w13.grad[1] == 0) and x.grad.shape == x.shape


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0)])
def test_windows_and_the_log_sum_exp(window):
    """Two documents, against a mask; out_transform scales by the log-sum-exp, as sinks do."""
    config = titan_attention.VarlenAttention.Config(window_size=window)
    ours = torchtitan.varlen_attention(config).build()
    q, k, v = (torch.randn(1, 10, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    masks = titan_attention.VarlenMetadata(starts, starts, 6, 6)

    def scaled(out, lse):
        return out * lse.sigmoid()[..., None]

    got = ours(q, k, v, attention_masks=masks, scale=0.5, out_transform=scaled)
    place = torch.arange(10)
    document = (place >= 4)[:, None] == (place >= 4)
    behind = place[:, None] - place
    seen = document & (behind >= 0 if window[1] == 0 else document)
    if window[0] > 0:
        seen &= behind <= window[0]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    wanted = scaled(out, scores.logsumexp(-1).transpose(1, 2))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_attention(is_causal):
    config = titan_attention.ScaledDotProductAttention.Config()
    ours = torchtitan.attention(config).build()
    stock = config.build()
    q, k, v = (torch.randn(2, 7, heads, 8) for heads in (4, 2, 2))
    options = {"enable_gqa": True, "is_causal": is_causal, "scale": 0.3}
    torch.testing.assert_close(ours(q, k, v, **options), stock(q, k, v, **options))
    with pytest.raises(ConfigError, match="attention_masks must be None"):
        ours(q, k, v, attention_masks="a mask")


def _on_two_ranks(folder, *what):
    (folder / "store").unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.torchtitan_parts"]
    ranks = [
        subprocess.Popen([*command, str(folder), str(rank), *what], cwd=ROOT) for rank in range(2)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]


def test_modules_on_two_ranks(tmp_path):
    """DTensors: results and gradients of TorchTitan's modules in one process."""
    _on_two_ranks(tmp_path, "modules")
    wanted = parts.results(parts.small_modules(ours=False), parts.inputs())
    for rank in range(2):
        found = torch.load(tmp_path / f"modules{rank}.pt")
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama3", "qwen3_moe"])
def test_a_model_under_tensor_parallelism(tmp_path, kind):
    """TorchTitan's default backend: each rank's loss and gradients are those of its modules."""
    torch.save(parts.model(*MODELS[kind]).state_dict(), tmp_path / "weights.pt")
    _on_two_ranks(tmp_path, *MODELS[kind], "")
    _on_two_ranks(tmp_path, *MODELS[kind], ",".join(parts.OVERRIDES))
    for rank in range(2):
        wanted, found = (torch.load(tmp_path / f"{whose}{rank}.pt") for whose in ("theirs", "ours"))
        assert wanted.keys() == found.keys() and len(wanted) > 15
        for name, value in wanted.items():
            error = (found[name] - value).norm()
            assert error <= (2e-2 if kind == "qwen3_moe" else 1e-5) * value.norm(), name


def test_what_is_refused():
    with pytest.raises(
        ConfigError, match=r"window_size must be \(-1, -1\) or \(left, 0\); got \(4"
    ):
        torchtitan.varlen_attention(
            titan_attention.VarlenAttention.Config(window_size=(4, 2))
        ).build()
    with pytest.raises(ConfigError, match="elementwise_affine of RMSNorm must be True"):
        torchtitan.rmsnorm(RMSNorm.Config(normalized_shape=4, elementwise_affine=False)).build()
    up = Linear.Config(in_features=4, out_features=8, bias=True)
    down = Linear.Config(in_features=8, out_features=4)
    with pytest.raises(ConfigError, match="w1 of FeedForward must be a Linear without bias"):
        torchtitan.feed_forward(FeedForward.Config(w1=up, w2=down, w3=up)).build()


def test_the_command_line_of_the_docs():
    page = (ROOT / "docs" / "integrations" / "torchtitan.md").read_text()
    line = page.split("--override.imports ")[1].split("\n")[0].rstrip("\\ ")
    named = parse_cli_imports([line])
    assert {name.rpartition(".")[0] for name in named} == {parts.PACKAGE}
    parts.configuration("qwen3", "debugmodel_moe", tuple(n.rpartition(".")[2] for n in named))
