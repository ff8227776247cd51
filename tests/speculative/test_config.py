"""`speculative_config`: what is accepted, and errors that name the option."""

from __future__ import annotations

import pytest

from engine.engine_config import EngineConfig
from engine.errors import ConfigError, UnknownOptionError
from engine.speculative import SpeculativeConfig


def nothing(ids, count):
    return None


@pytest.mark.parametrize(
    ("option", "method", "count"),
    [
        ({"method": "ngram"}, "ngram", 8),
        ({"method": "suffix"}, "suffix", 12),
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", 3),
        ({"model": "smollm2"}, "draft_model", 4),
        ({"model": "a", "method": "eagle3"}, "eagle3", 4),
        ({"proposer": nothing}, "custom", 4),
        (nothing, "custom", 4),
    ],
)
def test_method_and_number_of_drafts(option, method, count):
    config = EngineConfig(speculative_config=option)
    assert config.speculative_config.method == method
    assert config.max_draft_tokens == config.speculative_config.num_tokens == count


def test_without_it_there_are_no_drafts():
    assert EngineConfig().speculative_config is None and EngineConfig().max_draft_tokens == 0
    # The limit of a step may be smaller or larger than what is proposed.
    options = {"max_draft_tokens": 5, "speculative_config": {"method": "ngram"}}
    assert EngineConfig(**options).max_draft_tokens == 5


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"method": "n-gram"}, r"speculative_config.method must be one of 'ngram', .*got 'n-gram'"),
        ({}, "speculative_config.method must be one of"),
        ({"method": 7}, "got 7"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "_tokens must be a whole",
        ),
        ({"method": "ngram", "num_speculative_tokens": 64}, r"in \[1, 63\], or None; got 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "got True"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "at most prompt_lookup_max = 4; got 5",
        ),
        ({"method": "ngram", "prompt_lookup_max": 65}, r"prompt_lookup_max must be .*got 65"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size must be"),
        ({"method": "ngram", "adaptive": 1}, "adaptive must be True or False; got 1"),
        ({"method": "ngram", "model": "x"}, "model must be None for method='ngram'; got 'x'"),
        ({"method": "eagle3"}, "model must be given for method='eagle3'; got None"),
        ({"method": "draft_model", "model": ""}, "model must be a text that is not empty"),
        ({"method": "custom"}, "proposer must be given"),
        ({"method": "custom", "proposer": 5}, "proposer must be a callable"),
        ({"method": "mtp", "proposer": nothing, "model": "x"}, "proposer must be None"),
        (5, r"must be a mapping, a callable or None; got 5"),
        ("ngram", r"got 'ngram' \(str\)"),
    ],
)
def test_wrong_values_are_named(option, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(speculative_config=option)


def test_an_unknown_name_has_a_nearest_one():
    with pytest.raises(UnknownOptionError, match="num_speculative_tokens"):
        SpeculativeConfig.from_option({"method": "ngram", "num_speculative_token": 3})


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (3, 8)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_max": 6}, (6, 6)),
        ({"prompt_lookup_min": 2}, (2, 8)),
        ({"prompt_lookup_min": 9}, (9, 9)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": None}, (3, 8)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 2}, (2, 2)),
    ],
)
def test_one_length_of_a_match_alone(given, lengths):
    """As in vLLM the minimum follows a maximum; a minimum never exceeds the default maximum."""
    config = SpeculativeConfig(method="ngram", **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lengths
