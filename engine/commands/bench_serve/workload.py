"""Requests to send: random prompts or prompts from a file, and their arrival times."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RequestError
from engine.model_files import excerpt, read_file

__all__ = ["CHAT", "COMPLETIONS", "Job", "Lengths", "arrivals", "file_jobs", "random_jobs"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_MAX_FILE = 1 << 30
_MAX_LINE = 16 << 20
_MAX_OUTPUT = 1 << 24  # maximum tokens per output
# Each word is about one token.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes
    ----------
    prompt : dict
        The ``prompt`` or ``messages`` field of the request.
    num_output_tokens : int
        The request's `max_tokens`.
    num_prompt_tokens : int
        Prompt length; 0 if only the server can count it.
    """

    prompt: dict[str, Any]
    num_output_tokens: int
    num_prompt_tokens: int = 0


@dataclass(frozen=True)
class Lengths:
    """Length distribution of random requests, in tokens.

    Lengths are drawn uniformly from [length * (1 - range_ratio), length * (1 + range_ratio)]. All
    prompts start with a common prefix of `prefix_len` tokens, not included in their length.

    Examples
    --------
    >>> Lengths(562, 562, 0.822).span(562)
    (100, 1024)
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def span(self, length: int) -> tuple[int, int]:
        """Return the minimum and maximum length."""
        low = math.floor(length * (1 - self.range_ratio))
        return max(1, low), max(1, math.ceil(length * (1 + self.range_ratio)))


def random_jobs(
    count: int, lengths: Lengths, endpoint: str, seed: int, vocab_size: int
) -> list[Job]:
    """Return random requests: token ids below `vocab_size`, or words for a chat endpoint.

    Equal arguments yield equal requests; a larger `count` only appends more.
    """
    rng = random.Random(seed)
    is_chat = endpoint == CHAT

    def draw(size: int) -> list[Any]:
        return rng.choices(_WORDS if is_chat else range(vocab_size), k=size)

    prefix = draw(lengths.prefix_len)
    jobs = []
    for _ in range(count):
        size = rng.randint(*lengths.span(lengths.input_len))
        tokens = prefix + draw(size)
        prompt = _chat(" ".join(tokens)) if is_chat else {"prompt": tokens}
        jobs.append(Job(prompt, rng.randint(*lengths.span(lengths.output_len)), len(tokens)))
    return jobs


def file_jobs(file: Path, count: int, endpoint: str, output_len: int) -> list[Job]:
    """Return the requests of a JSONL file in order, cycling if it has fewer than `count`.

    Each line is an object with ``prompt`` (text, or token ids for completions) or ``messages``
    (chat), and optionally ``output_tokens``; other fields are ignored.

    Raises
    ------
    RequestError
        If the file cannot be read, or a line is invalid; the message names the line.
    """
    data = read_file(file, _MAX_FILE, error=RequestError)
    jobs: list[Job] = []
    for number, line in enumerate(data.splitlines(), 1):
        if len(jobs) == count:
            break
        if not line.strip():
            continue
        try:
            jobs.append(_job(line, endpoint, output_len))
        except RequestError as error:
            raise RequestError(f"--dataset-path {excerpt(file)}, line {number}: {error}") from None
    if not jobs:
        raise RequestError(f"--dataset-path {excerpt(file)} must have a line; it is empty")
    return [jobs[index % len(jobs)] for index in range(count)]


def _job(line: bytes, endpoint: str, output_len: int) -> Job:
    if len(line) > _MAX_LINE:
        raise RequestError(f"must have at most {_MAX_LINE} bytes; got {len(line)}")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"must be JSON; {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f"must be an object; got {excerpt(row)}")
    length = row.get("output_tokens", output_len)
    if type(length) is not int or not 1 <= length <= _MAX_OUTPUT:
        wanted = f"an integer from 1 to {_MAX_OUTPUT}"
        raise RequestError(f"output_tokens must be {wanted}; got {excerpt(length)}")
    return Job(_prompt(row, endpoint), length)


def _prompt(row: dict[str, Any], endpoint: str) -> dict[str, Any]:
    text = row.get("prompt")
    messages = row.get("messages")
    if endpoint == CHAT:
        if isinstance(messages, list) and messages:
            return {"messages": messages}
        if isinstance(text, str):
            return _chat(text)
        raise RequestError("a chat needs messages, or a prompt that is text")
    is_ids = isinstance(text, list) and text and all(type(each) is int for each in text)
    if isinstance(text, str) or is_ids:
        return {"prompt": text}
    raise RequestError("a completion needs a prompt: text, or a list of token ids")


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the arrival time of each request, in seconds from the start.

    Parameters
    ----------
    count : int
    rate : float
        Requests per second; inf: all at once.
    burstiness : float
        Shape parameter of the gamma distribution of intervals. 1: Poisson process; below 1: bursty;
        above 1: more regular; inf: equal intervals.
    seed : int

    Examples
    --------
    >>> arrivals(3, 4.0, math.inf, seed=0)
    [0.0, 0.25, 0.5]
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    moments = []
    now = 0.0
    for _ in range(count):
        moments.append(now)
        even = math.isinf(burstiness)
        now += 1 / rate if even else rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return moments
