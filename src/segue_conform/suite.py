"""Which cases are there, and how are they run?

Every case runs for itself, in the order of the tables, a few at a time; one that takes too long has failed. First it is
found out what is after the server: where a script comes back word for word, it is the scripted upstream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from segue_conform import (
    completions,
    completions_more,
    messages,
    messages_more,
    responses_connection,
    responses_fields,
    responses_http,
    responses_kept,
    responses_socket,
    responses_stream,
)
from segue_conform.case import Absent, Case, Need, Result, Verdict, Wrong, printable, shown
from segue_conform.rules import text_of
from segue_conform.target import Target, script

CASES: tuple[Case, ...] = (
    *responses_http.CASES,
    *responses_fields.CASES,
    *responses_kept.CASES,
    *responses_stream.CASES,
    *responses_socket.CASES,
    *responses_connection.CASES,
    *messages.CASES,
    *messages_more.CASES,
    *completions.CASES,
    *completions_more.CASES,
)
# How many answers a case may wait for, each for the longest time.
ANSWERS_MAX = 2
# A server with one slot answers them one after the other.
BESIDE = 4


async def has_script(target: Target) -> bool:
    """Whether the scripted upstream is after the server."""
    words = "Conform says 40961."
    try:
        answer = await target.post(
            "/responses", target.create(script({"text": words}), store=False)
        )
        if answer.status == 200:
            return text_of(answer.json) == words
        chat = await target.post(
            "/chat/completions", completions.body(target, script({"text": words}))
        )
        return chat.status == 200 and words in str(chat.body)
    except (Wrong, TimeoutError, aiohttp.ClientError, KeyError, TypeError):
        return False


async def run_case(case: Case, target: Target) -> Result:
    """What comes of one case. Whatever a server sends, the suite goes on."""
    began = time.monotonic()
    verdict: Verdict = "failed"
    try:
        async with asyncio.timeout(ANSWERS_MAX * target.answer_s):
            await case.run(target)
        verdict, why = "passed", ""
    except Wrong as wrong:
        why = str(wrong)
    except Absent as absent:
        verdict, why = "absent", str(absent)
    except TimeoutError:
        why = f"no answer within {time.monotonic() - began:.0f} s"
    except aiohttp.ClientError as error:
        why = f"the connection broke: {shown(str(error) or type(error).__name__)}"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        # The cases read what they were sent as the types promise it.
        why = f"the answer has another shape: {type(error).__name__} {shown(str(error))}"
    return Result(case, verdict, printable(why), time.monotonic() - began)


async def run_suite(
    target: Target, cases: Sequence[Case], on_result: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """The results of these cases, in their order."""
    met = {Need.NOTHING}
    if target.key is not None:
        met.add(Need.KEY)
    if any(case.need in (Need.SCRIPT, Need.CONTROL) for case in cases) and await has_script(target):
        met |= {Need.SCRIPT} if target.upstream is None else {Need.SCRIPT, Need.CONTROL}
    free = asyncio.Semaphore(BESIDE)

    async def tried(case: Case) -> Result:
        if case.need not in met:
            result = Result(case, "not run", f"needs {case.need.value}")
        else:
            async with free:
                result = await run_case(case, target)
        on_result(result)
        return result

    # What looks at the load of the upstream runs when nothing else does.
    alone = [case for case in cases if case.need is Need.CONTROL]
    beside = [case for case in cases if case.need is not Need.CONTROL]
    results = await asyncio.gather(*map(tried, beside))
    results += [await tried(case) for case in alone]
    places = {case.name: at for at, case in enumerate(cases)}
    return sorted(results, key=lambda result: places[result.case.name])
