"""The model of a step's time: against what was measured, and against itself."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from engine.commands._bench_models import built_in_config, built_in_names
from engine.config import MoeConfig
from engine.device import Device
from engine.errors import ConfigError
from engine.loading.load_config import LoadConfig
from engine.loading.weight_memory import quantized_formats, weight_bytes
from engine.loading.weight_table import weight_shapes
from engine.scaling import (
    CARDS,
    NCCL,
    OURS,
    Collective,
    Constants,
    Division,
    Speed,
    Step,
    StepModel,
    Terms,
    Workload,
    divisions,
    find_card,
)
from engine.scaling.division import stages
from engine.scaling.memory import plan_memory
from engine.scaling.plan import _stage_weights, plan_scaling
from engine.scaling.step_time import _chosen_experts
from engine.weights import FORMATS
from tests.bench.fit_scaling import FITTED, best_us
from tests.bench.scaling_points import UNFITTED, collective_points, measured_points
from tests.bench.scaling_record import predictions, table
from tests.golden.configs import CASES, golden_config

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "docs" / "benchmarks" / "scaling.json").read_text())
LIMITS = {"one request": 0.09}  # of a prediction's error
OTHER_LIMIT, MEAN_LIMIT, COLLECTIVE_LIMIT = 0.13, 0.04, 0.15


def _model(name="llama-3.1-8b", quantization=None, card="h200", constants=None, itemsize=2):
    config, constants = built_in_config(name), constants or Constants()
    return StepModel(config, "bfloat16", itemsize, quantization, find_card(card), constants)


def _speed(division=None, **options):
    return Speed(_model(**options), division or Division())


@pytest.mark.parametrize("point", measured_points(), ids=lambda point: point.case)
def test_a_measured_point_is_predicted(point):
    error = point.error(Constants())
    assert abs(error) < LIMITS.get(point.group, OTHER_LIMIT), f"{error:+.3f}: {point.source}"


def test_the_mean_error_is_small():
    errors = [abs(point.error(Constants())) for point in measured_points()]
    assert len(errors) > 40 and sum(errors) / len(errors) < MEAN_LIMIT


@pytest.mark.parametrize(("whose", "ways"), [("ours", OURS), ("NCCL", NCCL)])
def test_sums_over_two_gpus_are_predicted(whose, ways):
    link_rate = find_card("h200").link_rate
    for size, us in collective_points(whose):
        found = best_us(ways, size, link_rate)
        assert abs(found / us - 1) < COLLECTIVE_LIMIT, (size, us, found)


def test_no_constant_is_far_from_its_best():
    """A constant that no point depends on, or that was not fitted again, would be noticed."""

    def squares(constants):
        return sum(
            ((2 if p.group == "one request" else 1) * math.log1p(p.error(constants))) ** 2
            for p in points
        )

    points = [point for point in measured_points() if point.group not in UNFITTED]
    constants = Constants()
    best = squares(constants)
    for name in FITTED:
        moved = {
            factor: squares(
                dataclasses.replace(constants, **{name: factor * getattr(constants, name)})
            )
            for factor in (0.5, 0.9, 1.1, 2.0)
        }
        assert max(moved.values()) > 1.05 * best, f"{name}: no point depends on it"
        assert min(moved.values()) > 0.97 * best, f"{name}: run tests.bench.fit_scaling"


def test_the_record_and_the_document_are_of_this_model():
    assert json.loads(json.dumps(predictions())) == RECORD["predicted"], (
        "run python -m tests.bench.scaling_record and tests.bench.plot scaling"
    )
    assert table(RECORD) in (ROOT / "docs" / "scaling.md").read_text()


def test_parts_add_up():
    terms = _speed(Division(4)).token(1000)
    assert terms.total == pytest.approx(sum(terms.as_dict().values()))
    assert terms.times(3).total == pytest.approx(3 * terms.total)
    assert (terms + terms).weights == 2 * terms.weights
    assert terms.as_dict()[terms.largest] == max(terms.as_dict().values())
    assert Terms().total == 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_more_work_takes_longer(name):
    speed = _speed(name=name)

    def us(num_seqs, context):
        return speed.step_terms(Step.decode(num_seqs, context)).total

    assert us(1, 100) < us(1, 10_000) < us(1, 100_000)
    assert us(1, 500) < us(16, 500) < us(64, 500) < us(256, 500)
    assert speed.prompts(512).total < speed.prompts(16384).total


def test_reading_takes_at_least_the_memory_its_bytes():
    """No prediction is faster than the data sheet's rate."""
    for name, quantization in (("llama-3.1-8b", None), ("llama-3.1-8b", "fp8"),
                               ("qwen3-0.6b", None)):  # fmt: skip
        config, card = built_in_config(name), find_card("h200")
        formats = quantized_formats(config, FORMATS[quantization]) if quantization else {}
        num_bytes = weight_bytes(config, "bfloat16", formats=formats)
        if not config.tie_word_embeddings:
            num_bytes -= 2 * config.vocab_size * config.hidden_size  # a row of it is read
        terms = _speed(name=name, quantization=quantization).token(1)
        assert terms.weights > num_bytes / card.memory_rate / 1e6


