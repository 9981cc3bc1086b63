"""A person talks to a model in the terminal: answers as they come, one socket, and a way back where it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from segue_cli.client.conversation import Talk
from tests.clients.proxy import proxied
from tests.support import WAIT_S, ServedProcess, metric, served_process


async def chat(
    url: str, typed: str, *flags: str, aside: int = asyncio.subprocess.STDOUT
) -> tuple[int, str]:
    """The command with these lines typed; its exit status, and what it said; `aside` has what is no answer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "segue_cli.cli", "chat", "--url", url, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=aside,
    )
    async with asyncio.timeout(WAIT_S):
        out, _ = await process.communicate(typed.encode())
    assert process.returncode is not None
    return process.returncode, out.decode()


def serving(folder: Path, *turns: dict[str, object], tps: str = "0") -> list[str]:
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    return ["--script", str(script), "--tps", tps, "--store", "memory"]


async def lookups(served: ServedProcess) -> float:
    return await metric(served, 'segue_state_lookups_total{where="connection"}')


async def test_person_holds_a_conversation_on_one_socket(tmp_path: Path) -> None:
    turns = ({"reasoning": "A fruit?", "text": "An apple."}, {"text": "A leek [not markup]."})
    with served_process(*serving(tmp_path, *turns), cwd=tmp_path) as served:
        async with proxied(served.port) as proxy:
            code, said = await chat(
                proxy.url, "A fruit?\nA vegetable?\n/new\nA fruit?\n/quit\nno\n"
            )
        assert code == 0
        assert [said.count(text) for text in ("An apple.", "A leek [not markup].")] == [2, 1]
        assert "A fruit?" in said
        assert proxy.handshakes == [101]
        assert [bool(frame.get("previous_response_id")) for _, frame in proxy.frames] == [
            False,
            True,
            False,
        ]
        assert len(proxy.frames[2][1]["input"]) == 1
        assert await lookups(served) == 1


async def test_answers_to_a_pipe_are_all_of_standard_output(tmp_path: Path) -> None:
    with served_process(*serving(tmp_path, {"text": "An apple."}), cwd=tmp_path) as served:
        code, said = await chat(served.url, "A fruit?\n", aside=asyncio.subprocess.DEVNULL)
    assert (code, said.split()) == (0, ["An", "apple."])


async def test_lost_connection_is_opened_again_with_the_whole_conversation(tmp_path: Path) -> None:
    turns = ({"text": "An apple."}, {"text": "A leek."})
    with served_process(*serving(tmp_path, *turns), cwd=tmp_path) as served:
        async with proxied(served.port, cut_at=frozenset({2})) as proxy:
            code, said = await chat(proxy.url, "A fruit?\nA vegetable?\n")
        assert code == 0
        assert "A leek." in said
        assert proxy.handshakes == [101, 101]
        last = proxy.frames[-1][1]
        assert "previous_response_id" not in last
        assert [item.get("role") for item in last["input"]] == ["user", "assistant", "user"]


async def test_old_connection_is_replaced_without_a_word(tmp_path: Path) -> None:
    """The age limit passes between two questions."""
    flags = serving(tmp_path, {"text": "An apple."}, {"text": "A leek."})
    with served_process(*flags, "--connection-age-s", "0.2", cwd=tmp_path) as served:
        talk = Talk(f"{served.url}/v1", "scripted", None, None)
        try:
            await asyncio.to_thread(list, talk.ask("A fruit?"))
            while await metric(served, "segue_connections"):
                pass
            events = await asyncio.to_thread(list, talk.ask("A vegetable?"))
        finally:
            talk.drop()
        assert events[-1].type == "response.completed"
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(str(text) for text in texts) == "A leek."


async def test_interrupt_ends_the_answer_and_frees_the_engine(tmp_path: Path) -> None:
    flags = serving(tmp_path, {"text": "So:", "pad_tokens": 2_000}, tps="20")
    with served_process(*flags, cwd=tmp_path) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "segue_cli.cli", "chat", "--url", served.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Go on\n")
        async with asyncio.timeout(WAIT_S):
            await process.stdout.readuntil(b"So:")
            process.send_signal(signal.SIGINT)
            await process.stdout.readuntil(b"Stopped.")
            name = 'segue_turns_total{outcome="cancelled",transport="websocket"}'
            while not await metric(served, name):
                pass
            process.stdin.close()
            assert await process.wait() == 0


async def test_server_without_sockets_is_named(tmp_path: Path) -> None:
    with served_process("--store", "memory", "--websocket", "false", cwd=tmp_path) as served:
        code, said = await chat(served.url, "Hello\n")
    assert code == 2
    assert "426" in said


async def test_orders_to_a_terminal_are_shown_and_not_given(tmp_path: Path) -> None:
    """The model repeats a page that would set the clipboard and clear the screen."""
    evil = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b2J\tand\r\nmore"
    turns = ({"reasoning": f"think {evil}", "text": f"say {evil}"},)
    typed = evil.partition("\t")[0]
    with served_process(*serving(tmp_path, *turns), cwd=tmp_path) as served:
        for flags in ((), ("--markdown",)):
            code, said = await chat(served.url, f"Hi\n/model {typed}\n/{typed}\n/quit\n", *flags)
            assert code == 0
            assert all(one.isprintable() or one in "\n\t" for one in said), said
            assert said.count("say \\u001b]52;c;cm0gLXJmIH4=\\u0007\\u001b[2J\\u009b2J") == 1
            assert "more" in said
