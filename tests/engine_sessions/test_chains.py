"""Has the engine the whole prompt, whatever was kept, forgotten, cut, forked or lost on the way?

Both ends are the real ones, in one process: Segue's engine with its frames, and the plugin's serving with its chains
and kept turns. The answers of the engine between them depend on every id.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import aclosing, suppress

import pytest

from segue.border.refusals import EngineLost
from segue.seams.model import Finish, Ids, Job, Sampling
from segue.seams.prompt import NO_TOKENS, Tokens, id_array
from tests.engine_sessions.replica import Replica, answer_to
from tests.engines.asking import job

# The long run: SEGUE_TEST_CHAINS=10000 pytest tests/engine_sessions/test_chains.py
CHAINS = int(os.environ.get("SEGUE_TEST_CHAINS", "150"))
OWNERS = ("alice", "bob")


class Player:
    """Random turns of random conversations at two replicas."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        tokens_max = self.random.choice((300, 2_000, 50_000))
        blocks = self.random.choice((220, 400))
        self.replicas = [
            Replica(
                f"r{n}",
                step=2 - n % 2 if seed % 3 else 2,
                tokens_max=tokens_max,
                blocks=blocks,
                seed=seed,
            )
            for n in range(2)
        ]
        self.engines = [replica.engine() for replica in self.replicas]
        # What a client could go on from: owner, salt, prompt, answer.
        self.ends: list[tuple[str, str | None, Tokens, list[int]]] = []

    def draw(self, most: int) -> list[int]:
        return [self.random.randrange(10, 500) for _ in range(self.random.randint(1, most))]

    def next_job(self) -> Job:
        """A beginning, or a child of any turn before: of the whole answer, of a part, or of a part of the prompt."""
        random = self.random
        if not self.ends or random.random() < 0.08:
            owner, salt = random.choice(OWNERS), random.choice((None, "s"))
            # Two owners may well begin alike.
            prompt = NO_TOKENS.plus(id_array(range(10, 40))).plus(id_array(self.draw(30)))
        else:
            place = -1 if random.random() < 0.6 else random.randrange(len(self.ends))
            owner, salt, prompt, answer = self.ends[place]
            if random.random() < 0.1 and prompt.before is not None and prompt.before.length:
                prompt, answer = prompt.before, []
            elif random.random() < 0.3:
                answer = answer[: random.randint(0, len(answer))]
            new = self.draw(20)
            if random.random() < 0.5:
                prompt = prompt.plus(id_array([*answer, *new]))
            else:
                prompt = prompt.plus(id_array(answer)).plus(id_array(new))
            if random.random() < 0.03:
                owner = random.choice(OWNERS)
        # Now and then it is read ahead, in a node of its own, of a tool's output that has not ended.
        most = random.randint(1, 12)
        is_ahead = random.random() < 0.15 and bool(prompt.before and prompt.before.length)
        if is_ahead and prompt.before is not None:
            prompt, most = Tokens(prompt.before, prompt.ids[:], prompt.length), 0
        return job(
            prompt, most, owner=owner, cache_salt=salt, sampling=Sampling(), is_ahead=is_ahead
        )

    async def turn(self) -> None:
        """One job, read to its end or left in the middle."""
        asked, random = self.next_job(), self.random
        engine = random.choice(self.engines)
        prompt = asked.prompt
        assert isinstance(prompt, Tokens)
        wanted = answer_to(prompt.flat().tolist(), asked.output_tokens_max or 0)
        leave_at = random.randint(1, 12) if random.random() < 0.15 else 1_000
        got: list[int] = []
        # After its first token a connection that breaks ends the answer.
        with suppress(EngineLost):
            async with aclosing(engine.sample(asked)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Ids):
                        got += piece.ids
                    if isinstance(piece, Finish):
                        assert got == wanted, "the engine had another prompt"
                    if len(got) >= leave_at:
                        break
        assert got == wanted[: len(got)], "the engine had another prompt"
        if asked.is_ahead and prompt.before is not None:
            # The output goes on after it, or after a part of it.
            shown = prompt.ids[: random.randint(1, len(prompt.ids))].tolist()
            self.ends.append((asked.owner, asked.cache_salt, prompt.before, shown))
        else:
            self.ends.append((asked.owner, asked.cache_salt, prompt, got))
        del self.ends[:-40]

    async def play(self, turns: int) -> None:
        """Some at once; now and then a replica forgets everything, or loses its connections."""
        while turns > 0:
            count = min(turns, self.random.choice((1, 1, 1, 3)))
            await asyncio.gather(*(self.turn() for _ in range(count)), self.fault())
            turns -= count
            self._retry()
        for replica in self.replicas:
            await replica.close()

    async def fault(self) -> None:
        """Before, within or after an answer: a replica forgets all, its connections break, or they do in a frame."""
        if self.random.random() > 0.1:
            return
        replica = self.random.choice(self.replicas)
        for _ in range(self.random.randrange(40)):
            await asyncio.sleep(0)
        fault = self.random.choice(("restart", "lose", "cut"))
        if fault == "cut":
            for wire in replica.wires:
                wire.bytes_left = self.random.randrange(60)
        else:
            getattr(replica, fault)()

    def _retry(self) -> None:
        """What a minute does: the connection is tried again."""
        for engine in self.engines:
            engine._retry_at = 0.0


@pytest.mark.timeout(7200)
async def test_random_chains_get_the_answers_of_their_whole_prompts() -> None:
    counted = {
        "kept": 0,
        "whole": 0,
        "http": 0,
        "refused": 0,
        "taken": 0,
        "by_hash": 0,
        "let_go": 0,
    }
    played = 0
    seed = 0
    while played < CHAINS:
        player = Player(seed)
        turns = player.random.randint(5, 30)
        await player.play(turns)
        played += 1
        seed += 1
        for engine in player.engines:
            turns_by, refusals = engine.session_counts
            for how, count in turns_by.items():
                counted[how] += count
            counted["refused"] += sum(refusals.values())
        for replica in player.replicas:
            if replica.core is not None:
                for name in ("taken", "by_hash", "let_go"):
                    counted[name] += replica.core.kept.counts[name]
    print(f"{played} chains: {counted}")
    # Every way was gone.
    assert all(counted.values())