@pytest.mark.parametrize(
    "case",
    [
        *("qwen3_next", "kimi_linear", "bailing_moe_v2_5", "deepseek_v3", "granitemoehybrid"),
        *("falcon_h1", "gemma3n", "gemma4", "lfm2"),
    ],
)
def test_every_kind_of_layer_reads_its_matrices(case):
    few = {"hidden_size": 1 << 16, "vocab_size": 1, "moe": None}
    config = dataclasses.replace(golden_config(case), **few)
    model = StepModel(config, "bfloat16", 2, None, find_card("h200"), Constants())
    shapes = [shape for shape in weight_shapes(config).values() if len(shape) == 2]
    num_bytes = 2 * sum(map(math.prod, shapes))
    assert Speed(model, Division()).token(1).weights > num_bytes / model.card.memory_rate / 1e6


@pytest.mark.parametrize(
    ("case", "num_attentions", "key_bytes", "state_bytes"),
    [
        ("falcon_h1", 4, 4 * 2 * 2 * 2 * 24, 4 * (2 * 2 * 112 + 4 * 6 * 12 * 10)),
        ("lfm2", 1, 2 * 2 * 2 * 16, 3 * 2 * 3 * 64),
        ("nemotron_h", 1, 2 * 2 * 2 * 24, 2 * (2 * 2 * 112 + 4 * 6 * 12 * 10)),
        ("longcat_flash", 4, 4 * 2 * 48, 0),
        ("gemma3n", 5, 2 * 2 * 2 * 2 * 24, 0),  # three have windows
    ],
)
def test_a_token_reads_keys_of_every_attention_and_states(
    case, num_attentions, key_bytes, state_bytes
):
    model = StepModel(golden_config(case), "bfloat16", 2, None, find_card("h200"), Constants())
    us, more = (Speed(model, Division()).token(context).pages for context in (1000, 2000))
    bytes_per_us = model.card.memory_rate * model.constants.read_pages * 1e6
    assert (more - us) * bytes_per_us == pytest.approx(1000 * key_bytes)
    if state_bytes:
        rest = 2 * us - more - num_attentions * model.constants.sequence_us
        assert rest * bytes_per_us == pytest.approx(2 * state_bytes)


def test_tensor_parallel_divides_what_is_read_and_adds_sums():
    whole, half = _speed().token(1000), _speed(Division(2)).token(1000)
    assert half.weights == pytest.approx(whole.weights / 2, rel=1e-3)
    assert whole.collectives == 0 < half.collectives
    assert half.total > whole.total / 2


def test_replicas_and_stages_do_not_change_one_request_much():
    one = _speed().token(1000)
    assert _speed(Division(data=8)).token(1000).total == one.total
    staged = _speed(Division(pipeline=4)).token(1000)
    assert staged.total == pytest.approx(one.total + staged.transfers)
    assert staged.transfers > 0


