"""Makes the engine's `Speculation` from its config."""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.scheduler.scheduler import Scheduler
from engine.speculative.config import SpeculativeConfig
from engine.speculative.controller import Controller
from engine.speculative.costs import measure_step_costs
from engine.speculative.guarded import GuardedProposer
from engine.speculative.ngram import NgramProposer, SuffixProposer
from engine.speculative.proposer import CustomProposer, Proposer
from engine.speculative.speculation import NoSpeculation, Speculation

__all__ = ["make_speculation"]


def make_speculation(
    config: SpeculativeConfig | None, scheduler: Scheduler, runner: Any
) -> Speculation | NoSpeculation:
    """Return the `Speculation` of an engine.

    Parameters
    ----------
    config : SpeculativeConfig or None
    scheduler : Scheduler
    runner : ModelRunner
        With its graphs captured, and nothing computed yet.

    Raises
    ------
    ConfigError
        If the draft model does not fit to the target.
    """
    if config is None:
        return NoSpeculation()
    trees = scheduler.config.draft_trees
    proposer = _make_proposer(config, allow_trees=trees)
    guarded = GuardedProposer(proposer, runner.model.config.vocab_size)
    graph_lens = None
    if runner.graphs is not None:
        graph_lens = sorted({key.query_len for key in runner.graphs.keys})
    lens = graph_lens or [1, 1 + config.num_tokens]
    costs = measure_step_costs(runner, lens, scheduler.config.max_num_seqs)
    controller = Controller(costs, graph_lens, is_adaptive=config.adaptive)
    return Speculation(config, guarded, scheduler, controller)


def _make_proposer(config: SpeculativeConfig, *, allow_trees: bool) -> Proposer:
    if config.proposer is not None:
        return CustomProposer(config.proposer)
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer(config.prompt_lookup_min, allow_trees=allow_trees)
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer(config.prompt_lookup_min)
    raise ConfigError(f"speculative_config.method {config.method!r} is not available")
