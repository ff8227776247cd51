"""A mock of the paged KV cache, without arithmetic, that detects every slot with wrong content.

The "keys and values" of a token are a number that depends on the token and all before it, on the
cache salt and on the rope kind. The mock writes them to the slots given by the block table, and
carries out the step's block moves. Before it samples, it compares every slot in the context with
what the request would have there on its own. The next token is a function of the last number, so
`oracle` can compute the whole output.
"""

from __future__ import annotations

from types import SimpleNamespace

from engine.cache.state_slots import StateAccess
from engine.drafts import MAX_STATE_QUERY_LEN
from engine.request import Request

VOCAB = 7
EOS = 0
_MODULUS = (1 << 61) - 1


def rules(max_tokens=8, min_tokens=0, ignore_eos=False, stop_token_ids=None):
    """The sampling parameters that the scheduler reads."""
    return SimpleNamespace(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_ids,
    )


def make_request(name, prompt, max_tokens=8, *, ignore_eos=True, **fields):
    """A request whose ids are in the mock's vocabulary."""
    sampling = rules(max_tokens, ignore_eos=ignore_eos)
    return Request(name, list(prompt), sampling, eos_token_ids=[EOS], **fields)


def seed_of(request, long_rope):
    """The number before the first token."""
    return sum(map(ord, request.cache_salt or "")) * 2 + long_rope + 17


def chain(value, token):
    """The number of `token` after a prefix of number `value`."""
    return (value * 1_000_003 + token + 1) % _MODULUS


def next_token(value):
    """The token sampled after a prefix of number `value`."""
    return (value >> 7) % VOCAB


def oracle(request, num_outputs=0):
    """All output ids that `request` ends with; the first `num_outputs` are taken as given.

    Each follows the number of all tokens before it, of the rope kind that their count calls for.
    """
    values = [seed_of(request, False), seed_of(request, True)]
    outputs = list(request.output_token_ids[:num_outputs])
    for token in request.prompt_token_ids + outputs:
        values = [chain(value, token) for value in values]
    limit = request.max_num_tokens - request.num_prompt_tokens
    while len(outputs) < limit:
        length = request.num_prompt_tokens + len(outputs)
        outputs.append(next_token(values[0 < request.short_rope_len < length]))
        values = [chain(value, outputs[-1]) for value in values]
        if outputs[-1] == EOS and not request.sampling_params.ignore_eos:
            break
    return outputs


