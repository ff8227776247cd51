"""Build the engine's `Speculation` from its config."""

from __future__ import annotations

import sys

from engine.model import Model
from engine.runner.model_runner import ModelRunner
from engine.scheduler.scheduler import Scheduler
from engine.speculative.config import SpeculativeConfig
from engine.speculative.controller import Controller
from engine.speculative.costs import measure_step_costs
from engine.speculative.draft_model import DraftModelProposer
from engine.speculative.forced import ForcedTokens
from engine.speculative.guarded import GuardedProposer
from engine.speculative.head_proposer import HeadProposer
from engine.speculative.heads import LoadedHead
from engine.speculative.ngram import NgramProposer, SuffixProposer
from engine.speculative.proposer import CustomProposer, Proposer
from engine.speculative.speculation import NoSpeculation, Speculation

__all__ = ["make_speculation"]


def make_speculation(
    config: SpeculativeConfig | None,
    scheduler: Scheduler,
    runner: ModelRunner,
    draft: Model | LoadedHead | None = None,
    *,
    overlaps: bool = False,
    is_pipelined: bool = False,
) -> Speculation | NoSpeculation:
    """Return the `Speculation` of an engine.

    Parameters
    ----------
    config : SpeculativeConfig or None
        None: no speculation.
    scheduler : Scheduler
        Scheduler of the engine.
    runner : ModelRunner
        Runner with captured graphs, before its first step.
    draft : Model or LoadedHead, optional
        Draft model or head, for "draft_model", "eagle3" and "mtp" (`load_draft`).
    overlaps, is_pipelined : bool
        See `Speculation`.
    """
    if config is None:
        return NoSpeculation()
    proposer = _make_proposer(config, scheduler, runner, draft)
    guarded = GuardedProposer(proposer, runner.model.config.vocab_size, may_defer=draft is not None)
    graph_lens = None
    if runner.graphs is not None:
        graph_lens = sorted({key.query_len for key in runner.graphs.keys})
    lens = graph_lens or [1, 1 + min(config.num_tokens, scheduler.config.max_draft_tokens)]
    limits = scheduler.config
    num_tokens = min(limits.max_num_batched_tokens, limits.max_model_len)
    costs = measure_step_costs(runner, lens, limits.max_num_seqs, num_tokens)
    controller = Controller(costs, graph_lens, is_adaptive=config.adaptive)
    return Speculation(
        config, guarded, scheduler, controller, overlaps=overlaps, is_pipelined=is_pipelined
    )


def _make_proposer(
    config: SpeculativeConfig,
    scheduler: Scheduler,
    runner: ModelRunner,
    draft: Model | LoadedHead | None,
) -> Proposer:
    limits = scheduler.config
    if callable(config.proposer):
        return CustomProposer(config.proposer)
    if config.method == "grammar":
        return ForcedTokens()
    assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
    if config.method == "suffix":
        return SuffixProposer(config.prompt_lookup_min, allow_trees=limits.draft_trees)
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    count = min(config.num_tokens, limits.max_draft_tokens)
    generations = scheduler.blocks.allocator.generations
    if isinstance(draft, LoadedHead):
        return HeadProposer(draft.head, runner, limits, count, generations)
    vocab_size = runner.model.config.vocab_size
    pool = runner.kv_cache.pool
    proposer = DraftModelProposer(draft, vocab_size, pool, limits, count, generations)
    proposer.prepare(graphs=runner.graphs is not None, progress=sys.stderr.isatty())
    return proposer
