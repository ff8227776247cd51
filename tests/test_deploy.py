"""Dockerfile, compose files, Prometheus and Grafana agree with the server and with each other."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from engine.commands import serve
from engine.server import load_log, metrics
from engine.server.routes import health

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
PINNED = re.compile(r"[a-z/]+:v?\d+\.\d+\.\d+(-[a-z-]+)?")


def _yaml(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def _instructions():
    """Return (stage, instruction, arguments) of each line of the Dockerfile."""
    stage, found = "", []
    for line in DOCKERFILE.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word and word != "#" and word.isupper():
            if word == "FROM":
                stage = rest.split()[-1]
            found.append((stage, word, rest.strip()))
    return found


def _of(*words):
    return [(stage, rest) for stage, word, rest in _instructions() if word in words]


def _options(command):
    """Return the options of an `engine serve` command, and fail if one is unknown."""
    assert command[0] == "serve"
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = vars(parser.parse_args(command[1:]))
    return {name.replace("_", "-"): str(value) for name, value in given.items()}


# ---- the images


def test_there_are_two_targets_that_run_as_nobody_special():
    stages = [rest.split() for _, rest in _of("FROM")]
    names = [words[-1] for words in stages]
    assert names[-2:] == ["cuda", "cpu"]  # the last is the default
    assert all(words[0] == "runtime" for words in stages[-2:])
    users = _of("USER")
    assert users == [("runtime", "10001:10001")]
    after = DOCKERFILE[DOCKERFILE.index("\nUSER ") :]
    assert "RUN " not in after, "what is written after USER belongs to it"


def test_base_images_are_pinned():
    (arg,) = [rest for _, rest in _of("ARG") if rest.startswith("PYTHON=")]
    assert PINNED.fullmatch(arg.removeprefix("PYTHON=")), arg
    names = {rest.split()[-1] for _, rest in _of("FROM")}
    assert {rest.split()[0] for _, rest in _of("FROM")} <= names | {"${PYTHON}"}


def test_what_is_copied_exists_and_is_not_ignored():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    copied = [shlex.split(rest)[:-1] for _, rest in _of("COPY") if "--from=" not in rest]
    names = [name.removeprefix("./") for words in copied for name in words]
    assert {"engine", "cuda_src", "pyproject.toml"} <= set(names)
    for name in names:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in rules, f"{name} is ignored"
    # What the build of the wheel reads beside the package.
    for name in re.findall(r'"?(?:readme|license-files)"? = \[?"([^"]+)"', _pyproject()):
        assert name in names, name
    assert any(fnmatch("engine/__pycache__", rule) for rule in rules if not rule.startswith("!"))


def _pyproject():
    return (ROOT / "pyproject.toml").read_text()


def test_the_extras_exist():
    extras = re.findall(r"'\.\[([a-z0-9,]+)\]'", DOCKERFILE)
    assert len(extras) == 2
    known = set(re.findall(r"^([a-z0-9]+) = \[", _pyproject(), re.MULTILINE))
    for names in extras:
        assert {"serve", "hub"} <= set(names.split(",")) <= known


def test_the_health_check_asks_the_open_path():
    ((_, rest),) = _of("HEALTHCHECK")
    assert "http://127.0.0.1:8000/health" in rest
    command = json.loads(rest[rest.index("[") :])
    compile(command[2], "HEALTHCHECK", "exec")
    assert "/health" in [route.path for route in health.routes()]
    assert _of("EXPOSE") == [("runtime", "8000")]


def test_the_images_command_is_understood():
    ((_, entry),) = _of("ENTRYPOINT")
    assert json.loads(entry) == ["engine"]
    ((_, command),) = _of("CMD")
    options = _options(json.loads(command))
    assert options.get("port", "8000") == "8000"


# ---- compose


def test_compose_pins_images_and_publishes_to_this_machine_only():
    services = _yaml("compose.yaml")["services"]
    assert set(services) == {"engine", "prometheus", "grafana"}
    for name, service in services.items():
        if "build" not in service:
            assert PINNED.fullmatch(service["image"]), service["image"]
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name} is open to the network"
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]


def test_the_engines_service_fits_to_the_image_and_the_server():
    service = _yaml("compose.yaml")["services"]["engine"]
    over = _yaml("compose.cuda.yaml")["services"]["engine"]
    targets = {rest.split()[-1] for _, rest in _of("FROM")}
    assert {service["build"]["target"], over["build"]["target"]} == {"cpu", "cuda"} <= targets
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    options = _options(service["command"])
    assert service["ports"] == [f"127.0.0.1:8000:{options['port']}"]
    assert options["host"] == "0.0.0.0"
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > float(options["shutdown-timeout"])
    ((_, volume),) = _of("VOLUME")
    assert service["volumes"] == [f"cache:{volume}"]
    ((_, environment),) = [each for each in _of("ENV") if each[0] == "cuda"]
    for path in re.findall(r"=(/\S+)", environment):
        assert path.startswith(volume), f"{path} cannot be written: the rest is read-only"


def test_what_compose_mounts_exists():
    file = _yaml("compose.yaml")
    for service in file["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists() and volume.endswith(":ro"), volume
            else:
                assert source in file["volumes"]


def test_prometheus_and_grafana_find_their_sources():
    services = _yaml("compose.yaml")["services"]
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    assert f"--config.file={mounted['./prometheus.yaml']}" in services["prometheus"]["command"]
    (job,) = _yaml("prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["engine:8000"]}]
    assert job["metrics_path"] == "/metrics"
    (source,) = _yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["uid"] == "prometheus"
    (provider,) = _yaml("grafana/provisioning/dashboards/engine.yaml")["providers"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{mounted['./grafana/dashboards']}/engine.json"


# ---- the dashboard


def _dashboard():
    return json.loads((DEPLOY / "grafana" / "dashboards" / "engine.json").read_text())


def _published():
    """Return the names of the series that /metrics has."""
    names = {value.name for value in metrics.GAUGES}
    names |= {f"{value.name}_total" for value in metrics.COUNTERS}
    for value in metrics.HISTOGRAMS:
        names |= {f"{value.name}_{part}" for part in ("bucket", "sum", "count")}
    return names | {f"{metrics.REQUESTS}_total"}


def _queries():
    panels = _dashboard()["panels"]
    return [(panel["title"], t["expr"]) for panel in panels for t in panel["targets"]]


@pytest.mark.parametrize(("title", "query"), _queries())
def test_a_panel_shows_metrics_that_the_server_has(title, query):
    names = re.findall(r"\b(?:vllm|engine):\w+", query)
    assert names and set(names) <= _published(), set(names) - _published()
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)
    assert query.count('model_name=~"$model"') == len(names)
    for name in names:
        is_counted = name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert is_counted == (f"rate({name}" in query), "counters are shown as rates, gauges not"


def test_the_dashboard_has_the_figures_of_the_log_in_the_same_words():
    targets = [target for panel in _dashboard()["panels"] for target in panel["targets"]]
    queries = {target["legendFormat"]: target["expr"] for target in targets}
    figures = {
        "prompt_tokens_per_s": ("vllm:prompt_tokens_total",),
        "output_tokens_per_s": ("vllm:generation_tokens_total",),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_cache_used": ("vllm:kv_cache_usage_perc",),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        "accepted_drafts": (
            "vllm:spec_decode_num_accepted_tokens_total",
            "vllm:spec_decode_num_draft_tokens_total",
        ),
    }
    assert figures.keys() == load_log.WORDS.keys()
    for field, names in figures.items():
        query = queries[load_log.WORDS[field]]
        assert tuple(re.findall(r"vllm:\w+", query)) == names, field


def test_the_dashboard_holds_together():
    dashboard = _dashboard()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in panels]
    assert len({place[:2] for place in places}) == len(panels)
    assert all(x + w <= 24 for x, _, w, _ in places)
    for panel in panels:
        for item in (panel, *panel["targets"]):
            assert item["datasource"]["uid"] == "prometheus"
        assert panel["description"]
    (variable,) = dashboard["templating"]["list"]
    assert variable["name"] == "model"
    (name,) = re.findall(r"label_values\((\S+), model_name\)", variable["query"]["query"])
    assert name in _published()


# ---- Ray


def test_the_ray_serve_application_is_understood():
    ray_serve = pytest.importorskip("engine.server.replicas.ray_serve")
    (application,) = _yaml("ray_serve.yaml")["applications"]
    module, _, name = application["import_path"].partition(":")
    assert module == ray_serve.__name__ and callable(getattr(ray_serve, name))
    config = ray_serve.RayServeConfig.from_options(application["args"])
    assert config.max_replicas > config.min_replicas
    assert set(config.engine) <= set(serve.LLM_OPTIONS)


def test_the_ray_cluster_mounts_the_application_and_installs_the_extras():
    cluster = _yaml("ray_cluster.yaml")
    for path in cluster["file_mounts"].values():
        assert (ROOT / path).exists()
    extras = re.search(r"rawengine\[(.*)\]", " ".join(cluster["setup_commands"]))[1].split(",")
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"serve", "cluster"} <= set(extras) <= set(known)


def test_the_metadata_names_urls_and_operating_systems():
    """The systems of docs/platforms.md, and every minor version of Python up to the newest one."""
    text = _pyproject()
    systems = re.findall(r'"Operating System :: (.*)"', text)
    assert systems == ["MacOS", "Microsoft :: Windows", "POSIX :: Linux"]
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', text)
    minors = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    assert minors[0] == oldest[1] and [*map(int, minors)] == [*range(int(minors[0]), 14)]
    assert re.search(r'\[project\.urls\]\n(\w+ = "https://\S+"\n)+', text)
