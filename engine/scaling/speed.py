"""Speed of a model divided over GPUs: one request, many requests, prompts."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from engine.config import ModelConfig
from engine.dtypes import itemsize
from engine.scaling.division import Division, stages
from engine.scaling.step_time import Step, StepModel
from engine.scaling.terms import Terms

__all__ = ["Speed", "Workload"]

_PROMPT_TOKENS = 8192  # tokens per step with prompts
_PARTS = 32  # number of intervals of the integral over the last requests' steps


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together, with uniformly distributed lengths.

    Attributes
    ----------
    num_requests : int
        Number of requests.
    prompt, output : (int, int)
        Minimum and maximum length in tokens.
    """

    num_requests: int
    prompt: tuple[int, int] = (100, 1024)
    output: tuple[int, int] = (100, 1024)

    @property
    def mean_prompt(self) -> float:
        """Mean prompt length in tokens."""
        return sum(self.prompt) / 2

    @property
    def mean_output(self) -> float:
        """Mean output length in tokens."""
        return sum(self.output) / 2

    @property
    def context(self) -> float:
        """Mean context length of a running request while it decodes, in tokens."""
        low, high = self.output
        square = (low * low + low * high + high * high) / 3
        return self.mean_prompt + square / (2 * self.mean_output)

    def share_alive(self, step: float) -> float:
        """Return the share of requests whose output has more than `step` tokens."""
        low, high = self.output
        if step < low:
            return 1.0
        return max(0.0, (high - step) / (high - low)) if high > low else 0.0


@dataclass(frozen=True)
class Speed:
    """Predictions for one division of a model.

    Attributes
    ----------
    model : StepModel
        The model, its formats, and the card.
    division : Division
        The division.
    gpus_per_host : int
        Number of GPUs per host, connected by the card's link.
    """

    model: StepModel
    division: Division
    gpus_per_host: int = 8

    @cached_property
    def _stages(self) -> list[ModelConfig]:
        return stages(self.model.config, self.division)

    @property
    def is_linked(self) -> bool:
        """Whether all stages are on one host, where they write into each other's memory."""
        return self.division.tensor * self.division.pipeline <= self.gpus_per_host

    def stage_times(self, step: Step) -> list[Terms]:
        """Return the time of each pipeline stage, including the transfer to the next one."""
        count = len(self._stages)
        constants = self.model.constants
        us = constants.stage_us if self.is_linked else constants.message_us
        found = []
        for index, local in enumerate(self._stages):
            is_last = index == count - 1
            terms = self.model.stage_terms(local, step, self.division, is_last=is_last)
            if count > 1:
                terms += Terms(transfers=us)
            found.append(terms if is_last else terms + self._transfer(index, step))
        return found

    def _transfer(self, stage: int, step: Step) -> Terms:
        """Return the time to send a step's activations from stage `stage` to the next one.

        They are a layer's output and the residual that it has not been added to.
        """
        constants = self.model.constants
        hidden = self.model.config.hidden_size
        num_bytes = 2 * step.num_tokens * hidden * itemsize(self.model.dtype)
        rate = self.model.card.link_rate if self.is_linked else constants.message_rate
        us = num_bytes / rate / 1e3
        if (stage + 1) * self.division.tensor % self.gpus_per_host == 0:  # on another host
            us += constants.network_us + num_bytes / constants.network_rate / 1e3
        return Terms(transfers=us)

    def step_terms(self, step: Step) -> Terms:
        """Return the time of a step from its start to its tokens, through all stages."""
        device = sum(self.stage_times(step), Terms(host=self.model.constants.step_us))
        return device + Terms(host=max(0.0, self._host_us(step) - device.total))

    def cycle_terms(self, step: Step) -> Terms:
        """Return the time between two steps of a full pipeline: the time of the slowest stage."""
        slowest = max(self.stage_times(step), key=lambda terms: terms.total)
        device = slowest + Terms(host=self.model.constants.step_us)
        return device + Terms(host=max(0.0, self._host_us(step) - device.total))

    def _host_us(self, step: Step) -> float:
        constants = self.model.constants
        if step.is_decode:
            return constants.host_step_us + constants.host_sequence_us * step.num_tokens
        layers = self._stages[0].num_layers
        return constants.host_prompt_us + layers * constants.host_prompt_layer_us

    def token(self, context: float) -> Terms:
        """Return the time of one token of a single request."""
        return self.step_terms(Step.decode(1, context))

    def prompts(self, length: float) -> Terms:
        """Return the prefill time per token for many prompts of `length` tokens, on one replica."""
        rows = max(1, round(_PROMPT_TOKENS / length))
        step = Step(_PROMPT_TOKENS, (length + 1) / 2, rows, is_decode=False)
        return self.cycle_terms(step).times(1 / _PROMPT_TOKENS)

    def requests(self, work: Workload, num_running: int) -> tuple[float, Terms]:
        """Return output tokens per second of all replicas, and one replica's time for its requests.

        Parameters
        ----------
        work : Workload
            The requests, spread evenly over the replicas.
        num_running : int
            Maximum number of concurrent requests per replica.
        """
        mine = math.ceil(work.num_requests / self.division.data)
        running = min(mine, num_running)
        terms = self.prompts(work.mean_prompt).times(mine * work.mean_prompt)
        if mine > running:  # whenever a request ends, the next one starts
            steps = (mine - running) / running * work.mean_output
            terms += self._decodes(running, work.context).times(steps)
        terms += self._last_requests(work, running)
        tokens = work.num_requests * work.mean_output
        return tokens / terms.total * 1e6, terms

    def _last_requests(self, work: Workload, running: int) -> Terms:
        """Return the time of the final steps, when requests end and no new ones start."""
        ends = [0.0, float(work.output[0])]
        width = (work.output[1] - work.output[0]) / _PARTS
        ends += [work.output[0] + width * (part + 1) for part in range(_PARTS if width else 0)]
        terms = Terms()
        for first, last in itertools.pairwise(ends):
            middle = (first + last) / 2
            alive = max(1, round(running * work.share_alive(middle)))
            terms += self._decodes(alive, work.mean_prompt + middle).times(last - first)
        return terms

    def _decodes(self, num_seqs: int, context: float) -> Terms:
        """Return the time of one token of `num_seqs` sequences, split over the pipeline stages.

        Unless stages are linked, one group of sequences more than stages is in flight, so that the
        host works ahead.
        """
        num_stages = self.division.pipeline
        num_groups = num_stages if num_stages == 1 or self.is_linked else num_stages + 1
        count = min(num_groups, num_seqs)
        step = Step.decode(math.ceil(num_seqs / count), context)
        if count < num_stages:  # too few sequences to keep all stages busy
            return self.step_terms(step)
        return self.cycle_terms(step).times(count)