class PagedMock:
    """Runs steps of a scheduler, in the order of the calls."""

    def __init__(self, config):
        self.block_size = config.block_size
        self.pages = [[None] * config.block_size for _ in range(config.num_blocks)]
        self.host = [None] * config.num_host_blocks
        self.states = [None] * config.num_state_slots
        self.host_states = [None] * config.num_host_state_slots
        self._slots = {}  # request -> the slot it continues in
        self.num_snapshot_hits = self.num_slot_copies = 0
        self._sampled = {}  # (request, position) -> id, as the device knows it
        self._next = (-1, [])  # what the next step is if its batch is unchanged
        self.num_unchanged = self.num_accepted = self.num_rejected = 0

    def run(self, output):
        """Compute a step at once; return the sampled ids by request."""
        return self.execute(output, self.lay_out(output))

    def lay_out(self, output):
        """A snapshot of the scheduler's state, as a step's arrays would hold it."""
        assert not any(r.num_pending_tokens > 1 for r in output.admitted)
        chunks = [(s.request, s.start, s.num_scheduled_tokens) for s in output.sequences]
        if output.is_unchanged:
            assert self._next == (output.step_id, chunks) and not output.preempted
            assert all(s.is_sampled for s in output.sequences)
        self.num_unchanged += output.is_unchanged
        self._next = (output.step_id + 1, [(r, start + n, 1) for r, start, n in chunks])
        if output.num_draft_tokens:
            self._next = (-1, [])
        assert all(r in output.admitted or not r.block_table for r in output.restarted)
        accesses = self._accesses(output)
        return [
            (
                s,
                s.request.token_ids(0, s.num_reached_tokens),
                list(s.request.block_table),
                seed_of(s.request, s.request.long_rope),
                accesses.get(s.request),
            )
            for s in output.sequences
        ]

    def _accesses(self, output):
        """The slots of each sequence: those in the output, else the one it wrote last."""
        if not self.states:
            assert not output.state_access and output.slot_moves is None
            return {}
        given = {access.request: access for access in output.state_access}
        assert len(given) == len(output.state_access)
        assert given.keys() <= {s.request for s in output.sequences}
        accesses = {}
        for request in (s.request for s in output.sequences):
            slot = self._slots.get(request)
            accesses[request] = given.get(request) or StateAccess(request, slot, (slot,))
            self._slots[request] = accesses[request].targets[0]
        written = [slot for a in accesses.values() for slot in (*a.targets, a.snapshot)]
        written = [slot for slot in written if slot >= 0]
        assert len(set(written)) == len(written), "two sequences write a slot"
        for access in accesses.values():
            others = set(written) - {*access.targets, access.snapshot}
            assert access.source not in others, "a slot is read and written by two sequences"
        return accesses

    def execute(self, output, batch):
        """Move blocks, then compute a batch from `lay_out`."""
        for device, host in output.swap_out:
            self.host[host] = list(self.pages[device])
        copied = [(list(self.pages[source]), target) for source, target in output.copies]
        for content, target in copied:
            self.pages[target] = content
        for host, device in output.swap_in:
            self.pages[device] = list(self.host[host])
        for block in output.freed_blocks:
            self.pages[block] = [None] * self.block_size
        if output.slot_moves is not None:
            self._move_slots(output.slot_moves)
        return dict(filter(None, [self._run(*entry) for entry in batch]))

    def _move_slots(self, moves):
        for device, host in moves.swap_out:
            self.host_states[host] = self.states[device]
        assert not {s for s, _ in moves.copies} & {t for _, t in moves.copies}
        self.num_slot_copies += len(moves.copies)
        for source, target in moves.copies:
            self.states[target] = self.states[source]
        for host, device in moves.swap_in:
            self.states[device] = self.host_states[host]
        for slot in moves.freed:
            self.states[slot] = None

    def _run_states(self, sequence, access, values):
        """Advance the states; `values` are the numbers before and after each token."""
        first = sequence.start
        where = f"{sequence.request.request_id}: state {access.source} after {first} tokens"
        assert first == 0 or self.states[access.source] == values[first], where
        stop = first + sequence.num_scheduled_tokens
        if len(access.targets) > 1:
            assert len(access.targets) == sequence.num_scheduled_tokens <= MAX_STATE_QUERY_LEN
            written = enumerate(access.targets, first + 1)
        else:
            written = [(stop, access.targets[0])]
        for position, slot in written:
            self.states[slot] = values[position]
        if access.snapshot >= 0:
            assert first < access.snapshot_len <= stop
            self.states[access.snapshot] = values[access.snapshot_len]
        self.num_snapshot_hits += access.source not in access.targets

    def _run(self, sequence, known, table, seed, access):
        request, stop = sequence.request, sequence.num_reached_tokens
        unknown = range(len(known), stop)
        ids = [*known, *(self._sampled[request, position] for position in unknown)]
        assert sequence.num_pending_tokens == min(len(unknown), 1)
        value = seed
        after = [seed]
        for position, token in enumerate(ids):
            value = chain(value, token)
            after.append(value)
            block, slot = table[position // self.block_size], position % self.block_size
            if position >= sequence.start:
                self.pages[block][slot] = value
            where = f"{request.request_id}: slot {position} (block {block})"
            assert self.pages[block][slot] == value, where
        drafts = sequence.drafts
        if access is not None:
            for token in drafts.token_ids if drafts else ():
                after.append(chain(after[-1], token))
            self._run_states(sequence, access, after)
        if not sequence.is_sampled:
            return None
        if drafts is None:
            self._sampled[request, stop] = next_token(value)
            return request, [next_token(value)]
        values = [value]
        for index, token in enumerate(drafts.token_ids):
            parent = index - 1 if drafts.parents is None else drafts.parents[index]
            values.append(chain(values[parent + 1], token))
            block, slot = divmod(stop + index, self.block_size)
            self.pages[table[block]][slot] = values[-1]
        sampled = [next_token(value) for value in values]
        rows = drafts.accepted_rows(sampled)
        for source, target in drafts.moves(rows):  # the rows ascend, so none is overwritten
            (at, slot), (to, to_slot) = (
                divmod(stop + index, self.block_size) for index in (source, target)
            )
            self.pages[table[to]][to_slot] = self.pages[table[at]][slot]
        self.num_accepted += len(rows) - 1
        self.num_rejected += len(drafts) - len(rows) + 1
        return request, [sampled[row] for row in rows]


def drive(scheduler, mock, *, late=0, max_steps=10_000):
    """Step until no request is left; commit each step once `late` more have been scheduled."""
    in_flight = []

    def commit_oldest():
        output, batch = in_flight.pop(0)
        scheduler.commit(output, mock.execute(output, batch))

    for _ in range(max_steps):
        if not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        assert not output.is_empty or in_flight, "no progress"
        if not output.is_empty:
            in_flight.append((output, mock.lay_out(output)))
        if in_flight and (len(in_flight) > late or output.is_empty):
            commit_oldest()
    while in_flight:
        commit_oldest()
    assert not scheduler.has_unfinished_requests(), f"not drained after {max_steps} steps"
