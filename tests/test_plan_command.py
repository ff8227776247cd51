"""`engine plan`, as a shell sees it: no GPU, clear errors, JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.cli import main
from engine.commands._bench_models import config_folder
from tests.golden.configs import FOLDER

ARGUMENTS = ["plan", "llama-3.1-8b", "--gpu", "h200"]


def _run(capsys, *arguments, status=0):
    with pytest.raises(SystemExit) as done:
        main([*ARGUMENTS, *arguments])
    out, err = capsys.readouterr()
    assert done.value.code == status, out + err
    return out if status == 0 else err


def test_the_table_names_every_way_and_the_fastest(capsys):
    text = _run(capsys, "--gpus", "8")
    for name in ("dp 8", "tp 2 x pp 2 x dp 2", "tp 8", "pp 8"):
        assert f"\n{name} " in text
    assert "Predicted, not measured" in text and "8 x NVIDIA H200" in text
    assert "lowest latency: tp 8" in text and "highest throughput: " in text


def test_json_has_the_parts_of_the_times(capsys):
    record = json.loads(_run(capsys, "--gpus", "4", "--json"))
    rows = {row["name"]: row for row in record["rows"]}
    assert record["num_gpus"] == 4 and set(rows) >= {"dp 4", "tp 4"}
    tensor = rows["tp 4"]
    assert sum(tensor["token"].values()) == pytest.approx(1e3 * tensor["ms_per_token"])
    assert tensor["token"]["collectives"] > 0 == rows["dp 4"]["token"]["collectives"]
    assert rows[record["fastest_token"]]["ms_per_token"] == min(
        row["ms_per_token"] for row in record["rows"]
    )
    assert rows[record["most_tokens"]]["output_tokens_per_s"] == max(
        row["output_tokens_per_s"] for row in record["rows"]
    )


def test_sizes_leave_only_their_ways(capsys):
    text = _run(capsys, "--gpus", "8", "--tensor-parallel-size", "4", "--data-parallel-size", "1")
    assert "tp 4 x pp 2" in text and "dp" not in text
    assert _run(capsys, "--gpus", "8", "-tp", "4", "-pp", "2") == text  # `--data-...` follows


def test_stages_of_given_sizes(capsys):
    text = _run(capsys, "--gpus", "4", "--pipeline-layers", "17,15")
    assert "\npp 2 (17 + 15) x dp 2 " in text and "\ntp 2 x pp 2 (17 + 15) " in text
    assert "\ntp 4" not in text and "pp 4" not in text


def test_expert_parallel_is_a_choice_for_mixtures(capsys):
    arguments = ["plan", "mixtral-8x7b", "--gpu", "h200", "--gpus", "2"]
    for extra, number in (([], 1), (["--enable-expert-parallel"], 2)):
        with pytest.raises(SystemExit):
            main([*arguments, *extra])
        lines = capsys.readouterr().out.splitlines()
        assert sum("(ep) " in line[:26] for line in lines) >= 1
        assert any(line.startswith("dp 2") for line in lines) == (number == 1)


def test_8_bit_pages_hold_twice_the_tokens(capsys):
    wide, narrow = (
        json.loads(_run(capsys, "--json", "--kv-cache-dtype", name))["rows"][0]["num_tokens"]
        for name in ("auto", "fp8")
    )
    assert 2 * wide <= narrow <= 2 * wide + 16


def test_formats_of_files_can_be_planned_for_a_built_in_configuration(capsys):
    assert "in q4_k," in _run(capsys, "-q", "q4_k")


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (None, "bfloat16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4_g128"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
    ],
)
def test_a_folder_is_planned_in_the_format_of_its_files(capsys, tmp_path, scheme, name):
    values = json.loads((config_folder("llama-3.1-8b") / "config.json").read_text())
    values |= {} if scheme is None else {"quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"")
    for extra, wanted in (([], name), (["-q", "fp8"], "fp8"), (["-q", "none"], "bfloat16")):
        with pytest.raises(SystemExit) as done:
            main(["plan", str(tmp_path), "--gpu", "h200", *extra])
        assert not done.value.code
        assert f" in {wanted}, " in capsys.readouterr().out


def test_a_gguf_file_is_planned_in_the_type_of_most_of_its_layers(capsys):
    with pytest.raises(SystemExit) as done:
        main(["plan", "smollm2", "--gpu", "l40s"])
    assert not done.value.code and " in q4_1, " in capsys.readouterr().out


def test_an_unknown_model_is_told_with_the_names_that_need_no_files(capsys):
    with pytest.raises(SystemExit) as done:
        main(["plan", "nowhere", "--gpu", "l40s"])
    said = capsys.readouterr().err
    assert done.value.code == 2 and "'nowhere' is not known" in said and "llama-3.1-8b" in said


def test_what_does_not_fit_is_said_and_status_1(capsys):
    with pytest.raises(SystemExit) as done:
        main(["plan", "mixtral-8x7b", "--gpu", "l40s"])
    assert done.value.code == 1
    text, reason = capsys.readouterr()
    assert "does not fit: " in text and "lowest latency" not in text
    assert reason == "engine plan: the model fits in no way\n"


def test_other_cards_say_where_their_constants_are_from(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "llama-3.1-8b", "--gpu", "a100"])
    assert (
        "constants measured on H100s and H200s, scaled by the data sheets"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus must be from 1 to 1024; got 0"),
        (["--gpus", "6", "--tensor-parallel-size", "4"], "must divide --gpus 6; got 4"),
        (["--gpus", "4", "--tensor-parallel-size", "2", "--data-parallel-size", "1",
          "--pipeline-parallel-size", "1"], "must multiply to --gpus 4; got tensor 2"),
        (["--pipeline-layers", "17,15", "--gpus", "4", "--pipeline-parallel-size", "4"],
         "--pipeline-layers must be 4 numbers (--pipeline-parallel-size); got 17,15"),
        (["--pipeline-layers", "17,0", "--gpus", "2"], "must be positive integers"),
        (["--pipeline-layers", "17,15"], "divides --gpus 1; got 17,15, 2 stages"),
        (["--pipeline-layers", "32", "--gpus", "2"], "must be two numbers or more"),
        (["--pipeline-layers", "17,16", "--gpus", "2"], "add up to 32, the layers; got 17 + 16"),
        (["--enable-expert-parallel"], "needs a model with experts"),
        (["--kv-cache-dtype", "fp4"], "must be one of auto, fp8, int8; got 'fp4'"),
        (["--dtype", "float32"], "dtype must be bfloat16 or float16"),
        (["--prompt-len", "200000"], "at most --max-model-len 131072; got 200000 + 1"),
        (["--prompt-len", "8", "--output-len", "9", "--max-model-len", "16"], "16; got 8 + 9"),
        (["--num-requests", "-1"], "--num-requests must be from 1"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2"),
        (["-q", "int3"], "quantization must be one of"),
    ],
)  # fmt: skip
def test_wrong_options_say_what_was_wanted(capsys, arguments, message):
    assert message in _run(capsys, *arguments, status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3-30b-a3b", "--enable-expert-parallel"], "needs --gpus of at least 2; got 1"),
        (["qwen3-30b-a3b", "--gpus", "4", "-tp", "1", "--enable-expert-parallel"],
         "needs --tensor-parallel-size of at least 2; got 1"),
                ([""], "model must be a name or a path; got ''"),
    ],
)  # fmt: skip
def test_what_a_model_or_its_division_refuses(capsys, arguments, message):
    with pytest.raises(SystemExit) as done:
        main(["plan", *arguments, "--gpu", "h200"])
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_pages_of_latents_are_not_quantized(capsys, tmp_path):
    record = json.loads((FOLDER / "deepseek_v3.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    with pytest.raises(SystemExit) as done:
        main(["plan", str(tmp_path), "--gpu", "h200", "--kv-cache-dtype", "int8"])
    said = capsys.readouterr().err
    assert done.value.code == 2
    assert "kv_cache_dtype must be 'auto' for deepseek_v3" in said and "got 'int8'" in said


def test_the_length_that_is_not_given_has_room_beside_the_other(capsys):
    text = _run(capsys, "--prompt-len", "4000", "--max-model-len", "4096")
    assert "prompts of 4000 and outputs of 96 tokens" in text
    text = _run(capsys, "--output-len", "3996", "--max-model-len", "4096")
    assert "prompts of 100 and outputs of 3996 tokens" in text


def test_fewer_running_requests_leave_more_pages(capsys):
    few, many = (
        json.loads(_run(capsys, "--json", "--max-num-seqs", count))["rows"][0]
        for count in ("8", "1024")
    )
    assert few["activations"] < many["activations"] and few["pages"] > many["pages"]


def test_an_unknown_card_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as done:
        main(["plan", "llama-3.1-8b", "--gpu", "h20"])
    assert done.value.code == 2 and "did you mean 'h200'?" in capsys.readouterr().err


def test_planning_needs_neither_a_gpu_nor_the_server():
    code = (
        "import sys; from engine.cli import main\n"
        "try: main(['plan', 'llama-3.1-8b', '--gpu', 'h200'])\n"
        "except SystemExit as done: assert not done.code\n"
        "assert not {'cupy', 'starlette', 'engine.server'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