def test_a_pipeline_across_hosts_uses_the_network():
    inside, across = (
        Speed(_model(), Division(8, 2), host).token(1000).transfers for host in (16, 8)
    )
    constants = Constants()
    sent = 2 * 8192 / 1e3  # KB of two vectors
    assert inside == pytest.approx(2 * constants.stage_us + sent / find_card("h200").link_rate)
    messages = 2 * constants.message_us + sent / constants.message_rate
    network = constants.network_us + sent / constants.network_rate
    assert across == pytest.approx(messages + network)


def test_as_many_groups_as_stages_keep_linked_stages_at_work():
    speed, apart = (Speed(_model(), Division(pipeline=2), host) for host in (2, 1))
    work = Workload(256)
    weights = [each.requests(work, 256)[1].weights for each in (speed, apart)]
    assert weights[1] == pytest.approx(1.5 * weights[0], rel=0.1)


def test_two_replicas_have_twice_the_rate_of_half_the_requests():
    one = _speed().requests(Workload(100), 256)[0]
    assert _speed(Division(data=2)).requests(Workload(200), 256)[0] == pytest.approx(2 * one)


def test_a_busy_host_is_waited_for():
    constants = dataclasses.replace(Constants(), host_step_us=10_000.0)
    terms = _speed(constants=constants).token(100)
    assert terms.total > 10_000 and terms.largest == "host"


def test_requests_are_the_sum_of_their_steps():
    """The integral over outputs of even lengths against a count of every step."""
    speed, work = _speed(), Workload(64, (300, 300), (200, 1000))
    lengths = np.linspace(200, 1000, 64)
    us = speed.prompts(300).total * 64 * 300
    for step in range(1000):
        alive = int((lengths > step).sum())
        if alive:
            us += speed.step_terms(Step.decode(alive, 300 + step)).total
    rate = 64 * 600 / us * 1e6
    assert speed.requests(work, 256)[0] == pytest.approx(rate, rel=0.03)


def test_waiting_requests_take_the_places_of_ended_ones():
    speed, work = _speed(), Workload(640, (300, 300), (500, 500))
    few, many = (speed.requests(work, running)[0] for running in (8, 64))
    assert few < many < speed.requests(work, 640)[0]


def test_a_running_request_has_the_context_of_a_random_moment():
    work = Workload(1, (100, 100), (10, 500))
    contexts = [100 + step for length in range(10, 501) for step in range(length)]
    assert work.context == pytest.approx(np.mean(contexts), rel=0.01)
    assert [work.share_alive(step) for step in (0, 9, 255, 500)] == [1, 1, 0.5, 0]


@pytest.mark.parametrize("num_tokens", [1, 4, 64, 1024])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_experts_chosen_at_random(num_tokens, count):
    moe = MoeConfig(64, 8, 4, (True,))
    rng = np.random.default_rng(0)
    used, pairs = [], []
    for _ in range(200):
        scores = rng.random((num_tokens, 64))
        chosen = np.argpartition(scores, 8, axis=1)[:, :8]
        counts = np.bincount(chosen.ravel(), minlength=64).reshape(count, -1)
        used.append((counts > 0).sum(axis=1).max())
        pairs.append(counts.sum(axis=1).max())
    found = _chosen_experts(moe, num_tokens, Division(count, expert=count > 1))
    assert found[0] == pytest.approx(np.mean(used), rel=0.2)
    assert found[1] == pytest.approx(np.mean(pairs), rel=0.2)


def test_one_shot_and_two_shot_move_what_they_should():
    one, two = Collective("", 0, 0, 1, True), Collective("", 0, 0, 1, False)
    assert one.us(1e6, 8, 1) == pytest.approx(7e3) and two.us(1e6, 8, 1) == pytest.approx(1750)
    assert one.us(1e6, 2, 1) == two.us(1e6, 2, 1)


@pytest.mark.parametrize("quantization", [None, "fp8", "q4_0"])
@pytest.mark.parametrize("name", built_in_names())
def test_one_gpu_has_the_memory_of_the_memory_plan(name, quantization):
    model = _model(name, quantization)
    length = 4096
    how = LoadConfig(Device("cuda", 0), "bfloat16", length, "dummy", quantization)
    wanted = plan_memory(model.config, how, model.card.memory)
    (row,) = plan_scaling(model, [Division()], Workload(4), max_model_len=length).rows
    if wanted.budget.left < 0:
        assert row.reason.startswith("does not fit") and row.pages == wanted.budget.left
        return
    assert row.weights == sum(group.num_bytes for group in wanted.weights) + wanted.rope_bytes
    assert (row.pages, row.activations) == (wanted.budget.left, wanted.budget.activations)
    assert row.num_tokens == wanted.pages[0].num_tokens


def test_gpus_have_buffers_for_collectives_and_for_what_the_previous_stage_sends():
    model = _model("llama-3.1-8b")
    ways = [Division(data=8), Division(pipeline=8), Division(4, 2), Division(8)]
    rows = plan_scaling(model, ways, Workload(4), max_model_len=4096).rows
    assert [row.collectives >> 20 for row in rows] == [0, 9 * 128, 288 + 3 * 128, 336]
    for row in rows:
        used = row.weights + row.activations + row.collectives + row.pages
        assert used == int(0.9 * model.card.memory)


@pytest.mark.parametrize("quantization", [None, "q4_0"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b"])
def test_the_stages_have_all_weights(name, quantization):
    model, division = _model(name, quantization), Division(pipeline=4)
    config = model.config
    formats = quantized_formats(config, FORMATS[quantization]) if quantization else {}
    parts = [_stage_weights(model, division, index) for index in range(4)]
    total, table_bytes = weight_bytes(config, "bfloat16", formats=formats), 0
    if config.tie_word_embeddings:
        table_bytes = 2 * config.vocab_size * config.hidden_size  # in the first and the last
    assert sum(parts) == total + table_bytes


@pytest.mark.parametrize("case", ["gemma4", "mimo_v2_flash", "minimax_m2", "gpt_oss"])
def test_ranks_have_equal_parts_of_all_weights(case):
    config = golden_config(case)
    model = StepModel(config, "bfloat16", 2, None, find_card("h200"), Constants())
    whole = weight_bytes(config, "bfloat16")
    for expert in (False, True) if config.moe is not None else (False,):
        part = _stage_weights(model, Division(2, expert=expert), 0)
        assert whole / 2 < part < 0.56 * whole


def test_every_model_can_be_planned():
    """Each golden configuration, in every division over two GPUs that it permits."""
    for case in CASES:
        config = golden_config(case)
        model = StepModel(config, "bfloat16", 2, None, find_card("h200"), Constants())
        whole = Speed(model, Division()).token(100)
        for division in divisions(config, 2):
            try:
                division.check(config, 8)
            except ConfigError:
                continue
            speed = Speed(model, division)
            token = speed.token(100)
            assert token.weights <= 1.01 * whole.weights, (case, division)
            assert token.pages <= 1.01 * whole.pages, (case, division)
            assert 0 < speed.prompts(512).total < math.inf


def test_layers_are_spread_evenly():
    config = built_in_config("qwen3-0.6b")
    assert [each.num_layers for each in stages(config, Division(1, 8))] == [4] * 4 + [3] * 4


def test_a_smaller_last_stage_makes_up_for_the_output_layer():
    """In steps of many requests; prompts wait for the larger stage."""
    even, uneven = (_speed(Division(pipeline=2, layers=layers)) for layers in (None, (17, 15)))
    decodes = [max(t.total for t in s.stage_times(Step.decode(128, 500))) for s in (even, uneven)]
    assert 0.95 * decodes[0] < decodes[1] < decodes[0]
    assert uneven.prompts(4096).total > even.prompts(4096).total
    assert uneven.token(500).total == pytest.approx(even.token(500).total)


def test_every_division_is_listed_once():
    config = built_in_config("mixtral-8x7b")
    found = list(divisions(config, 12))
    assert len(set(found)) == len(found) and all(each.num_gpus == 12 for each in found)
    assert Division(3, 2, 2) in found and Division(12, expert=True) in found


@pytest.mark.parametrize(
    ("name", "division", "form", "message"),
    [
        ("llama-3.1-8b", Division(3), None, "num_attention_heads must be a multiple of 3"),
        ("llama-3.1-8b", Division(16), None, "in one host of 8; got 16"),
        ("llama-3.1-8b", Division(1, 64), None, "at most 32, the layers; got 64"),
        ("llama-3.1-8b", Division(1, 2, layers=(17, 16)), None, r"add up to 32, .* 17 \+ 16 = 33"),
        ("llama-3.1-8b", Division(2, expert=True), None, "need a model with experts"),
        ("mixtral-8x7b", Division(16, expert=True), None, "in one host of 8"),
        ("gpt-oss-20b", Division(4), "mxfp4", "block of 32; got 720"),
        ("qwen3-30b-a3b", Division(8), "fp8_block", "block of 128; got 96"),
    ],
)
def test_a_division_that_cannot_be_says_why(name, division, form, message):
    with pytest.raises(ConfigError, match=message):
        division.check(built_in_config(name), 8, FORMATS.get(form or ""))


def test_whole_experts_can_be_divided_where_their_width_cannot():
    for count in (2, 4, 8):
        config = built_in_config("gpt-oss-20b")
        Division(count, expert=True).check(config, 8, FORMATS["mxfp4"])


def test_a_card_without_the_arithmetic_is_refused():
    with pytest.raises(ConfigError, match="no tensor cores for fp8"):
        _model(quantization="fp8", card="a100")
    assert _model(quantization="int8", card="a100").card.tensor_int8


@pytest.mark.parametrize("card", CARDS)
def test_a_card_has_a_source_and_sensible_figures(card):
    card = CARDS[card]
    assert card.source and card.devices and card.memory >= 10e9 and card.tensor_16 > 25
    assert card.memory_rate >= 0.28 and card.link_rate >= 16
    assert find_card(card.name) is card
    assert card.tensor_16 > card.vector and card.tensor_int8 >= 1.9 * card.tensor_16
    assert card.tensor_fp8 == 0 or 1.9 < card.tensor_fp8 / card.tensor_16 < 2.1


@pytest.mark.parametrize("name", ["4090", "RTX 4090", "GeForce RTX 4090", "rtx-4090", "RTX4090"])
def test_a_card_is_found_by_the_forms_of_its_name(name):
    assert find_card(name) is CARDS["rtx4090"]
    assert find_card(name.replace("4090", "4060 Ti 16GB")) is CARDS["rtx4060ti-16gb"]


def test_geforce_cards_have_the_rates_of_their_white_papers():
    """Those that a white paper states; 'AI TOPS' of the specifications are 16 x or 32 x float32."""
    for name, tensor, fp8, int8 in (
        ("rtx3080", 59.5, 0, 238),
        ("rtx4080", 97.5, 194.9, 389.9),
        ("rtx4090", 165.2, 330.3, 660.6),
        ("rtx5080", 112.6, 225.1, 450.2),
        ("rtx5090", 209.5, 419.0, 838.0),
    ):
        card = CARDS[name]
        found = card.tensor_16, card.tensor_fp8, card.tensor_int8
        assert found == pytest.approx((tensor, fp8, int8), rel=0.003), name
    for name, tops in (("rtx4060ti-16gb", 353), ("rtx4070", 466), ("rtx4070tisuper", 706),
                       ("rtx4080super", 836)):  # fmt: skip
        assert 16 * CARDS[name].vector == pytest.approx(tops, rel=0.005), name
    for name, tops in (("rtx5060ti-16gb", 759), ("rtx5070", 988), ("rtx5070ti", 1406),
                       ("rtx5080", 1801), ("rtx5090", 3352), ("rtxpro6000", 4000)):  # fmt: skip
        assert 32 * CARDS[name].vector == pytest.approx(tops, rel=0.005), name


def test_a_faster_memory_is_faster():
    times = [_speed(card=card).token(500).total for card in ("b200", "h200", "h100", "a100")]
    assert times == sorted(times)
